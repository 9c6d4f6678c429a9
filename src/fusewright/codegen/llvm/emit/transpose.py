"""Transposing tiles: loads that run along the wrong axis are read row by row, turned in registers, and left on the
stack for the vector loop.

Takes the kernel's strategy (mode "outer" with `rows`); gives, for a full tile, a table from `Load` to its place on the
stack. Always holds: only loads that are performed at every point of the tile are staged (none that stands under a
mask), so that no element outside a buffer is read.
"""

from __future__ import annotations

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Shape, StageView, children, values_of
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.types import type_text
from fusewright.loops.ir import Axis, Expression, Load, Masked
from fusewright.sizes import expressions as sizes


@dataclass(frozen=True, slots=True)
class Staged:
    """A tile on the stack: element (row r, column c) at `text`[r * columns + c]; `row_start`, `column_start`: the
    tile's origin along the axes.
    """

    text: str
    columns: int
    row: Axis
    row_start: Value
    column_start: Value


def staged_loads(shape: Shape, vector: Axis, rows: Axis) -> list[tuple[StageView, Load]]:
    """Loads that are contiguous along `rows` and strided along `vector`, performed at every point."""
    found: dict[Load, StageView] = {}
    for view in shape.views:
        for expr in unmasked(values_of(view.stage)):
            if not isinstance(expr, Load) or expr.bindings or expr.buffer in shape.aliases:
                continue
            index = view.dim(expr.index)
            along, across = sizes.coefficient(index, vector.symbol), sizes.coefficient(index, rows.symbol)
            if (
                isinstance(across, int)
                and across == 1
                and along is not None
                and not (isinstance(along, int) and abs(along) <= 1)
            ):
                found.setdefault(expr, view)
    return [(view, load) for load, view in found.items()]


def unmasked(roots: list[Expression]) -> list[Expression]:
    """The expressions below `roots` that are evaluated at every point."""
    seen: dict[Expression, None] = {}
    pending = list(roots)
    while pending:
        expr = pending.pop()
        if expr in seen:
            continue
        seen[expr] = None
        pending.extend((expr.mask,) if isinstance(expr, Masked) else children(expr))
    return list(seen)


def transpose(b: FunctionBuilder, vectors: list[Value]) -> list[Value]:
    """A square of vectors turned over its diagonal, by swapping blocks of doubling size: log2(n) * n two-input
    shuffles."""
    count = len(vectors)
    distance = 1
    while distance < count:
        turned = list(vectors)
        for i in range(count):
            if i & distance:
                continue
            low, high = vectors[i], vectors[i + distance]
            first = [lane if not lane & distance else count + lane - distance for lane in range(count)]
            second = [lane + distance if not lane & distance else count + lane for lane in range(count)]
            turned[i] = _shuffle(b, low, high, first)
            turned[i + distance] = _shuffle(b, low, high, second)
        vectors = turned
        distance *= 2
    return vectors


def _shuffle(b: FunctionBuilder, low: Value, high: Value, order: list[int]) -> Value:
    vector = type_text(low.type, low.lanes)
    indices = ", ".join(f"i32 {i}" for i in order)
    return b.value(
        f"shufflevector {vector} {low.text}, {vector} {high.text}, <{len(order)} x i32> <{indices}>",
        low.type,
        len(order),
    )
