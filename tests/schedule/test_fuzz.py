"""Random programs: the fused plan gives what the unfused program gives, for every order of outer points, over a poisoned arena."""

from __future__ import annotations

import random

import pytest
import torch

from fusewright.loops.ir import LoopProgram
from fusewright.schedule import ScheduleOptions
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from tests.loops import reference as loops
from tests.schedule import programs as p, reference as plans
from tests.schedule.programs import Builder, View
from tests.schedule.reference import schedule

SHAPES = [(6, 8), (3, 4, 5), (2, 3, 4, 6), (24,), (4, 1, 6), (8, 8), (3, 5, 5), (2, 4, 4, 3)]
BINARY = [p.add, p.sub, p.mul, p.maximum]
KINDS = (
    "unary binary binary reduce reduce normal normal scan permute reshape narrow swap swap shift cat cat divide extern extern "
    "inplace inplace inplace"
).split()
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
        kind = choose.choice(KINDS)
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
        elif kind == "swap":  # the same buffer in two orders: equal extents, other elements
            equal = [
                (i, j) for i in range(len(source.shape)) for j in range(i) if source.shape[i] == source.shape[j] > 1
            ]
            if equal:
                i, j = choose.choice(equal)
                dims = list(range(len(source.shape)))
                dims[i], dims[j] = j, i
                fresh = b.pointwise(f"fresh_{step}", p.tanh, source)
                swapped = fresh.permute(*dims)
                pool.append(
                    b.pointwise(f"swap_{step}", p.sub, fresh, swapped)
                    if choose.random() < 0.5
                    else b.pointwise(f"turn_{step}", p.relu, swapped)
                )
        elif kind == "shift":  # each element with its neighbour
            dim = choose.randrange(len(source.shape))
            length = source.shape[dim] - 1
            if length > 0:
                fresh = b.pointwise(f"fresh_{step}", p.tanh, source)
                pool.append(
                    b.pointwise(f"shift_{step}", p.sub, fresh.narrow(dim, 0, length), fresh.narrow(dim, 1, length))
                )
        elif kind == "cat":
            dim = choose.randrange(len(source.shape))
            fitting = [
                v
                for v in pool
                if len(v.shape) == len(source.shape)
                and all(a == c or d == dim for d, (a, c) in enumerate(zip(v.shape, source.shape)))
            ]
            other = choose.choice(fitting)
            shape = (*source.shape[:dim], source.shape[dim] + other.shape[dim], *source.shape[dim + 1 :])
            whole = b.buffer(shape)
            b.pointwise(f"cat_{step}_0", p.tanh, source, out=whole.narrow(dim, 0, source.shape[dim]))
            b.pointwise(f"cat_{step}_1", p.relu, other, out=whole.narrow(dim, source.shape[dim], other.shape[dim]))
            pool.append(whole)
            if choose.random() < 0.7:
                pool.append(
                    b.pointwise(f"part_{step}", p.tanh, whole.narrow(dim, other.shape[dim] // 2, source.shape[dim]))
                )
        elif kind == "divide":  # a statistic for every two neighbours, read at i // 2
            axis = len(source.shape) - 1
            if source.shape[axis] % 2 == 0:
                dense = b.pointwise(f"copy_{step}", lambda v: v, source)
                pairs = dense.reshape(*source.shape[:axis], source.shape[axis] // 2, 2)
                pool.append(b.divided(f"divide_{step}", dense, b.reduce(f"pair_{step}", "max", pairs, [axis + 1])))
        elif kind == "extern":
            if choose.random() < 0.5:  # what comes out of a library call is transposed in place or not
                source = b.extern(
                    f"abs_{step}", torch.ops.aten.abs.default, source, shape=source.shape, placement="out"
                )
                turned = list(range(len(source.shape)))
                choose.shuffle(turned)
                source = b.pointwise(f"turn_{step}", p.tanh, source.permute(*turned))
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
            same_place = source.buffer != view.buffer or (source.stride, source.offset) == (view.stride, 0)
            if view.shape == source.shape and same_place:  # an operation never reads other elements of what it writes
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
