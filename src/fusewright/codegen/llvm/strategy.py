"""How a kernel is laid over vectors, loops and threads.

Takes a normalised `Shape` and the target; gives a `Strategy`. Always holds: iterations of the parallel domain never
write the same element (axes along which indirect or accumulating stores may meet are `serial`, run in order inside one
iteration, and are never vectorised).

Two modes. "inner": each stage vectorises one of its own axes; outer points are scalar. "outer": lanes are neighbouring
points of one outer axis, and all stages run for a tile of them; pure pointwise work is of this mode. The cheaper one
under a small cost model is taken.
"""

from __future__ import annotations

import torch

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Access, Shape, StageView, reductions_of, scans_of, values_of, walk
from fusewright.codegen.llvm.emit import scans
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.transpose import staged_loads
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.loops.ir import Apply, Axis, Load
from fusewright.schedule.plan import Store
from fusewright.sizes import expressions as sizes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, Expr

BLOCK = 1024  # elements of a contiguous pointwise axis that one iteration of the parallel domain takes
TILE_VECTORS = 4  # vectors side by side in a transposing tile
# Bytes of a line that a transposing tile reads before it goes on to the next one, which lies on another page: four
# lines of the cache read 3 times as fast as a half (bfloat16, 128 MiB).
TILE_LINE = 256
TILE_MEMORY = 256 << 10  # bytes of transposing tiles: a part of a second-level cache
# Vectors side by side, for bodies of so few operations, where there are so many tiles: a sum over the columns of 128
# MiB reaches 90% of a copy's rate, with four vectors 57%.
WIDE, LIGHT, LEAST_TILES = 8, 4, 16
EXPENSIVE = {  # in simple vector operations
    "exp": 14, "exp2": 12, "expm1": 16, "sigmoid": 22, "tanh": 26, "erf": 36, "log": 22, "div": 8, "sqrt": 8,
    "rsqrt": 14, "reciprocal": 8,
    **dict.fromkeys("log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh".split(), 60),
    **dict.fromkeys("asinh acosh atanh erfc lgamma pow hypot fmod remainder floor_divide trunc_divide".split(), 90),
}  # fmt: skip
# A wide tile: bytes of a row that it takes at most and at least, bytes that it remembers between stages (a second-level
# cache), bytes of its accumulators (a part of a first-level cache); bytes of a tensor that caches do not hold.
WIDE_PIECE, LEAST_PIECE, WIDE_MEMORY, WIDE_STATE, BEYOND_CACHES = 4096, 1024, 768 << 10, 24 << 10, 4 << 20
_CONTIGUOUS, _SPREAD, _REVERSED, _GATHER, _SCATTER = 1.0, 0.1, 2.0, 10.0, 18.0
PREFIX_STEP = 2  # a shuffle and an addition
# lanes so many elements apart (or a multiple) share few sets of a cache, and drive each other out
CONFLICT, _CONFLICTING = (
    1024,
    3.0,
)


@dataclass(slots=True)
class Strategy:
    """lanes: elements of a vector. vector: the outer axis in lanes (mode "outer") or None. stage_axes: the vector axis
    of each stage (mode "inner").

    domain: (axis, block) in order, block 0 for single points; serial: outer axes run in order inside an iteration.
    copies: vectors side by side. rows: the outer axis that a transposing tile walks inside an iteration, `tile_rows` (a
    multiple of `lanes`) points at a time.
    """

    mode: str
    lanes: int
    vector: Axis | None
    stage_axes: list[Axis | None]
    domain: list[tuple[Axis, int]]
    serial: list[Axis]
    copies: int
    rows: Axis | None = None
    wide: int = 0
    tile_rows: int = 0


def operation_cost(view: StageView) -> float:
    """Simple operations at one point of the stage."""
    return sum(EXPENSIVE.get(expr.op, 1) for expr in walk(values_of(view.stage)) if isinstance(expr, Apply)) + 1.0


def vector_lanes(shape: Shape, target: Target) -> int:
    """By the widest float in use, else by the widest integer, counting only what is loaded and stored."""
    kernel = shape.kernel
    dtypes = set(kernel.dtypes)
    floats = [max(ELEMENT_TYPES[d].size, 4) for d in dtypes if d.is_floating_point]
    for view in shape.views:
        for expr in walk(values_of(view.stage)):
            if isinstance(expr, Apply) and expr.dtype is torch.float64:
                floats.append(8)
    if floats:
        return target.lanes(max(floats))
    return target.lanes(max((max(ELEMENT_TYPES[d].size, 2) for d in dtypes), default=4))


def choose(shape: Shape, target: Target, threads: int = 1) -> Strategy:
    """threads: that will run the kernel, as far as is known; what is computed does not depend on it."""
    lanes = vector_lanes(shape, target)
    serial = _serial_axes(shape)
    parallel = [axis for axis in shape.outer if axis not in serial]
    best_cost, best_axis = _inner_cost(shape, lanes), None
    for axis in parallel:
        cost = _outer_cost(shape, axis, lanes)
        if cost < best_cost:
            best_cost, best_axis = cost, axis
    if best_axis is None:
        stage_axes = [_stage_axis(view, lanes)[1] for view in shape.views]
        return Strategy("inner", lanes, None, stage_axes, [(axis, 0) for axis in parallel], serial, 1)
    return _outer_strategy(shape, best_axis, parallel, serial, lanes, threads)


def _outer_strategy(
    shape: Shape, vector: Axis, parallel: list[Axis], serial: list[Axis], lanes: int, threads: int
) -> Strategy:
    others = [axis for axis in parallel if axis is not vector]
    pointwise = all(not view.axes for view in shape.views)
    rows = None
    wide = 0 if serial or pointwise else wide_columns(shape, vector, lanes, threads)
    if wide:
        block, copies = wide, 2 if any(ELEMENT_TYPES[dtype].size == 2 for dtype in shape.kernel.dtypes) else 1
    elif pointwise:
        copies = 1
        rows = _transposed_rows(shape, vector, others) if not serial else None
        # Where other axes run in order inside an iteration, this axis is all the parallelism there is.
        block = TILE_VECTORS * lanes if rows is not None or serial else max(BLOCK, lanes)
        block = block if rows is None else _tile_columns(shape, vector, rows, others, block, threads)
    else:
        copies = _tile_copies(shape, vector, lanes)
        block = copies * lanes
    height = _tile_rows(shape, vector, rows, lanes) if rows is not None else 0
    domain: list[tuple[Axis, int]] = [(axis, height if axis is rows else 0) for axis in others]
    return Strategy(
        "outer",
        lanes,
        vector,
        [None] * len(shape.views),
        [*domain, (vector, block)],
        serial,
        copies,
        rows,
        wide,
        height,
    )


def wide_columns(shape: Shape, vector: Axis, lanes: int, threads: int) -> int:
    """Columns of a wide tile, 0 where a narrow one serves as well or better: where the data lies in the caches or in
    short rows, where there are fewer columns than threads need, where a tile has too much to remember, and where
    columns are not read side by side."""
    kernel = shape.kernel
    if not isinstance(vector.extent, int) or any(scans_of(view.stage) for view in shape.views):
        return 0
    pieces = [size for view in shape.views for size in _row_pieces(view, vector)]
    if not pieces or any(not isinstance(axis.extent, int) for view in shape.views for axis in view.axes):
        return 0
    if any(access.bound for view in shape.views for access in view.accesses) or not _side_by_side(shape, vector):
        return 0
    remembered = sum(estimate(s.size) * ELEMENT_TYPES[s.dtype].size for s in kernel.scratch) + _read_again(shape)
    reduces = [reduce for view in shape.views for reduce in reductions_of(view.stage)]
    if any(ELEMENT_TYPES[reduce.value.dtype].kind == "bool" for reduce in reduces):
        return 0
    state = sum(ELEMENT_TYPES[reduce.value.dtype].size + 8 * reduce.kind.startswith("arg") for reduce in reduces)
    tiles = threads / _points([axis for axis in shape.outer if axis is not vector])
    columns = WIDE_PIECE // min(pieces)
    while columns * min(pieces) >= LEAST_PIECE:
        fits = columns * remembered <= WIDE_MEMORY and columns * state <= WIDE_STATE
        if fits and vector.extent >= columns * max(tiles, 1) and columns % lanes == 0:
            return columns
        columns //= 2
    return 0


def _row_pieces(view: StageView, vector: Axis) -> list[int]:
    """Bytes of an element of each large tensor that the stage reduces over rows that lie far apart."""
    found: list[int] = []
    for expr in walk(values_of(view.stage)) if view.axes and reductions_of(view.stage) else ():
        if isinstance(expr, Load) and expr.buffer not in view.aliases:
            index, size = view.dim(expr.index), ELEMENT_TYPES[expr.dtype].size
            row = sizes.coefficient(index, view.axes[-1].symbol)
            beside = sizes.coefficient(index, vector.symbol) == 1
            is_far = isinstance(row, int) and row * size >= LEAST_PIECE
            if beside and is_far and _points([vector, *view.axes]) * size >= BEYOND_CACHES:
                found.append(size)
    return found


def _side_by_side(shape: Shape, vector: Axis) -> bool:
    return all(
        sizes.coefficient(access.index, vector.symbol) in (0, 1) for view in shape.views for access in view.accesses
    )


def _read_again(shape: Shape) -> int:
    """Bytes for each column that several stages read from memory."""
    readers: dict[tuple[str, Dim], list[float]] = {}
    for view in shape.views:
        for access in view.accesses:
            if view.axes and not access.store and access.buffer not in shape.aliases:
                readers.setdefault((access.buffer, 0), []).append(_points(view.axes))
    dtypes = dict(zip(shape.kernel.buffers, shape.kernel.dtypes))
    return sum(
        int(max(counts)) * ELEMENT_TYPES[dtypes[name]].size for (name, _), counts in readers.items() if len(counts) > 1
    )


def _tile_copies(shape: Shape, vector: Axis, lanes: int) -> int:
    """Vectors side by side in a tile: several hide the latency of accumulation and use whole cache lines; heavy bodies
    need fewer. Light ones that wait for memory take more of each row that they pass, as long as there are tiles enough
    for the threads."""
    heavy = max(operation_cost(view) for view in shape.views)
    limit = 4 if heavy <= 24 else 2 if heavy <= 60 else 1
    scratch = sum(estimate(s.size) * ELEMENT_TYPES[s.dtype].size * lanes for s in shape.kernel.scratch)
    full = max(1, -(-estimate(vector.extent) // lanes))
    accumulators = max(len(reductions_of(view.stage)) for view in shape.views)
    if (
        heavy <= LIGHT
        and accumulators <= 2
        and full * _points([axis for axis in shape.outer if axis is not vector]) >= WIDE * LEAST_TILES
    ):
        limit = WIDE
    while limit > 1 and scratch * limit > 1 << 17:
        limit //= 2
    if isinstance(vector.extent, int) and vector.extent % lanes == 0:
        for copies in range(limit, 0, -1):
            if full % copies == 0 and (copies > 1 or full <= 1 or limit == 1):
                return copies
    return min(limit, full)


def _transposed_rows(shape: Shape, vector: Axis, others: list[Axis]) -> Axis | None:
    """An axis along which loads that are strided along `vector` are contiguous: walking it inside a tile uses whole
    cache lines."""
    return next((axis for axis in others if staged_loads(shape, vector, axis)), None)


def _tile_columns(shape: Shape, vector: Axis, rows: Axis, others: list[Axis], least: int, threads: int) -> int:
    """Points of `vector` in a transposing tile: as many as the second-level cache remembers where tensors lie beyond
    the caches and there are tiles enough for the threads."""
    loads = staged_loads(shape, vector, rows)
    axes = [vector, *others]
    size = max(ELEMENT_TYPES[load.dtype].size for _, load in loads)
    if not all(isinstance(axis.extent, int) for axis in axes) or _points(axes) * size < BEYOND_CACHES:
        return least
    columns = TILE_MEMORY // (TILE_LINE * (1 << (len(loads) - 1).bit_length()))
    tiles = _points([axis for axis in others if axis is not rows]) * estimate(rows.extent) * size / TILE_LINE
    while columns > least and (
        estimate(vector.extent) < columns or tiles * (estimate(vector.extent) // columns) < LEAST_TILES * threads
    ):
        columns //= 2
    return max(columns, least)


def _tile_rows(shape: Shape, vector: Axis, rows: Axis, lanes: int) -> int:
    """Points of `rows` in a transposing tile: whole lines of the cache where they go up, or are so many that the rest
    counts for little."""
    size = min(ELEMENT_TYPES[load.dtype].size for _, load in staged_loads(shape, vector, rows))
    count = max(TILE_LINE // size, lanes)
    while count > lanes and not (
        sizes.is_multiple(rows.extent, count) or (isinstance(rows.extent, int) and rows.extent >= 16 * count)
    ):
        count //= 2
    return count


# --- costs ------------------------------------------------------------------------------------------------------------


def _access_cost(view: StageView, access: Access, axis: Axis, lanes: int) -> float:
    """For one vector along `axis`."""
    if any(axis.symbol in view.facts(value).deps for _, value in access.bound):
        return _SCATTER if access.store else _GATHER
    stride = sizes.coefficient(access.index, axis.symbol)
    if isinstance(stride, int):
        if stride and stride % CONFLICT == 0:
            return (_SCATTER if access.store else _GATHER) * _CONFLICTING
        if stride == 0:
            return _SCATTER if access.store else _SPREAD
        if stride == 1:
            return _CONTIGUOUS
        if stride == -1:
            return _REVERSED
    elif stride is None and _blockwise(access.index, axis.symbol, lanes):
        return _CONTIGUOUS + 0.5
    return _SCATTER if access.store else _GATHER


def _blockwise(index: Dim, symbol: Expr, lanes: int) -> bool:
    """Whether every division of the index by a constant keeps whole vectors together."""
    if isinstance(index, int):
        return True
    for monomial, _ in index.terms:
        for atom in monomial:
            if atom is symbol or symbol not in sizes.free_symbols(atom):
                continue
            if (
                not isinstance(atom, (sizes.FloorDiv, sizes.Mod))
                or not isinstance(atom.right, int)
                or atom.right % lanes
            ):
                return False
    return True


def _waste(extent: Dim, lanes: int) -> float:
    """Lanes paid for over lanes used."""
    size = estimate(extent)
    return -(-size // lanes) * lanes / max(size, 1)


def _points(axes: list[Axis]) -> float:
    result = 1.0
    for axis in axes:
        result *= max(estimate(axis.extent), 1)
    return result


def _stage_axis(view: StageView, lanes: int) -> tuple[float, Axis | None]:
    """(cost of the stage for one outer point, its best vector axis)."""
    operations = operation_cost(view)
    points = _points(view.axes)
    best: tuple[float, Axis | None] = (points * (len(view.accesses) + operations), None)
    steps = scans_of(view.stage)
    if not all(scans.is_prefix(scan) for scan in steps):
        return best
    operations += len(steps) * PREFIX_STEP * (lanes.bit_length() + 1)
    for axis in view.axes[-1:] if steps else view.axes:  # parts of a scanned axis run in order
        if _meets(view, axis):
            continue
        accesses = sum(_access_cost(view, access, axis, lanes) for access in view.accesses)
        cost = points / lanes * _waste(axis.extent, lanes) * (accesses + operations) + 12.0 * len(
            reductions_of(view.stage)
        )
        if cost < best[0]:
            best = (cost, axis)
    return best


def _inner_cost(shape: Shape, lanes: int) -> float:
    return _points(shape.outer) * sum(_stage_axis(view, lanes)[0] for view in shape.views)


def _outer_cost(shape: Shape, axis: Axis, lanes: int) -> float:
    total = 0.0
    for view in shape.views:
        accesses = sum(_access_cost(view, access, axis, lanes) for access in view.accesses)
        total += _points(view.axes) * (accesses + operation_cost(view))
    return _points(shape.outer) / lanes * _waste(axis.extent, lanes) * total


# --- stores that may meet ---------------------------------------------------------------------------------------------


def _may_meet(store: Store) -> bool:
    return store.mode != "write" or bool(store.bindings)


def _serial_axes(shape: Shape) -> list[Axis]:
    """Outer axes along which two iterations may store to one element."""
    serial: list[Axis] = []
    for view in shape.views:
        for statement in view.stage.statements:
            if isinstance(statement, Store) and _may_meet(statement):
                index = view.dim(statement.index)
                serial += [axis for axis in shape.outer if axis not in serial and not _distinct(index, axis)]
    return serial


def _meets(view: StageView, axis: Axis) -> bool:
    """Whether stores of the stage may meet along its own `axis`."""
    return any(
        isinstance(statement, Store) and _may_meet(statement) and not _distinct(view.dim(statement.index), axis)
        for statement in view.stage.statements
    )


def _distinct(index: Dim, axis: Axis) -> bool:
    """Whether points that differ in `axis` certainly have different indices, whatever the rest: `axis` is one digit of
    a mixed-radix number.

    With c the axis' coefficient and m = c * extent: every other term is a multiple of m, or the terms that are not add
    up to 0 .. c-1.
    """
    scale = sizes.coefficient(index, axis.symbol)
    if not isinstance(scale, int) or scale <= 0 or isinstance(index, int):
        return False
    rest = index - axis.symbol * scale
    low: Dim = 0
    if not isinstance(rest, int):
        for monomial, count in rest.terms:
            if isinstance(axis.extent, int):
                high = count % (scale * axis.extent) == 0
            else:
                high = axis.extent in monomial and count % scale == 0
            if not high:
                low = low + sizes.product(monomial) * count
    first, last = sizes.bounds(low)
    return first is not None and last is not None and first >= 0 and last < scale
