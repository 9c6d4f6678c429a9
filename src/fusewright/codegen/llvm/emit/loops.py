"""Loops around bodies: counted loops, nests, and the vector loop with its unrolled main part and its masked tail.

Takes contexts, an axis and a body (a Python function that emits one pass and maps carried values to their successors);
gives the values after the loop. Always holds: a body is emitted only where it runs at least once whenever control
reaches it, so that what it hoists is safe; carried values are phis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.base.records import dataclass, replace
from fusewright.codegen.llvm.emit.builder import Block, Cursor, FunctionBuilder, Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.indexing import Indexer
from fusewright.codegen.llvm.emit.types import type_text
from fusewright.loops.ir import Axis
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

Body = Callable[[list[Context], list[Value]], list[Value]]
VectorBody = Callable[[list[Context], list[list[Value]]], list[list[Value]]]
UNROLL_WHOLE = 4  # a loop of so few turns is written out


@dataclass(frozen=True, slots=True)
class Turns:
    """for symbol in range(start, stop, step). `runs`: at least once."""

    symbol: Expr
    start: Dim | Value
    stop: Dim | Value
    step: int = 1
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """`length` elements of `axis` from `start`, `copies` vectors of `lanes` at a time. `no_tail`: `length` is a
    multiple of `lanes`."""

    axis: Expr
    start: Value
    length: int | Value
    lanes: int
    copies: int
    no_tail: bool = False


class Loops:
    def __init__(self, b: FunctionBuilder, indexer: Indexer) -> None:
        self.b = b
        self.indexer = indexer

    def nest(self, contexts: list[Context], axes: Sequence[Axis], carried: list[Value], body: Body) -> list[Value]:
        """`body` at every point of `axes`, the last one fastest."""
        if not axes:
            return body(contexts, carried)
        axis, rest = axes[0], axes[1:]

        def inner(inside: list[Context], values: list[Value]) -> list[Value]:
            return self.nest(inside, rest, values, body)

        return self.counted(contexts, Turns(axis.symbol, 0, axis.extent), carried, inner)

    def counted(self, contexts: list[Context], turns: Turns, carried: list[Value], body: Body) -> list[Value]:
        """`body` at each of `turns`. The contexts are vectors side by side (or one scalar), all at the same point."""
        b = self.b
        symbol, start, stop, step = turns.symbol, turns.start, turns.stop, turns.step
        if isinstance(start, int) and isinstance(stop, int):
            points = range(start, stop, step)
            if not points:
                return carried
            if len(points) == 1 or (len(points) <= UNROLL_WHOLE and step == 1 and len(contexts) == 1 and not carried):
                return self._written_out(contexts, symbol, points, carried, body)
        here = contexts[0].here.cursor
        saved = b.scope
        b.scope = contexts[0].here
        first, last = self._bound(contexts[0], start), self._bound(contexts[0], stop)
        runs = turns.runs or (
            isinstance(start, int) and not isinstance(stop, Value) and (sizes.bounds(stop)[0] or 0) > start
        )
        guard_block: Block | None = None
        inside = contexts
        if not runs:
            enough = b.compare("icmp slt", first, last)
            guard_block = here.block
            guarded = Cursor(b.block("some"))
            inside = [ctx.enter(scope) for ctx, scope in self._shared(contexts, guarded)]
            guard_target = guarded.block
        else:
            guarded = here
        loop = b.block("loop")
        index = Value(b.name(), "i64")
        scope = Scope(Cursor(loop), defines={symbol}, values={symbol: index})
        index.home = scope
        phis = [Value(b.name(), v.type, v.lanes, scope) for v in carried]
        after = body([ctx.enter(scope) for ctx in inside], phis)
        b.scope = scope
        after = [b.splat(new, phi.lanes) for new, phi in zip(after, phis)]
        latch = scope.cursor.block
        next_index = b.op("add nsw", index, b.const(step, "i64"))
        more = b.compare("icmp slt", next_index, last)
        done = b.block("done")
        b.emit(f"  br i1 {more.text}, label %{loop.label}, label %{done.label}")
        entry = guarded.block
        entry.lines.append(f"  br label %{loop.label}")
        heads = [f"  {index.text} = phi i64 [ {first.text}, %{entry.label} ], [ {next_index.text}, %{latch.label} ]"]
        for phi, before, new in zip(phis, carried, after):
            kind = type_text(phi.type, phi.lanes)
            heads.append(f"  {phi.text} = phi {kind} [ {before.text}, %{entry.label} ], [ {new.text}, %{latch.label} ]")
        loop.lines[:0] = heads
        here.block = done
        results = [Value(new.text, new.type, new.lanes, contexts[0].here) for new in after]
        if guard_block is not None:
            joined = b.block("joined")
            done.lines.append(f"  br label %{joined.label}")
            guard_block.lines.append(f"  br i1 {enough.text}, label %{guard_target.label}, label %{joined.label}")
            here.block = joined
            b.scope = contexts[0].here
            results = [
                b.value(
                    f"phi {type_text(new.type, new.lanes)} [ {before.text}, %{guard_block.label} ], [ {new.text}, "
                    f"%{done.label} ]",
                    new.type,
                    new.lanes,
                )
                for before, new in zip(carried, results)
            ]
        b.scope = saved
        return results

    def _shared(self, contexts: list[Context], cursor: Cursor) -> list[tuple[Context, Scope]]:
        scope = Scope(cursor, barrier=True)  # where the loop is empty, what it reads may be no memory
        return [(ctx, scope) for ctx in contexts]

    def _bound(self, ctx: Context, limit: Dim | Value) -> Value:
        return limit if isinstance(limit, Value) else self.indexer.scalar(ctx.uniform, limit)

    def _written_out(
        self, contexts: list[Context], symbol: Expr, points: range, carried: list[Value], body: Body
    ) -> list[Value]:
        for point in points:
            scope = Scope(contexts[0].here.cursor, defines={symbol}, values={symbol: self.b.const(point, "i64")})
            carried = body([ctx.enter(scope) for ctx in contexts], carried)
        return carried

    # --- vectors

    def vectors(
        self, ctx: Context, strip: Strip, groups: list[list[Value]], body: VectorBody, whole: bool = False
    ) -> list[list[Value]]:
        """`body` over the elements of `strip`; the carried values of copy k are groups[k]. `whole`: its length is at
        most one pass of all copies."""
        if isinstance(strip.length, int):
            return self._static(ctx, strip, strip.length, groups, body)
        if whole:
            return self._one_pass(ctx, strip, strip.length, groups, body)
        return self._dynamic(ctx, strip, strip.length, groups, body)

    def _vector_contexts(
        self, ctx: Context, base: Scope, strip: Strip, masks: Sequence[Value | None]
    ) -> list[Context]:
        """One context for each mask: vector k starts k * lanes after the base scope's value of the axis."""
        made = []
        for k, mask in enumerate(masks):
            scope = Scope(base.cursor, defines={strip.axis}, lane=True, mask=mask)
            made.append(Context((*ctx.chain, base, scope), strip.lanes, strip.axis, k * strip.lanes))
        return made

    def _static(
        self, ctx: Context, strip: Strip, length: int, groups: list[list[Value]], body: VectorBody
    ) -> list[list[Value]]:
        lanes, copies = strip.lanes, strip.copies
        full, rest = divmod(length, lanes)
        turns = full // copies if full > copies else 0
        done = turns * copies
        if turns:
            groups = self._main(ctx, strip, self._plus(ctx, strip.start, done * lanes), groups, body, runs=True)
        masks: list[Value | None] = [None] * (full - done)
        if rest:
            masks.append(Value("<" + ", ".join(f"i1 {str(i < rest).lower()}" for i in range(lanes)) + ">", "i1", lanes))
        # A masked last vector may be one more than the copies that carry values: it then takes the first copy's.
        for at in range(0, len(masks), copies):
            rest_of = replace(strip, start=self._plus(ctx, strip.start, (done + at) * lanes))
            groups = self._straight(ctx, rest_of, masks[at : at + copies], groups, body)
        return groups

    def _plus(self, ctx: Context, value: Value, amount: int) -> Value:
        if amount == 0:
            return value
        b = self.b
        if value.home is None:
            return b.const(int(value.text) + amount, "i64")
        saved, b.scope = b.scope, ctx.here
        result = b.op("add nsw", value, b.const(amount, "i64"))
        b.scope = saved
        return result

    def _straight(
        self,
        ctx: Context,
        strip: Strip,
        masks: Sequence[Value | None],
        groups: list[list[Value]],
        body: VectorBody,
    ) -> list[list[Value]]:
        """One vector from the strip's start for each mask."""
        base = Scope(ctx.here.cursor, defines={strip.axis}, values={strip.axis: strip.start})
        made = self._vector_contexts(ctx, base, strip, masks)
        return body(made, groups[: len(made)]) + groups[len(made) :]

    def _main(
        self,
        ctx: Context,
        strip: Strip,
        stop: Value,
        groups: list[list[Value]],
        body: VectorBody,
        runs: bool = False,
    ) -> list[list[Value]]:
        """The unmasked loop from the strip's start: its copies a turn while a whole turn is left (start + k * copies *
        lanes = stop for some k)."""
        counts = [len(group) for group in groups]

        def turn(inside: list[Context], values: list[Value]) -> list[Value]:
            base = inside[0].here  # the loop's scope: the axis' value is its index
            outer = Context(inside[0].chain[:-1])
            made = self._vector_contexts(outer, base, strip, [None] * strip.copies)
            return _flat(body(made, _grouped(values, counts)))

        turns = Turns(strip.axis, strip.start, stop, strip.lanes * strip.copies, runs)
        return _grouped(self.counted([ctx], turns, _flat(groups), turn), counts)

    def _dynamic(
        self, ctx: Context, strip: Strip, length: Value, groups: list[list[Value]], body: VectorBody
    ) -> list[list[Value]]:
        b, lanes, copies = self.b, strip.lanes, strip.copies
        saved, b.scope = b.scope, ctx.here
        start = at = strip.start
        for width in (copies, 1) if copies > 1 else (1,):
            span = width * lanes
            left = b.op("sub nsw", b.op("add nsw", start, length), at) if at is not start else length
            stop = b.op("add nsw", at, b.op("and", left, b.const(-span, "i64")))
            part = replace(strip, start=at, copies=width)
            groups = self._main(ctx, part, stop, groups[:width], body) + groups[width:]
            b.scope = ctx.here
            at = stop
        if not strip.no_tail:
            rest, tail = b.op("and", length, b.const(lanes - 1, "i64")), replace(strip, start=at)

            def last(inside: Context, group: list[Value]) -> list[Value]:
                return self._straight(inside, tail, [self.first_lanes(inside, rest, lanes)], [group], body)[0]

            groups = [self.maybe(ctx, rest, groups[0], last), *groups[1:]]
        b.scope = saved
        return groups

    def first_lanes(self, ctx: Context, count: Value, lanes: int) -> Value:
        """The mask of the first `count` lanes (any i64).

        LLVM must not find out that it is one lane: it makes a masked store of one narrowed lane a scalar store of the
        width before it was narrowed, which writes beyond the end (bfloat16 and int16 of 1025 elements). It asks nothing
        of what is read from volatile memory.
        """
        b = self.b
        saved, b.scope = b.scope, ctx.here
        count = b.unknown(count)
        limit = b.intrinsic("smax", b.intrinsic("smin", count, b.const(lanes, "i64")), b.const(0, "i64"))
        mask = b.compare("icmp ult", self.indexer.iota(lanes, "i32"), b.convert("trunc", limit, "i32"))
        b.scope = saved
        return mask

    def maybe(
        self, ctx: Context, condition: Value, carried: list[Value], body: Callable[[Context, list[Value]], list[Value]]
    ) -> list[Value]:
        """`body` if the i64 `condition` is not 0."""
        b = self.b
        saved, b.scope = b.scope, ctx.here
        flag = b.compare("icmp ne", condition, b.const(0, "i64"))
        cursor = ctx.here.cursor
        before = cursor.block
        inside = Scope(Cursor(b.block("tail")), barrier=True)
        first = inside.cursor.block
        after = body(ctx.enter(inside), carried)
        b.scope = inside
        lanes = [max(x.lanes, y.lanes) for x, y in zip(carried, after)]
        after = [b.splat(value, count) for value, count in zip(after, lanes)]
        last = inside.cursor.block
        joined = b.block("joined")
        last.lines.append(f"  br label %{joined.label}")
        before.lines.append(f"  br i1 {flag.text}, label %{first.label}, label %{joined.label}")
        cursor.block = joined
        b.scope = ctx.here
        results = [
            b.value(
                f"phi {type_text(new.type, new.lanes)} [ {old.text}, %{before.label} ], [ {new.text}, %{last.label} ]",
                new.type,
                new.lanes,
            )
            for old, new in zip(carried, after)
        ]
        b.scope = saved
        return results

    def _one_pass(
        self, ctx: Context, strip: Strip, length: Value, groups: list[list[Value]], body: VectorBody
    ) -> list[list[Value]]:
        """All copies at once where they all count, else all copies under masks. Carries nothing (the body is a whole
        outer point)."""
        assert not _flat(groups)
        b, lanes, copies = self.b, strip.lanes, strip.copies
        saved, b.scope = b.scope, ctx.here
        span = copies * lanes
        is_full = b.convert("zext", b.compare("icmp sge", length, b.const(span, "i64")), "i64")
        partial = b.op("sub", b.const(1, "i64"), is_full)

        def full(inside: Context, _: list[Value]) -> list[Value]:
            self._straight(inside, strip, [None] * copies, groups, body)
            return []

        def masked(inside: Context, _: list[Value]) -> list[Value]:
            masks = []
            for k in range(copies):
                left = self._plus(inside, length, -k * lanes)
                masks.append(self.first_lanes(inside, left, lanes))
            self._straight(inside, strip, masks, groups, body)
            return []

        self.maybe(ctx, is_full, [], full)
        self.maybe(ctx, partial, [], masked)
        b.scope = saved
        return groups


def _flat(groups: Sequence[Sequence[Value]]) -> list[Value]:
    return [value for group in groups for value in group]


def _grouped(values: Sequence[Value], counts: Sequence[int]) -> list[list[Value]]:
    groups, at = [], 0
    for count in counts:
        groups.append(list(values[at : at + count]))
        at += count
    return groups
