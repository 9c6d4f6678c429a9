"""From loop-IR expressions to values: each computed once, in the outermost scope that knows what it needs.

Takes expressions and a `Context`; gives `Value`s. Always holds: a value is emitted where it dominates all its uses;
what touches memory or may report a failure stays under its mask; memory that the kernel itself writes is read anew in
each stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusewright.codegen.analysis import StageView, same_walk
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.expressions import EMITTERS
from fusewright.codegen.llvm.emit.indexing import Bound, Indexer, fits_i32
from fusewright.codegen.llvm.emit.math import exp
from fusewright.codegen.llvm.emit.memory import Memory, Place, Pointer, register_literal
from fusewright.codegen.llvm.emit.transpose import Staged
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.loops import ir
from fusewright.loops.ir import (
    Apply,
    Axis,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
)
from fusewright.sizes.expressions import Expr, bounds

_COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}


class Evaluator:
    """`view` is the stage whose expressions are evaluated; set it before evaluating (indices are read through it).
    `outer`: the loops around all stages."""

    def __init__(self, b: FunctionBuilder, pointers: dict[str, Pointer], outer: tuple[Axis, ...] = ()) -> None:
        self.b = b
        self.pointers = pointers
        self.outer = outer
        self.places: tuple[Expression, ...] = ()  # where the store that is evaluated writes
        self.indexer = Indexer(b)
        self.memory = Memory(b, self.indexer)
        self.view: StageView
        self.ahead: dict[Expression, int] = {}  # see prefetch.py
        self.store_ahead: dict[str, int] = {}
        self.next_rows: dict[Expression, Axis] = {}
        self.maxima: dict[str, tuple[StageView, Expression]] = {}  # locals that are maxima, and of what
        self.staged: dict[Expression, Staged] = {}  # loads to be taken from a transposed tile
        self._handlers: dict[type, Callable[[Context, int, Expression], Value]] = {
            IndexValue: self._index_value,
            Apply: self._apply,
            Masked: self._masked,
            CheckedIndex: self._checked,
            Load: self._load,
        }

    def value(self, ctx: Context, expr: Expression) -> Value:
        if isinstance(expr, Constant):
            return Value(register_literal(expr.value, expr.dtype), ELEMENT_TYPES[expr.dtype].register)
        if isinstance(expr, LocalValue):
            return ctx.chain[ctx.level(expr.name)].values[expr.name]
        facts = self.view.facts(expr)
        level = ctx.home(facts)
        scope = ctx.chain[level]
        key: object = (expr, id(self.view)) if facts.volatile else expr
        found = scope.memo.get(key)
        if found is None:
            b = self.b
            saved = b.scope, b.mask
            b.scope, b.mask = scope, ctx.mask_at(level)
            found = scope.memo[key] = self._handlers[type(expr)](ctx, level, expr)
            b.scope, b.mask = saved
        return found

    def _apply(self, ctx: Context, level: int, expr: Expression) -> Value:
        assert isinstance(expr, Apply)
        narrow = self._narrow_comparison(ctx, expr)
        if narrow is not None:
            return narrow
        if expr.op == "exp" and expr.dtype is torch.float32 and self._below_maximum(expr.args[0]):
            return exp(self.b, self.value(ctx, expr.args[0]), at_most_zero=True)
        return EMITTERS[expr.op](self.b, expr, [self.value(ctx, arg) for arg in expr.args])

    def _below_maximum(self, expr: Expression) -> bool:
        """Whether `expr` is something less the greatest of its row."""
        if not (isinstance(expr, Apply) and expr.op == "sub" and isinstance(expr.args[1], LocalValue)):
            return False
        maximum = self.maxima.get(expr.args[1].name)
        return maximum is not None and maximum[1] == expr.args[0] and same_walk(maximum[0], self.view)

    def _narrow_comparison(self, ctx: Context, expr: Apply) -> Value | None:
        """Indices (of masks, of padding) are compared in i32 where their ranges allow it: half the registers of i64."""
        code = _COMPARISONS.get(expr.op)
        if code is None or not all(
            isinstance(arg, (IndexValue, Constant)) and arg.dtype is torch.int64 for arg in expr.args
        ):
            return None
        indices = [
            self.view.dim(arg.index) if isinstance(arg, IndexValue) else int(arg.value)  # type: ignore[attr-defined]
            for arg in expr.args
        ]
        if not all(fits_i32(d) for d in indices):
            return None
        return self.b.compare(f"icmp {code}", *(self.indexer.lanes_of_type(ctx, d, "i32") for d in indices))

    def _index_value(self, ctx: Context, level: int, expr: Expression) -> Value:
        assert isinstance(expr, IndexValue)
        return self.indexer.lanes_i64(ctx, self.view.dim(expr.index))

    def _masked(self, ctx: Context, level: int, expr: Expression) -> Value:
        assert isinstance(expr, Masked)
        mask = self.value(ctx, expr.mask)
        body = self._under(ctx, level, expr.mask, expr.body)
        if not self.view.facts(expr.other).effects:
            return self.b.select(mask, body, self.value(ctx, expr.other))
        # Its loads may be out of range where the body's are not: the second part of a concatenation.
        rest = ir.apply("logical_not", expr.mask, dtype=torch.bool)
        return self.b.select(mask, body, self._under(ctx, level, rest, expr.other))

    def _under(self, ctx: Context, level: int, mask: Expression, expr: Expression) -> Value:
        """The value where `mask` holds (and the mask of the place does)."""
        outer = ctx.chain[level]
        key = (mask, id(self.view))
        inside = outer.children.get(key)
        if inside is None:
            combined = self.b.both(ctx.mask_at(level), self.value(ctx, mask))
            inside = outer.children[key] = Scope(outer.cursor, lane=outer.lane, mask=combined, barrier=True)
        return self.value(ctx.under_mask(level, inside), expr)

    def _checked(self, ctx: Context, level: int, expr: Expression) -> Value:
        assert isinstance(expr, CheckedIndex)
        b = self.b
        value = self.value(ctx, expr.value)
        extent = self.indexer.scalar(ctx.uniform, self.view.dim(expr.extent))
        zero = b.const(0, "i64")
        if expr.wrap:
            value = b.select(b.compare("icmp slt", value, zero), b.op("add", value, extent), value)
        bad = b.compare("icmp uge", value, extent)
        reported, around = bad, {name for scope in ctx.chain[: level + 1] for name in scope.defines}
        # A loop that writes by an index is its operator's own: if it is empty, eager looks at no index.
        for axis in (*self.outer, *self.view.axes) if any(expr is one for one in self.places) else ():
            if axis.symbol not in around and (bounds(axis.extent)[0] or 0) <= 0:
                runs = b.compare("icmp sgt", self.indexer.scalar(ctx.uniform, axis.extent), zero)
                reported = b.op("and", reported, runs)
        b.report(reported)
        return b.select(bad, zero, value)

    def bindings(self, ctx: Context, bindings: tuple[tuple[Expr, Expression], ...]) -> Bound:
        return {symbol: self._as_index(self.value(ctx, value), value.dtype) for symbol, value in bindings}

    def _as_index(self, value: Value, dtype: torch.dtype) -> Value:
        if value.type == "i64":
            return value
        return self.b.convert(
            "sext" if ELEMENT_TYPES[dtype].signed and dtype is not torch.bool else "zext", value, "i64"
        )

    def _load(self, ctx: Context, level: int, expr: Expression) -> Value:
        assert isinstance(expr, Load)
        staged = self.staged.get(expr)
        if staged is not None and ctx.chain[level].lane:
            return self._load_staged(ctx, expr, staged)
        at = ctx if ctx.chain[level].lane else ctx.uniform
        bound = self.bindings(ctx, expr.bindings)
        if expr in self.next_rows and self.b.mask is None:
            self._fetch_next_row(at, expr, self.next_rows[expr])
        return self.memory.load(at, self._place(expr, bound, self.ahead.get(expr, 0)), self.b.mask)

    def _place(self, access: Load | Store, bound: Bound, ahead: int = 0) -> Place:
        return Place(self.pointers[access.buffer], self.view.dim(access.index), bound, ahead)

    def _fetch_next_row(self, ctx: Context, expr: Load, axis: Axis) -> None:
        """What the load takes at the next point of the outer `axis` (at the last one: what it takes now), its index
        unchecked."""
        b, ((symbol, checked),) = self.b, expr.bindings
        assert isinstance(checked, CheckedIndex)
        at = ctx.level(axis.symbol)
        base, saved = ctx.chain[at], b.scope
        key = ("next row", axis.symbol)
        following = base.children[key].values[axis.symbol] if key in base.children else None
        if following is None:
            b.scope = base
            last = b.op("sub nsw", self.indexer.scalar(ctx.uniform, axis.extent), b.const(1, "i64"))
            following = b.intrinsic("smin", b.op("add nsw", base.values[axis.symbol], b.const(1, "i64")), last)
            b.scope = saved
        moved = ctx.elsewhere(at, axis.symbol, following, key)
        index = self._as_index(self.value(moved, checked.value), checked.value.dtype)
        self.memory.fetch_row(moved, self._place(expr, {symbol: index}))
        b.scope = saved

    def _load_staged(self, ctx: Context, expr: Load, staged: Staged) -> Value:
        b = self.b
        row = b.op("sub nsw", self.indexer.scalar(ctx.uniform, staged.row.symbol), staged.row_start)
        column = b.op("sub nsw", self.indexer.base(ctx), staged.column_start)
        index = b.op("add nsw", b.op("mul nsw", row, b.const(staged.columns, "i64")), column)
        return self.memory.load_tile_row(staged.text, expr.dtype, index, ctx.lanes)

    def store(self, ctx: Context, store: Store, value: Value) -> None:
        """Writes `value` at the innermost point of `ctx`."""
        b = self.b
        saved = b.scope, b.mask
        self.places = tuple(place for _, place in store.bindings)
        bound = self.bindings(ctx, store.bindings)
        self.places = ()
        b.scope, b.mask = ctx.here, ctx.mask_at(len(ctx.chain) - 1)
        place = self._place(store, bound, self.store_ahead.get(store.buffer, 0))
        self.memory.store(ctx, place, value, b.mask, store.mode)
        b.scope, b.mask = saved

    def store_pair(self, first: Context, second: Context, store: Store, low: Value, high: Value) -> None:
        """The same for two vectors side by side without masks: of bfloat16, both are rounded at once."""
        b = self.b
        saved = b.scope, b.mask
        b.scope, b.mask = second.here, None
        pieces = [b.unrounded.get(value.text) for value in (low, high)]
        done = False
        if pieces[0] is not None and pieces[1] is not None and pieces[0].lanes == pieces[1].lanes == first.lanes:
            place = self._place(store, {}, self.store_ahead.get(store.buffer, 0))
            done = self.memory.store_pair(first, place, pieces[0], pieces[1])
        b.scope, b.mask = saved
        if not done:
            self.store(first, store, low)
            self.store(second, store, high)
