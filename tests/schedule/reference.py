"""A reference interpreter of plans: runs kernels by their written rules over a poisoned arena.

Takes a `Plan` and inputs; gives what the graph returns. Always holds: outer points run one at a time in a shuffled order while there are
few of them (else all at once, statement by statement); temporaries live where the memory plan put them; a freed temporary is gone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright.loops.ir import Axis, LoopProgram, Store
from fusewright.schedule import ScheduleOptions, schedule as fused, with_memory
from fusewright.schedule.plan import Define, Kernel, Plan, Product, Reduce, RunKernel
from fusewright.sizes.expressions import Expr
from tests.loops import reference as loops
from tests.loops.reference import Index, Memory, Points, accumulate, collect, grid

POISON = 0xA5


def schedule(program: LoopProgram, options: ScheduleOptions = ScheduleOptions()) -> Plan:
    """The program's plan with memory, no step of it replaced."""
    return with_memory(fused(program, options), options.own_bytes)


def run_kernel(memory: Memory, kernel: Kernel, one_at_a_time: int = 64, seed: int = 0) -> None:
    shape, indices = grid(memory, kernel.outer)
    points = math.prod(shape)
    if points == 0:
        return
    if points <= one_at_a_time:
        order = list(range(points))
        random.Random(seed).shuffle(order)
        for flat in order:
            place: dict[Expr, Index] = {}
            for axis, size in zip(reversed(kernel.outer), reversed(shape)):
                place[axis.symbol] = torch.tensor(flat % size)
                flat //= size
            _run_stages(memory, kernel, (), place)
    else:
        _run_stages(memory, kernel, shape, indices)


def _run_stages(memory: Memory, kernel: Kernel, outer: tuple[int, ...], indices: dict[Expr, Index]) -> None:
    """All stages, over the outer points in `indices` at once; row memory gets the outer points as leading offset."""
    rows = math.prod(outer)
    base = torch.arange(rows).reshape(outer)
    for scratch in kernel.scratch:
        size = memory.size(scratch.size)
        memory.buffers[scratch.name] = _poisoned(rows * size, scratch.dtype)
    visible: dict[str, Tensor] = {}
    if kernel.product is not None:
        visible[kernel.product.local] = _product(memory, kernel.product, outer, indices)
    for stage in kernel.stages:
        visible.update(_run_stage(memory, kernel, stage.axes, stage.statements, outer, indices, base, visible))
    for scratch in kernel.scratch:
        del memory.buffers[scratch.name]


def _product(memory: Memory, product: Product, outer: tuple[int, ...], indices: dict[Expr, Index]) -> Tensor:
    """The sums of a product at the outer points in `indices`."""
    widened = {sym: torch.as_tensor(value).unsqueeze(-1) for sym, value in indices.items()}
    points = Points(memory, (*outer, product.length), {**widened, product.k: torch.arange(product.length)})
    factors = []
    for side in (product.left, product.right):
        if side.value is not None:
            factors.append(points.evaluate(side.value).float().expand(points.shape))
            continue
        inside = torch.ones(points.shape, dtype=torch.bool)
        for along, within, extent in side.checks:
            place = points.index(along + within)
            inside = inside & (place >= 0) & (place < extent)
        address = points.restricted(inside).address(side.buffer, side.outer + side.inner, ())
        factors.append(torch.where(inside, memory.buffers[side.buffer][address].float(), 0.0))
    return (factors[0] * factors[1]).sum(-1)


def _run_stage(
    memory: Memory,
    kernel: Kernel,
    axes: tuple[Axis, ...],
    statements: Sequence[Any],
    outer: tuple[int, ...],
    indices: dict[Expr, Index],
    base: Tensor,
    visible: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The locals that later stages see."""
    inner, more = grid(memory, axes, before=len(outer))
    widened = {
        sym: torch.as_tensor(value).reshape((*torch.as_tensor(value).shape, *[1] * len(inner)))
        for sym, value in indices.items()
    }
    sizes = {scratch.name: memory.size(scratch.size) for scratch in kernel.scratch}
    row = base.reshape((*base.shape, *[1] * len(inner)))
    shape = outer + inner
    locals_ = {
        name: value.expand(outer).reshape((*outer, *[1] * len(inner))).expand(shape) for name, value in visible.items()
    }
    later: dict[str, Tensor] = {}

    class Here(Points):
        def address(self, buffer, dim, bindings):  # type: ignore[no-untyped-def]
            if buffer not in sizes:
                return super().address(buffer, dim, bindings)
            found = self.index(dim, bindings)
            if self.active is not None:
                found = torch.where(self.active, found, 0)
            assert found.numel() == 0 or (int(found.min()) >= 0 and int(found.max()) < sizes[buffer]), (
                f"{buffer}[{dim}] outside its row"
            )
            return found + row * sizes[buffer]

        def restricted(self, mask):  # type: ignore[no-untyped-def]
            active = mask if self.active is None else mask & self.active
            return Here(self.memory, self.shape, self.indices, self.locals, active)

    points = Here(memory, shape, {**widened, **more}, locals_)
    for statement in statements:
        value = (
            points.evaluate(statement.value).expand(shape).clone()
        )  # indexing with one number gives a view, which later stores change
        if isinstance(statement, Define):
            points.locals[statement.local] = value
            if not axes:
                later[statement.local] = value
        elif isinstance(statement, Store):
            flat = memory.buffers[statement.buffer]
            assert value.dtype == flat.dtype, f"storing {value.dtype} into {statement.buffer} of {flat.dtype}"
            address = points.address(statement.buffer, statement.index, statement.bindings).expand(shape)
            if statement.mode == "write":
                assert address.unique().numel() == address.numel(), (
                    f"{kernel.name}: colliding writes to {statement.buffer}"
                )
            accumulate(flat, address.reshape(-1), value.reshape(-1), statement.mode)
        elif isinstance(statement, Reduce):
            assert value.dtype not in loops.HALF, "accumulating in half precision"
            later[statement.local] = loops.reduce(statement.kind, value.reshape((*outer, math.prod(inner))))
        else:
            result, position = loops.scan(statement.kind, value.contiguous())
            points.locals[statement.local] = result
            if statement.position is not None:
                assert position is not None
                points.locals[statement.position] = position
    return later


def _poisoned(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count * dtype.itemsize,), POISON if dtype != torch.bool else 1, dtype=torch.uint8).view(dtype)


def take_over(plan: Plan, kernel: Kernel, memory: Memory) -> None:
    """Lets what the kernel writes be the memory that it takes over."""
    for read, written in kernel.inplace:
        if plan.takes_over.get(written) == read:
            memory.buffers[written] = memory.buffers[read].view(plan.buffers[written].dtype)


def run(plan: Plan, inputs: Sequence[Any], one_at_a_time: int = 64) -> list[Any]:
    """What the plan returns for these inputs (which it may update)."""
    memory = loops.prepare(plan, inputs)
    arena = torch.full((memory.size(plan.arena_size),), POISON, dtype=torch.uint8)
    for name, place in plan.placements.items():
        start, dtype = memory.size(place.offset), plan.buffers[name].dtype
        size = memory.size(plan.buffers[name].span()) * dtype.itemsize
        memory.buffers[name] = arena[start : start + size].view(dtype)
    for number, step in enumerate(plan.steps):
        if isinstance(step, RunKernel):
            take_over(plan, plan.kernels[step.kernel], memory)
            run_kernel(memory, plan.kernels[step.kernel], one_at_a_time, seed=number)
        else:
            loops.run_extern(memory, step.extern)
        for name, last in plan.last_use.items():
            if last == number:
                del memory.buffers[name]
    return [
        r.clone() if isinstance(r, Tensor) and not any(r is i for i in inputs) else r
        for r in collect(plan, memory, inputs)
    ]
