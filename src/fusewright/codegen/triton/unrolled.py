"""Several points of one axis, one after the other in each thread: what does not depend on the axis is computed once.

Takes an emitter; writes the statements of each point. Always holds: the values of all points stand before the first
store, so that no load waits for one; and an address is that of the first point and a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusewright.codegen.triton import indices
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.codegen.triton.tiles import Tile
from fusewright.codegen.triton.values import Value
from fusewright.loops.ir import Expression, Store
from fusewright.schedule.plan import Statement
from fusewright.sizes.expressions import Dim, Sum

if TYPE_CHECKING:
    from fusewright.codegen.triton.kernel import Emitter


def is_unrolled(tile: Tile | ProductTile) -> bool:
    return isinstance(tile, Tile) and tile.kind == "flat" and bool(tile.y_axes)


def statements(emitter: Emitter, of_stage: Sequence[Statement]) -> None:
    """The statements of a stage, at each of the points if there are several. The second walk knows all values and adds
    the stores."""
    tile = emitter.tile
    if not (isinstance(tile, Tile) and is_unrolled(tile)):
        emitter.run_statements(of_stage)
        return
    (axis,), first = tile.y_axes, indices.flat_symbol("y", tile.y_axes)
    known: list[dict[tuple[Expression, str], Value]] = [{} for _ in range(tile.y)]
    for storing in (False, True):
        for point, emitter.memo in enumerate(known):
            emitter.mapping = {**emitter.outer_mapping, axis.symbol: first + point}
            for statement in of_stage:
                if storing or not isinstance(statement, Store):
                    emitter.run_statements([statement])
                else:
                    emitter.evaluate(statement.value)


def parted(tile: Tile | ProductTile, index: Dim) -> tuple[Dim, int]:
    """The index of an access as one that is the same for all points, and a number to add."""
    offset = index.constant if is_unrolled(tile) and isinstance(index, Sum) else 0
    return index - offset, offset
