"""Whole graphs, lowered and scheduled, with compiled kernels: random programs against the reference interpreter, functions against eager."""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
import pytest
import torch
import torch.nn.functional as F

from fusewright.schedule import ScheduleOptions
from fusewright.schedule.printer import plan_text
from tests.codegen.llvm.harness import run_plan
from tests.loops import reference as loops
from tests.loops.tracing import lowered
from tests.schedule import programs
from tests.schedule.reference import schedule
from tests.schedule.test_fuzz import EAGER_TO_FUSE, random_program

FEATURES = dict(llvm.get_host_cpu_features())
NO_AVX512 = frozenset(name for name in FEATURES if name.startswith(("avx512", "avx10", "evex")))
NO_AVX = NO_AVX512 | frozenset(
    name for name in FEATURES if name.startswith("avx") or name in ("fma", "f16c", "vaes", "vpclmulqdq")
)
PROCESSORS = {"host": frozenset(), "without AVX-512": NO_AVX512, "without AVX": NO_AVX}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("block", range(4))
def test_random_programs(block: int, processor: str) -> None:
    for seed in range(block * 6, block * 6 + 6):
        program = random_program(seed)
        inputs = programs.inputs_for(program)
        expected_inputs = [t.clone() for t in inputs]
        expected = [t.clone() for t in loops.run(program, expected_inputs)]
        plan = schedule(program, EAGER_TO_FUSE if seed % 2 else ScheduleOptions())
        actual, status = run_plan(plan, inputs, without=PROCESSORS[processor])
        assert status == 0
        try:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(inputs, expected_inputs, rtol=1e-5, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{plan_text(plan, False)}") from None


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf")), -1) @ v


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "gelu of a biased row": (lambda x, b: F.gelu(x + b), lambda: [r(6, 50), r(50)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (50,), w, b), lambda: [r(6, 50), r(50), r(50)]),
    "layer norm in bfloat16": (lambda x: F.layer_norm(x, (64,)), lambda: [r(6, 64).bfloat16()]),
    "batch norm in training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda: [r(3, 5, 7, 6), r(5), r(5)],
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: [r(3, 6, 5, 5), r(6), r(6)]),
    "log softmax and loss": (lambda x, y: F.cross_entropy(x, y), lambda: [r(9, 33), torch.randint(0, 33, (9,))]),
    "attention with a causal mask": (attention, lambda: [r(2, 3, 17, 8), r(2, 3, 17, 8), r(2, 3, 17, 8)]),
    "rotary embedding": (rotary, lambda: [r(2, 3, 5, 32), r(5, 32), r(5, 32)]),
    "channels last": (lambda x: F.relu(x.to(memory_format=torch.channels_last) * 2 + 1), lambda: [r(2, 20, 6, 6)]),
    "column sums": (lambda x: (x.sum(0), x.var(0)), lambda: [r(40, 70)]),
    "a large sum": (lambda x: x.sum(), lambda: [r(300, 700)]),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), lambda: [r(2, 3, 7, 9)]),
    "padding and rolling": (lambda x: torch.roll(F.pad(x, (1, 2, 3, 0), value=0.5), 4, 1), lambda: [r(4, 6, 9)]),
    "index arithmetic": (lambda x, i: x[i % 5] + x.flip(0)[i // 3], lambda: [r(5, 20), torch.arange(13)]),
    "a transposed copy": (lambda x, y: (x.transpose(1, 2) + y).contiguous(), lambda: [r(3, 40, 70), r(3, 70, 40)]),
    "mixed dtypes": (
        lambda x, y, z: (x * y + z.double()).to(torch.float16) + (y > 3),
        lambda: [r(60), torch.arange(60), r(60).bfloat16()],
    ),
    "cumulative sums": (lambda x: x.cumsum(-1) + x.cumsum(0), lambda: [r(7, 35)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_eager(name: str) -> None:
    function, make = FUNCTIONS[name]
    inputs = make()
    expected = function(*[t.clone() for t in inputs])
    plan = schedule(lowered(function, inputs))
    assert plan.kernels
    actual, status = run_plan(plan, inputs)
    assert status == 0
    wanted = list(expected) if isinstance(expected, tuple) else [expected]
    torch.testing.assert_close(actual, wanted, equal_nan=True, check_stride=False)
