"""Transposing tiles: what is strided along the vector axis is read row by row, turned in registers, and kept beside the
vector loop.

Takes the emitter of a kernel whose strategy has `rows`; gives, for a tile, a table from `Load` to its place. Always
holds: no element outside a buffer is read. At the edges of the axes squares of large tiles are read under masks, and
rows beyond the end are the last one.

Tiles of tensors beyond the caches take a kibibyte and more of each row on either side, and lie in the second-level
cache: every row lies on a page of its own, and a processor that reads four lines of each waits for addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusewright.codegen.llvm.emit.builder import Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.loops import Turns
from fusewright.codegen.llvm.emit.memory import LINE, Place
from fusewright.codegen.llvm.emit.transpose import Staged, staged_loads
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.loops.ir import Axis, Expression, Load
from fusewright.sizes import expressions as sizes

if TYPE_CHECKING:
    from fusewright.codegen.llvm.emitter import KernelEmitter

SMALL = 16 << 10
"""Bytes of a tile up to which it lies on the stack."""
WIDEST = 16
"""Rows of a square: so many vectors are in registers at once."""


def place(emitter: KernelEmitter) -> list[tuple[Load, int, int | None]]:
    """(staged load, elements from one row of its tile to the next, bytes of the tile if it is not to lie on the
    stack)."""
    strategy = emitter.strategy
    made: list[tuple[Load, int, int | None]] = []
    if strategy.rows is None or strategy.vector is None:
        return []
    for _, load in staged_loads(emitter.shape, strategy.vector, strategy.rows):
        size, block = ELEMENT_TYPES[load.dtype].size, strategy.domain[-1][1]
        large = strategy.tile_rows * block * size > SMALL
        pitch = block + (LINE // size if large else 0)  # rows of a large tile are spread over the sets of a cache
        made.append((load, pitch, strategy.tile_rows * pitch * size if large else None))
    return made


def fill(
    emitter: KernelEmitter,
    context: Context,
    axis: Axis,
    row_start: Value,
    start: Value,
    counts: tuple[int | Value, int | Value],
) -> dict[Expression, Staged]:
    """Reads the tile whose first row and first column of `axis` are given. counts: its rows and columns, values where
    they may be fewer than a whole tile's."""
    b, strategy, loops = emitter.b, emitter.strategy, emitter.loops
    rows, block = strategy.rows, strategy.domain[-1][1]
    assert rows is not None
    height, width = counts
    masked = isinstance(height, Value) or isinstance(width, Value)
    origin = Scope(
        context.here.cursor, defines={rows.symbol, axis.symbol}, values={rows.symbol: row_start, axis.symbol: start}
    )
    inside = context.enter(origin)
    saved, b.scope = b.scope, origin
    staged: dict[Expression, Staged] = {}
    views = {load: view for view, load in staged_loads(emitter.shape, axis, rows)}
    for load, pitch, large in place(emitter):
        square = _square(emitter, ELEMENT_TYPES[load.dtype].size, block)
        index = views[load].dim(load.index)
        along = sizes.coefficient(index, axis.symbol)
        assert along is not None  # see staged_loads
        tile = emitter.tiles[load]
        column, line = sizes.loop_symbol("tile", block), sizes.loop_symbol("line", strategy.tile_rows)

        def turn(contexts: list[Context], _: list[Value]) -> list[Value]:
            at = contexts[0]
            b.scope = at.here
            place = {axis.symbol: axis.symbol + column, rows.symbol: rows.symbol + line}  # noqa: B023
            moved = sizes.substitute(index, place)  # noqa: B023
            stride = emitter.indexer.scalar(at.uniform, along)  # noqa: B023
            last = mask = None
            if masked:
                left = b.op("sub nsw", _value(emitter, height), at.chain[at.level(line)].values[line])  # noqa: B023
                mask = loops.first_lanes(at, left, square)  # noqa: B023
                most = b.op("sub nsw", _value(emitter, width), b.const(1, "i64"))
                last = b.op("sub nsw", most, at.chain[at.level(column)].values[column])  # noqa: B023
            first = emitter.indexer.scalar(at, line * pitch + column)  # noqa: B023
            source = Place(emitter.pointers[load.buffer], moved, {}, ahead=int(large is not None))  # noqa: B023
            square_of = (tile, pitch, first)  # noqa: B023
            emitter.evaluator.memory.fill_tile(square_of, (at, source, stride), square, last, mask)  # noqa: B023
            return []

        def lines(contexts: list[Context], _: list[Value]) -> list[Value]:
            return loops.counted(contexts, Turns(line, 0, height, square, runs=True), [], turn)  # noqa: B023

        loops.counted([inside], Turns(column, 0, width, square, runs=True), [], lines)
        staged[load] = Staged(tile, pitch, rows, row_start, start)
    b.scope = saved
    return staged


def _square(emitter: KernelEmitter, size: int, block: int) -> int:
    """Rows and columns that are turned at once: whole lines of the cache where registers are so wide."""
    return min(max(emitter.target.lanes(size), emitter.strategy.lanes), WIDEST, emitter.strategy.tile_rows, block)


def _value(emitter: KernelEmitter, count: int | Value) -> Value:
    return count if isinstance(count, Value) else emitter.b.const(count, "i64")
