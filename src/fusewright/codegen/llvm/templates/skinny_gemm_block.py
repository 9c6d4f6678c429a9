"""Sums of a block of columns of a matrix product, as functions that all product kernels of a module share.

Takes the element type and a `Tile`; gives the name of an LLVM function, whose text is added to the module once. Always
holds: products are summed in float32, over vectors of the inner dimension and then across them; nothing beyond an
operand's rows is read.

With few rows the time goes into reading the weights once. So a block of columns (rows of the weights' memory, which are
long and read from their start to their end) is multiplied by all rows at a time: registers hold sums for some rows and
columns, each a vector of partial sums along the inner dimension, which shuffles add up at the end. No copy of the
weights is needed. Lengths and strides are arguments, so layers of all sizes have one function, which is compiled once.
"""

from __future__ import annotations

import torch

from fusewright.base.records import dataclass
from fusewright.codegen.llvm.emit.builder import Value
from fusewright.codegen.llvm.emit.memory import PREFETCH, SECOND_LEVEL
from fusewright.codegen.llvm.emit.shared import Writer, define
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, suffix, type_text

COLUMNS = 16
"""Columns of a block: with one row, what a thread reads before it looks at the next block is at least some
kilobytes."""

MOST_ROWS = 16
"""That are multiplied at a time. Of products of more, blocks of rows are."""

ROW_BLOCK = 64
"""Rows of a block, about: its inputs stay in a second-level cache while all columns are read."""

STEP = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}
"""Vectors of float32 that one load gives."""

_ONE_ROW = 1.25
"""What a row costs alone, against a row among several: loads take longer than multiplications."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What registers hold: sums for `rows` times `columns`, `chains` vectors for each."""

    rows: int
    columns: int
    chains: int = 1


def tile_for(rows: int, target: Target, dtype: torch.dtype) -> Tile:
    """The tile with the least computed in vain (the last rows are computed again where they are no multiple), the
    largest of those. One row takes few columns at a time: more would read from as many places in memory, which share
    sets of a cache where the rows' length is a power of two."""
    largest = 3 if target.registers < 32 else 6 if dtype is torch.float32 else 5
    return _tile(_best(rows, largest) if rows <= MOST_ROWS else largest, target)


def row_block(rows: int, tile: Tile) -> int:
    """Rows of each block but the last, of about as many each."""
    each = -(-rows // -(-rows // ROW_BLOCK))
    return -(-each // tile.rows) * tile.rows


def tiles_for_any() -> dict[int, Tile]:
    """The tile for each number of rows, of few different ones, and small ones: each is compiled."""
    best = {rows: _best(rows, 3) for rows in range(1, MOST_ROWS + 1)}
    return {rows: Tile(1, 4, 2) if count == 1 else Tile(count, 4) for rows, count in best.items()}


def _best(rows: int, largest: int) -> int:
    return min(
        range(1, min(rows, largest) + 1),
        key=lambda count: (-(-rows // count) * (count if count > 1 else _ONE_ROW), -count),
    )


def _tile(rows: int, target: Target) -> Tile:
    wide = target.registers >= 32 and rows <= 3 and target.lanes(4) >= 8
    return Tile(1, 4, 2) if rows == 1 else Tile(rows, 8 if wide else 4)


PARAMETERS = "(ptr %x, i64 %x_step, ptr %w, i64 %w_step, i64 %length, i64 %last, i64 %ahead, {rows}ptr %sums)"
"""x, w: the first row, and the block's first column; steps: bytes from one to the next. last: number of the block's
last column that exists (the others repeat it). ahead: w_step where the second-level cache is to fetch the next columns
meanwhile, else 0. sums: rows x COLUMNS."""


def tile_function(dtype: torch.dtype, length: int, tile: Tile, target: Target, declarations: dict[str, str]) -> str:
    """The function for as many rows as the tile has, and the inner length `length` (and others)."""
    return define("product", _TileWriter(dtype, length, tile, target, declarations).text(), declarations)


def rows_function(
    dtype: torch.dtype, length: int, target: Target, declarations: dict[str, str], many: Tile | None = None
) -> str:
    """The function for any number of rows from 1 to MOST_ROWS, a further argument; `many`: the tile for more."""
    tiles = tiles_for_any()
    labels = {tile: f"tile{tile.rows}" for tile in (*tiles.values(), *([] if many is None else [many]))}
    cases = " ".join(f"i64 {rows}, label %{labels[tile]}" for rows, tile in tiles.items())
    more = "done" if many is None else labels[many]
    return _loops(f"switch i64 %rows, label %{more} [ {cases} ]", labels, dtype, length, target, declarations)


def many_function(dtype: torch.dtype, length: int, tile: Tile, target: Target, declarations: dict[str, str]) -> str:
    """The function for some number of rows, a further argument. Where they are fewer than the tile's, those before them
    are read as well, and have their sums before the others'."""
    return _loops("br label %tiles", {tile: "tiles"}, dtype, length, target, declarations)


def _loops(
    entry: str, labels: dict[Tile, str], dtype: torch.dtype, length: int, target: Target, declarations: dict[str, str]
) -> str:
    lines = [PARAMETERS.format(rows="i64 %rows, ") + " {", "entry:", f"  {entry}"]
    for tile, label in labels.items():
        name = tile_function(dtype, length, tile, target, declarations)
        lines += [f"{label}:", *(f"  {line}" for line in _rows_loop(name, tile, label))]
    declarations.setdefault("llvm.smin.i64", "declare i64 @llvm.smin.i64(i64, i64)")
    return define("product", "\n".join([*lines, "done:", "  ret void", "}"]), declarations)


def _rows_loop(function: str, tile: Tile, label: str) -> list[str]:
    """Calls the tile's function for all rows, the last ones again where they are no multiple."""
    return [
        f"%left_{label} = sub nsw i64 %rows, {tile.rows}",
        f"br label %loop_{label}",
        f"loop_{label}:",
        f"%first_{label} = phi i64 [ 0, %{label} ], [ %next_{label}, %loop_{label} ]",
        f"%at_{label} = call i64 @llvm.smin.i64(i64 %first_{label}, i64 %left_{label})",
        f"%byte_{label} = mul nsw i64 %at_{label}, %x_step",
        f"%x_{label} = getelementptr i8, ptr %x, i64 %byte_{label}",
        f"%slot_{label} = mul nsw i64 %at_{label}, {4 * COLUMNS}",
        f"%sums_{label} = getelementptr i8, ptr %sums, i64 %slot_{label}",
        f"%only_{label} = icmp eq i64 %first_{label}, 0",
        f"%ahead_{label} = select i1 %only_{label}, i64 %ahead, i64 0",
        f"call void @{function}(ptr %x_{label}, i64 %x_step, ptr %w, i64 %w_step, i64 %length, i64 %last, i64 "
        f"%ahead_{label}, "
        f"ptr %sums_{label})",
        f"%next_{label} = add nsw i64 %first_{label}, {tile.rows}",
        f"%more_{label} = icmp slt i64 %next_{label}, %rows",
        f"br i1 %more_{label}, label %loop_{label}, label %done",
    ]


class _TileWriter(Writer):
    def __init__(
        self, dtype: torch.dtype, length: int, tile: Tile, target: Target, declarations: dict[str, str]
    ) -> None:
        super().__init__(target, declarations)
        self.dtype, self.tile = dtype, tile
        self.element = ELEMENT_TYPES[dtype]
        self.lanes = target.lanes(4)
        self.step = self.lanes * STEP[dtype]
        # most lengths are; then there is no second loop to be compiled
        self.whole = length % (self.step * tile.chains) == 0

    def text(self) -> str:
        b, tile = self.b, self.tile
        self.parts = b.value(
            f"alloca [{tile.rows * (COLUMNS // tile.columns)} x <{self.lanes} x float>], align 64", "ptr"
        ).text
        chunk = self.step * tile.chains
        unrolled = b.op("and", Value("%length", "i64"), b.const(-chunk, "i64"))
        inputs = [self._address("%x", "%x_step", b.const(row, "i64")) for row in range(tile.rows)]
        self.ahead = b.op("mul nsw", Value("%ahead", "i64"), b.const(tile.columns, "i64")).text if tile.rows > 1 else ""
        self.loop(
            "groups",
            b.const(0, "i64"),
            b.const(COLUMNS, "i64"),
            tile.columns,
            [],
            lambda at, _: self._group(at, inputs, unrolled),
        )
        for row in range(tile.rows):
            self._finish_row(row)
        b.emit("  ret void")
        return b.text(PARAMETERS.format(rows=""))

    # --- sums

    def _address(self, base: str, step: str, number: Value) -> str:
        b = self.b
        if number.text == "0":
            return base
        offset = b.op("mul nsw", number, Value(step, "i64"))
        return b.value(f"getelementptr i8, ptr {base}, i64 {offset.text}", "ptr").text

    def _group(self, group: Value, inputs: list[str], unrolled: Value) -> list[Value]:
        """The columns from number `group` on."""
        b, tile = self.b, self.tile
        weights = []
        for column in range(tile.columns):
            number = b.op("add nsw", group, b.const(column, "i64"))
            weights.append(self._address("%w", "%w_step", b.intrinsic("smin", number, Value("%last", "i64"))))
        sums = self._dot(inputs, weights, unrolled)
        slot = b.op("udiv exact", group, b.const(tile.columns, "i64"))
        kind = f"<{self.lanes} x float>"
        for row in range(tile.rows):
            (joined,) = self._joined(sums[row * tile.columns : (row + 1) * tile.columns], self.lanes // tile.columns)
            index = b.op("add nsw", slot, b.const(row * (COLUMNS // tile.columns), "i64"))
            place = b.value(f"getelementptr {kind}, ptr {self.parts}, i64 {index.text}", "ptr")
            b.emit(f"  store {joined.typed}, ptr {place.text}, align {4 * self.lanes}")
        return []

    def _dot(self, inputs: list[str], weights: list[str], unrolled: Value) -> list[Value]:
        """Vectors of partial sums, row by row."""
        b, tile = self.b, self.tile
        count = tile.rows * tile.columns
        zeros = [b.splat(b.const(0.0, "float"), self.lanes)] * (count * tile.chains)

        def chunk(at: Value, sums: list[Value]) -> list[Value]:
            return self._chunk(at, sums, inputs, weights)

        def rest(at: Value, sums: list[Value]) -> list[Value]:
            return self._rest(at, sums, inputs, weights)

        run = self.loop if self.whole else self.loop_if_any
        chains = run("chunks", b.const(0, "i64"), unrolled, self.step * tile.chains, zeros, chunk)
        sums = chains[:count]
        for chain in range(1, tile.chains):
            sums = [b.op("fadd", x, y) for x, y in zip(sums, chains[chain * count :])]
        return (
            sums if self.whole else self.loop_if_any("rest", unrolled, Value("%length", "i64"), self.step, sums, rest)
        )

    def _chunk(self, at: Value, sums: list[Value], inputs: list[str], weights: list[str]) -> list[Value]:
        """A turn of the main loop: a step for each chain."""
        b, count = self.b, len(inputs) * len(weights)
        after: list[Value] = []
        for chain in range(self.tile.chains):
            here = at if chain == 0 else b.op("add nsw", at, b.const(chain * self.step, "i64"))
            after += self._turn(here, sums[chain * count : (chain + 1) * count], inputs, weights, None)
        return after

    def _rest(self, at: Value, sums: list[Value], inputs: list[str], weights: list[str]) -> list[Value]:
        """A step of which not all elements need exist."""
        b = self.b
        left = b.op("sub nsw", Value("%length", "i64"), at)
        numbers = Value("<" + ", ".join(f"i32 {k}" for k in range(self.step)) + ">", "i32", self.step)
        few = b.convert("trunc", b.intrinsic("smin", left, b.const(self.step, "i64")), "i32")
        return self._turn(at, sums, inputs, weights, b.compare("icmp slt", numbers, few))

    def _turn(
        self, at: Value, sums: list[Value], inputs: list[str], weights: list[str], mask: Value | None
    ) -> list[Value]:
        b, after = self.b, list(sums)
        xs = [self._vectors(address, at, mask) for address in inputs]
        for column, address in enumerate(weights):
            fetches = mask is None and self.tile.rows > 1  # with one row, reading on is all there is to do
            for part, weight in enumerate(self._vectors(address, at, mask, fetches)):
                for row, x in enumerate(xs):
                    place = row * len(weights) + column
                    after[place] = b.fma(x[part], weight, after[place])
        return after

    def _vectors(self, address: str, at: Value, mask: Value | None, fetches: bool = False) -> list[Value]:
        """Elements of a row from `at` on, as vectors of float32, 0 where the mask is false. In bfloat16 the even ones,
        then the odd."""
        b, count, memory = self.b, self.step, self.element.memory
        place = b.value(f"getelementptr {memory}, ptr {address}, i64 {at.text}", "ptr").text
        if fetches:
            ahead = b.value(f"getelementptr i8, ptr {place}, i64 {self.ahead}", "ptr").text
            b.declarations.setdefault(PREFETCH, f"declare void @{PREFETCH}(ptr, i32, i32, i32)")
            b.emit(f"  call void @{PREFETCH}(ptr {ahead}, i32 0, i32 {SECOND_LEVEL}, i32 1)")
        vector = type_text(memory, count)
        if mask is None:
            raw = b.value(f"load {vector}, ptr {place}, align {self.element.size}", memory, count)
        else:
            name = f"llvm.masked.load.{suffix(memory, count)}.p0"
            b.declarations.setdefault(name, f"declare {vector} @{name}(ptr, i32, <{count} x i1>, {vector})")
            arguments = f"ptr {place}, i32 {self.element.size}, {mask.typed}, {vector} zeroinitializer"
            raw = b.value(f"call {vector} @{name}({arguments})", memory, count)
        if self.dtype is torch.float32:
            return [raw]
        if self.dtype is torch.float16:
            return [b.convert("fpext", raw, "float")]
        pairs = b.value(f"bitcast {raw.typed} to <{self.lanes} x i32>", "i32", self.lanes)
        even = b.op("shl", pairs, b.const(16, "i32"))
        odd = b.op("and", pairs, b.const(0xFFFF0000, "i32"))
        return [b.convert("bitcast", half, "float") for half in (even, odd)]

    # --- from vectors of partial sums to sums

    def _finish_row(self, row: int) -> None:
        b, width = self.b, self.tile.columns
        per_row = COLUMNS // width
        kind = f"<{self.lanes} x float>"
        vectors = []
        for number in range(per_row):
            place = b.value(f"getelementptr {kind}, ptr {self.parts}, i64 {row * per_row + number}", "ptr").text
            vectors.append(b.value(f"load {kind}, ptr {place}, align {4 * self.lanes}", "float", self.lanes))
        for number, vector in enumerate(self._joined(vectors, 1, width)):
            place = b.value(f"getelementptr float, ptr %sums, i64 {row * COLUMNS + number * self.lanes}", "ptr").text
            b.emit(f"  store {vector.typed}, ptr {place}, align {4 * self.lanes}")

    def _joined(self, vectors: list[Value], wanted: int, columns: int = 1) -> list[Value]:
        """Vectors with the sums of more columns each, by adding neighbours. columns: in each of the given vectors;
        wanted: lanes for a column in the end."""
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
                    b.value(
                        f"shufflevector {kind} {one.text}, {kind} {other.text}, <{lanes} x i32> <{order}>",
                        "float",
                        lanes,
                    )
                    for order in halves
                )
                pairs.append(b.op("fadd", low, high))
            vectors, width = pairs, half
        return vectors
