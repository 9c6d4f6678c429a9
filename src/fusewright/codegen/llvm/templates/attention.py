"""Attention of few queries as one LLVM function, for any number of keys.

Takes a `Kernel` with an `attention` whose features lie side by side, and a `Target`; gives the function's text. Always
holds: scores, probabilities and sums are float32; a query whose keys are all masked gives zeros; nothing beyond an
operand is read.

One query goes through all keys, sixteen at a time: their scores are a product of one row (product_block.py), and what
was summed so far is scaled when a larger score comes, so that no score need be kept. The function for one query is
shared by all kernels of a module.
"""

from __future__ import annotations

import math

import torch

from fusewright.codegen.analysis import Shape
from fusewright.codegen.llvm.emit.builder import Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.expressions import convert
from fusewright.codegen.llvm.emit.math import exp
from fusewright.codegen.llvm.emit.shared import Writer, define
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, suffix, type_text
from fusewright.codegen.llvm.emitter import SIGNATURE, KernelText
from fusewright.codegen.llvm.kernel import KernelEmitter
from fusewright.codegen.llvm.strategy import Strategy
from fusewright.codegen.llvm.templates.skinny_gemm_block import COLUMNS, STEP, Tile, tile_function
from fusewright.schedule.plan import Attention, Kernel, Rows
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim

MOST_VECTORS = 16
"""Of sums, which stay in registers."""

_KEYS = 64
"""A number of keys to reckon with where none is known."""
_NS_OF_16_KEYS, _THREAD_NS = 60.0, 8000.0


def is_supported(attention: Attention, target: Target) -> bool:
    """Whether there is a kernel for it: features are whole vectors."""
    dtype, features = attention.query.dtype, attention.features
    if (
        not target.multiplies_adds
        or dtype not in STEP
        or (attention.mask is not None and attention.mask.dtype not in STEP)
    ):
        return False
    lanes = target.lanes(4)
    if features < lanes or features % lanes or features // lanes > MOST_VECTORS:
        return False
    return all(rows.dtype is dtype for rows in (attention.key, attention.value, attention.result))


def emit_attention(kernel: Kernel, target: Target, declarations: dict[str, str]) -> KernelText:
    """Raises ValueError for attention that has no kernel (`is_supported`)."""
    attention = kernel.attention
    if attention is None or not is_supported(attention, target):
        raise ValueError(f"no kernel for the attention in {kernel.name}")
    return AttentionEmitter(kernel, attention, target, declarations).run()


class AttentionEmitter(KernelEmitter):
    def __init__(self, kernel: Kernel, attention: Attention, target: Target, declarations: dict[str, str]) -> None:
        self.attention = attention
        shape = Shape(kernel, list(kernel.outer), [], {})
        super().__init__(
            shape, Strategy("outer", 1, None, [], [(axis, 0) for axis in kernel.outer], [], 1), target, declarations
        )

    def run(self) -> KernelText:
        made = super().run()
        keys = self.attention.columns
        blocks = -(-(keys if isinstance(keys, int) else _KEYS) // COLUMNS)
        grain = max(1, int(_THREAD_NS / (max(blocks, 1) * _NS_OF_16_KEYS)))
        return KernelText(self.b.text(SIGNATURE), made.extent, grain)

    def _point(self, context: Context, starts: list[Value]) -> None:
        b, attention = self.b, self.attention
        keys: Dim = attention.columns
        if attention.causal:
            keys = sizes.minimum(keys, self.kernel.outer[2].symbol + 1)
        function = row_function(attention, self.target, b.declarations)
        arguments = [self._address(context, attention.query)]
        for rows in (attention.key, attention.value):
            step = self.indexer.scalar(context, rows.step * ELEMENT_TYPES[rows.dtype].size)
            arguments += [self._address(context, rows), step]
        if attention.mask is not None:
            arguments.append(self._address(context, attention.mask))
        b.scope = context.here
        arguments += [self.indexer.scalar(context, keys), self._address(context, attention.result)]
        b.scope = context.here
        b.call_void(function, arguments)

    def _address(self, context: Context, rows: Rows) -> Value:
        """Where the operand starts for the point."""
        self.b.scope = context.here
        return Value(self.evaluator.memory.address(context, self.pointers[rows.buffer], rows.outer), "ptr")


def row_function(attention: Attention, target: Target, declarations: dict[str, str]) -> str:
    """The function for one query: (query, key, bytes from one to the next, value, the same, mask if there is one, keys,
    result)."""
    mask = None if attention.mask is None else attention.mask.dtype
    writer = _RowWriter(attention.query.dtype, attention.features, mask, attention.scale, target, declarations)
    return define("attention", writer.text(), declarations)


class _RowWriter(Writer):
    def __init__(
        self,
        dtype: torch.dtype,
        features: int,
        mask: torch.dtype | None,
        scale: float,
        target: Target,
        declarations: dict[str, str],
    ) -> None:
        super().__init__(target, declarations)
        self.dtype, self.features, self.mask, self.scale = dtype, features, mask, scale
        self.lanes = target.lanes(4)
        self.count = features // self.lanes
        # A query is a row, keys are columns.
        self.scores_of = tile_function(dtype, features, Tile(1, 4, 2), target, declarations)

    def text(self) -> str:
        b = self.b
        self.scores = b.value(f"alloca [{COLUMNS} x float], align 64", "ptr").text
        keys = Value("%keys", "i64")
        zero = b.const(0.0, "float")
        start = [b.const(-math.inf, "float"), zero, *[b.splat(zero, self.lanes)] * self.count]
        _, total, *sums = self.loop_if_any("block", b.const(0, "i64"), keys, COLUMNS, start, self._block)
        # No key, or none that is not masked: zeros.
        total = b.select(b.compare("fcmp oeq", total, zero), b.const(1.0, "float"), total)
        divisor = self._spread(total)
        for number, value in enumerate(sums):
            self._store(number, b.op("fdiv", value, divisor))
        b.emit("  ret void")
        mask = "" if self.mask is None else "ptr %mask, "
        return b.text(f"(ptr %q, ptr %k, i64 %k_step, ptr %v, i64 %v_step, {mask}i64 %keys, ptr %out)")

    def _spread(self, value: Value) -> Value:
        """A number that was just computed, in all lanes."""
        b, vector = self.b, type_text("float", self.lanes)
        one = b.value(f"insertelement {vector} poison, float {value.text}, i64 0", "float", self.lanes)
        return b.value(
            f"shufflevector {vector} {one.text}, {vector} poison, <{self.lanes} x i32> zeroinitializer",
            "float",
            self.lanes,
        )

    def _block(self, first: Value, carried: list[Value]) -> list[Value]:
        """The keys from number `first` on: the largest score so far, the sum of powers, the weighted sums of values."""
        b = self.b
        before, total, *sums = carried
        left = b.op("sub nsw", Value("%keys", "i64"), first)
        last = b.intrinsic("smin", b.op("sub nsw", left, b.const(1, "i64")), b.const(COLUMNS - 1, "i64"))
        key = self._row("%k", "%k_step", first)
        arguments = [
            Value("%q", "ptr"),
            b.const(0, "i64"),
            Value(key, "ptr"),
            Value("%k_step", "i64"),
            b.const(self.features, "i64"),
            last,
        ]
        b.call_void(self.scores_of, [*arguments, b.const(0, "i64"), Value(self.scores, "ptr")])
        scores = [self._score(number, first, last) for number in range(COLUMNS // self.lanes)]
        largest = before
        for score in scores:
            top = b.intrinsic("vector.reduce.fmax", score, type_="float", lanes=1)
            largest = b.intrinsic("maxnum", largest, top)
        # Where all are masked so far, the powers shall be 0, not NaN.
        nothing = b.compare("fcmp oeq", largest, b.const(-math.inf, "float"))
        shift = self._spread(b.select(nothing, b.const(0.0, "float"), largest))
        for number, score in enumerate(scores):
            power = exp(b, b.op("fsub", score, shift), at_most_zero=True)
            place = b.value(f"getelementptr float, ptr {self.scores}, i64 {number * self.lanes}", "ptr").text
            b.emit(f"  store {power.typed}, ptr {place}, align {4 * self.lanes}")
            name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
            added = b.call(name, [b.const(0.0, "float"), power], "float", flags="reassoc")
            scores[number] = added
        factor = exp(b, b.op("fsub", self._spread(before), shift), at_most_zero=True)
        total = b.op("fmul", total, b.lane(factor, 0))
        for added in scores:
            total = b.op("fadd", total, added)
        sums = [b.op("fmul", value, factor) for value in sums]
        count = b.op("add nsw", last, b.const(1, "i64"))
        sums = self.loop("value", b.const(0, "i64"), count, 1, sums, lambda at, now: self._add(at, now, first))
        return [largest, total, *sums]

    def _score(self, number: int, first: Value, last: Value) -> Value:
        """A vector of scores, -inf for keys that do not exist."""
        b, lanes = self.b, self.lanes
        place = b.value(f"getelementptr float, ptr {self.scores}, i64 {number * lanes}", "ptr").text
        score = b.value(f"load {type_text('float', lanes)}, ptr {place}, align {4 * lanes}", "float", lanes)
        score = b.op("fmul", score, b.const(self.scale, "float"))
        numbers = Value("<" + ", ".join(f"i32 {number * lanes + k}" for k in range(lanes)) + ">", "i32", lanes)
        exists = b.compare("icmp sle", numbers, b.convert("trunc", last, "i32"))
        if self.mask is not None:
            score = b.op("fadd", score, self._mask(number, first, exists))
        return b.select(exists, score, b.const(-math.inf, "float"))

    def _mask(self, number: int, first: Value, exists: Value) -> Value:
        b, lanes = self.b, self.lanes
        assert self.mask is not None
        element = ELEMENT_TYPES[self.mask]
        at = b.op("add nsw", first, b.const(number * lanes, "i64"))
        place = b.value(f"getelementptr {element.memory}, ptr %mask, i64 {at.text}", "ptr").text
        vector = type_text(element.memory, lanes)
        name = f"llvm.masked.load.{suffix(element.memory, lanes)}.p0"
        b.declarations.setdefault(name, f"declare {vector} @{name}(ptr, i32, <{lanes} x i1>, {vector})")
        arguments = f"ptr {place}, i32 {element.size}, {exists.typed}, {vector} zeroinitializer"
        raw = b.value(f"call {vector} @{name}({arguments})", element.memory, lanes)
        return convert(b, raw, self.mask, torch.float32)

    def _add(self, number: Value, sums: list[Value], first: Value) -> list[Value]:
        """One key's value, times its power."""
        b, element, lanes = self.b, ELEMENT_TYPES[self.dtype], self.lanes
        row = self._row("%v", "%v_step", b.op("add nsw", first, number))
        place = b.value(f"getelementptr float, ptr {self.scores}, i64 {number.text}", "ptr").text
        power = self._spread(b.value(f"load float, ptr {place}, align 4", "float"))
        after = []
        for part, total in enumerate(sums):
            place = b.value(f"getelementptr {element.memory}, ptr {row}, i64 {part * lanes}", "ptr").text
            raw = b.value(
                f"load {type_text(element.memory, lanes)}, ptr {place}, align {element.size}", element.memory, lanes
            )
            after.append(b.fma(power, convert(b, raw, self.dtype, torch.float32), total))
        return after

    def _row(self, base: str, step: str, number: Value) -> str:
        offset = self.b.op("mul nsw", number, Value(step, "i64"))
        return self.b.value(f"getelementptr i8, ptr {base}, i64 {offset.text}", "ptr").text

    def _store(self, number: int, value: Value) -> None:
        b, element = self.b, ELEMENT_TYPES[self.dtype]
        narrow = convert(b, value, torch.float32, self.dtype)
        place = b.value(f"getelementptr {element.memory}, ptr %out, i64 {number * self.lanes}", "ptr").text
        b.emit(f"  store {narrow.typed}, ptr {place}, align {element.size}")
