"""Loads and stores: contiguous, spread, reversed, strided and gathered, under masks, with bool kept as bytes.

Takes a buffer's pointer, an index and a `Context`; gives register values, or writes them. Always holds: no byte outside
the lanes that count is touched, neither read nor written; a scalar access under a false mask goes to a block of zeros
instead.
"""

from __future__ import annotations

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, replace
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.expressions import extreme
from fusewright.codegen.llvm.emit.indexing import Bound, Indexer, Part, vector_of_pointers
from fusewright.codegen.llvm.emit.transpose import transpose
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, ElementType, literal, suffix, type_text
from fusewright.sizes.expressions import Dim

LINE = 64  # bytes of a cache line
NEAR = 8192  # bytes ahead up to which what is fetched goes into the first-level cache
PREFETCH = "llvm.prefetch.p0"
FIRST_LEVEL, SECOND_LEVEL = 3, 2  # the cache that a prefetch brings a line to
ZEROS = "fw.zeros"  # enough zeros for one vector of any type
ZEROS_DEFINITION = f"@{ZEROS} = internal constant [1024 x i8] zeroinitializer, align 64"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a buffer starts. `interleaved`: a scratch buffer with one copy for each of so many lanes, element by
    element (0 for plain memory); `copies` then holds one pointer for each vector that is computed side by side, by the
    vector's offset. `start`: the copies are for the columns of a wide tile, of which this is the first.
    """

    text: str
    dtype: torch.dtype
    interleaved: int = 0
    copies: dict[int, str] | None = None
    start: Value | None = None

    @property
    def element(self) -> ElementType:
        return ELEMENT_TYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Place:
    """`pointer[index]`, where `bound` gives the values of bound symbols. ahead: bytes from there to what is to be
    fetched meanwhile, 0 for nothing."""

    pointer: Pointer
    index: Dim
    bound: Bound
    ahead: int = 0


@dataclass(slots=True)
class Memory:
    b: FunctionBuilder
    indexer: Indexer

    # --- addresses

    def _at(self, memory: str, pointer: str, value: Value | None, constant: int) -> str:
        b = self.b
        if value is not None:
            pointer = b.value(f"getelementptr {memory}, ptr {pointer}, i64 {value.text}", "ptr").text
        if constant:
            pointer = b.value(f"getelementptr {memory}, ptr {pointer}, i64 {constant}", "ptr").text
        return pointer

    def _step(self, pointer: Pointer, base: str, parts: list[Part], constant: int) -> str:
        """The address `base`[sum of `parts` + constant], a step for each scope that knows a part. What an outer scope
        knows is frozen: loop strength reduction then sees one number. It looks through sums and products of sizes and
        minima of indices, and tries the ways to share their terms between addresses: up to three quarters of LLVM's
        time for a kernel with many."""
        b, memory = self.b, pointer.element.memory
        for scope, part in parts[:-1]:
            key = ("address", memory, base, part.text)
            found = scope.memo.get(key)
            if found is None:
                saved, b.scope = b.scope, scope
                text = self._at(memory, base, part, 0)
                if not pointer.interleaved:
                    text = b.value(f"freeze ptr {text}", "ptr").text
                found = scope.memo[key] = Value(text, "ptr", 1, scope)
                b.scope = saved
            base = found.text
        return self._at(memory, base, parts[-1][1] if parts else None, constant)

    def _locate(self, ctx: Context, place: Place) -> tuple[str, Dim | None, str, Value | None]:
        """(kind, stride, address of lane 0, vector of indices): kind is "one" address, "row" of strided ones, or
        "any"."""
        pointer, d, bound = place.pointer, place.index, place.bound
        b, memory = self.b, pointer.element.memory
        base = pointer.text
        if pointer.start is not None and ctx.lanes > 1:
            start = self._step(pointer, base, *self.indexer.parts(ctx.uniform, d * pointer.interleaved, bound))
            column = b.op("sub nsw", self.indexer.base(ctx), pointer.start)
            return "row", 1, self._at(memory, start, column, 0), None
        if pointer.interleaved and ctx.lanes > 1:
            assert pointer.copies is not None
            base = pointer.copies[ctx.offset]
            if not self.indexer.varies(ctx, d, bound):
                parts, constant = self.indexer.parts(ctx.uniform, d * ctx.lanes, bound)
                return "row", 1, self._step(pointer, base, parts, constant), None
            index = b.op("mul", self.indexer.lanes_i64(ctx, d, bound), b.const(ctx.lanes, "i64"))
            return "any", None, base, b.op("add", index, self.indexer.iota(ctx.lanes, "i64"))
        stride = self.indexer.stride(ctx, d, bound)
        if stride is None:
            return "any", None, base, self.indexer.lanes(ctx, d, bound)
        address = self._step(pointer, base, *self.indexer.first_lane(ctx, d, bound))
        return ("one" if isinstance(stride, int) and stride == 0 else "row"), stride, address, None

    def _row_pointers(self, ctx: Context, memory: str, address: str, stride: Dim) -> Value:
        b = self.b
        if isinstance(stride, int):
            return vector_of_pointers(b, memory, address, self.indexer.iota(ctx.lanes, "i64", stride))
        step = b.splat(self.indexer.scalar(ctx.uniform, stride), ctx.lanes)
        return vector_of_pointers(b, memory, address, b.op("mul", step, self.indexer.iota(ctx.lanes, "i64")))

    def _reverse(self, value: Value) -> Value:
        vector = type_text(value.type, value.lanes)
        order = ", ".join(f"i32 {i}" for i in reversed(range(value.lanes)))
        return self.b.value(
            f"shufflevector {vector} {value.text}, {vector} poison, <{value.lanes} x i32> <{order}>",
            value.type,
            value.lanes,
        )

    # --- loads

    def load(self, ctx: Context, place: Place, mask: Value | None) -> Value:
        element, ahead = place.pointer.element, place.ahead
        kind, stride, address, index = self._locate(ctx, place)
        if kind == "one":
            raw = self._load_one(element, address, mask)
        elif kind == "row" and stride in (1, -1):
            if stride == -1:
                address = self._at(element.memory, address, None, 1 - ctx.lanes)
                mask = self._reverse(mask) if mask is not None and mask.lanes > 1 else mask
            raw = self._load_row(element, address, ctx.lanes, mask)
            if ahead and ctx.offset * element.size % LINE == 0:
                self._fetch(address, ahead)
            raw = self._reverse(raw) if stride == -1 else raw
        else:
            if index is not None and index.lanes == 1:  # varies by its deps only, not in fact
                raw = self._load_one(element, self._at(element.memory, address, index, 0), mask)
            else:
                assert index is not None or stride is not None
                pointers = (
                    vector_of_pointers(self.b, element.memory, address, index)
                    if index is not None
                    else self._row_pointers(ctx, element.memory, address, stride)  # type: ignore[arg-type]
                )
                raw = self._gather(element, pointers, mask)
        if element.kind == "bool":
            return self.b.compare("icmp ne", raw, self.b.const(0, "i8"))
        return raw

    def _fetch(self, address: str, ahead: int, to_write: int = 0, locality: int = 0) -> None:
        """locality: the cache that a line is brought to; 0: the first level for what is needed soon."""
        b = self.b
        place = b.value(f"getelementptr i8, ptr {address}, i64 {ahead}", "ptr").text
        b.declarations.setdefault(PREFETCH, f"declare void @{PREFETCH}(ptr, i32, i32, i32)")
        near = locality or (FIRST_LEVEL if ahead <= NEAR else SECOND_LEVEL)
        b.emit(f"  call void @{PREFETCH}(ptr {place}, i32 {to_write}, i32 {near}, i32 1)")

    def fetch_row(self, ctx: Context, place: Place) -> None:
        """Brings the line of a vector of elements side by side to the first-level cache; once for vectors that share
        it."""
        if ctx.offset * place.pointer.element.size % LINE == 0:
            kind, stride, address, _ = self._locate(ctx, place)
            if kind == "row" and stride == 1:
                self._fetch(address, 0)

    def load_tile_row(self, tile: str, dtype: torch.dtype, index: Value, lanes: int) -> Value:
        """A vector from a tile on the stack."""
        element = ELEMENT_TYPES[dtype]
        raw = self._load_row(element, self._at(element.memory, tile, index, 0), lanes, None)
        return self.b.compare("icmp ne", raw, self.b.const(0, "i8")) if element.kind == "bool" else raw

    def fill_tile(
        self,
        tile: tuple[str, int, Value],
        source: tuple[Context, Place, Value],
        count: int,
        last: Value | None,
        mask: Value | None,
    ) -> None:
        """Turns a square of `count` rows and columns: row k becomes a column of the tile.

        tile: (its address, elements from one of its rows to the next, the element where the square begins). source: (a
        context without lanes, the first element, elements from one row to the next; an `ahead` that is not 0 brings
        what lies below the square to the second-level cache). last: the last row that is there, which stands for those
        after it; mask: the elements of a row that are.
        """
        (text, pitch, begin), (ctx, first, stride) = tile, source
        b, element = self.b, first.pointer.element
        base = self.address(ctx, first.pointer, first.index)
        vectors = []
        for k in range(count):
            row = b.const(k, "i64") if last is None else b.intrinsic("smin", b.const(k, "i64"), last)
            address = self._at(element.memory, base, b.op("mul nsw", row, stride), 0) if k else base
            vectors.append(self._load_row(element, address, count, mask))
            if first.ahead:
                below = self._at(element.memory, address, b.op("mul nsw", b.const(count, "i64"), stride), 0)
                self._fetch(below, 0, locality=SECOND_LEVEL)
        for row_, value in enumerate(transpose(b, vectors)):
            self._store_row(element, self._at(element.memory, text, begin, row_ * pitch), value, None)

    def address(self, ctx: Context, pointer: Pointer, d: Dim) -> str:
        """Of one element, in a context without lanes."""
        return self._step(pointer, pointer.text, *self.indexer.parts(ctx, d))

    def _load_one(self, element: ElementType, address: str, mask: Value | None) -> Value:
        b = self.b
        if mask is not None:
            address = b.value(f"select i1 {b.any_lane(mask).text}, ptr {address}, ptr @{ZEROS}", "ptr").text
        return b.value(f"load {element.memory}, ptr {address}, align {element.size}", element.memory)

    def _load_row(self, element: ElementType, address: str, lanes: int, mask: Value | None) -> Value:
        b = self.b
        if mask is not None and mask.lanes == 1:
            address = b.value(f"select i1 {mask.text}, ptr {address}, ptr @{ZEROS}", "ptr").text
            mask = None
        vector = type_text(element.memory, lanes)
        if mask is None:
            return b.value(f"load {vector}, ptr {address}, align {element.size}", element.memory, lanes)
        name = f"llvm.masked.load.{suffix(element.memory, lanes)}.p0"
        b.declarations.setdefault(name, f"declare {vector} @{name}(ptr, i32, <{lanes} x i1>, {vector})")
        arguments = f"ptr {address}, i32 {element.size}, {mask.typed}, {vector} zeroinitializer"
        return b.value(f"call {vector} @{name}({arguments})", element.memory, lanes)

    def _gather(self, element: ElementType, pointers: Value, mask: Value | None) -> Value:
        b, lanes = self.b, pointers.lanes
        vector = type_text(element.memory, lanes)
        name = f"llvm.masked.gather.{suffix(element.memory, lanes)}.v{lanes}p0"
        b.declarations.setdefault(name, f"declare {vector} @{name}(<{lanes} x ptr>, i32, <{lanes} x i1>, {vector})")
        which = self._mask_text(mask, lanes)
        arguments = f"{pointers.typed}, i32 {element.size}, {which}, {vector} zeroinitializer"
        return b.value(f"call {vector} @{name}({arguments})", element.memory, lanes)

    def _mask_text(self, mask: Value | None, lanes: int) -> str:
        if mask is None:
            return f"<{lanes} x i1> splat (i1 true)"
        return self.b.splat(mask, lanes).typed

    # --- stores

    def store(self, ctx: Context, place: Place, value: Value, mask: Value | None, mode: str) -> None:
        """Writes `value`, or accumulates it there (the caller sees to it that no two lanes meet)."""
        element, ahead = place.pointer.element, place.ahead
        if mode != "write":
            value = self._accumulate(ctx, replace(place, ahead=0), value, mask, mode)
        if element.kind == "bool":
            value = self.b.convert("zext", value, "i8")
        kind, stride, address, index = self._locate(ctx, place)
        if ctx.lanes == 1:
            self._store_one(
                element, address if index is None else self._at(element.memory, address, index, 0), value, mask
            )
            return
        value = self.b.splat(value, ctx.lanes)
        if kind == "row" and stride in (1, -1):
            if stride == -1:
                address = self._at(element.memory, address, None, 1 - ctx.lanes)
                value = self._reverse(value)
                mask = self._reverse(mask) if mask is not None and mask.lanes > 1 else mask
            if ahead and ctx.offset * element.size % LINE == 0:
                self._fetch(address, ahead, to_write=1)
            self._store_row(element, address, value, mask)
        elif index is not None:
            pointers = vector_of_pointers(self.b, element.memory, address, self.b.splat(index, ctx.lanes))
            self._scatter(element, pointers, value, mask)
        else:
            assert stride is not None
            self._scatter(element, self._row_pointers(ctx, element.memory, address, stride), value, mask)

    def store_pair(self, ctx: Context, place: Place, low: Value, high: Value) -> bool:
        """Writes bfloat16 for the context's vector and the one after it, in one store: `low` and `high` are
        float32. Returns False, and writes nothing, where they do not lie side by side.

        The upper halves of both, and the lower halves, become one vector each. Rounding to nearest even goes up where
        the lower half is more than 0x8000, or just that below an odd upper half: five instructions, where vectors by
        themselves take seven and a packing."""
        b = self.b
        kind, stride, address, _ = self._locate(ctx, place)
        if kind != "row" or stride != 1:
            return False
        count = 2 * ctx.lanes
        vector = f"<{count} x i16>"
        pieces = []
        for value in (low, high):
            bits = b.convert("bitcast", value, "i32")
            if not b.plain_nans:
                bits = b.select(b.compare("fcmp uno", value, value), b.const(0x7FC00000, "i32"), bits)
            pieces.append(b.value(f"bitcast {bits.typed} to {vector}", "i16", count).text)
        upper, lower = (
            b.value(
                f"shufflevector {vector} {pieces[0]}, {vector} {pieces[1]}, <{count} x i32> "
                f"<{', '.join(f'i32 {k}' for k in places)}>",
                "i16",
                count,
            )
            for places in (range(1, 2 * count, 2), range(0, 2 * count, 2))
        )
        odd = b.op("and", upper, b.const(1, "i16"))
        up = b.compare("icmp ugt", b.op("or", lower, odd), b.const(0x8000, "i16"))
        rounded = b.select(up, b.op("add", upper, b.const(1, "i16")), upper)
        if place.ahead:
            self._fetch(address, place.ahead, to_write=1)
        self._store_row(place.pointer.element, address, rounded, None)
        return True

    def _accumulate(self, ctx: Context, place: Place, value: Value, mask: Value | None, mode: str) -> Value:
        b, element = self.b, place.pointer.element
        old = self.load(ctx, place, mask)
        if mode != "add":
            return extreme(b, element, mode == "max", old, value)
        if element.kind == "half":
            raise ValueError(f"accumulation into memory of {place.pointer.dtype} is not supported")
        return b.op({"float": "fadd", "int": "add", "bool": "or"}[element.kind], old, value)

    def _store_one(self, element: ElementType, address: str, value: Value, mask: Value | None) -> None:
        b = self.b
        if mask is not None:
            old = b.value(f"load {element.memory}, ptr {address}, align {element.size}", element.memory)
            value = b.select(mask, value, old)
        b.emit(f"  store {element.memory} {value.text}, ptr {address}, align {element.size}")

    def _store_row(self, element: ElementType, address: str, value: Value, mask: Value | None) -> None:
        b = self.b
        if mask is None:
            b.emit(f"  store {value.typed}, ptr {address}, align {element.size}")
            return
        if mask.home is None and mask.text.startswith("<i1 true") and mask.text.count("true") == 1:
            # LLVM makes a masked store of one narrowed lane a scalar store, of the width before it was narrowed (int16,
            # bfloat16).
            self._store_one(element, address, b.lane(value, 0), None)
            return
        name = f"llvm.masked.store.{suffix(element.memory, value.lanes)}.p0"
        vector = type_text(element.memory, value.lanes)
        b.declarations.setdefault(name, f"declare void @{name}({vector}, ptr, i32, <{value.lanes} x i1>)")
        b.emit(
            f"  call void @{name}({value.typed}, ptr {address}, i32 {element.size}, "
            f"{self._mask_text(mask, value.lanes)})"
        )

    def _scatter(self, element: ElementType, pointers: Value, value: Value, mask: Value | None) -> None:
        b, lanes = self.b, pointers.lanes
        name = f"llvm.masked.scatter.{suffix(element.memory, lanes)}.v{lanes}p0"
        vector = type_text(element.memory, lanes)
        b.declarations.setdefault(name, f"declare void @{name}({vector}, <{lanes} x ptr>, i32, <{lanes} x i1>)")
        b.emit(
            f"  call void @{name}({value.typed}, {pointers.typed}, i32 {element.size}, {self._mask_text(mask, lanes)})"
        )


def register_literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A constant of `dtype` as it is held in registers."""
    if dtype is torch.bfloat16:
        bits = int(torch.tensor(float(value), dtype=dtype, device="cpu").view(torch.int16).item())
        return literal(bits, "i16")
    return literal(value, ELEMENT_TYPES[dtype].register)
