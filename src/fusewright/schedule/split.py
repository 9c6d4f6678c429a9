"""Reductions with little outer parallelism, cut in two: partial results of fixed chunks, then their combination.

Takes a `LoopProgram`; gives one in which such a reduction became two. Always holds: the chunks depend on sizes alone
(never on the number of threads), so results are reproducible; sums gain accuracy, as in pairwise summation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fusewright.base.records import replace
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, LoopProgram, Operation, Pointwise, Reduction
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.options import ScheduleOptions
from fusewright.schedule.statistics import Chunks, find_statistics, statistics_of_chunks
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, Expr, Symbol, coefficient, loop_symbol, product, substitute, symbol
from fusewright.sizes.tensor_type import contiguous_strides

SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all", "xor_sum"})
POSITIONAL: dict[str, ir.ReductionKind] = {"argmax": "max", "argmin": "min"}
"""Reductions to a position → the reduction to the value there."""
ELEMENTARY = frozenset({"exp", "expm1", "log", "log1p", "erf", "erfc", "tanh", "sin", "cos", "sigmoid", "pow"})
"""Functions of some ten instructions and more."""
MOST_ROWS = 1 << 14
"""Partial results that one pass of a single block adds up without delay."""
LEAST_CHUNKS = 3
"""Chunks on a GPU below which another pass over the partial results costs more than more parallelism brings."""
LONG_COLUMN = 1024
"""Rows of a chunk from which more chunks are better than longer ones."""
SHORT_RUN = 128
"""Bytes of neighbouring elements below which a GPU fetches more than a reduction along them reads."""
SHORT_RUN_ROWS = 64
"""Reduced points beside a short run from which it is worth taking apart."""
Cut = tuple[tuple[int, int], ...]
"""Which reduced axes are cut, outermost first, and into how many chunks each."""


def split_reductions(program: LoopProgram, options: ScheduleOptions) -> LoopProgram:
    """The program itself where nothing is split."""
    cuts = _cuts(program, options)
    if not cuts:
        return program
    made: dict[int, tuple[Operation, ...]] = {}
    buffers = dict(program.buffers)
    cut_up: dict[int, tuple[Reduction, Chunks]] = {}
    for position, operation in enumerate(program.operations):
        cut = (
            cuts.get(_space(operation, options))
            if isinstance(operation, Reduction) and _splittable(operation)
            else None
        )
        if cut is not None and isinstance(operation, Reduction):
            chunks = _chunks(operation, cut, buffers[operation.buffer].device, options)
            buffers[chunks.buffer.name] = chunks.buffer
            cut_up[position] = operation, chunks
            if operation.kind in POSITIONAL:
                more, made[position] = _positions_in_chunks(operation, chunks)
                buffers.update((buffer.name, buffer) for buffer in more)
            else:
                made[position] = _sums_of_chunks(operation, chunks)
    if options.lanes > 1:
        for squares, mean in find_statistics(program.operations).items():
            if mean in cut_up and squares in cut_up and cut_up[mean][1].buffer.shape == cut_up[squares][1].buffer.shape:
                buffer, made[mean], made[squares] = statistics_of_chunks(*cut_up[mean], *cut_up[squares])
                buffers[buffer.name] = buffer
    operations = [new for position, old in enumerate(program.operations) for new in made.get(position, (old,))]
    return replace(program, buffers=buffers, operations=operations)


Space = tuple[tuple[Dim, ...], tuple[Dim, ...], bool, int | None, bool]


def _space(operation: Reduction, options: ScheduleOptions) -> Space:
    """The extents that a reduction walks, and which way it reads."""
    outer, reduced = (tuple(axis.extent for axis in axes) for axes in (operation.axes, operation.reduced))
    return outer, reduced, _along_outer(operation), _short_run(operation, options), operation.kind in POSITIONAL


def _cuts(program: LoopProgram, options: ScheduleOptions) -> dict[Space, Cut]:
    """How the reductions over each space are cut. They are cut alike, so that they stay one loop."""
    found: dict[Space, Cut] = {}
    made: dict[str, ir.Expression] = {}
    if options.lanes > 1:
        loops = [operation for operation in program.operations if isinstance(operation, Pointwise)]
        made = {store.buffer: store.value for loop in loops for store in loop.stores}
    rows: set[tuple[Dim, Dim]] = set()  # (number, length) of those that reductions on a GPU walk whole
    cuts: list[tuple[Reduction, Cut]] = []
    for operation in program.operations:
        if not isinstance(operation, Reduction) or (options.lanes == 1 and not _splittable(operation)):
            continue
        cut = _cut(operation, options, options.lanes > 1 and _is_dear(operation, made))
        if cut is None and options.lanes > 1:
            rows.add((_extent(operation.axes), _extent(operation.reduced)))
        elif cut is not None and _splittable(operation):
            cuts.append((operation, cut))
    for operation, cut in cuts:
        cut, space = _cut_to_rows(operation, rows) or cut, _space(operation, options)
        found[space] = max(found.get(space, cut), cut, key=_count)
    return found


def _cut_to_rows(operation: Reduction, rows: set[tuple[Dim, Dim]]) -> Cut | None:
    """A cut into rows that other reductions walk, so that they may become one kernel (a loss over a batch, and the
    softmax of its rows)."""
    for count in range(1, len(operation.reduced)):
        outside = operation.reduced[:count]
        number, length = _extent((*operation.axes, *outside)), _extent(operation.reduced[count:])
        extents = [axis.extent for axis in outside]
        if (number, length) in rows and isinstance(number, int) and number <= MOST_ROWS:
            return tuple((k, extent) for k, extent in enumerate(extents) if isinstance(extent, int))
    return None


def _extent(axes: Sequence[Axis]) -> Dim:
    return product(axis.extent for axis in axes)


def _count(cut: Cut) -> int:
    """The number of chunks."""
    return math.prod(count for _, count in cut)


def _splittable(operation: Reduction) -> bool:
    if operation.kind in ("any", "all"):
        return operation.value.dtype is torch.bool
    if operation.kind in POSITIONAL:
        return operation.value.dtype is not torch.bool
    return operation.kind in SPLITTABLE


def _cut(operation: Reduction, options: ScheduleOptions, dear: bool = False) -> Cut | None:
    """How the reduction is cut, or None where it stays whole. dear: its values take long to compute, on the way."""
    run = _short_run(operation, options)
    if run is not None:
        # Neighbours in memory become neighbouring columns, each summed by itself.
        rest = [k for k in range(len(operation.reduced)) if k != run]
        columns = replace(
            operation, axes=(*operation.axes, operation.reduced[run]), reduced=tuple(operation.reduced[k] for k in rest)
        )
        extent = operation.reduced[run].extent
        assert isinstance(extent, int)
        return tuple(sorted((*((rest[k], count) for k, count in _cut(columns, options, dear) or ()), (run, extent))))
    outer = estimate(product(axis.extent for axis in operation.axes))
    reduced = estimate(product(axis.extent for axis in operation.reduced))
    along_outer = options.lanes > 1 and _along_outer(operation)
    whole = 0 if along_outer else options.longest_row(outer)
    smallest, least_points = options.smallest_chunk, options.chunk_points
    if options.gathered_chunk and any(load.bindings for load in survey([operation.value]).loads):
        smallest, least_points, whole = options.gathered_chunk, 16 * options.gathered_chunk, 0
    chunks = options.chunks
    if along_outer:
        outer = -(-outer // options.lanes)
        smallest //= 4
        # A block of columns ends with a sum across its threads: by a fifth, fewer and longer ones are quicker, of what
        # is in memory.
        if not dear:
            chunks = min(chunks, max(chunks // 2, outer * (reduced // LONG_COLUMN)))
    points = estimate(product(axis.extent for axis in (*operation.axes, *operation.reduced)))
    if outer >= options.min_parallel or points < least_points or reduced < max(2 * smallest, whole + 1):
        return None
    wanted = min(chunks, reduced // smallest)
    if options.lanes > 1:
        wanted = min(wanted, max(-(-chunks // max(outer, 1)), 2))
    best: Cut = ()
    positional = operation.kind in POSITIONAL  # positions count chunk by chunk
    for k, axis in enumerate(() if positional else operation.reduced):
        if isinstance(axis.extent, int):
            count = _largest_divisor(axis.extent, wanted)
            if count > 1 and count > _count(best):
                best = ((k, count),)
    if positional or (options.lanes > 1 and 2 * _count(best) < wanted):
        best = max(best, _cut_outermost(operation, wanted), key=_count)
    least = LEAST_CHUNKS if options.lanes > 1 else 2
    return best if _count(best) >= least and _count(best) * 4 >= min(wanted, 16) else None


def _is_dear(operation: Reduction, made: Mapping[str, ir.Expression]) -> bool:
    """Whether an elementary function is in what it reduces, or in the loop that computes what it reads and so may join
    it."""
    values = [operation.value]
    values += [made[load.buffer] for load in survey(values).loads if load.buffer in made]
    return not ELEMENTARY.isdisjoint(survey(values).applied)


def _cut_outermost(operation: Reduction, wanted: int) -> Cut:
    """Outer axes taken apart wholly, and the next one cut, so that a chunk is one piece of memory where the reduced
    axes are."""
    cut: list[tuple[int, int]] = []
    for k, axis in enumerate(operation.reduced):
        count = _largest_divisor(axis.extent, wanted) if isinstance(axis.extent, int) else 1
        if count > 1:
            cut.append((k, count))
        wanted //= count
        if count != axis.extent:
            break
    return tuple(cut)


def _along_outer(operation: Reduction) -> bool:
    """Whether neighbouring elements of the largest value read lie along an outer axis."""
    main = _main_load(operation)
    return main is not None and any(coefficient(main.index, axis.symbol) == 1 for axis in operation.axes)


def _main_load(operation: Reduction) -> ir.Load | None:
    """Of the largest value that is read, at a place known beforehand."""
    axes = (*operation.axes, *operation.reduced)

    def walked(load: ir.Load) -> int:
        return sum(1 for axis in axes if coefficient(load.index, axis.symbol) != 0)

    return max((load for load in survey([operation.value]).loads if not load.bindings), key=walked, default=None)


def _short_run(operation: Reduction, options: ScheduleOptions) -> int | None:
    """The reduced axis that neighbouring elements lie along, where it is so short that what is read between its ends is
    mostly others' (a group of channels, in channels-last images)."""
    if options.lanes == 1 or len(operation.reduced) < 2 or operation.kind in POSITIONAL:
        return None
    main = _main_load(operation)
    if main is None:
        return None
    for k, axis in enumerate(operation.reduced):
        if coefficient(main.index, axis.symbol) == 1:
            rest = estimate(product(other.extent for other in operation.reduced if other is not axis))
            points = estimate(product(other.extent for other in (*operation.axes, *operation.reduced)))
            short = isinstance(axis.extent, int) and axis.extent > 1 and axis.extent * main.dtype.itemsize < SHORT_RUN
            return k if short and rest >= SHORT_RUN_ROWS and points >= options.chunk_points else None
    return None


def _largest_divisor(extent: int, limit: int) -> int:
    return next((d for d in range(min(limit, extent), 0, -1) if extent % d == 0), 1)


def _chunks(operation: Reduction, cut: Cut, device: torch.device, options: ScheduleOptions) -> Chunks:
    mapping: dict[Expr, Dim] = {}
    chunk: list[Axis] = []
    run = _short_run(operation, options)
    columns: list[Axis] = []
    rest = list(operation.reduced)
    for which, count in cut:
        axis = operation.reduced[which]
        assert isinstance(axis.extent, int)
        length = axis.extent // count
        # Symbols of one name and extent are one: each axis has names of its own.
        outside, inside = Axis(loop_symbol(f"c{which}", count), count), Axis(loop_symbol(f"k{which}", length), length)
        mapping[axis.symbol] = outside.symbol * length + inside.symbol
        chunk.append(outside)
        if which == run:
            columns.append(outside)
        rest[which] = inside
    rewriter = Rewriter(
        dim=lambda index: substitute(index, mapping),
        load=lambda node: None,
        local=lambda node: node,
        bind=_Renamer().bind,
    )
    # The partial results keep the order in which neighbouring elements are read: the chunk goes inside of a row,
    # outside of columns.
    numbers = tuple(axis for axis in chunk if axis not in columns)
    first = columns or (options.lanes > 1 and _along_outer(operation))
    axes = (*numbers, *operation.axes, *columns) if first else (*operation.axes, *numbers)
    shape = tuple(a.extent for a in axes)
    strides = contiguous_strides(shape)
    buffer = Buffer(f"{operation.buffer}_partial", shape, strides, operation.value.dtype, device, "temporary")
    index: Dim = 0
    for a, stride in zip(axes, strides):
        index = index + a.symbol * stride
    return Chunks(axes, tuple(chunk), tuple(rest), rewriter.visit(operation.value), buffer, index)


def _sums_of_chunks(operation: Reduction, chunks: Chunks) -> tuple[Reduction, Reduction]:
    """What each chunk accumulates, and the same of all chunks."""
    whole = replace(
        operation, reduced=chunks.chunk, value=ir.load(chunks.buffer.name, chunks.index, chunks.buffer.dtype)
    )
    return chunks.reduction(operation, chunks.value), whole


def _positions_in_chunks(operation: Reduction, chunks: Chunks) -> tuple[list[Buffer], tuple[Operation, ...]]:
    """The extreme of each chunk and its position there; then which chunk has the first extreme of all, and its
    position."""
    values, name = chunks.buffer, operation.buffer
    positions = replace(values, name=f"{name}_positions", dtype=torch.int64)
    extents = [axis.extent for axis in operation.axes]
    strides = contiguous_strides(tuple(extents))
    first = replace(positions, name=f"{name}_first", shape=tuple(extents), stride=strides)
    place: Dim = 0
    for axis, stride in zip(operation.axes, strides):
        place = place + axis.symbol * stride
    accumulated = ir.local_value("acc", torch.int64)
    counts = [axis.extent for axis in chunks.chunk]
    number = symbol("p", 0, product(counts) - 1)
    numbers: dict[Expr, Dim] = {}
    inner: Dim = 1
    for axis in reversed(chunks.chunk):
        numbers[axis.symbol] = number // inner % axis.extent
        inner = inner * axis.extent
    which = ir.load(first.name, place, torch.int64)
    length = ir.index_value(_extent(chunks.rest))
    inside = ir.load(positions.name, substitute(chunks.index, numbers), torch.int64, ((number, which),))
    before = ir.apply("mul", which, length, dtype=torch.int64)
    found = ir.apply("add", before, inside, dtype=torch.int64)
    finish = Rewriter(
        dim=lambda index: index,
        load=lambda node: None,
        local=lambda node: found if node.name == "acc" else node,
        bind=lambda old, value: old,
    ).visit(operation.finish)
    return [positions, first], (
        replace(chunks.reduction(operation, chunks.value), kind=POSITIONAL[operation.kind]),
        replace(
            chunks.reduction(operation, chunks.value),
            name=f"{operation.name}_positions",
            buffer=positions.name,
            finish=accumulated,
        ),
        replace(
            operation,
            name=f"{operation.name}_first",
            reduced=chunks.chunk,
            value=ir.load(values.name, chunks.index, values.dtype),
            buffer=first.name,
            index=place,
            finish=accumulated,
        ),
        Pointwise(operation.name, operation.axes, (ir.Store(name, operation.index, finish),), operation.locations),
    )


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
