"""What to fetch before it is needed: the processor's own prefetching stops at each page, and does not see far along
columns.

Takes a `Shape`, its `Strategy` and a stage; gives bytes between a load or store and the place to fetch while it runs,
for those that gain.
Always holds: a fetch is a hint, and may point anywhere.

Measured with data beyond the caches: reductions of rows take 0.9 to 0.98 of the time in bfloat16, sums over columns 0.8
(float32) and 0.87. Streams of pointwise kernels reach 97 to 108% of a copy's rate where they reached 75 to 98: a
processor sees a few lines ahead in a body of fifty instructions, and a store waits for the line that it writes to. The
second of several passes over a row (the exponentials of a softmax) finds it in the caches and leaves memory idle: it
fetches the next row. Cumulative sums take 0.53 to 0.58 of the time in float32, 0.9 in bfloat16.
"""

from __future__ import annotations

from fusewright.codegen.analysis import Shape, StageView, reductions_of, scans_of, values_of, walk
from fusewright.codegen.llvm.emit.transpose import unmasked
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.loops.ir import Axis, CheckedIndex, Expression, Load
from fusewright.schedule.plan import Store
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim

FAR = 4096  # bytes ahead in a stream: a page
ROWS_OF_TILE = 4  # rows ahead in a transposing tile
ROWS = 8  # rows ahead where a tile of columns passes over them
LEAST = 4 << 20  # bytes of a buffer that caches may hold whole


def distances(shape: Shape, strategy: Strategy, number: int) -> dict[Expression, int]:
    """For the loads of stage `number`."""
    view, axis = shape.views[number], strategy.stage_axes[number]
    found: dict[Expression, int] = {}
    for expr in walk(values_of(view.stage)):
        if isinstance(expr, Load) and not expr.bindings and _is_large(shape, expr.buffer, view):
            distance = (
                _along_rows(shape, strategy, number, expr)
                if axis is not None
                else _along_columns(shape, strategy, number, expr)
            )
            if distance:
                found[expr] = distance * ELEMENT_TYPES[expr.dtype].size
    return found


def store_distances(shape: Shape, strategy: Strategy, number: int) -> dict[str, int]:
    """Bytes to what a stage will store, by buffer: of large results that it writes as one stream."""
    view = shape.views[number]
    if strategy.wide:
        return _stores_of_next_row(shape, strategy, view)
    if strategy.rows is not None:
        return {
            statement.buffer: ROWS_OF_TILE * row * ELEMENT_TYPES[statement.value.dtype].size
            for statement in view.stage.statements
            if isinstance(statement, Store) and not statement.bindings
            and _bytes_used(shape, statement.buffer, view) >= LEAST
            and (row := _row_of_tile(strategy, view.dim(statement.index), ELEMENT_TYPES[statement.value.dtype].size))
        }  # fmt: skip
    axis = strategy.stage_axes[number] or _streaming_axis(strategy, view)
    if axis is None:
        return {}
    return {
        statement.buffer: FAR
        for statement in view.stage.statements
        if isinstance(statement, Store) and not statement.bindings
        and sizes.coefficient(view.dim(statement.index), axis.symbol) == 1
        and _bytes_used(shape, statement.buffer, view) >= LEAST
    }  # fmt: skip


def _stores_of_next_row(shape: Shape, strategy: Strategy, view: StageView) -> dict[str, int]:
    """In a wide tile: the same columns of the next row."""
    found: dict[str, int] = {}
    for statement in view.stage.statements if view.axes and not reductions_of(view.stage) else ():
        if (
            isinstance(statement, Store)
            and not statement.bindings
            and _bytes_used(shape, statement.buffer, view) >= LEAST
        ):
            row = sizes.coefficient(view.dim(statement.index), view.axes[-1].symbol)
            if isinstance(row, int):
                found[statement.buffer] = (
                    row * ELEMENT_TYPES[dict(zip(shape.kernel.buffers, shape.kernel.dtypes))[statement.buffer]].size
                )
    return found


def _streaming_axis(strategy: Strategy, view: StageView) -> Axis | None:
    """The axis of a pointwise kernel along which its vectors follow one another."""
    return strategy.vector if not view.axes and strategy.rows is None and not strategy.wide else None


def gathered_rows(shape: Shape, strategy: Strategy, number: int) -> dict[Expression, Axis]:
    """Rows that stage `number` takes from a large table at indices it reads (an embedding): each of these loads, with
    the outer axis along which its index changes. No processor sees where the next row lies; rows of 2 KiB took 0.75 of
    the time when it was fetched."""
    view = shape.views[number]
    along = strategy.stage_axes[number] or _streaming_axis(strategy, view)
    found: dict[Expression, Axis] = {}
    if along is None:
        return found
    for expr in unmasked(values_of(view.stage)):
        if not isinstance(expr, Load) or len(expr.bindings) != 1 or expr.buffer in shape.aliases:
            continue
        ((symbol, value),) = expr.bindings
        index, row = view.dim(expr.index), sizes.coefficient(view.dim(expr.index), symbol)
        deps = view.facts(value).deps
        axes = [axis for axis, block in strategy.domain if not block and axis.symbol in deps]
        if not (
            isinstance(value, CheckedIndex) and isinstance(value.extent, int) and isinstance(value.value, Load) and axes
        ):
            continue
        plain = not value.value.bindings and not view.facts(value.value).volatile and along.symbol not in deps
        size = ELEMENT_TYPES[expr.dtype].size
        if (
            plain
            and sizes.coefficient(index, along.symbol) == 1
            and isinstance(row, int)
            and row * value.extent * size >= LEAST
        ):
            found[expr] = axes[-1]
    return found


def streamed(shape: Shape, view: StageView, axis: Axis) -> dict[Expression, int]:
    """Loads of large tensors that run along `axis`, with the bytes of an element."""
    return {
        expr: ELEMENT_TYPES[expr.dtype].size
        for expr in walk(values_of(view.stage))
        if isinstance(expr, Load)
        and not expr.bindings
        and _is_large(shape, expr.buffer, view)
        and sizes.coefficient(view.dim(expr.index), axis.symbol) == 1
    }


def _is_large(shape: Shape, buffer: str, view: StageView) -> bool:
    """Whether the kernel reads so much of a buffer that is not its own."""
    return buffer not in shape.aliases and _bytes_used(shape, buffer, view) >= LEAST


def _bytes_used(shape: Shape, buffer: str, view: StageView) -> int:
    """Of a buffer by a stage, at all its points; 0 where that is not known."""
    dtypes = dict(zip(shape.kernel.buffers, shape.kernel.dtypes))
    total = ELEMENT_TYPES[dtypes[buffer]].size if buffer in dtypes else 0
    symbols = set().union(*(sizes.free_symbols(access.index) for access in view.accesses if access.buffer == buffer))
    for axis in (*shape.outer, *view.axes):
        if not isinstance(axis.extent, int):
            return 0
        total *= axis.extent if axis.symbol in symbols else 1
    return total


def _along_rows(shape: Shape, strategy: Strategy, number: int, load: Load) -> int:
    """Elements ahead in a stage that reduces a row, or all of a stream; elements to the next row where this one has
    been read."""
    view, axis = shape.views[number], strategy.stage_axes[number]
    index = view.dim(load.index)
    if axis is None or sizes.coefficient(index, axis.symbol) != 1:
        return 0
    readers = sum(
        _reads_along(shape.views[earlier], strategy.stage_axes[earlier], load.buffer) for earlier in range(number)
    )
    if not readers:
        return FAR // ELEMENT_TYPES[load.dtype].size if reductions_of(view.stage) or scans_of(view.stage) else 0
    if readers > 1 or not strategy.domain or strategy.serial:
        return 0
    row = sizes.coefficient(index, strategy.domain[-1][0].symbol)
    return row if isinstance(row, int) and row * ELEMENT_TYPES[load.dtype].size >= FAR // 2 else 0


def _reads_along(view: StageView, axis: Axis | None, buffer: str) -> bool:
    return axis is not None and any(
        access.buffer == buffer and not access.store and sizes.coefficient(access.index, axis.symbol) == 1
        for access in view.accesses
    )


def _along_columns(shape: Shape, strategy: Strategy, number: int, load: Load) -> int:
    """Elements to a later row of a stage that reduces over rows; ahead in the stream of a pointwise kernel."""
    view = shape.views[number]
    index = view.dim(load.index)
    axis = _streaming_axis(strategy, view)
    if axis is not None:
        return FAR // ELEMENT_TYPES[load.dtype].size if sizes.coefficient(index, axis.symbol) == 1 else 0
    if strategy.rows is not None:
        return ROWS_OF_TILE * _row_of_tile(strategy, index, ELEMENT_TYPES[load.dtype].size)
    if strategy.vector is None or not view.axes or not reductions_of(view.stage):
        return 0
    row = sizes.coefficient(index, view.axes[-1].symbol)
    if sizes.coefficient(index, strategy.vector.symbol) != 1 or not isinstance(row, int):
        return 0
    if strategy.wide and _read_before(shape, number, load.buffer):
        return strategy.wide  # this tile lies in the caches: the next one beside it
    return ROWS * row if row * ELEMENT_TYPES[load.dtype].size >= FAR // 4 else 0


def _row_of_tile(strategy: Strategy, index: Dim, size: int) -> int:
    """Elements to the same columns of the next row in a transposing tile that takes long pieces of rows; 0 in
    others."""
    assert strategy.rows is not None and strategy.vector is not None
    row = sizes.coefficient(index, strategy.rows.symbol)
    is_long = strategy.domain[-1][1] * size >= FAR // 4 and sizes.coefficient(index, strategy.vector.symbol) == 1
    return row if is_long and isinstance(row, int) else 0


def _read_before(shape: Shape, number: int, buffer: str) -> bool:
    return any(
        access.buffer == buffer and not access.store for view in shape.views[:number] for access in view.accesses
    )
