"""Generated GPU kernels under Triton's interpreter: random programs against the reference interpreter, functions against eager."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright.base.records import replace
from fusewright.codegen.triton import (
    Processor,
    Unsupported,
    capabilities,
    generate,
    kernel,
    module,
    operations,
    reductions,
    tiles,
)
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, LoopProgram, Store, checked_index, load, local_value
from fusewright.loops.lower import lower, promotion
from fusewright.schedule import ScheduleOptions
from fusewright.schedule.plan import Plan, Reduce, RunExtern, Stage
from fusewright.schedule.printer import plan_text
from fusewright.sizes.expressions import loop_symbol, symbol
from tests.codegen.llvm.harness import kernel_of
from tests.codegen.triton.harness import TINY, run_code, run_plan
from tests.graph.texts import graph_of
from tests.loops import reference as loops, tracing
from tests.loops.tracing import lowered
from tests.schedule import programs
from tests.schedule.reference import schedule
from tests.schedule.test_fuzz import EAGER_TO_FUSE, random_program

GPU = ScheduleOptions(
    min_parallel=16, lanes=8, held_rows=512, chunks=16, smallest_chunk=64, chunk_points=1024, scratch_bytes=128 * 1024
)


def run(program: LoopProgram, inputs: list[torch.Tensor], options: ScheduleOptions = GPU) -> list[torch.Tensor]:
    plan = schedule(program, options)
    try:
        return run_plan(plan, inputs)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan_text(plan, False)}") from error


@pytest.mark.parametrize("block", range(2))
def test_random_programs(block: int) -> None:
    for seed in range(block * 6, block * 6 + 6):
        program = random_program(seed)
        inputs = programs.inputs_for(program)
        expected_inputs = [t.clone() for t in inputs]
        expected = [t.clone() for t in loops.run(program, expected_inputs)]
        actual = run(program, inputs, EAGER_TO_FUSE if seed % 2 else GPU)
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text, seed=seed: f"seed {seed}: {text}"
        )
        torch.testing.assert_close(inputs, expected_inputs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(20))
def test_many_random_programs(block: int) -> None:
    for seed in range(100 + block * 10, 110 + block * 10):
        program = random_program(seed)
        inputs = programs.inputs_for(program)
        expected = [t.clone() for t in loops.run(program, [t.clone() for t in inputs])]
        torch.testing.assert_close(run(program, inputs), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax((q @ k.transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf")), -1) @ v


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def scattered(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x.index_add(0, index, values),
        x.scatter_add(0, index[:, None].expand(-1, 6), values),
        x[index],
        F.embedding(index, x),
    )


def with_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 1.5, float("nan"), x)


def extreme_logits() -> torch.Tensor:
    """Rows that are walked in steps: plain, beginning with negative infinities, nothing but these, and with an infinity or a NaN late."""
    x = r(6, 20000) * 20
    x[1, :9000] = x[2] = float("-inf")
    x[3, 17000] = float("inf")
    x[4, 17000] = float("nan")
    return x


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = with_nan(x)
    return (
        y.amax(1),
        y.amin(0),
        y.argmax(1),
        y.argmin(0),
        torch.round(x).argmax(1),
        (x > 9).any(1),
        (x < 9).all(0),
        y.cummax(1)[1],
    )


def divisions(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    floats = (x // y, torch.fmod(x, y), torch.remainder(x, y), torch.div(x, y, rounding_mode="trunc"))
    return (
        *floats,
        a // b,
        torch.fmod(a, b),
        a % b,
        torch.div(a, b, rounding_mode="trunc"),
        a << 3,
        a >> 2,
        a**2,
        torch.sign(a),
    )


def elementary(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p = x.abs() + 0.1
    return (
        x.exp(), x.expm1(), p.log(), p.log2(), p.log10(), p.log1p(), p.sqrt(), p.rsqrt(), p.reciprocal(), x.sin(), x.cos(), x.tan(), x.atan(),
        x.sinh(), x.cosh(), x.tanh(), x.asinh(), x.sigmoid(), x.erf(), x.erfc(), p.lgamma(), x.floor(), x.ceil(), x.round(), x.trunc(),
        x.frac(), x.isnan(), x.isinf(), x.signbit(), x.copysign(-p), torch.hypot(x, p), torch.atan2(x, p), p**x, p**0.5, x**3, -x, x.abs(),
    )  # fmt: skip


def normed_difference(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first half of a network's step: statistics, and a difference that is stored and summed over the same columns."""
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    difference = torch.where(y < 0, 0.0, x - y)
    return var, mean, difference, difference.sum((0, 2, 3)), (difference * (x - mean)).sum((0, 2, 3))


FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "gelu of a biased row": (lambda x, b: F.gelu(x + b), lambda: [r(6, 50), r(50)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (50,), w, b), lambda: [r(6, 50), r(50), r(50)]),
    "softmax of rows that are one block, and of longer ones": (
        lambda x, y: (x.softmax(-1), y.softmax(-1)),
        lambda: [r(3, 70), r(1, 33000)],
    ),
    "a loss over classes that are infinite, or no numbers": (
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        lambda: [extreme_logits(), torch.arange(6)],
    ),
    "softmax along the rows": (lambda x: x.softmax(0), lambda: [r(70, 40)]),
    "batch norm in training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda: [r(3, 5, 7, 6), r(5), r(5)],
    ),
    "batch norm of many images": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda: [r(16, 5, 12, 12) * 3 + 100, r(5), r(5)],
    ),
    "batch norm of many channels-last images and its sums": (
        normed_difference,
        lambda: [
            (r(16, 6, 12, 12) + 1).to(memory_format=torch.channels_last),
            r(16, 6, 12, 12).to(memory_format=torch.channels_last),
        ],
    ),
    "large index values": (
        lambda x: (x + torch.arange(10) * 2**33, torch.arange(0, 10 * 2**31, 2**31) < x),
        lambda: [torch.arange(10)],
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: [r(3, 6, 5, 5), r(6), r(6)]),
    "group norm of channels-last images": (
        lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)),
        lambda: [(r(3, 12, 24, 24) * 3 + 1).to(memory_format=torch.channels_last), r(12), r(12)],
    ),
    "sums over groups of channels-last images": (
        lambda x, y: ((x * y).unflatten(1, (4, 3)).sum((2, 3, 4)), x.unflatten(1, (4, 3)).amax((2, 3, 4))),
        lambda: [r(3, 12, 24, 24).to(memory_format=torch.channels_last) for _ in range(2)],
    ),
    "two axes cut into as many chunks": (lambda x: x[:, :3].sum(), lambda: [r(3, 5, 3127)]),
    "log softmax and loss": (lambda x, y: F.cross_entropy(x, y), lambda: [r(9, 33), torch.randint(0, 33, (9,))]),
    "attention with a causal mask": (attention, lambda: [r(2, 3, 17, 8), r(2, 3, 17, 8), r(2, 3, 17, 8)]),
    "rotary embedding": (rotary, lambda: [r(2, 3, 5, 32), r(5, 32), r(5, 32)]),
    "channels last": (lambda x: F.relu(x.to(memory_format=torch.channels_last) * 2 + 1), lambda: [r(2, 20, 6, 6)]),
    "column sums": (lambda x: (x.sum(0), x.var(0)), lambda: [r(40, 70)]),
    "column sums in chunks": (lambda x: x.sum(0), lambda: [r(4096, 8)]),
    "a large sum": (lambda x: x.sum(), lambda: [r(300, 70)]),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), lambda: [r(2, 3, 7, 9)]),
    "linear resampling": (
        lambda x, y: tuple(
            F.interpolate(one, size, mode="bilinear", align_corners=corners)
            for one in (x, y) for size in ((14, 18), (5, 4)) for corners in (False, True)
        ),
        lambda: [r(2, 3, 7, 9), r(2, 3, 7, 9).to(memory_format=torch.channels_last)],
    ),
    "padding and rolling": (lambda x: torch.roll(F.pad(x, (1, 2, 3, 0), value=0.5), 4, 1), lambda: [r(4, 6, 9)]),
    "index arithmetic": (lambda x, i: x[i % 5] + x.flip(0)[i // 3], lambda: [r(5, 20), torch.arange(13)]),
    "a transposed copy": (lambda x, y: (x.transpose(1, 2) + y).contiguous(), lambda: [r(3, 40, 70), r(3, 70, 40)]),
    "mixed dtypes": (lambda x, y, z: (x * y + z.double()) + (y > 3), lambda: [r(60), torch.arange(60), r(60).half()]),
    "cumulative sums": (lambda x: x.cumsum(-1) + x.cumsum(0), lambda: [r(7, 35)]),
    "a long cumulative sum": (lambda x: x.double().cumsum(-1), lambda: [r(2, 9000)]),
    "extremes and their positions": (extremes, lambda: [r(9, 33)]),
    "divergence of softmaxes of long rows": (
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="sum"),
        lambda: [r(3, 40000), r(3, 40000)],
    ),
    "softmax of rows longer than a block": (lambda x: x.softmax(-1), lambda: [r(2, 70000).bfloat16()]),
    "positions in chunks": (
        lambda x: (x.argmax(), x.argmin(0), torch.round(x).argmax(), *torch.round(x).max(0)),
        lambda: [r(2000, 3)],
    ),
    "positions beside NaN and infinities": (
        lambda x: (x.argmax(0), x.argmin(0), (x - x).argmax(), torch.full_like(x, float("-inf")).argmax()),
        lambda: [torch.where(torch.rand(2000, 3) < 0.001, r(2000, 3).log(), r(2000, 3))],
    ),
    "a long row's extreme": (lambda x: (x.argmax(-1), x.amax(-1)), lambda: [r(1, 2100)]),
    "gathers and scatters": (scattered, lambda: [r(8, 6), torch.tensor([1, 1, 7, 0, 1]), r(5, 6)]),
    "division": (divisions, lambda: [torch.arange(-8, 8), torch.tensor([3, -3, 5, 2] * 4), r(16), r(16)]),
    "elementary functions": (elementary, lambda: [r(40)]),
    "windows of changing size": (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), lambda: [r(2, 3, 8, 9)]),
    "a pooled window": (lambda x: F.avg_pool2d(x, 3, 2, 1) + F.max_pool2d(x, 3, 2, 1), lambda: [r(2, 3, 9, 9)]),
}


@pytest.mark.one_in(2)  # Triton's interpreter is slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_eager(name: str) -> None:
    function, make = FUNCTIONS[name]
    torch.manual_seed(3)
    inputs = make()
    expected = function(*(t.clone() for t in inputs))
    actual = run(lowered(function, inputs), inputs)
    torch.testing.assert_close(
        actual, list(expected) if isinstance(expected, tuple) else [expected], rtol=2e-5, atol=2e-5, equal_nan=True
    )


def test_moments_read_their_data_once_and_lose_nothing() -> None:
    """A mean far from zero: the squares of chunks are taken about the mean of each chunk."""
    x = torch.randn(16, 6, 24, 24).mul_(0.1).add_(100).to(memory_format=torch.channels_last)
    program = lowered(lambda x: torch.var_mean(x, (0, 2, 3)), [x])
    plan = schedule(program, GPU)
    readers = [kernel for kernel in plan.kernels.values() if "in0" in kernel.buffers]
    assert len(readers) == 1 and len(plan.kernels) == 2, plan_text(plan, False)
    var, mean = run_plan(plan, [x])
    wide_var, wide_mean = torch.var_mean(x.double(), (0, 2, 3))
    torch.testing.assert_close(var.double(), wide_var, rtol=2e-5, atol=0)
    torch.testing.assert_close(mean.double(), wide_mean, rtol=1e-6, atol=0)


def test_groups_of_channels_are_read_as_columns() -> None:
    """Three channels beside each other in memory, of twelve: a program that read one group alone would fetch the others' too."""
    x, w, b = torch.randn(2, 12, 48, 48).to(memory_format=torch.channels_last), torch.randn(12), torch.randn(12)
    plan = schedule(lowered(lambda x, w, b: F.group_norm(x, 4, w, b), [x, w, b]), GPU)
    texts = {name: code.text for name, code in generate(list(plan.kernels.values()), plan.buffers, TINY).items()}
    (first,) = [text for text in texts.values() if "_shift: f32, *" in text]
    assert "< 12:" in first, first
    torch.testing.assert_close(run_plan(plan, [x, w, b]), [F.group_norm(x, 4, w, b)], rtol=2e-5, atol=2e-5)


def test_what_a_reduction_of_columns_reads_is_stored_on_the_way() -> None:
    x, y = (torch.randn(16, 64, 12, 12).to(memory_format=torch.channels_last) for _ in range(2))
    program = lowered(
        lambda x, y: ((d := torch.where(x <= 0, 0.0, y)), d.sum((0, 2, 3)), (d * x).sum((0, 2, 3))), [x, y]
    )
    plan = schedule(program, replace(GPU, chunks=128))
    assert len(plan.kernels) == 2, plan_text(plan, False)
    torch.testing.assert_close(run_plan(plan, [x, y]), loops.run(program, [x, y]), rtol=1e-5, atol=1e-4)


def test_halves_are_rounded_within_a_unit() -> None:
    """Triton's interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place."""
    torch.manual_seed(0)
    x, w = r(6, 64).bfloat16(), r(64).bfloat16()
    function = lambda x, w: F.layer_norm(x, (64,), w) * torch.sigmoid(x)
    (actual,) = run(lowered(function, [x, w]), [x, w])
    torch.testing.assert_close(actual, function(x, w), rtol=1.6e-2, atol=1e-2)


def test_a_gelu_of_halves_is_as_exact_as_halves_are() -> None:
    """1 + erf(x) is approximate where halves are stored; also far on the left, where it is small."""
    x = torch.cat([torch.linspace(-5.5, 6, 4001), torch.tensor([float("inf"), float("nan"), 0.0, -0.0])]).half()
    (actual,) = run(lowered(lambda x: F.gelu(x), [x]), [x])
    torch.testing.assert_close(actual, F.gelu(x.double()).half(), rtol=1e-3, atol=1.2e-7, equal_nan=True)


def test_a_tanh_of_halves_is_as_exact_as_halves_are() -> None:
    """Where halves are stored it is approximate: on both sides of where a series takes its place, and at the ends."""
    ends = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-7, -90.0, 90.0])
    x = torch.cat([torch.linspace(-6, 6, 4001), torch.linspace(-0.2, 0.2, 4001), ends]).half()
    (actual,) = run(lowered(lambda x: x.tanh(), [x]), [x])
    torch.testing.assert_close(actual, x.double().tanh().half(), rtol=1e-3, atol=1.2e-7, equal_nan=True)


def test_only_what_is_rounded_to_a_half_is_computed_fast() -> None:
    """One kernel, which stores halves and full floats: the exponential that is summed stays exact."""
    x = r(64, 40).bfloat16()
    inputs = [x, r(64, 40).bfloat16()]
    program = lowered(lambda x, y: (torch.ops.aten.gelu_backward(y, x), torch.erf(x.float())), inputs)
    plan = schedule(program, GPU)
    (code,) = generate(list(plan.kernels.values()), plan.buffers, Processor()).values()
    assert "lib.fast_one_plus_erf(" in code.text and "lib.erf(" in code.text and "lib.exp(" not in code.text, code.text
    slope, exact = run_plan(plan, inputs)
    torch.testing.assert_close(exact, torch.erf(x.float()), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(slope, torch.ops.aten.gelu_backward(inputs[1], x), rtol=2e-2, atol=1e-2)


def test_a_long_rows_maximum_and_exponentials_share_a_loop() -> None:
    plan = schedule(lowered(lambda x, y: F.cross_entropy(x, y), [r(6, 20000), torch.arange(6)]), GPU)
    codes = generate(list(plan.kernels.values()), plan.buffers, Processor())
    assert sum(code.text.count("for base in") for code in codes.values() if "20000" in code.text) == 1


def test_a_row_stays_in_registers_and_equal_kernels_share_their_text() -> None:
    x, y = r(64, 96), r(64, 96)
    plan = schedule(lowered(lambda x, y: (x.softmax(-1), y.softmax(-1)), [x, y]), GPU)
    codes = generate(list(plan.kernels.values()), plan.buffers, Processor())
    assert all(not code.spills and "debug_barrier" not in code.text for code in codes.values())
    assert len({code.key for code in codes.values()}) == 1


def several(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).erf() + x
    return y, y.relu().double().float(), (y + 1).prod(1) * 2, (y - 1).cumsum(1) * 3, (y * 1).index_add(0, i, y).relu()


def refusing(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """As if the generator had no code for it."""

    def refuse(*given: object) -> None:
        if what in (given[0], "cumsum"):
            raise Unsupported(what)

    if what == "erf":
        monkeypatch.delitem(operations.OPERATIONS, what)
    elif what == "float64":
        language_type = operations.language_type
        monkeypatch.setattr(operations, "language_type", lambda dtype: refuse(str(dtype)[6:]) or language_type(dtype))
    elif what == "add":
        monkeypatch.setattr(capabilities, "check_store", refuse)
        monkeypatch.setattr(kernel, "check_store", refuse)
    else:
        monkeypatch.setattr(reductions, "check_scan" if what == "cumsum" else "check_reduction", refuse)


LEFT = {"erf": "erf", "prod": "prod", "cumsum": "cumsum", "add": "index_add", "float64": "_to_copy", "all": ""}


@pytest.mark.parametrize("what", LEFT)
def test_what_has_no_code_is_one_operator_of_the_plan(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the generator refuses."""
    monkeypatch.setattr(promotion, "_converts_float8", lambda device: True)
    refusing(monkeypatch, what)
    inputs = [r(5, 9), torch.tensor([4, 0, 4, 1, 1])]
    plan = on_a_gpu(several, inputs)
    left = [step.extern.target for step in plan.steps if isinstance(step, RunExtern)]
    assert [target._schema.name.removeprefix("aten::") for target in left] == [LEFT[what]] * bool(LEFT[what])
    torch.testing.assert_close(run_plan(plan, inputs), list(several(*inputs)), rtol=2e-5, atol=2e-5)


def test_a_kernel_of_many_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part's place depends on the sizes of all others. What no launch takes is refused."""
    monkeypatch.setattr(promotion, "_converts_float8", lambda device: True)
    count = 150
    inputs = [r(2 + place, 2) for place in range(count)]
    program = tracing.on_a_gpu(lambda *x: torch.cat(x) * 2, inputs, {place: {0: f"n{place}"} for place in range(count)})
    plan = schedule(program, GPU)
    assert max(len(code.signature) for code in generate(list(plan.kernels.values()), plan.buffers, TINY).values()) > count
    monkeypatch.setattr(module, "MOST_PARAMETERS", count)
    with pytest.raises(Unsupported, match="parameters"):
        generate(list(plan.kernels.values()), plan.buffers, TINY)


def test_what_is_refused_of_one_operator_may_be_read_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has updated what the operator writes, and then is refused, has changed nothing."""
    refusing(monkeypatch, "sum")
    inputs = [r(4, 3, 5), torch.zeros(3), torch.ones(3)]
    function = lambda x, m, v: (F.batch_norm(x + 1, m := m.clone(), v := v.clone(), training=True) * 2, m * 3, v * 3)
    torch.testing.assert_close(run_plan(on_a_gpu(function, inputs), inputs), list(function(*inputs)))


NUMBERS = torch.cat([
    torch.linspace(-40, 40, 4001), torch.arange(-20.0, 20.0), torch.logspace(-37, 37, 149), -torch.logspace(-37, 8, 91),
    torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]),
]).double()  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_digamma_is_eagers_everywhere(dtype: torch.dtype) -> None:
    x = NUMBERS.to(dtype)
    (found,) = run_plan(on_a_gpu(torch.digamma, [x]), [x])
    exact = torch.digamma(x.double()).to(dtype)  # eager's own loses digits near a pole
    # the interpreter cuts off what bfloat16 has no room for
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-7, torch.float16: 0.0, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found, exact, equal_nan=True, rtol=tolerance, atol=1e-15)
    zeros = x == 0
    assert torch.equal(found[zeros], torch.digamma(x)[zeros])


ODD = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3e38, -3e38])
SHORT = (torch.int8, torch.uint8, torch.int16)


@pytest.mark.parametrize("how", ["amax", "amin", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, *SHORT], ids=str)
def test_extremes_and_short_sums_at_places(dtype: torch.dtype, how: str) -> None:
    """Of NaN whatever its sign, on either side; short integers wrap around."""
    numbers = torch.cat([torch.randn(150) * 90, ODD])[torch.randperm(160)]
    start = torch.cat([torch.randn(90) * 90, ODD])
    if not dtype.is_floating_point:
        numbers, start = (one.nan_to_num(7.0).clamp(-1e4, 1e4).int() for one in (numbers, start))
    given = [start.to(dtype), torch.randint(0, 100, (160,)), numbers.to(dtype)]
    function = lambda x, i, v: x.scatter_reduce(0, i, v, how)
    plan = on_a_gpu(function, given)
    assert not any(isinstance(step, RunExtern) for step in plan.steps)
    torch.testing.assert_close(run_plan(plan, given), [function(*given)], equal_nan=True, rtol=1e-4, atol=1e-4)


ADDITIONS = {
    "index_add": "%y = aten.index_add(%a, 0, %i, %g)",
    "index_put": "%y = aten.index_put(%a, [%i], %g, True)",
    "embedding": "%y = aten.embedding_dense_backward(%g, %i, 9, -1, False)",
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_halves_are_added_in_float32(name: str) -> None:
    """A thousand ones and one more: a half would stop at a rounded sum."""
    text = f"""
        %a: float16[9, 4]@cuda = input
        %i: int64[5000]@cuda = input
        %g: float16[5000, 4]@cuda = input
        {ADDITIONS[name]}
        return [%y]"""
    program = lower(graph_of(text), ())
    start, index = torch.rand(9, 4).half(), torch.arange(5000) % 9
    given = (1 + torch.rand(5000, 4)).half()
    expected = torch.zeros(9, 4, dtype=torch.float64) if name == "embedding" else start.double()
    expected = expected.index_add(0, index, given.double())
    (found,) = run(program, [start, index, given])
    torch.testing.assert_close(found.double(), expected, rtol=6e-4, atol=0)


def on_a_gpu(function: Callable[..., object], inputs: list[torch.Tensor]) -> Plan:
    """The plan of what lies on a GPU, whether there is one or not."""
    return schedule(tracing.on_a_gpu(function, inputs), GPU)


def rotated(x: torch.Tensor, weight: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    y = y.transpose(1, 2)
    return y * cosine + torch.cat((-y[..., 16:], y[..., :16]), -1) * sine


def test_a_normalised_row_that_is_rotated_is_one_kernel() -> None:
    """Its halves meet, so no row of it stays in registers: it is computed again."""
    inputs = [r(2, 5, 8, 32), r(32), r(5, 32), r(5, 32)]
    plan = on_a_gpu(rotated, inputs)
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    memory = {f"in{number}": one for number, one in enumerate(inputs)}
    (result,) = set(code.buffers) - memory.keys()
    made = torch.full((2, 5, 8, 32), 113.0)
    run_code(code, memory | {result: made})
    torch.testing.assert_close(made.transpose(1, 2), rotated(*inputs), rtol=1e-4, atol=1e-5)


def test_a_sum_of_two_is_no_reduction() -> None:
    """Gradients of repeated heads: they are added where they are used."""
    x = r(2, 8, 40, 16)
    plan = on_a_gpu(lambda x: x.view(2, 4, 2, 40, 16).sum(2).transpose(1, 2).reshape(80, 64) * 2, [x])
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    assert "tl.sum" not in code.text
    made = torch.full((80, 64), 113.0)
    run_code(code, {"in0": x, code.buffers[-1]: made})
    torch.testing.assert_close(made, x.view(2, 4, 2, 40, 16).sum(2).transpose(1, 2).reshape(80, 64) * 2)


POINTS = {
    "embedding": ("%y = aten.embedding_dense_backward(%g, %i, 6, -1, False)", True),
    "embedding with a row left out": ("%y = aten.embedding_dense_backward(%g, %i, 6, 2, False)", True),
    "index_add": ("%y = aten.index_add(%a, 0, %i, %g)", False),
}


@pytest.mark.parametrize("name", POINTS)
def test_many_points_that_add_to_few_places_are_sums(name: str) -> None:
    """Atomics to few places wait for each other."""
    line, fresh = POINTS[name]
    text = f"""
        %a: float32[6, 3]@cuda = input
        %i: int64[900]@cuda = input
        %g: float32[900, 3]@cuda = input
        {line}
        return [%y]"""
    program = lower(graph_of(text), ())
    assert not any(store.mode == "add" for one in program.operations for store in getattr(one, "stores", ()))
    start, index, given = torch.rand(6, 3), torch.randint(0, 6, (900,)), torch.rand(900, 3)
    used = given * (index != 2)[:, None] if "left out" in name else given
    expected = (torch.zeros(6, 3) if fresh else start).index_add(0, index, used)
    (found,) = run(program, [start, index, given])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_places_in_an_image_are_computed_once_for_several_channels(
    batch: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SHARED_BYTES", 4)  # as of halves
    x, scale = torch.randn(batch, 3, 7, 9).contiguous(memory_format=layout), r(batch, 3, 1, 1)

    def resampled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(11, 13), mode="bilinear") * scale

    plan = on_a_gpu(resampled, [x, scale])
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    assert ("Y: tl.constexpr" in code.text) == (batch > 1 or layout is torch.contiguous_format), code.text
    wanted = resampled(x, scale)
    made = torch.full_like(wanted, 113.0)
    run_code(code, {"in0": x, "in1": scale, code.buffers[-1]: made})
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(11, 5), (3, 20), (7, 9)], ids=str)
def test_cubic_resampling_of_rows_in_short_integers(size: tuple[int, int], corners: bool) -> None:
    """Loops on a GPU only. Positions of 64 bits take twice the instructions, and shared memory to hand them on."""
    x = torch.randn(2, 3, 7, 9)

    def resampled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size, mode="bicubic", align_corners=corners)

    plan = on_a_gpu(resampled, [x])
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    assert not re.search(r"full\(.*int64", code.text), "positions are compared in 64 bits"
    memory = {"in0": x, **{name: torch.full((2, 3, *size), 113.0) for name in code.buffers if name != "in0"}}
    run_code(code, memory)
    torch.testing.assert_close(memory[code.buffers[-1]], resampled(x), rtol=1e-4, atol=1e-5)


GRIDS = {
    "channels": ((2, 6, 9, 11), torch.contiguous_format),
    "channels side by side": ((2, 6, 9, 11), torch.channels_last),
    "three channels": ((1, 3, 9, 11), torch.contiguous_format),
    "eleven channels": ((1, 11, 9, 11), torch.contiguous_format),
    "one channel": ((3, 1, 9, 11), torch.contiguous_format),
}


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("name", GRIDS)
def test_samples_at_the_places_of_a_grid(name: str, mode: str, padding: str) -> None:
    shape, layout = GRIDS[name]
    image, grid = torch.randn(shape).contiguous(memory_format=layout), 1.3 * torch.randn(shape[0], 7, 5, 2)
    grid[0, 0] = torch.tensor([[float("nan"), 0.2], [1e20, 0.1], [float("inf"), -3], [-1e10, 5], [-1, 1]])

    def sampled(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, g * 0.9, mode=mode, padding_mode=padding, align_corners=False) * 2

    plan = on_a_gpu(sampled, [image, grid])
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    assert "int64" not in re.sub(r"\(v\d+\)\.to\(tl\.int64\)", "", code.text), "positions are computed in 64 bits"
    wanted = sampled(image, grid)
    made = torch.full_like(wanted, 113.0)
    run_code(code, {"in0": image, "in1": grid, code.buffers[-1]: made})
    if mode == "bilinear" and padding == "zeros":
        wanted = torch.where(grid.isfinite().all(-1)[:, None], wanted, 0)  # as on a GPU
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_points_of_a_thread_are_written_over_what_they_are_computed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that is updated."""
    monkeypatch.setattr(tiles, "SHARED_BYTES", 4)
    inputs = [torch.randn(2, 8, 9, 11), torch.randn(2, 8, 7, 5)]

    def function(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept.addcmul_(F.interpolate(x, size=(7, 5), mode="bilinear"), kept.sin())

    plan = on_a_gpu(function, inputs)
    (kernel,) = plan.kernels.values()
    (code,) = generate([kernel], plan.buffers, TINY).values()
    assert "Y: tl.constexpr" in code.text and code.text.count("lib.sin") == 8
    wanted = function(inputs[0], inputs[1].clone())
    run_plan(plan, inputs)
    torch.testing.assert_close(inputs[1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_stands_for_eight_bits_beyond_the_end(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float: Triton converts no integer to these types."""
    monkeypatch.setattr(promotion, "_converts_float8", lambda device: True)
    x = torch.randn(37).to(dtype)
    plan = schedule(lowered(lambda x: x.float() * 2, [x]), GPU)
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    (load,) = re.findall(r"tl\.load\(.*\)", code.text)
    assert "_mask" in load and "other=0.0" in load
    made = torch.full((37,), 113.0)
    run_code(code, {code.buffers[0]: x, code.buffers[-1]: made})
    torch.testing.assert_close(made, x.float() * 2, rtol=0, atol=0)


def test_before_a_row_that_is_empty_no_place_to_write_is_checked() -> None:
    """The check stands before the loop along the row."""
    n = symbol("s0", 0)
    i, j, t = loop_symbol("o0", 3), loop_symbol("r0", n), symbol("t0", None)
    checked = checked_index(load("index", i, torch.int64), 5)
    total = Reduce("total", "sum", load("x", i * n + j, torch.float32))
    write = Store("z", t, load("x", i * n + j, torch.float32), "add", ((t, checked),))
    stage = Stage((Axis(j, n),), (total, write))
    last = Stage((), (Store("y", i, local_value("total", torch.float32)),))
    shapes: dict[str, Any] = {"index": ((3,), (1,)), "x": ((3, n), (n, 1)), "z": ((5,), (1,)), "y": ((3,), (1,))}
    dtypes = {name: torch.int64 if name == "index" else torch.float32 for name in shapes}
    device = torch.device("cpu")
    buffers = {name: Buffer(name, *shapes[name], dtypes[name], device, "temporary", 0) for name in shapes}
    kernel = kernel_of("loop", [Axis(i, 3)], [stage, last], dtypes, "zy", sizes=(n,))
    text = generate([kernel], buffers, TINY, {})[kernel.name].text
    assert re.search(r"device_assert\(.* \| \(\(\(s0 > 0\)\) == 0\), ", text)


@pytest.mark.parametrize("place", [lambda x, i: i.expand(x.shape), lambda x, i: torch.zeros_like(x, dtype=torch.int64)])
def test_before_a_row_that_is_empty_nothing_is_read_at_a_place_that_the_row_does_not_change(
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Nor is the place checked: what a row of that length is read from has no memory."""

    def function(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x * y.take(place(x, i))).sum(-1)

    inputs = [r(5, 7), r(7), torch.tensor([3])]
    plan = schedule(tracing.on_a_gpu(function, inputs, {0: {1: "s0"}, 1: {0: "s0"}}), GPU)
    (code,) = generate(list(plan.kernels.values()), plan.buffers, TINY).values()
    (size,) = code.sizes
    for n in (7, 0):
        x, y, made = r(5, n), r(n), torch.full((5,), 113.0)
        tensors = dict(zip(code.buffers, (x, y, inputs[2], made) if len(code.buffers) == 4 else (x, y, made)))
        run_code(code, tensors, {size: n})
        expected = function(x, y, inputs[2]) if n else torch.zeros(5)
        torch.testing.assert_close(made, expected)
    (load,) = re.findall(rf"tl\.load\({code.text.partition('(')[2].split(', ')[1]} .*\)", code.text)
    assert f"({size} > 0)" in load


LEAST, MOST = -(2**31), 2**31 - 1
BEYOND = (math.inf, -math.inf, math.nan, 300.0, -1.0, -70000.0, 3e9, -3e9, 1e19, -1e19)
# What PyTorch makes of BEYOND on an H200 (from float32; from float64 the same, but for a NaN in 32 bits).
ON_A_GPU = {
    torch.uint8: (255, 0, 0, 44, 255, 144, 0, 0, 255, 0),
    torch.int8: (-1, 0, 0, 44, -1, -112, -1, 0, -1, 0),
    torch.int16: (-1, 0, 0, 300, -1, -4464, -1, 0, -1, 0),
    torch.int32: (MOST, LEAST, 0, 300, -1, -70000, MOST, LEAST, MOST, LEAST),
    torch.int64: (2**63 - 1, -(2**63), -(2**63), 300, -1, -70000, 3000000000, -3000000000, 2**63 - 1, -(2**63)),
    torch.uint16: (65535, 0, 0, 300, 0, 0, 24064, 0, 65535, 0),
    torch.uint32: (2**32 - 1, 0, 0, 300, 0, 0, 3000000000, 0, 2**32 - 1, 0),
    torch.uint64: (2**64 - 1, 0, 2**63, 300, 0, 0, 3000000000, 0, 9999999980506447872, 0),
}


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("target", ON_A_GPU, ids=str)
def test_a_number_out_of_range_is_what_a_gpu_makes_of_it(target: torch.dtype, source: torch.dtype) -> None:
    """The compiler, which knows the number, takes anything. Where it is in range, every device makes the same of it."""
    for number, expected in zip(BEYOND, ON_A_GPU[target], strict=True):
        if source is torch.float64 and number in (1e19, -1e19) and target is torch.uint64:
            expected = 10**19 if number > 0 else 0
        if source is torch.float64 and math.isnan(number) and target in (torch.int32, torch.uint32):
            expected = 2**31 if target is torch.uint32 else LEAST
        made = ir.cast(ir.constant(number, source), target)
        if not isinstance(made, ir.Constant):
            text = operations.apply(made, ["of no use"], operations.Style())
            made = operations.beyond(made)
            assert text == operations.typed(made)
        assert made.value == expected, number


def test_numbers_out_of_range_in_a_kernel() -> None:
    def converted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full_like(x, number).to(target) for number in BEYOND for target in list(ON_A_GPU)[:5])

    found = run(lowered(converted, [torch.ones(3)]), [torch.ones(3)])
    expected = [ON_A_GPU[target][place] for place in range(len(BEYOND)) for target in list(ON_A_GPU)[:5]]
    assert [set(one.tolist()) for one in found] == [{number} for number in expected]
