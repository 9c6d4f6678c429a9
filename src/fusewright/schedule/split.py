"""Reductions with little outer parallelism, cut in two: partial results of fixed chunks, then their combination.

Takes a `LoopProgram`; gives one in which such a reduction became two. Always holds: the chunks depend on sizes alone (never on the number
of threads), so results are reproducible; sums gain accuracy, as in pairwise summation.
"""

from __future__ import annotations

import torch

from fusewright.graph.sizes import Dim, Expr, Symbol, coefficient, loop_symbol, product, substitute, symbol
from fusewright.graph.types import contiguous_strides
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, LoopProgram, Operation, Reduction
from fusewright.records import replace
from fusewright.schedule.axes import hint
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.options import ScheduleOptions

SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all", "xor_sum"})


def split_reductions(program: LoopProgram, options: ScheduleOptions) -> LoopProgram:
    """The program itself where nothing is split."""
    cuts = _cuts(program, options)
    if not cuts:
        return program
    operations: list[Operation] = []
    buffers = dict(program.buffers)
    for operation in program.operations:
        chunking = cuts.get(_space(operation)) if isinstance(operation, Reduction) and _splittable(operation) else None
        if chunking is None:
            operations.append(operation)
            continue
        assert isinstance(operation, Reduction)
        partial, combine, buffer = _split(operation, *chunking, buffers[operation.buffer].device, options.lanes)
        buffers[buffer.name] = buffer
        operations += [partial, combine]
    return replace(program, buffers=buffers, operations=operations)


Space = tuple[tuple[Dim, ...], tuple[Dim, ...], bool]


def _space(operation: Reduction) -> Space:
    """The extents that a reduction walks, and which way it reads."""
    return tuple(axis.extent for axis in operation.axes), tuple(axis.extent for axis in operation.reduced), _along_outer(operation)


def _cuts(program: LoopProgram, options: ScheduleOptions) -> dict[Space, tuple[int, int]]:
    """How the reductions over each space are cut. They are cut alike, so that they stay one loop."""
    found: dict[Space, tuple[int, int]] = {}
    for operation in program.operations:
        chunking = _chunking(operation, options) if isinstance(operation, Reduction) and _splittable(operation) else None
        if chunking is not None and isinstance(operation, Reduction):
            known = found.setdefault(_space(operation), chunking)
            found[_space(operation)] = max(known, chunking, key=lambda cut: cut[1])
    return found


def _splittable(operation: Reduction) -> bool:
    return operation.kind in SPLITTABLE and (operation.kind not in ("any", "all") or operation.value.dtype is torch.bool)


def _chunking(operation: Reduction, options: ScheduleOptions) -> tuple[int, int] | None:
    """(which reduced axis, number of chunks), or None where the reduction stays whole."""
    outer = hint(product(axis.extent for axis in operation.axes))
    reduced = hint(product(axis.extent for axis in operation.reduced))
    smallest, least_points = options.smallest_chunk, options.chunk_points
    if options.gathered_chunk and any(load.bindings for load in survey([operation.value]).loads):
        smallest, least_points = options.gathered_chunk, 16 * options.gathered_chunk
    if options.lanes > 1 and _along_outer(operation):
        outer = -(-outer // options.lanes)
        smallest //= 4
    points = hint(product(axis.extent for axis in (*operation.axes, *operation.reduced)))
    if outer >= options.min_parallel or points < least_points or reduced < 2 * smallest:
        return None
    wanted = min(options.chunks, reduced // smallest)
    if options.lanes > 1:
        wanted = min(wanted, max(-(-options.chunks // max(outer, 1)), 2))
    best: tuple[int, int] | None = None
    for k, axis in enumerate(operation.reduced):
        if isinstance(axis.extent, int):
            count = _largest_divisor(axis.extent, wanted)
            if count > 1 and (best is None or count > best[1]):
                best = k, count
    return best if best is not None and best[1] * 4 >= min(wanted, 16) else None


def _along_outer(operation: Reduction) -> bool:
    """Whether neighbouring elements of the largest value read lie along an outer axis."""
    loads = [load for load in survey([operation.value]).loads if not load.bindings]
    if not loads:
        return False
    axes = (*operation.axes, *operation.reduced)

    def walked(load: ir.Load) -> int:
        return sum(1 for axis in axes if coefficient(load.index, axis.symbol) != 0)

    main = max(loads, key=walked)
    return any(coefficient(main.index, axis.symbol) == 1 for axis in operation.axes)


def _largest_divisor(extent: int, limit: int) -> int:
    return next((d for d in range(min(limit, extent), 0, -1) if extent % d == 0), 1)


def _split(operation: Reduction, which: int, count: int, device: torch.device, lanes: int) -> tuple[Reduction, Reduction, Buffer]:
    axis = operation.reduced[which]
    assert isinstance(axis.extent, int)
    length = axis.extent // count
    chunk = Axis(loop_symbol("c", count), count)
    rest = Axis(loop_symbol("k", length), length)
    mapping: dict[Expr, Dim] = {axis.symbol: chunk.symbol * length + rest.symbol}
    rewriter = Rewriter(dim=lambda index: substitute(index, mapping), load=lambda node: None, local=lambda node: node, bind=_Renamer().bind)
    # The partial results keep the order in which neighbouring elements are read: the chunk goes inside of a row, outside of columns.
    outside = lanes > 1 and _along_outer(operation)
    axes = (chunk, *operation.axes) if outside else (*operation.axes, chunk)
    shape = tuple(a.extent for a in axes)
    strides = contiguous_strides(shape)
    dtype = operation.value.dtype
    buffer = Buffer(f"{operation.buffer}_partial", shape, strides, dtype, device, "temporary")
    index: Dim = 0
    for a, stride in zip(axes, strides):
        index = index + a.symbol * stride
    reduced = (*operation.reduced[:which], rest, *operation.reduced[which + 1 :])
    partial = replace(
        operation,
        name=f"{operation.name}_partial",
        axes=axes,
        reduced=reduced,
        value=rewriter.visit(operation.value),
        buffer=buffer.name,
        index=index,
        finish=ir.local_value("acc", dtype),
    )
    combine = replace(operation, reduced=(chunk,), value=ir.load(buffer.name, index, dtype))
    return partial, combine, buffer


class _Renamer:
    """Fresh symbols for rewritten indirect indices: one for each value."""

    def __init__(self) -> None:
        self.found: dict[tuple[ir.Expression, Dim | None], Expr] = {}

    def bind(self, old: Expr, value: ir.Expression) -> Expr:
        assert isinstance(old, Symbol)
        key = (value, old.upper)
        if key not in self.found:
            self.found[key] = symbol(f"p{len(self.found)}", old.lower, old.upper)
        return self.found[key]
