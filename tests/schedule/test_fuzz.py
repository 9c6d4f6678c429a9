"""Random programs: the fused plan gives what the unfused program gives, for every order of outer points, over a poisoned arena."""

from __future__ import annotations

import random

import pytest
import torch

from fusewright.loops.ir import LoopProgram
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from tests.loops import reference as loops
from tests.schedule import programs as p
from tests.schedule import reference as plans
from tests.schedule.programs import Builder, View

SHAPES = [(6, 8), (3, 4, 5), (2, 3, 4, 6), (24,), (4, 1, 6)]
BINARY = [p.add, p.sub, p.mul, p.maximum]
UNARY = [p.relu, p.tanh, lambda v: p.mul(v, 0.5), lambda v: p.rsqrt(p.add(p.mul(v, v), 1.0))]


def random_program(seed: int) -> LoopProgram:
    """Pointwise operations, broadcasts, reductions, scans, views, library calls and scatters over a few related shapes."""
    choose = random.Random(seed)
    b = Builder()
    base = choose.choice(SHAPES)
    pool: list[View] = [b.input(*base) for _ in range(choose.randint(1, 3))]
    if choose.random() < 0.5:
        pool.append(b.input(*(n if choose.random() < 0.5 else 1 for n in base)))
    for step in range(choose.randint(3, 14)):
        kind = choose.choice("unary unary binary binary binary reduce reduce normal scan permute reshape narrow extern inplace".split())
        source = choose.choice(pool[-4:] if choose.random() < 0.7 else pool)
        if kind == "unary":
            pool.append(b.pointwise(f"unary_{step}", choose.choice(UNARY), source))
        elif kind == "binary":
            fitting = [v for v in pool if _broadcasts(v, source)]
            pool.append(b.pointwise(f"binary_{step}", choose.choice(BINARY), source, choose.choice(fitting)))
        elif kind == "reduce":
            dims = sorted(choose.sample(range(len(source.shape)), choose.randint(1, len(source.shape))))
            pool.append(b.reduce(f"reduce_{step}", choose.choice(["sum", "max", "min"]), source, dims))
        elif kind == "normal":
            total = b.reduce(f"total_{step}", "sum", source, [len(source.shape) - 1], 0.25)
            pool.append(b.pointwise(f"normal_{step}", p.sub, source, total))
        elif kind == "scan":
            pool.append(b.scan(f"scan_{step}", "sum", source, choose.randrange(len(source.shape)))[0])
        elif kind == "permute":
            dims = list(range(len(source.shape)))
            choose.shuffle(dims)
            pool.append(source.permute(*dims))
        elif kind == "reshape":
            dense = b.pointwise(f"copy_{step}", lambda v: v, source)
            fitting_shapes = [s for s in [*SHAPES, *(v.shape for v in pool)] if _numel(s) == _numel(source.shape)]
            pool.append(dense.reshape(*choose.choice([source.shape, *fitting_shapes])))
        elif kind == "narrow":
            dim = max(range(len(source.shape)), key=lambda d: source.shape[d])
            half = source.shape[dim] // 2
            if half:
                parts = source.narrow(dim, 0, half), source.narrow(dim, half, half)
                pool.append(b.pointwise(f"gate_{step}", p.mul, *parts))
        elif kind == "extern":
            if all(n >= 1 for n in source.shape):
                pool.append(
                    b.extern(
                        f"sort_{step}",
                        torch.ops.aten.sigmoid.default,
                        source,
                        shape=source.shape,
                        placement=choose.choice(["out", "returned"]),
                    )
                )
        elif kind == "inplace":
            target = choose.choice([v for v in pool if v.buffer.startswith("in")])
            whole = b.program.buffers[target.buffer]
            view = View(target.buffer, whole.shape, whole.stride)
            if len({v.shape for v in (view, source)}) == 1:
                b.pointwise(f"update_{step}", lambda v: p.mul(v, 0.5), source, out=view)
    temporaries = [v for v in pool if v.buffer.startswith("t")] or [b.pointwise("last", p.relu, pool[0])]
    return b.done(*choose.sample(temporaries, min(len(temporaries), choose.randint(1, 3))))


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _broadcasts(v: View, w: View) -> bool:
    return len(v.shape) == len(w.shape) and all(a == b or 1 in (a, b) for a, b in zip(v.shape, w.shape))


def check(program: LoopProgram, options: ScheduleOptions, one_at_a_time: int) -> int:
    inputs = p.inputs_for(program)
    expected_inputs = [t.clone() for t in inputs]
    expected = [t.clone() for t in loops.run(program, expected_inputs)]
    plan = schedule(program, options)
    verify(plan)
    actual = plans.run(plan, inputs, one_at_a_time)
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(inputs, expected_inputs, rtol=1e-5, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{plan_text(plan, False)}") from None
    return len(plan.kernels)


EAGER_TO_FUSE = ScheduleOptions(min_parallel=1, small_points=1 << 30, chunk_points=64)


@pytest.mark.parametrize("block", range(8))
def test_fused_gives_what_unfused_gives(block: int) -> None:
    fused = unfused = 0
    for seed in range(block * 12, block * 12 + 12):
        program = random_program(seed)
        fused += check(program, EAGER_TO_FUSE if seed % 2 else ScheduleOptions(), 64 if seed % 3 else 0)
        unfused += sum(not hasattr(operation, "target") for operation in program.operations)
    assert fused < unfused  # something is fused, or this tests nothing


def test_every_number_of_merges_is_right() -> None:
    """`fuse_limit` stops at any merge, so that a wrong answer can be bisected."""
    program = random_program(5)
    counts = [check(program, ScheduleOptions(fuse_limit=limit), 64) for limit in range(5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= check(program, ScheduleOptions(), 64)


def test_no_fusion_is_one_kernel_an_operation() -> None:
    program = random_program(3)
    plan = schedule(program, ScheduleOptions(fusion=False))
    assert all(len(kernel.origins) == 1 for kernel in plan.kernels.values())
    check(program, ScheduleOptions(fusion=False), 64)
