"""What to fetch before it is needed: the processor's own prefetching stops at each page, and does not see far along columns.

Takes a `Shape`, its `Strategy` and a stage; gives bytes between a load and the place to fetch while it runs, for the loads that gain.
Always holds: a fetch is a hint, and may point anywhere.

Measured on one core with data beyond the caches: reductions of rows take 0.9 to 0.98 of the time in bfloat16, sums over columns 0.8
(float32) and 0.87; to fetch the next row in the last of several passes (softmax, cross entropy) gains nothing.
"""

from __future__ import annotations

from fusewright.codegen.llvm.analysis import Shape, StageView, reductions_of, values_of, walk
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.codegen.llvm.types import ELEMENT_TYPES
from fusewright.graph import sizes
from fusewright.loops.ir import Axis, Expression, Load

FAR = 4096  # bytes ahead in a stream: a page
ROWS = 8  # rows ahead where a tile of columns passes over them
LEAST = 4 << 20  # bytes of a buffer that caches may hold whole


def distances(shape: Shape, strategy: Strategy, number: int) -> dict[Expression, int]:
    """For the loads of stage `number`."""
    view, axis = shape.views[number], strategy.stage_axes[number]
    found: dict[Expression, int] = {}
    for expr in walk(values_of(view.stage)):
        if isinstance(expr, Load) and not expr.bindings and _is_large(shape, expr.buffer, view):
            distance = _along_rows(view, expr, axis) if axis is not None else _along_columns(strategy, view, expr)
            if distance:
                found[expr] = distance * ELEMENT_TYPES[expr.dtype].size
    return found


def streamed(shape: Shape, view: StageView, axis: Axis) -> dict[Expression, int]:
    """Loads of large tensors that run along `axis`, with the bytes of an element."""
    return {
        expr: ELEMENT_TYPES[expr.dtype].size
        for expr in walk(values_of(view.stage))
        if isinstance(expr, Load) and not expr.bindings and _is_large(shape, expr.buffer, view)
        and sizes.coefficient(view.dim(expr.index), axis.symbol) == 1
    }


def _is_large(shape: Shape, buffer: str, view: StageView) -> bool:
    """Whether the kernel reads so much of a buffer that is not its own."""
    if buffer in shape.aliases:
        return False
    dtypes = dict(zip(shape.kernel.buffers, shape.kernel.dtypes))
    total = ELEMENT_TYPES[dtypes[buffer]].size if buffer in dtypes else 0
    symbols = set().union(*(sizes.free_symbols(access.index) for access in view.accesses if access.buffer == buffer and not access.store))
    for axis in (*shape.outer, *view.axes):
        if not isinstance(axis.extent, int):
            return False
        total *= axis.extent if axis.symbol in symbols else 1
    return total >= LEAST


def _along_rows(view: StageView, load: Load, axis: Axis) -> int:
    """Elements ahead in a stage that reduces a row, or all of a stream."""
    streamed = sizes.coefficient(view.dim(load.index), axis.symbol) == 1 and bool(reductions_of(view.stage))
    return FAR // ELEMENT_TYPES[load.dtype].size if streamed else 0


def _along_columns(strategy: Strategy, view: StageView, load: Load) -> int:
    """Elements to a later row of a stage that reduces over rows."""
    if strategy.vector is None or not view.axes or not reductions_of(view.stage):
        return 0
    index = view.dim(load.index)
    row = sizes.coefficient(index, view.axes[-1].symbol)
    if sizes.coefficient(index, strategy.vector.symbol) != 1 or not isinstance(row, int):
        return 0
    return ROWS * row if row * ELEMENT_TYPES[load.dtype].size >= FAR // 4 else 0
