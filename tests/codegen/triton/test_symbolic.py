"""Programs over sizes that vary, as they are on an H200: scheduled, generated, compiled without one, and interpreted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright.backends import gpu
from fusewright.codegen.triton import Processor, generate
from fusewright.loops.lower import promotion
from fusewright.runtime import cuda_code
from fusewright.schedule import ScheduleOptions
from fusewright.schedule.plan import Plan
from tests.codegen.triton.harness import refused, run_plan
from tests.loops.tracing import on_a_gpu

H200 = Processor(90, 132)
aten = torch.ops.aten
r = torch.randn


def places(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


def gradient(operator: Any, *more: Any) -> Callable[..., torch.Tensor]:
    """Of a resampling, which the library computes, and a kernel from it."""
    return lambda g, x: operator(g, list(g.shape[2:]), list(x.shape), *more) * 2


WINDOW = [3, 3], [1, 1], [1, 1], [1, 1], False


def pooled(n: int, m: int) -> list[torch.Tensor]:
    x = r(2, 3, n, m)
    return [r(2, 3, n, m), x, aten.max_pool2d_with_indices(x, *WINDOW)[1]]


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int, int], list[torch.Tensor]]]] = {
    "index_add": (lambda x, i, v: x.index_add(0, i, v), lambda n, m: [r(n, m), places(n, 4), r(4, m)]),
    "index_add of columns": (lambda x, i, v: x.index_add(1, i, v), lambda n, m: [r(n, m), places(m, 4), r(n, 4)]),
    "index_put": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda n, m: [r(n, m), places(n, 4), r(4, m)],
    ),
    "index_put of columns": (
        lambda x, i, v: aten.index_put(x, [None, i], v, True),
        lambda n, m: [r(n, m), places(m, 4), r(n, 4)],
    ),
    "scatter_add": (lambda x, i, v: x.scatter_add(0, i, v), lambda n, m: [r(n, m), places(n, 4, m), r(4, m)]),
    "embedding's gradient": (
        lambda g, i: aten.embedding_dense_backward(g, i, 9, 2, False),
        lambda n, m: [r(n, m, 4), places(9, n, m)],
    ),
    "nearest resampling's gradient": (
        gradient(aten.upsample_nearest2d_backward.default),
        lambda n, m: [r(2, 3, 2 * n, 2 * m), r(2, 3, n, m)],
    ),
    "linear resampling's gradient": (
        gradient(aten.upsample_linear1d_backward.default, True),
        lambda n, m: [r(2, n, 2 * m), r(2, n, m)],
    ),
    "bilinear resampling's gradient": (
        gradient(aten.upsample_bilinear2d_backward.default, False),
        lambda n, m: [r(2, 3, 2 * n, 2 * m), r(2, 3, n, m)],
    ),
    "cummax": (lambda x: x.cummax(-2), lambda n, m: [r(n, m)]),
    "cummax's gradient": (
        lambda g, x, i: aten.cummaxmin_backward(g, x, i, -2),
        lambda n, m: [r(n, m), r(n, m), places(n, n, m)],
    ),
    "max_pool2d's gradient": (lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *WINDOW, i), pooled),
    "layer_norm": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), lambda n, m: [r(4, n, m), r(m)]),
}
SIZES = 5, 6


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Plan]:
    monkeypatch.setattr(cuda_code, "processor", lambda index: H200)
    monkeypatch.setattr(cuda_code, "target", lambda index: H200)
    monkeypatch.setattr(promotion, "_converts_float8", lambda device: True)

    def make(name: str) -> Plan:
        function, make = PROGRAMS[name]
        inputs = make(*SIZES)
        multiples = {size * scale: f"n{size * scale}" for size in SIZES for scale in (1, 2)}
        symbolic = {
            place: {dim: multiples[size] for dim, size in enumerate(one.shape) if size in multiples}
            for place, one in enumerate(inputs)
        }
        program = on_a_gpu(function, inputs, symbolic)
        return gpu.scheduled(program, gpu.schedule_options(ScheduleOptions(), program))

    return make


def test_each_is_compiled(planned: Callable[[str], Plan], compiler: cuda_code.Compiler, tmp_path: Path) -> None:
    plans = {name: planned(name) for name in PROGRAMS}
    assert not [name for name, plan in plans.items() if not any(kernel.sizes for kernel in plan.kernels.values())]
    codes = [
        code for plan in plans.values() for code in generate(list(plan.kernels.values()), plan.buffers, H200).values()
    ]
    assert not refused(compiler, codes, tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_what_eager_has_at_other_sizes(name: str, planned: Callable[[str], Plan]) -> None:
    plan, (function, make) = planned(name), PROGRAMS[name]
    for sizes in (SIZES, (3, 4)):
        inputs = make(*sizes)
        expected = function(*inputs)
        found = run_plan(plan, inputs, H200)
        torch.testing.assert_close(found, list(expected) if isinstance(expected, tuple) else [expected])
