"""Attention of many queries as one LLVM function: a block of queries at a time, any number of keys.

Takes a `Kernel` with an `attention` (`many`) whose features lie side by side, and a `Target`; gives the function's
text. Always holds: scores, probabilities and sums are float32; a query whose keys are all masked gives zeros; nothing
beyond an operand is read.

Each lane is a query. A block's queries are turned over once, so that a vector holds one feature of all of them; then a
key's feature or a value's is one number for all lanes, read from where it lies, and the largest score, the powers and
their sums need no step across lanes. Keys go through in blocks, whose scores stay in the first-level cache; what was
summed so far is scaled when a larger score comes. Queries that do not exist repeat the last one, so that storing their
results again changes nothing; so do keys, whose scores only the largest sees.
"""

from __future__ import annotations

import math

import torch

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Shape
from fusewright.codegen.llvm.emit.builder import Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.expressions import convert
from fusewright.codegen.llvm.emit.math import exp
from fusewright.codegen.llvm.emit.shared import Writer, define
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.transpose import transpose
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, suffix, type_text
from fusewright.codegen.llvm.emitter import SIGNATURE, KernelText
from fusewright.codegen.llvm.kernel import KernelEmitter
from fusewright.codegen.llvm.row_memory import STACK_LIMIT
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.codegen.llvm.templates.skinny_gemm_block import STEP
from fusewright.loops.ir import Axis
from fusewright.schedule.plan import Attention, Kernel, Rows
from fusewright.sizes import expressions as sizes

KEYS = 64
"""Of a block. Their scores and the features of 64 queries, of keys and values fit in the first-level cache."""

MANY_BLOCKS = 5
"""With more, a function of its own for a last block that is not full would take longer to compile than it is worth."""

SQUARE = 8
"""Rows and columns turned over at once. With sixteen, where registers have room, compiling takes twice as long."""

WIDE_BYTES = 16 * 1024
"""For keys or values of a block in float32 where they are halves."""

_FLOPS_PER_NS, _THREAD_NS = 150.0, 8000.0
_SOME_KEYS = 128
"""A number to reckon with where none is known."""


@dataclass(frozen=True, slots=True)
class Block:
    """What registers hold: sums for `across` keys (or features of values) times `vectors` of queries."""

    across: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        return self.vectors * self.lanes


def block_for(target: Target) -> Block:
    """Loads of a turn take less time than its multiplications, and the sums are at least as many as are under way at
    once."""
    across, vectors = (4, 3) if target.registers < 32 else (8, 2) if target.vector_bits >= 512 else (4, 4)
    return Block(across, vectors, target.lanes(4))


def is_supported(attention: Attention, rows: Axis, target: Target) -> bool:
    """Whether there is a kernel for it: one whose memory fits on a stack, of features that are whole squares. rows: the
    queries' axis."""
    dtype, features, mask = attention.query.dtype, attention.features, attention.mask
    if not target.multiplies_adds or dtype not in STEP or (mask is not None and mask.dtype not in STEP):
        return False
    block = block_for(target)
    if features <= 0 or features % SQUARE or _stack_bytes(dtype, features, block) > STACK_LIMIT:
        return False
    if any(sizes.coefficient(one.outer, rows.symbol) is None for one in attention.operands):
        return False
    return all(one.dtype is dtype for one in (attention.key, attention.value, attention.result))


def _keys(dtype: torch.dtype, features: int) -> int:
    """Keys of a block: a multiple of all tiles."""
    return KEYS if dtype is torch.float32 else min(KEYS, max(SQUARE, WIDE_BYTES // (4 * features) // SQUARE * SQUARE))


def _stack_bytes(dtype: torch.dtype, features: int, block: Block) -> int:
    keys = _keys(dtype, features)
    wide = 0 if dtype is torch.float32 else keys * features
    return 4 * ((2 * features + keys + 1) * block.width + wide)


def emit_attention_block(kernel: Kernel, target: Target, declarations: dict[str, str]) -> KernelText:
    """Raises ValueError for attention that has no kernel (`is_supported`)."""
    attention = kernel.attention
    if attention is None or not is_supported(attention, kernel.outer[2], target):
        raise ValueError(f"no kernel for the attention in {kernel.name}")
    return AttentionBlockEmitter(kernel, attention, target, declarations).run()


class AttentionBlockEmitter(KernelEmitter):
    def __init__(self, kernel: Kernel, attention: Attention, target: Target, declarations: dict[str, str]) -> None:
        self.attention = attention
        self.block = block_for(target)
        batch, heads, self.row_axis = kernel.outer
        domain = [(batch, 0), (heads, 0), (self.row_axis, self.block.width)]
        super().__init__(
            Shape(kernel, list(kernel.outer), [], {}),
            Strategy("outer", 1, None, [], domain, [], 1),
            target,
            declarations,
        )

    def run(self) -> KernelText:
        made = super().run()
        keys = self.attention.columns if isinstance(self.attention.columns, int) else _SOME_KEYS
        grain = max(1, int(_THREAD_NS * _FLOPS_PER_NS / max(4 * self.block.width * keys * self.attention.features, 1)))
        return KernelText(self.b.text(SIGNATURE), made.extent, grain)

    def _point(self, context: Context, starts: list[Value]) -> None:
        b, attention, start = self.b, self.attention, starts[-1]
        function = blocks_function(
            attention, self.row_axis.extent, self._mask_step() != 0, self.block, self.target, b.declarations
        )
        arguments = self._place(context, attention.query, start)
        for rows in (attention.key, attention.value):
            address, _ = self._place(context, rows, start)
            arguments += [address, self.indexer.scalar(context, rows.step * ELEMENT_TYPES[rows.dtype].size)]
        if attention.mask is not None:
            arguments += self._place(context, attention.mask, start)
        b.scope = context.here
        left = b.op("sub nsw", self.indexer.scalar(context, self.row_axis.extent - 1), start)
        last = b.intrinsic("smin", left, b.const(self.block.width - 1, "i64"))
        keys = self.indexer.scalar(context, attention.columns)
        arguments += [
            keys,
            start,
            last,
            b.const(attention.scale, "float"),
            *self._place(context, attention.result, start),
        ]
        b.scope = context.here
        b.call_void(function, arguments)

    def _mask_step(self) -> object:
        mask = self.attention.mask
        return 0 if mask is None else sizes.coefficient(mask.outer, self.row_axis.symbol)

    def _place(self, context: Context, rows: Rows, number: Value) -> list[Value]:
        """Where the operand's row of query `number` starts, and the bytes from there to the next one's."""
        b, symbol = self.b, self.row_axis.symbol
        scope = Scope(context.here.cursor, defines={symbol}, values={symbol: number})
        b.scope = scope
        address = self.evaluator.memory.address(context.enter(scope), self.pointers[rows.buffer], rows.outer)
        step = sizes.coefficient(rows.outer, symbol)
        assert step is not None, "is_supported has asked"
        b.scope = context.here
        return [Value(address, "ptr"), self.indexer.scalar(context, step * ELEMENT_TYPES[rows.dtype].size)]


PARAMETERS = (
    "(ptr %q, i64 %q_step, ptr %k, i64 %k_step, ptr %v, i64 %v_step, {mask}i64 %keys, i64 %first, i64 %last, float "
    "%scale, ptr %out, i64 %out_step)"
)
"""Steps: bytes from one row to the next. first: number of the block's first query. last: which of the block's queries
is its last."""


def blocks_function(
    attention: Attention, rows: sizes.Dim, by_row: bool, block: Block, target: Target, declarations: dict[str, str]
) -> str:
    """The function for a block of queries where there are `rows` of them. by_row: the mask is another one for each."""

    def of(vectors: int) -> str:
        writer = _BlockWriter(attention, by_row, Block(block.across, vectors, block.lanes), target, declarations)
        return define("attention_block", writer.text(), declarations)

    rest = rows % block.width if isinstance(rows, int) else 1
    fewest = max(1, SQUARE // block.lanes)  # vectors: squares are turned over whole
    few = fewest * block.lanes
    if not 0 < rest <= few or (isinstance(rows, int) and rows > MANY_BLOCKS * block.width):
        return of(block.vectors)
    if isinstance(rows, int) and rows <= few:
        return of(fewest)
    # The last block may be of few queries.
    parameters = PARAMETERS.format(mask="" if attention.mask is None else "ptr %mask, i64 %mask_step, ")
    lines = [
        parameters + " {",
        "entry:",
        f"  %few = icmp slt i64 %last, {few}",
        "  br i1 %few, label %one, label %several",
    ]
    for label, vectors in (("one", fewest), ("several", block.vectors)):
        lines += [f"{label}:", f"  call void @{of(vectors)}{parameters}", "  ret void"]
    return define("attention_blocks", "\n".join([*lines, "}"]), declarations)


class _BlockWriter(Writer):
    """The function for a block of queries."""

    def __init__(
        self, attention: Attention, by_row: bool, block: Block, target: Target, declarations: dict[str, str]
    ) -> None:
        super().__init__(target, declarations)
        self.block, self.causal, self.features = block, attention.causal, attention.features
        self.dtype, self.element = attention.query.dtype, ELEMENT_TYPES[attention.query.dtype]
        self.mask, self.by_row = None if attention.mask is None else attention.mask.dtype, by_row
        self.keys = _keys(self.dtype, self.features)
        self.turn = define("attention_turn", _TurnWriter(self.dtype, True, target, declarations).text(), declarations)
        self.turn_back = define(
            "attention_result", _ResultWriter(self.dtype, target, declarations).text(), declarations
        )
        if self.mask is not None and by_row:
            self.turn_mask = define(
                "attention_turn", _TurnWriter(self.mask, False, target, declarations).text(), declarations
            )

    def text(self) -> str:
        b, block = self.b, self.block
        self.queries, self.sums = self._scratch(self.features * block.width), self._scratch(self.features * block.width)
        self.scores = self._scratch(self.keys * block.width)
        factors = self._scratch(block.width)
        self.wide = "" if self.dtype is torch.float32 else self._scratch(self.keys * self.features)
        features, keys, last = b.const(self.features, "i64"), Value("%keys", "i64"), Value("%last", "i64")
        width = b.const(block.width, "i64")
        b.call_void(
            self.turn, [Value("%q", "ptr"), Value("%q_step", "i64"), last, features, Value(self.queries, "ptr"), width]
        )
        nothing = b.splat(b.const(0.0, "float"), block.lanes)
        size = b.const(self.features * block.width, "i64")
        self.loop("clear", b.const(0, "i64"), size, block.lanes, [], lambda at, _: self._clear(at))
        if self.causal:
            self.numbers = self._numbers()
            keys = b.intrinsic(
                "smin", keys, b.op("add nsw", b.op("add nsw", Value("%first", "i64"), last), b.const(1, "i64"))
            )
        start = [b.splat(b.const(-math.inf, "float"), block.lanes)] * block.vectors + [nothing] * block.vectors
        carried = self.loop_if_any(
            "block", b.const(0, "i64"), keys, self.keys, start, lambda at, now: self._block(at, now, keys)
        )
        for number, total in enumerate(carried[block.vectors :]):
            # No key, or none that is not masked: zeros.
            total = b.select(b.compare("fcmp oeq", total, nothing), b.const(1.0, "float"), total)
            self._store(b.op("fdiv", b.const(1.0, "float"), total), factors, number * block.lanes)
        arguments = [
            Value(self.sums, "ptr"),
            Value(factors, "ptr"),
            Value("%out", "ptr"),
            Value("%out_step", "i64"),
            last,
            features,
            width,
        ]
        b.call_void(self.turn_back, arguments)
        b.emit("  ret void")
        return b.text(PARAMETERS.format(mask="" if self.mask is None else "ptr %mask, i64 %mask_step, "))

    # --- memory

    def _scratch(self, count: int) -> str:
        return self.b.value(f"alloca [{count} x float], align 64", "ptr").text

    def _clear(self, at: Value) -> list[Value]:
        place = self.b.value(f"getelementptr float, ptr {self.sums}, i64 {at.text}", "ptr").text
        self._store(self.b.splat(self.b.const(0.0, "float"), self.block.lanes), place, 0)
        return []

    def _store(self, value: Value, base: str, at: int) -> None:
        place = self.b.value(f"getelementptr float, ptr {base}, i64 {at}", "ptr").text
        self.b.emit(f"  store {value.typed}, ptr {place}, align {4 * self.block.lanes}")

    def _load(self, base: str, at: int) -> Value:
        lanes = self.block.lanes
        place = self.b.value(f"getelementptr float, ptr {base}, i64 {at}", "ptr").text
        return self.b.value(f"load {type_text('float', lanes)}, ptr {place}, align {4 * lanes}", "float", lanes)

    def _row(self, base: str, step: str, number: Value) -> str:
        offset = self.b.op("mul nsw", number, Value(step, "i64"))
        return self.b.value(f"getelementptr i8, ptr {base}, i64 {offset.text}", "ptr").text

    def _vectors(self, base: str, number: Value) -> str:
        """The block's vectors number `number` of a scratch."""
        at = self.b.op("mul nsw", number, self.b.const(self.block.width, "i64"))
        return self.b.value(f"getelementptr float, ptr {base}, i64 {at.text}", "ptr").text

    def _everywhere(self, base: str, at: str, type_: str = "float") -> Value:
        """An element in all lanes."""
        b = self.b
        place = b.value(f"getelementptr {type_}, ptr {base}, i64 {at}", "ptr").text
        return self._spread(b.value(f"load {type_}, ptr {place}, align {2 if type_ != 'float' else 4}", type_))

    def _spread(self, value: Value) -> Value:
        b, lanes = self.b, self.block.lanes
        vector = type_text(value.type, lanes)
        one = b.value(f"insertelement {vector} poison, {value.typed}, i64 0", value.type, lanes)
        return b.value(
            f"shufflevector {vector} {one.text}, {vector} poison, <{lanes} x i32> zeroinitializer", value.type, lanes
        )

    # --- a block of keys

    def _numbers(self) -> list[Value]:
        """The queries' numbers, lane by lane."""
        b, lanes = self.b, self.block.lanes
        first, last = (self._spread(b.convert("trunc", Value(name, "i64"), "i32")) for name in ("%first", "%last"))
        found = []
        for vector in range(self.block.vectors):
            places = Value("<" + ", ".join(f"i32 {vector * lanes + k}" for k in range(lanes)) + ">", "i32", lanes)
            found.append(b.op("add nsw", first, b.intrinsic("smin", places, last)))
        return found

    def _block(self, first: Value, carried: list[Value], keys: Value) -> list[Value]:
        """The keys from number `first` on: each query's largest score so far, and its sum of powers."""
        b, block = self.b, self.block
        before, totals = carried[: block.vectors], carried[block.vectors :]
        count = b.intrinsic("smin", b.op("sub nsw", keys, first), b.const(self.keys, "i64"))
        rows = self._rows("%k", "%k_step", first, count)
        if self.mask is not None and self.by_row:
            here = b.value(f"getelementptr {ELEMENT_TYPES[self.mask].memory}, ptr %mask, i64 {first.text}", "ptr")
            rows_of_it = [here, Value("%mask_step", "i64"), Value("%last", "i64")]
            b.call_void(self.turn_mask, [*rows_of_it, count, Value(self.scores, "ptr"), b.const(block.width, "i64")])
        end = b.op("sub nsw", count, b.const(1, "i64"))
        zero = b.const(0, "i64")
        largest = self.loop(
            "scores", zero, count, block.across, before, lambda at, now: self._tile(at, now, rows, end, first)
        )
        factors, shifts, after = [], [], []
        for old, new in zip(before, largest):
            # Where all are masked so far, the powers shall be 0, not NaN.
            shift = b.select(b.compare("fcmp oeq", new, b.const(-math.inf, "float")), b.const(0.0, "float"), new)
            shifts.append(shift)
            factors.append(exp(b, b.op("fsub", old, shift), at_most_zero=True))
        nothing = b.splat(b.const(0.0, "float"), block.lanes)
        powers = self.loop(
            "powers", zero, count, 1, [nothing] * block.vectors, lambda at, now: self._power(at, now, shifts)
        )
        for total, factor, power in zip(totals, factors, powers):
            after.append(b.fma(total, factor, power))
        rows = self._rows("%v", "%v_step", first, count)
        features = b.const(self.features, "i64")
        self.loop("values", zero, features, block.across, [], lambda at, _: self._add(at, rows, count, factors))
        return [*largest, *after]

    def _rows(self, base: str, step: str, first: Value, count: Value) -> tuple[str, str]:
        """The block's rows in float32: the first one, and bytes to the next."""
        b = self.b
        here = self._row(base, step, first)
        if self.dtype is torch.float32:
            return here, step
        width = math.gcd(self.features, self.block.lanes)
        kind, size = self.element.memory, self.element.size

        def row(number: Value, _: list[Value]) -> list[Value]:
            source = self._row(here, step, number)
            start = b.op("mul nsw", number, b.const(self.features, "i64"))
            for at in range(0, self.features, width):
                place = b.value(f"getelementptr {kind}, ptr {source}, i64 {at}", "ptr").text
                raw = b.value(f"load {type_text(kind, width)}, ptr {place}, align {size}", kind, width)
                to = b.value(
                    f"getelementptr float, ptr {self.wide}, i64 {b.op('add nsw', start, b.const(at, 'i64')).text}",
                    "ptr",
                ).text
                b.emit(f"  store {convert(b, raw, self.dtype, torch.float32).typed}, ptr {to}, align {4 * width}")
            return []

        self.loop("widen", b.const(0, "i64"), count, 1, [], row)
        return self.wide, str(4 * self.features)

    def _tile(
        self, first: Value, largest: list[Value], rows: tuple[str, str], end: Value, block_first: Value
    ) -> list[Value]:
        """Scores of some keys, the last one again where there are fewer."""
        b, block = self.b, self.block
        numbers = [b.intrinsic("smin", b.op("add nsw", first, b.const(k, "i64")), end) for k in range(block.across)]
        keys = [self._row(*rows, number) for number in numbers]

        def feature(at: Value, sums: list[Value]) -> list[Value]:
            here = self._vectors(self.queries, at)
            queries = [self._load(here, vector * block.lanes) for vector in range(block.vectors)]
            after = []
            for k, key in enumerate(keys):
                one = self._everywhere(key, at.text)
                after += [b.fma(one, query, sums[k * block.vectors + vector]) for vector, query in enumerate(queries)]
            return after

        zeros = [b.splat(b.const(0.0, "float"), block.lanes)] * (block.across * block.vectors)
        sums = self.loop("feature", b.const(0, "i64"), b.const(self.features, "i64"), 1, zeros, feature)
        scale = self._spread(Value("%scale", "float"))
        largest = list(largest)
        for k, number in enumerate(numbers):
            here = self._vectors(self.scores, b.op("add nsw", first, b.const(k, "i64")))
            key = b.op("add nsw", block_first, number)
            for vector in range(block.vectors):
                score = b.op("fmul", sums[k * block.vectors + vector], scale)
                if self.mask is not None:
                    score = b.op(
                        "fadd", score, self._load(here, vector * block.lanes) if self.by_row else self._mask_of(key)
                    )
                if self.causal:
                    seen = b.compare("icmp sle", self._spread(b.convert("trunc", key, "i32")), self.numbers[vector])
                    score = b.select(seen, score, b.const(-math.inf, "float"))
                self._store(score, here, vector * block.lanes)
                # NaN is passed over here, and comes with its power.
                largest[vector] = b.select(b.compare("fcmp ogt", score, largest[vector]), score, largest[vector])
        return largest

    def _mask_of(self, key: Value) -> Value:
        assert self.mask is not None
        return convert(
            self.b, self._everywhere("%mask", key.text, ELEMENT_TYPES[self.mask].memory), self.mask, torch.float32
        )

    def _power(self, key: Value, totals: list[Value], shifts: list[Value]) -> list[Value]:
        b, lanes = self.b, self.block.lanes
        here = self._vectors(self.scores, key)
        after = []
        for vector, (total, shift) in enumerate(zip(totals, shifts)):
            power = exp(b, b.op("fsub", self._load(here, vector * lanes), shift), at_most_zero=True)
            self._store(power, here, vector * lanes)
            after.append(b.op("fadd", total, power))
        return after

    def _add(self, first: Value, rows: tuple[str, str], count: Value, factors: list[Value]) -> list[Value]:
        """Some features of the values, times their powers, to what was summed so far."""
        b, block = self.b, self.block
        base, step = rows
        base = b.value(f"getelementptr float, ptr {base}, i64 {first.text}", "ptr").text
        places = self._vectors(self.sums, first)
        old = [self._load(places, k * block.lanes) for k in range(block.across * block.vectors)]

        def key(at: Value, sums: list[Value]) -> list[Value]:
            here, values = self._vectors(self.scores, at), self._row(base, step, at)
            powers = [self._load(here, vector * block.lanes) for vector in range(block.vectors)]
            after = []
            for k in range(block.across):
                one = self._everywhere(values, str(k))
                after += [b.fma(one, power, sums[k * block.vectors + vector]) for vector, power in enumerate(powers)]
            return after

        start = [b.op("fmul", total, factors[k % block.vectors]) for k, total in enumerate(old)]
        for k, total in enumerate(self.loop("value", b.const(0, "i64"), count, 1, start, key)):
            self._store(total, places, k * block.lanes)
        return []


class _Square(Writer):
    """A function that turns rows over, a square at a time."""

    def __init__(self, dtype: torch.dtype, target: Target, declarations: dict[str, str]) -> None:
        super().__init__(target, declarations)
        self.dtype, self.element = dtype, ELEMENT_TYPES[dtype]

    def _squares(self) -> None:
        b, zero = self.b, self.b.const(0, "i64")

        def below(row: Value, _: list[Value]) -> list[Value]:
            return self.loop(
                "columns", zero, Value("%columns", "i64"), SQUARE, [], lambda column, _: self._square(row, column)
            )

        self.loop("rows", zero, Value("%width", "i64"), SQUARE, [], below)
        b.emit("  ret void")

    def _square(self, row: Value, column: Value) -> list[Value]:
        raise NotImplementedError

    def _outside(self, base: str, row: Value, number: int, column: Value) -> str:
        """Where row `row + number` (the last one, if there are fewer) is from `column` on."""
        b = self.b
        at = b.intrinsic("smin", b.op("add nsw", row, b.const(number, "i64")), Value("%last", "i64"))
        start = b.op("mul nsw", at, Value("%step", "i64"))
        start = b.value(f"getelementptr i8, ptr {base}, i64 {start.text}", "ptr")
        return b.value(f"getelementptr {self.element.memory}, ptr {start.text}, i64 {column.text}", "ptr").text

    def _inside(self, base: str, row: Value, column: Value, number: int) -> str:
        b = self.b
        at = b.op("mul nsw", b.op("add nsw", column, b.const(number, "i64")), Value("%width", "i64"))
        return b.value(f"getelementptr float, ptr {base}, i64 {b.op('add nsw', at, row).text}", "ptr").text

    def _floats(self, place: str) -> Value:
        return self.b.value(f"load {type_text('float', SQUARE)}, ptr {place}, align {4 * SQUARE}", "float", SQUARE)


class _TurnWriter(_Square):
    """(rows, bytes from one to the next, number of the last, columns, where column by column a number of each row goes,
    how many these are): float32. whole: columns are a multiple of a square's; else -inf for those beyond the last."""

    def __init__(self, dtype: torch.dtype, whole: bool, target: Target, declarations: dict[str, str]) -> None:
        super().__init__(dtype, target, declarations)
        self.whole = whole

    def text(self) -> str:
        self._squares()
        return self.b.text("(ptr %from, i64 %step, i64 %last, i64 %columns, ptr %to, i64 %width)")

    def _square(self, row: Value, column: Value) -> list[Value]:
        b, memory, size = self.b, self.element.memory, self.element.size
        there = None if self.whole else self._there(column)
        kind = type_text(memory, SQUARE)
        vectors = []
        for number in range(SQUARE):
            place = self._outside("%from", row, number, column)
            if there is None:
                raw = b.value(f"load {kind}, ptr {place}, align {size}", memory, SQUARE)
                vectors.append(convert(b, raw, self.dtype, torch.float32))
                continue
            name = f"llvm.masked.load.{suffix(memory, SQUARE)}.p0"
            b.declarations.setdefault(name, f"declare {kind} @{name}(ptr, i32, <{SQUARE} x i1>, {kind})")
            arguments = f"ptr {place}, i32 {size}, {there.typed}, {kind} zeroinitializer"
            raw = b.value(f"call {kind} @{name}({arguments})", memory, SQUARE)
            vectors.append(b.select(there, convert(b, raw, self.dtype, torch.float32), b.const(-math.inf, "float")))
        for number, vector in enumerate(transpose(b, vectors)):
            b.emit(f"  store {vector.typed}, ptr {self._inside('%to', row, column, number)}, align {4 * SQUARE}")
        return []

    def _there(self, column: Value) -> Value:
        """Which columns exist."""
        b, vector = self.b, type_text("i32", SQUARE)
        left = b.intrinsic("smin", b.op("sub nsw", Value("%columns", "i64"), column), b.const(SQUARE, "i64"))
        numbers = Value("<" + ", ".join(f"i32 {k}" for k in range(SQUARE)) + ">", "i32", SQUARE)
        one = b.value(f"insertelement {vector} poison, {b.convert('trunc', left, 'i32').typed}, i64 0", "i32", SQUARE)
        spread = b.value(
            f"shufflevector {vector} {one.text}, {vector} poison, <{SQUARE} x i32> zeroinitializer", "i32", SQUARE
        )
        return b.compare("icmp slt", numbers, spread)


class _ResultWriter(_Square):
    """The way back: (columns with a number of each row, what to multiply each row by, rows, bytes from one to the next,
    number of the last, columns, how many rows the columns have)."""

    def text(self) -> str:
        self._squares()
        return self.b.text("(ptr %from, ptr %factors, ptr %to, i64 %step, i64 %last, i64 %columns, i64 %width)")

    def _square(self, row: Value, column: Value) -> list[Value]:
        b = self.b
        factor = self._floats(b.value(f"getelementptr float, ptr %factors, i64 {row.text}", "ptr").text)
        vectors = [
            b.op("fmul", self._floats(self._inside("%from", row, column, number)), factor) for number in range(SQUARE)
        ]
        for number, vector in enumerate(transpose(b, vectors)):
            narrow = convert(b, vector, torch.float32, self.dtype)
            b.emit(
                f"  store {narrow.typed}, ptr {self._outside('%to', row, number, column)}, align {self.element.size}"
            )
        return []
