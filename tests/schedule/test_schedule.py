"""Golden texts of the schedules that matter, and that each gives the unfused program's numbers.

Run `python -m tests.schedule.test_schedule` to write the goldens anew after a deliberate change.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import pytest
import torch

from fusewright.loops import ir
from fusewright.loops.ir import LoopProgram
from fusewright.schedule import ScheduleOptions
from fusewright.schedule.plan import Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import loop_symbol, symbol
from tests.loops import reference as loops
from tests.schedule import programs as p, reference as plans
from tests.schedule.programs import Builder
from tests.schedule.reference import schedule

GOLDEN = pathlib.Path(__file__).parent / "golden"


def layer_norm() -> LoopProgram:
    b = Builder()
    x, weight, bias = b.input(4, 16, 32), b.input(32), b.input(32)
    return b.done(p.layer_norm(b, x, weight, bias, line=12))


def softmax() -> LoopProgram:
    b = Builder()
    return b.done(p.softmax(b, b.input(4, 3, 8, 16), line=7))


def residual_rms_norm() -> LoopProgram:
    """The sum is an output too: it is stored, and still forwarded in registers."""
    b = Builder()
    x, residual, weight = b.input(64, 48), b.input(64, 48), b.input(48)
    total = b.pointwise("add", p.add, x, residual, line=3)
    square = b.pointwise("square", lambda v: p.mul(v, v), total, line=4)
    mean = b.reduce("mean", "sum", square, [1], 1 / 48, line=4)
    scale = b.pointwise("rsqrt", lambda v: p.rsqrt(p.add(v, 1e-6)), mean, line=4)
    y = b.pointwise("rms_norm", lambda v, s, w: p.mul(p.mul(v, s), w), total, scale, weight, line=5)
    return b.done(y, total)


def gelu_mlp() -> LoopProgram:
    b = Builder()
    x, w1, b1, w2, b2 = b.input(32, 16), b.input(16, 64), b.input(64), b.input(64, 16), b.input(16)
    mm = torch.ops.aten.mm.default
    h = b.pointwise("add", p.add, b.extern("mm", mm, x, w1, shape=(32, 64), placement="out"), b1)
    h = b.pointwise("gelu", p.gelu, h)
    y = b.extern("mm", mm, h, w2, shape=(32, 16), placement="out")
    return b.done(b.pointwise("add", p.add, b.pointwise("add", p.add, y, b2), x))


def batch_norm_relu_add() -> LoopProgram:
    """Training statistics over (n, h, w), with the running mean updated in place."""
    b = Builder()
    x, residual, weight, bias, running = (
        b.input(4, 40, 5, 5),
        b.input(4, 40, 5, 5),
        b.input(1, 40, 1, 1),
        b.input(1, 40, 1, 1),
        b.input(1, 40, 1, 1),
    )
    mean = b.reduce("mean", "sum", x, [0, 2, 3], 0.01)
    centred = b.pointwise("sub", p.sub, x, mean)
    variance = b.reduce("var", "sum", b.pointwise("square", lambda v: p.mul(v, v), centred), [0, 2, 3], 0.01)
    y = b.pointwise(
        "batch_norm",
        lambda c, v, w, z: p.add(p.mul(p.mul(c, p.rsqrt(p.add(v, 1e-5))), w), z),
        centred,
        variance,
        weight,
        bias,
    )
    b.pointwise("running_mean", lambda r, m: p.add(p.mul(r, 0.9), p.mul(m, 0.1)), running, mean, out=running)
    return b.done(b.pointwise("add", p.add, b.pointwise("relu", p.relu, y), residual))


def masked_attention_softmax() -> LoopProgram:
    b = Builder()
    scores, mask = b.input(4, 3, 16, 16), b.input(4, 1, 1, 16)
    scaled = b.pointwise("div", lambda v: p.mul(v, 0.125), scores)
    return b.done(p.softmax(b, b.pointwise("add", p.add, scaled, mask)))


def cat_then_silu() -> LoopProgram:
    """Both parts are written into one buffer, as lowering does for cat."""
    b = Builder()
    x, y = b.input(64, 16), b.input(64, 32)
    whole = b.buffer((64, 48))
    b.pointwise("cat_0", lambda v: p.mul(v, 2.0), x, out=whole.narrow(1, 0, 16))
    b.pointwise("cat_1", p.tanh, y, out=whole.narrow(1, 16, 32))
    return b.done(b.pointwise("silu", lambda v: p.mul(v, p.op("sigmoid")(v)), whole))


def gated_unit() -> LoopProgram:
    """silu(x[:, :h]) * x[:, h:] of a biased projection."""
    b = Builder()
    x, bias = b.input(64, 96), b.input(96)
    h = b.pointwise("add", p.add, x, bias)
    gate, value = h.narrow(1, 0, 48), h.narrow(1, 48, 48)
    return b.done(b.pointwise("glu", lambda g, v: p.mul(p.mul(g, p.op("sigmoid")(g)), v), gate, value))


def heads_and_back() -> LoopProgram:
    """A projection's bias, the split into heads and a scale: one kernel over (b, h, s, d)."""
    b = Builder()
    x, bias = b.input(2 * 8, 4 * 16), b.input(4 * 16)
    h = b.pointwise("add", p.add, x, bias).reshape(2, 8, 4, 16).permute(0, 2, 1, 3)
    return b.done(b.pointwise("scale", lambda v: p.mul(v, 0.25), h))


def full_sum() -> LoopProgram:
    b = Builder()
    return b.done(b.reduce("sum", "sum", b.pointwise("square", lambda v: p.mul(v, v), b.input(512, 256)), [0, 1]))


PROGRAMS: dict[str, tuple[Callable[[], LoopProgram], int]] = {
    # name: (program, number of kernels)
    "layer_norm": (layer_norm, 1),
    "softmax": (softmax, 1),
    "residual_rms_norm": (residual_rms_norm, 1),
    "gelu_mlp": (gelu_mlp, 2),
    "batch_norm_relu_add": (batch_norm_relu_add, 1),
    "masked_attention_softmax": (masked_attention_softmax, 1),
    "cat_then_silu": (cat_then_silu, 1),
    "gated_unit": (gated_unit, 1),
    "heads_and_back": (heads_and_back, 1),
    "full_sum": (full_sum, 2),
}


def planned(program: LoopProgram, options: ScheduleOptions = ScheduleOptions()) -> Plan:
    plan = schedule(program, options)
    verify(plan)
    return plan


@pytest.mark.parametrize("name", PROGRAMS)
def test_golden(name: str) -> None:
    build, kernels = PROGRAMS[name]
    plan = planned(build())
    assert len(plan.kernels) == kernels
    assert plan_text(plan) + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("one_at_a_time", [0, 1 << 20])
def test_numbers(name: str, one_at_a_time: int) -> None:
    program = PROGRAMS[name][0]()
    inputs = p.inputs_for(program)
    inputs = [t.abs() if name == "batch_norm_relu_add" else t for t in inputs]
    expected_inputs = [t.clone() for t in inputs]
    expected = loops.run(program, expected_inputs)
    actual = plans.run(planned(program), inputs, one_at_a_time)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs, expected_inputs)


def test_equal_layers_give_equal_kernels() -> None:
    """Two layers on other buffers give kernels that are equal once buffers are numbered."""
    b = Builder()
    x, weight, bias = b.input(64, 32), b.input(32), b.input(32)
    square = b.input(32, 32)
    for _ in range(2):
        x = p.layer_norm(b, b.pointwise("add", p.add, x, x), weight, bias)
        x = b.extern("mm", torch.ops.aten.mm.default, x, square, shape=(64, 32))
    plan = planned(b.done(x))
    texts = set()
    for kernel in plan.kernels.values():
        text = repr(kernel.stages)
        for number, name in enumerate(kernel.buffers):
            text = text.replace(f"'{name}'", f"'b{number}'")
        texts.add(text)
    assert len(plan.kernels) == 2 and len(texts) == 1


def test_column_sum_and_its_row_wise_consumer_stay_apart() -> None:
    """A row's softmax needs all columns' sums, which are made along the other axis."""
    b = Builder()
    x = b.input(64, 48)
    total = b.reduce("sum", "sum", x, [0])
    assert len(planned(b.done(p.softmax(b, b.pointwise("sub", p.sub, x, total)))).kernels) >= 2


def test_no_fusion_across_a_library_call() -> None:
    """add -> sigmoid (extern) -> mul with the add's result: merging the two kernels would need the call in the middle."""
    b = Builder()
    x = b.input(64, 48)
    h = b.pointwise("add", p.add, x, x)
    y = b.extern("sigmoid", torch.ops.aten.sigmoid.default, h, shape=(64, 48))
    plan = planned(b.done(b.pointwise("mul", p.mul, h, y)))
    assert len(plan.kernels) == 2 and len(plan.steps) == 3


def test_three_projections_share_a_kernel() -> None:
    b = Builder()
    x, w, bias = b.input(64, 48), b.input(48, 48), b.input(48)
    mm = torch.ops.aten.mm.default
    outs = [b.pointwise("add", p.add, b.extern("mm", mm, x, w.reshape(48, 48), shape=(64, 48)), bias) for _ in range(1)]
    for k in range(2):
        other = b.input(48, 48)
        outs.append(b.pointwise("add", p.add, b.extern("mm", mm, x, other, shape=(64, 48)), bias))
    plan = planned(b.done(*outs))
    assert len(plan.kernels) == 1


def test_dead_and_duplicate_operations_disappear() -> None:
    b = Builder()
    x = b.input(64, 48)
    b.pointwise("dead", p.tanh, x)
    first, second = b.pointwise("relu", p.relu, x), b.pointwise("relu", p.relu, x)
    a, c = (
        b.extern("s", torch.ops.aten.sigmoid.default, first, shape=(64, 48)),
        b.extern("t", torch.ops.aten.tanh.default, second, shape=(64, 48)),
    )
    plan = planned(b.done(a, c))
    assert [kernel.origins for kernel in plan.kernels.values()] == [("relu",)]


def test_input_update_after_its_readers() -> None:
    """y reads the input's old value; the update may join, but never run first."""
    b = Builder()
    x = b.input(64, 48)
    y = b.pointwise("double", lambda v: p.mul(v, 2.0), x)
    z = b.pointwise("inc", lambda v: p.add(v, 1.0), y)
    b.pointwise("update", lambda v: v, z, out=x)
    program = b.done(y)
    inputs = p.inputs_for(program)
    old = inputs[0].clone()
    (result,) = plans.run(planned(program), inputs)
    torch.testing.assert_close(result, old * 2)
    torch.testing.assert_close(inputs[0], old * 2 + 1)


def test_scatter_stays_apart_from_readers_of_its_buffer() -> None:
    b = Builder()
    index, source = b.input(64, dtype=torch.int64), b.input(64)
    out = b.buffer((8,))
    zero = b.pointwise("zero", lambda v: p.mul(v, 0.0), b.input(8), out=out)
    i0, j0 = loop_symbol("i0", 64), symbol("j0", 0, 7)
    place = ir.checked_index(index.at((i0,)), 8)
    store = ir.Store(out.buffer, j0, source.at((i0,)), "add", ((j0, place),))
    b.program.operations.append(ir.Pointwise("scatter", (ir.Axis(i0, 64),), (store,)))
    program = b.done(b.pointwise("relu", p.relu, zero))
    plan = planned(program)
    assert len(plan.kernels) == 3
    inputs = p.inputs_for(program)
    torch.testing.assert_close(plans.run(plan, inputs), loops.run(program, [t.clone() for t in inputs]))


def test_symbolic_rows() -> None:
    """An unknown batch: one layer norm kernel that names the size it needs, and numbers for several batches."""
    batch = symbol("s0", 2)
    b = Builder()
    x, weight, bias = b.input(batch, 16, 32), b.input(32), b.input(32)
    b.program.size_symbols = {batch: (0, 0)}
    h = b.pointwise("gelu", p.gelu, b.pointwise("add", p.add, x, x).reshape(batch * 16, 32)).reshape(batch, 16, 32)
    program = b.done(p.layer_norm(b, h, weight, bias))
    plan = planned(program)
    (kernel,) = plan.kernels.values()
    assert kernel.sizes == (batch,) and estimate(kernel.outer[0].extent) > 0
    for size in (2, 5):
        inputs = [torch.randn(size, 16, 32), torch.randn(32), torch.randn(32)]
        torch.testing.assert_close(plans.run(plan, inputs), loops.run(program, inputs), rtol=1e-5, atol=1e-5)


def test_scan_with_positions() -> None:
    b = Builder()
    values, positions = b.scan("cummax", "max", b.pointwise("relu", p.relu, b.input(40, 12)), 1, positions=True)
    assert positions is not None
    program = b.done(b.pointwise("double", lambda v: p.mul(v, 2.0), values), positions)
    plan = planned(program)
    assert len(plan.kernels) == 1
    inputs = p.inputs_for(program)
    torch.testing.assert_close(plans.run(plan, inputs), loops.run(program, inputs))


@pytest.mark.parametrize(
    ("rows", "length", "whole"),
    [(64, 32000, True), (16, 32000, True), (64, 131072, True), (8, 131072, False), (64, 200000, False)],
)
def test_long_rows_of_a_gpu(rows: int, length: int, whole: bool) -> None:
    """A program takes a row, unless rows are so few that parts of them keep more of the GPU busy."""
    b = Builder()
    options = ScheduleOptions(
        min_parallel=528, lanes=64, chunks=1056, smallest_chunk=512, scratch_bytes=128 * 1024, whole_row=131072
    )
    plan = schedule(b.done(p.softmax(b, b.input(rows, length), line=7)), options)
    assert (len(plan.kernels) == 1) is whole


if __name__ == "__main__":
    for name, (build, _) in PROGRAMS.items():
        (GOLDEN / f"{name}.txt").write_text(plan_text(planned(build())) + "\n")
    sys.exit(0)
