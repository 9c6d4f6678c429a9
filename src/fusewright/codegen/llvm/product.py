"""A matrix product of few rows as one LLVM function, with the pointwise statements that follow it.

Takes a `Kernel` with a `product` whose operands lie side by side along the inner dimension (a linear layer's weights as the layer keeps
them), and a `Target`; gives the function's text. Always holds: products are summed in float32, over vectors of the inner dimension and
then across them; nothing beyond an operand's rows is read.

With few rows the time goes into reading the weights once. So a block of columns (rows of the weights' memory, which are long and read from
their start to their end) is multiplied by all rows at a time: registers hold sums for some rows and columns, each a vector of partial sums
along the inner dimension, which shuffles add up at the end. No copy of the weights is needed. The block's results stay on the stack, where
the ordinary emitter reads them for the statements.
"""

from __future__ import annotations

import torch

from fusewright.codegen.llvm.analysis import Shape, StageView
from fusewright.codegen.llvm.builder import Scope, Value
from fusewright.codegen.llvm.context import Context
from fusewright.codegen.llvm.kernel import SIGNATURE, KernelEmitter, KernelText
from fusewright.codegen.llvm.memory import Pointer
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.codegen.llvm.target import Target
from fusewright.codegen.llvm.types import ELEMENT_TYPES
from fusewright.graph import sizes
from fusewright.graph.sizes import Dim, Expr
from fusewright.loops import ir
from fusewright.loops.ir import Axis
from fusewright.records import dataclass, replace
from fusewright.schedule.expressions import Rewriter
from fusewright.schedule.plan import Kernel, Operand, Product, Statement, Store

COLUMNS = 16
"""Columns of a block, the iteration of the parallel domain: with one row, what a thread reads before it looks at the next block is at
least some kilobytes."""

LEAST_BITS = 256
"""Width of registers below which there is no kernel: there are too few of them, and a fused multiply-add is not certain."""

TILE = "product tile"

_STEP = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}
"""Vectors of float32 that one load gives."""

_BYTES_PER_NS, _MULTIPLY_ADDS_PER_NS, _THREAD_NS = 8.0, 2.5, 8000.0


def is_supported(product: Product, outer: tuple[Axis, ...], target: Target) -> bool:
    """Whether there is a kernel for the product: one matrix by one matrix of known sizes, both with the inner dimension side by side."""
    batch, rows, columns = (axis.extent for axis in outer)
    static = isinstance(rows, int) and isinstance(columns, int) and batch == 1 and rows > 0 and columns > 0
    plain = all(_is_plain(side, product.k) for side in (product.left, product.right))
    return static and plain and target.vector_bits >= LEAST_BITS and not product.chosen


def _is_plain(side: Operand, k: Expr) -> bool:
    return side.value is None and not side.checks and side.dtype in _STEP and side.inner is k


@dataclass(frozen=True, slots=True)
class Tile:
    """What registers hold: sums for `rows` times `columns`, `chains` vectors for each. Rows are padded to a multiple (the last one is
    computed again)."""

    rows: int
    columns: int
    chains: int = 1


def tile_for(rows: int, target: Target, dtype: torch.dtype) -> Tile:
    """The tile with the least computed in vain, the largest of those. One row takes few columns at a time: more would read from as many
    places in memory, which share sets of a cache where the rows' length is a power of two."""
    many = target.vector_bits >= 512  # and 32 registers
    largest = (6 if dtype is torch.float32 else 5) if many else 3
    best = min(range(1, largest + 1), key=lambda count: (-(-rows // count) * count, -count))
    if best == 1:
        return Tile(1, 4, 2)
    return Tile(best, 8 if many and best <= 3 else 4)


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
        serial = [self.row_axis] if self.row_axis.extent != 1 else []
        strategy = Strategy("outer", self.lanes, self.column_axis, [None], [(self.column_axis, COLUMNS)], serial, 1)
        super().__init__(shape, strategy, target, declarations)
        rows = self.row_axis.extent
        assert isinstance(rows, int)
        self.rows = rows
        self.tile = tile_for(rows, target, product.left.dtype)
        self.padded = -(-rows // self.tile.rows) * self.tile.rows

    def run(self) -> KernelText:
        b = self.b
        self.parts, self.sums = b.name(), b.name()
        vectors = self.padded * (COLUMNS // self.tile.columns)
        b.blocks[0].lines.append(f"  {self.parts} = alloca [{vectors} x <{self.lanes} x float>], align 64")
        b.blocks[0].lines.append(f"  {self.sums} = alloca [{self.padded * COLUMNS} x float], align 64")
        made = super().run()
        return KernelText(b.text(SIGNATURE), made.extent, self._grain())

    def _grain(self) -> int:
        """Blocks that are worth a thread: what is read and what is multiplied, whichever takes longer."""
        elements = COLUMNS * self.product.length
        read = elements * ELEMENT_TYPES[self.product.right.dtype].size / _BYTES_PER_NS
        computed = elements * self.padded / (_MULTIPLY_ADDS_PER_NS * self.lanes)
        return max(1, int(_THREAD_NS / max(read, computed, 0.5) + 0.5))

    def _serial(self, context: Context, starts: list[Value]) -> None:
        (start,) = starts
        self.evaluator.view = self.shape.views[0]
        self._multiply(context, start)
        # The statements' loads of the sums: row by row, from the block's first column on.
        self.pointers[TILE] = Pointer(self.sums, torch.float32, interleaved=COLUMNS, start=start)
        super()._serial(context, starts)

    # --- the block's sums

    def _multiply(self, context: Context, start: Value) -> None:
        group = sizes.loop_symbol("group", COLUMNS)
        first = sizes.loop_symbol("first", self.padded)
        step = self.tile.rows

        def columns(contexts: list[Context], _: list[Value]) -> list[Value]:
            weights = self._starts(contexts[0], self.product.right, self.column_axis, start, group, self.tile.columns)
            # The first rows bring the next columns' weights from memory; with one row, reading on is all there is to do.
            for begin, end, ahead in ((0, step, self._ahead()), (step, self.padded, 0)):
                self.loops.counted(contexts, first, begin, end, [], lambda inside, _: rows(inside, weights, ahead), step=step)  # noqa: B023
            return []

        def rows(contexts: list[Context], weights: list[str], ahead: int) -> list[Value]:
            zero = Value("0", "i64")
            inputs = self._starts(contexts[0], self.product.left, self.row_axis, zero, first, step)
            self._store_parts(contexts[0], group, first, self._dot(contexts[0], inputs, weights, ahead))
            return []

        self.loops.counted([context], group, 0, COLUMNS, [], columns, step=self.tile.columns)
        row = sizes.loop_symbol("row", self.rows)
        self.loops.counted([context], row, 0, self.rows, [], lambda inside, _: self._add_parts(inside[0], row))

    def _ahead(self) -> int:
        """Bytes from a group's weights to the next group's; 0 for not to fetch them."""
        distance = sizes.coefficient(self.product.right.outer, self.kernel.outer[2].symbol)
        if self.rows == 1 or not isinstance(distance, int):
            return 0
        return distance * self.tile.columns * ELEMENT_TYPES[self.product.right.dtype].size

    def _starts(self, context: Context, side: Operand, axis: Axis, start: Value, symbol: Expr, count: int) -> list[str]:
        """Addresses of `count` of the operand's rows (along `axis`) from start + symbol; the last row stands for those beyond it."""
        b = self.b
        extent = axis.extent
        assert isinstance(extent, int)
        origin = context.here
        b.scope = origin
        base = b.op("add nsw", start, context.chain[context.level(symbol)].values[symbol])
        whole = self.padded == extent if axis is self.row_axis else extent % COLUMNS == 0
        found = []
        for k in range(count):
            number = b.op("add nsw", base, b.const(k, "i64"))
            if not whole:
                number = b.intrinsic("smin", number, b.const(extent - 1, "i64"))
            scope = Scope(origin.cursor, defines={axis.symbol}, values={axis.symbol: number})
            number.home = scope
            inside = context.enter(scope)
            b.scope = scope
            index = self.shape.views[0].dim(side.outer)
            found.append(self.evaluator.memory.address(inside, self.pointers[side.buffer], index))
            b.scope = origin
        return found

    def _dot(self, context: Context, inputs: list[str], weights: list[str], ahead: int) -> list[list[Value]]:
        """Vectors of partial sums, row by row."""
        b, lanes, chains = self.b, self.lanes, self.tile.chains
        k, length = self.product.k, self.product.length
        step = lanes * max(_STEP[side.dtype] for side in (self.product.left, self.product.right))
        whole = length - length % step
        unrolled = whole - whole % (step * chains)
        zero = b.splat(b.const(0.0, "float"), lanes)
        count = len(weights)
        sums = [zero] * (len(inputs) * count)

        def turn(at: Value, sums: list[Value], left: int, ahead: int) -> list[Value]:
            xs = [self._vectors(address, self.product.left.dtype, at, left) for address in inputs]
            after = list(sums)
            for column, address in enumerate(weights):
                for part, weight in enumerate(self._vectors(address, self.product.right.dtype, at, left, ahead)):
                    for row, x in enumerate(xs):
                        place = row * count + column
                        after[place] = b.fma(x[part], weight, after[place])
            return after

        def body(contexts: list[Context], carried: list[Value]) -> list[Value]:
            here = contexts[0].here
            b.scope = here
            after: list[Value] = []
            for chain in range(len(carried) // len(sums)):
                at = here.values[k] if chain == 0 else b.op("add nsw", here.values[k], b.const(chain * step, "i64"))
                after += turn(at, carried[chain * len(sums) : (chain + 1) * len(sums)], step, ahead)
            return after

        def sum_of_chains(carried: list[Value]) -> list[Value]:
            b.scope = context.here
            total = carried[: len(sums)]
            for chain in range(1, chains):
                total = [b.op("fadd", x, y) for x, y in zip(total, carried[chain * len(sums) :])]
            return total

        if unrolled:
            sums = sum_of_chains(self.loops.counted([context], k, 0, unrolled, sums * chains, body, step=step * chains))
        sums = self.loops.counted([context], k, unrolled, whole, sums, body, step=step)
        b.scope = context.here
        if whole < length:
            sums = turn(b.const(whole, "i64"), sums, length - whole, 0)
        return [sums[row * count : (row + 1) * count] for row in range(len(inputs))]

    def _vectors(self, address: str, dtype: torch.dtype, at: Value, left: int, ahead: int = 0) -> list[Value]:
        """Elements of a row from `at` on, as vectors of float32; those from the `left`th are 0. In bfloat16 the even ones, then the odd.
        ahead: bytes from there to what is to be fetched meanwhile, 0 for nothing."""
        b, lanes, element = self.b, self.lanes, ELEMENT_TYPES[dtype]
        count = lanes * _STEP[dtype]
        place = b.value(f"getelementptr {element.memory}, ptr {address}, i64 {at.text}", "ptr").text
        mask = None
        if left < count:
            mask = Value("<" + ", ".join(f"i1 {str(i < left).lower()}" for i in range(count)) + ">", "i1", count)
        raw = self.evaluator.memory.load_row(dtype, place, count, mask, ahead)
        if dtype is torch.float32:
            return [raw]
        if dtype is torch.float16:
            return [b.convert("fpext", raw, "float")]
        pairs = b.value(f"bitcast <{count} x i16> {raw.text} to <{lanes} x i32>", "i32", lanes)
        even = b.op("shl", pairs, b.const(16, "i32"))
        odd = b.op("and", pairs, b.const(0xFFFF0000, "i32"))
        return [b.convert("bitcast", half, "float") for half in (even, odd)]

    # --- from vectors of partial sums to sums

    def _store_parts(self, context: Context, group: Expr, first: Expr, rows: list[list[Value]]) -> None:
        b, width = self.b, self.tile.columns
        b.scope = context.here
        per_row = COLUMNS // width
        for number, vectors in enumerate(rows):
            index: Dim = (first + number) * per_row + sizes.floor_div(group, width)
            (joined,) = self._joined(vectors, self.lanes // width)
            slot = self.indexer.scalar(context, index).text
            b.scope = context.here
            place = b.value(f"getelementptr <{self.lanes} x float>, ptr {self.parts}, i64 {slot}", "ptr")
            b.emit(f"  store {joined.typed}, ptr {place.text}, align {4 * self.lanes}")

    def _add_parts(self, context: Context, row: Expr) -> list[Value]:
        b = self.b
        b.scope = context.here
        per_row = COLUMNS // self.tile.columns
        index = context.chain[context.level(row)].values[row]
        kind = f"<{self.lanes} x float>"
        at = b.op("mul nsw", index, b.const(per_row, "i64"))
        vectors = []
        for number in range(per_row):
            slot = b.op("add nsw", at, b.const(number, "i64"))
            place = b.value(f"getelementptr {kind}, ptr {self.parts}, i64 {slot.text}", "ptr").text
            vectors.append(b.value(f"load {kind}, ptr {place}, align {4 * self.lanes}", "float", self.lanes))
        first = b.op("mul nsw", index, b.const(COLUMNS, "i64"))
        for number, vector in enumerate(self._joined(vectors, 1, self.tile.columns)):
            slot = b.op("add nsw", first, b.const(number * self.lanes, "i64"))
            target = b.value(f"getelementptr float, ptr {self.sums}, i64 {slot.text}", "ptr").text
            b.emit(f"  store {vector.typed}, ptr {target}, align {4 * self.lanes}")
        return []

    def _joined(self, vectors: list[Value], wanted: int, columns: int = 1) -> list[Value]:
        """Vectors with the sums of more columns each, by adding neighbours. columns: in each of the given vectors; wanted: lanes for a
        column in the end."""
        b, lanes = self.b, self.lanes
        width = lanes // columns
        kind = f"<{lanes} x float>"
        while width > wanted:
            half = width // 2
            lows = [block * width + lane for block in range(2 * lanes // width) for lane in range(half)]
            halves = [", ".join(f"i32 {lane + shift}" for lane in lows) for shift in (0, half)]
            pairs = []
            for one, other in zip(vectors[::2], vectors[1::2]):
                low, high = (
                    b.value(f"shufflevector {kind} {one.text}, {kind} {other.text}, <{lanes} x i32> <{order}>", "float", lanes)
                    for order in halves
                )
                pairs.append(b.op("fadd", low, high))
            vectors, width = pairs, half
        return vectors


def _shape(kernel: Kernel, product: Product) -> Shape:
    """The statements over rows and columns as they are: a block of columns must stay one. The sums are memory that the kernel writes."""
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
    return Shape(replace(kernel, stages=(stage,)), [axis for axis in (rows, columns) if axis.symbol not in single], [view], aliases)
