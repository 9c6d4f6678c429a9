"""A matrix product as one LLVM function, with the pointwise statements that follow it: made for few rows, and a loop
over blocks of many.

Takes a `Kernel` with a `product` whose operands lie side by side along the inner dimension (a linear layer's weights as
the layer keeps them), and a `Target`; gives the function's text. Always holds: products are summed in float32, over
vectors of the inner dimension and then across them; nothing beyond an operand's rows is read.

The sums of a block of columns (and rows) are made by a function that all kernels share (skinny_gemm_block.py). They
stay on the stack, where the ordinary emitter reads them for the statements.
"""

from __future__ import annotations

import torch

from fusewright.base.records import replace
from fusewright.codegen.analysis import Shape, StageView
from fusewright.codegen.llvm.emit.builder import Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.loops import Turns
from fusewright.codegen.llvm.emit.memory import Pointer
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.codegen.llvm.emitter import SIGNATURE, KernelText
from fusewright.codegen.llvm.kernel import KernelEmitter
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.codegen.llvm.templates.skinny_gemm_block import (
    COLUMNS,
    MOST_ROWS,
    ROW_BLOCK,
    STEP,
    many_function,
    row_block,
    rows_function,
    tile_for,
    tile_function,
)
from fusewright.loops import ir
from fusewright.loops.ir import Axis
from fusewright.schedule.expressions import Rewriter
from fusewright.schedule.plan import UNBOUNDED, Kernel, Operand, Product, Statement, Store
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

TILE = "product tile"

_BYTES_PER_NS, _MULTIPLY_ADDS_PER_NS, _THREAD_NS = 8.0, 2.5, 8000.0


def is_supported(product: Product, outer: tuple[Axis, ...], target: Target) -> bool:
    """Whether there is a kernel for the product: one matrix by one matrix, both with the inner dimension side by side,
    of sizes that are numbers but for the rows, for which `Product.most` must say few or any if they are none."""
    batch, rows, columns = (axis.extent for axis in outer)
    known = rows > 0 if isinstance(rows, int) else 0 < product.most <= MOST_ROWS or product.most == UNBOUNDED
    sides = (product.left, outer[1]), (product.right, outer[2])
    plain = all(_is_plain(side, axis, product.k) for side, axis in sides) and product.left.dtype is product.right.dtype
    few = known and isinstance(columns, int) and batch == 1 and columns > 0
    return few and plain and target.multiplies_adds and not product.chosen


def _is_plain(side: Operand, axis: Axis, k: Expr) -> bool:
    if side.value is not None or side.checks or side.dtype not in STEP or side.inner is not k:
        return False
    return sizes.coefficient(side.outer, axis.symbol) is not None


def emit_product(kernel: Kernel, target: Target, declarations: dict[str, str]) -> KernelText:
    """Raises ValueError for a product that has no kernel (`is_supported`)."""
    product = kernel.product
    if product is None or not is_supported(product, kernel.outer, target):
        raise ValueError(f"no kernel for the product in {kernel.name}")
    return ProductEmitter(kernel, product, target, declarations).run()


class ProductEmitter(KernelEmitter):
    def __init__(self, kernel: Kernel, product: Product, target: Target, declarations: dict[str, str]) -> None:
        _, self.row_axis, self.column_axis = kernel.outer
        self.product = product
        self.lanes = target.lanes(4)
        shape = _shape(kernel, product)
        self.rows = self.row_axis.extent
        most = self.rows if isinstance(self.rows, int) else product.most
        self.tile = tile_for(most, target, product.left.dtype)
        self.block = 0 if most <= MOST_ROWS else row_block(min(most, self._usual_rows()), self.tile)
        # Of a block, rows before it may be multiplied again, and have sums.
        self.before = self.tile.rows - 1 if self.block else 0
        self.kept_rows = (self.block or most) + self.before
        serial = [self.row_axis] if self.rows != 1 and not self.block else []
        rows = [(self.row_axis, self.block)] if self.block else []
        domain = [*rows, (self.column_axis, COLUMNS)]
        strategy = Strategy("outer", self.lanes, self.column_axis, [None], domain, serial, 1)
        super().__init__(shape, strategy, target, declarations)

    def _usual_rows(self) -> int:
        return self.rows if isinstance(self.rows, int) else ROW_BLOCK

    def run(self) -> KernelText:
        b = self.b
        self.sums = b.name()
        b.blocks[0].lines.append(f"  {self.sums} = alloca [{self.kept_rows * COLUMNS} x float], align 64")
        made = super().run()
        # Without rows there are no sums, and the product has no function for them.
        known = isinstance(self.rows, int) or self.block
        extent = made.extent if known else made.extent * sizes.minimum(self.rows, 1)
        return KernelText(b.text(SIGNATURE), extent, self._grain())

    def _grain(self) -> int:
        """Blocks that are worth a thread: what is read and what is multiplied, whichever takes longer."""
        elements = COLUMNS * self.product.length
        read = elements * ELEMENT_TYPES[self.product.right.dtype].size / _BYTES_PER_NS
        rows = self.block or (self.rows if isinstance(self.rows, int) else 1)
        computed = elements * rows / (_MULTIPLY_ADDS_PER_NS * self.lanes)
        return max(1, int(_THREAD_NS / max(read, computed, 0.5) + 0.5))

    def _serial(self, context: Context, starts: list[Value]) -> None:
        self.evaluator.view = self.shape.views[0]
        if self.block:
            self._rows_of_block(context, *starts)
            return
        (start,) = starts
        self._multiply(context, start)
        # The statements' loads of the sums: row by row, from the block's first column on.
        self.pointers[TILE] = Pointer(self.sums, torch.float32, interleaved=COLUMNS, start=start)
        super()._serial(context, starts)

    def _rows_of_block(self, context: Context, first: Value, start: Value) -> None:
        """The sums of a block of rows and columns, then the statements for it."""
        b = self.b
        stop = self._clipped(context, first, self.block, self.rows)
        b.scope = context.here
        rows = b.op("sub nsw", stop, first)
        sums = b.value(f"getelementptr float, ptr {self.sums}, i64 {self.before * COLUMNS}", "ptr")
        inputs = self._place(context, self.product.left, self.row_axis, first)
        dtype, length = self.product.left.dtype, self.product.length
        if isinstance(self.rows, int):
            function = many_function(dtype, length, self.tile, self.target, b.declarations)
        else:
            function = rows_function(dtype, length, self.target, b.declarations, self.tile)
        weights = self._weights(context, start)
        b.call_void(function, [*inputs, *weights, weights[1], rows, sums])
        # The statements know a row by its number in the whole.
        skipped = b.op("mul nsw", first, b.const(-COLUMNS, "i64"))
        whole = b.value(f"getelementptr float, ptr {sums.text}, i64 {skipped.text}", "ptr")
        self.pointers[TILE] = Pointer(whole.text, torch.float32, interleaved=COLUMNS, start=start)

        def body(contexts: list[Context], _: list[Value]) -> list[Value]:
            self._point(contexts[0], [first, start])
            return []

        self.loops.counted([context], Turns(self.row_axis.symbol, first, stop, runs=True), [], body)

    def _weights(self, context: Context, start: Value) -> list[Value]:
        """Where the block's columns lie, their length, and the number of the last one."""
        b = self.b
        left = b.op("sub nsw", self.indexer.scalar(context, self.column_axis.extent - 1), start)
        last = b.intrinsic("smin", left, b.const(COLUMNS - 1, "i64"))
        place = self._place(context, self.product.right, self.column_axis, start)
        return [*place, b.const(self.product.length, "i64"), last]

    def _multiply(self, context: Context, start: Value) -> None:
        """The block's sums for all rows: where their number is known by calls for some of them (the last ones again
        where they are no multiple of the tile's), of which the first bring the next columns' weights from memory."""
        b, product, dtype = self.b, self.product, self.product.left.dtype
        b.scope = context.here
        weights = self._weights(context, start)
        if not isinstance(self.rows, int):
            rows = self.indexer.scalar(context, self.rows)
            inputs = self._place(context, product.left, self.row_axis, b.const(0, "i64"))
            function = rows_function(dtype, product.length, self.target, b.declarations)
            b.call_void(function, [*inputs, *weights, weights[1], rows, Value(self.sums, "ptr")])
            return
        tile = self.tile
        function = tile_function(dtype, product.length, tile, self.target, b.declarations)
        for first in range(0, self.rows, tile.rows):
            at = min(first, self.rows - tile.rows)
            inputs = self._place(context, product.left, self.row_axis, b.const(at, "i64"))
            sums = b.value(f"getelementptr float, ptr {self.sums}, i64 {at * COLUMNS}", "ptr")
            ahead = weights[1] if first == 0 else b.const(0, "i64")
            b.call_void(function, [*inputs, *weights, ahead, sums])

    def _place(self, context: Context, side: Operand, axis: Axis, number: Value) -> list[Value]:
        """Where the operand's row `number` (along `axis`) starts, and the bytes from there to the next one."""
        b = self.b
        scope = Scope(context.here.cursor, defines={axis.symbol}, values={axis.symbol: number})
        b.scope = scope
        index = self.shape.views[0].dim(side.outer)
        address = self.evaluator.memory.address(context.enter(scope), self.pointers[side.buffer], index)
        step = sizes.coefficient(side.outer, axis.symbol)
        assert step is not None, "is_supported has asked"
        b.scope = context.here
        return [Value(address, "ptr"), self.indexer.scalar(context, step * ELEMENT_TYPES[side.dtype].size)]


def _shape(kernel: Kernel, product: Product) -> Shape:
    """The statements over rows and columns as they are: a block of columns must stay one. The sums are memory that the
    kernel writes."""
    batch, rows, columns = kernel.outer
    rewriter = Rewriter(
        lambda dim: dim,
        lambda load: None,
        lambda local: ir.load(TILE, rows.symbol, torch.float32) if local.name == product.local else local,
        lambda old, new: old,
    )

    def rewritten(statement: Statement) -> Statement:
        if isinstance(statement, Store):
            bindings, index = rewriter.bindings(statement.bindings, statement.index)
            return replace(statement, index=index, value=rewriter.visit(statement.value), bindings=bindings)
        return replace(statement, value=rewriter.visit(statement.value))

    (stage,) = kernel.stages
    stage = replace(stage, statements=tuple(rewritten(statement) for statement in stage.statements))
    aliases = {name: name for name in (*kernel.written, TILE)}
    for read, written in kernel.inplace:
        aliases[read] = aliases.setdefault(written, written)
    view = StageView(stage, [], aliases)
    single: dict[Expr, Dim] = {axis.symbol: 0 for axis in (batch, rows) if axis.extent == 1}
    view.change(single)
    return Shape(
        replace(kernel, stages=(stage,)),
        [axis for axis in (rows, columns) if axis.symbol not in single],
        [view],
        aliases,
    )
