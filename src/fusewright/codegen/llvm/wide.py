"""Reductions over rows in wide tiles: each row is read in pieces of pages, several rows in one pass, accumulators in
the nearest cache.

Takes the emitter of a kernel whose strategy says so (`Strategy.wide`); writes the stages of one block of columns.
Always holds: a column takes its rows in order, as in a narrow tile, so that the width of a tile changes no result.

A narrow tile keeps its accumulators in registers, and so reads a few lines of a row before it goes on to the next one,
which lies on another page: the processor fetches nothing ahead, and translates an address for every few lines. Where
two cores read 21 GB/s, a sum over columns of float32 reads 4 to 11 GB/s in tiles of 256 bytes, and 20 to 23 in tiles of
2 to 4 KiB with eight rows in a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusewright.base.records import dataclass, replace
from fusewright.codegen.analysis import StageView, reductions_of
from fusewright.codegen.llvm import parts
from fusewright.codegen.llvm.emit import reductions
from fusewright.codegen.llvm.emit.builder import Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.loops import Body, Strip, Turns
from fusewright.codegen.llvm.emit.memory import Memory
from fusewright.codegen.llvm.emit.types import TYPE_BITS
from fusewright.loops.ir import Axis
from fusewright.schedule.plan import Define, Reduce
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim

if TYPE_CHECKING:
    from fusewright.codegen.llvm.emitter import KernelEmitter

ROWS = 8
"""Rows that one pass takes."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A local with a value for each column of the tile: where its parts lie (type, array), and the reduction that makes
    it, if one does."""

    parts: tuple[tuple[str, str], ...]
    reduce: Reduce | None


class WideTile:
    """The stages over `length` columns (at most `Strategy.wide`) of `axis` from `start`."""

    def __init__(self, emitter: KernelEmitter, axis: Axis, start: Value, length: int | Value, no_tail: bool) -> None:
        self.emitter = emitter
        self.b = emitter.b
        self.memory: Memory = emitter.evaluator.memory
        self.axis = axis
        self.start = start
        self.length = length
        self.no_tail = no_tail
        self.kept: dict[str, _Kept] = {}

    def emit(self, context: Context) -> None:
        emitter, width = self.emitter, self.emitter.strategy.wide
        for scratch in emitter.kernel.scratch:
            emitter.pointers[scratch.name] = replace(
                emitter.pointers[scratch.name], interleaved=width, start=self.start
            )
        views = emitter.shape.views
        for number, view in enumerate(views):
            later = {
                dep for other in views[number + 1 :] for expr in other.expressions() for dep in other.facts(expr).deps
            }
            emitter.enter_stage(number)
            self._stage(context, view, later)

    def _stage(self, context: Context, view: StageView, later: set[object]) -> None:
        emitter = self.emitter
        reduces = reductions_of(view.stage)
        kept = [
            self._reserve(reduce.local, reductions.initial(reduce, emitter.position_type(view)), reduce)
            for reduce in reduces
        ]
        if reduces:
            self._columns(context, lambda contexts: self._start(view, kept, contexts))
        if not view.axes:
            self._columns(context, lambda contexts: self._pointwise(view, later, contexts))
        else:
            rows, others = view.axes[-1], view.axes[:-1]
            plan = parts.strides(view, view.axes)

            def part(inside: list[Context], _: list[Value], run: Body) -> list[Value]:
                self._part(inside[0], view, kept, lambda: run(inside, []))
                return []

            def passes(
                inside: list[Context], start: Value | None, length: Dim | Value, _: list[Value]
            ) -> list[Value]:
                self._rows(inside[0], view, rows, kept, start, length)
                return []

            def along(inside: list[Context], _: list[Value]) -> list[Value]:
                return loops.along(inside, rows, plan[-1], [], passes)

            loops = parts.Parts(emitter.loops, part)
            loops.nest([context], others, plan, [], along)
        self.kept |= {reduce.local: entry for reduce, entry in zip(reduces, kept)}

    def _part(self, context: Context, view: StageView, kept: list[_Kept], run: Callable[[], object]) -> None:
        """`run` with accumulators of its own for sums, which are then added to those around it."""
        b, around, sums = self.b, list(kept), [reduce for reduce in parts.sums_of(view) if reduce is not None]
        position = self.emitter.position_type(view)
        changed = [k for k, entry in enumerate(around) if entry.reduce in sums]
        for k in changed:
            reduce = around[k].reduce
            assert reduce is not None
            kept[k] = self._reserve("", reductions.initial(reduce, position), reduce)
        own = [kept[k] for k in changed]
        self._columns(context, lambda contexts: self._start(view, own, contexts))
        run()

        def add(contexts: list[Context]) -> None:
            for ctx in contexts:
                for outer, inner in zip((around[k] for k in changed), own):
                    before, more = ([self._load(ctx, place) for place in entry.parts] for entry in (outer, inner))
                    b.scope = ctx.here
                    for place, old, new in zip(outer.parts, before, more):
                        self._store(ctx, place, b.op("fadd", old, new))

        self._columns(context, add)
        kept[:] = around

    def _rows(
        self, context: Context, view: StageView, rows: Axis, kept: list[_Kept],
        start: Value | None, length: Dim | Value,
    ) -> None:  # fmt: skip
        """`length` rows from `start` (None: from 0), `ROWS` in a pass and then one."""
        b, loops = self.b, self.emitter.loops
        together = ROWS if kept else 1
        first: Dim | Value
        middle: Dim | Value
        last: Dim | Value
        if start is None:
            assert isinstance(length, int)
            first, middle, last = 0, length - length % together, length
        else:
            saved, b.scope = b.scope, context.here
            amount = length if isinstance(length, Value) else b.const(int(length), "i64")  # type: ignore[arg-type]
            first, last = start, b.op("add nsw", start, amount)
            middle = b.op("add nsw", start, b.op("and", amount, b.const(-together, "i64")))
            b.scope = saved
        passes = [(first, middle, together), (middle, last, 1)]
        for begin, end, count in passes[: 1 if sizes.is_multiple(rows.extent, together) else 2]:

            def turn(inside: list[Context], _: list[Value], count: int = count) -> list[Value]:
                at = len(inside[0].chain) - 1
                self._columns(inside[0], lambda contexts: self._pass(view, rows, kept, at, count, contexts))
                return []

            loops.counted([context], Turns(rows.symbol, begin, end, count), [], turn)

    def _pass(
        self, view: StageView, rows: Axis, kept: list[_Kept], at: int, count: int, contexts: list[Context]
    ) -> None:
        for ctx in contexts:
            state = [self._load(ctx, part) for entry in kept for part in entry.parts]
            for k in range(count):
                here = self._row(ctx, at, rows, k)
                self._recall(view, here)
                state = self.emitter.statements(view, here, state, None, ordered=True)
            self.b.scope = ctx.here
            for part, value in zip((part for entry in kept for part in entry.parts), state):
                self._store(ctx, part, value)

    def _row(self, ctx: Context, at: int, rows: Axis, k: int) -> Context:
        """The same columns, k rows further. What is known of them is known in scopes of their own."""
        if k == 0:
            return ctx
        b, base = self.b, ctx.chain[at]
        key = ("row", k)
        moved = base.children.get(key)
        if moved is not None:
            return ctx.elsewhere(at, rows.symbol, moved.values[rows.symbol], key)
        saved, b.scope = b.scope, base
        value = b.op("add nsw", base.values[rows.symbol], b.const(k, "i64"))
        b.scope = saved
        return ctx.elsewhere(at, rows.symbol, value, key)

    def _columns(self, context: Context, body: Callable[[list[Context]], None]) -> None:
        strategy = self.emitter.strategy

        def vectors(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            body(contexts)
            return groups

        groups: list[list[Value]] = [[] for _ in range(strategy.copies)]
        strip = Strip(self.axis.symbol, self.start, self.length, strategy.lanes, strategy.copies, self.no_tail)
        self.emitter.loops.vectors(context, strip, groups, vectors)

    # --- values of columns between loops

    def _reserve(self, name: str, start: list[Value], reduce: Reduce | None) -> _Kept:
        b, parts = self.b, []
        for value in start:
            array = b.name()
            bytes_ = self.emitter.strategy.wide * _size(value.type)
            b.blocks[0].lines.insert(0, f"  {array} = alloca [{bytes_} x i8], align 64")
            parts.append((value.type, array))
        return _Kept(tuple(parts), reduce)

    def _place(self, ctx: Context, part: tuple[str, str]) -> str:
        """Where the context's columns of an array begin."""
        b = self.b
        column = b.op("sub nsw", self.emitter.indexer.base(ctx), self.start)
        return b.value(f"getelementptr {part[0]}, ptr {part[1]}, i64 {column.text}", "ptr").text

    def _load(self, ctx: Context, part: tuple[str, str]) -> Value:
        b = self.b
        saved, b.scope = b.scope, ctx.here
        value = b.value(
            f"load <{ctx.lanes} x {part[0]}>, ptr {self._place(ctx, part)}, align {_size(part[0])}", part[0], ctx.lanes
        )
        b.scope = saved
        return value

    def _store(self, ctx: Context, part: tuple[str, str], value: Value) -> None:
        b = self.b
        saved, b.scope = b.scope, ctx.here
        b.emit(f"  store {b.splat(value, ctx.lanes).typed}, ptr {self._place(ctx, part)}, align {_size(part[0])}")
        b.scope = saved

    def _recall(self, view: StageView, ctx: Context) -> None:
        """Locals of earlier stages that this one uses, for the context's columns."""
        deps = {dep for expr in view.expressions() for dep in view.facts(expr).deps}
        for name, entry in self.kept.items():
            if name in deps:
                state = [self._load(ctx, part) for part in entry.parts]
                saved, self.b.scope = self.b.scope, ctx.here
                value = state[0] if entry.reduce is None else reductions.finish_lanes(self.b, entry.reduce, state)
                self.b.scope = saved
                self.emitter.define(ctx.here, name, value)

    def _start(self, view: StageView, kept: list[_Kept], contexts: list[Context]) -> None:
        for ctx in contexts:
            values = [
                v
                for entry in kept
                if entry.reduce
                for v in reductions.initial(entry.reduce, self.emitter.position_type(view))
            ]
            for part, value in zip((part for entry in kept for part in entry.parts), values):
                self._store(ctx, part, value)

    def _pointwise(self, view: StageView, later: set[object], contexts: list[Context]) -> None:
        for ctx in contexts:
            self._recall(view, ctx)
            self.emitter.statements(view, ctx, [], None, ordered=True)
            for statement in view.stage.statements:
                if isinstance(statement, Define) and statement.local in later:
                    value = ctx.chain[ctx.level(statement.local)].values[statement.local]
                    if statement.local not in self.kept:
                        self.kept[statement.local] = self._reserve(statement.local, [value], None)
                    self._store(ctx, self.kept[statement.local].parts[0], value)


def _size(type_: str) -> int:
    """Bytes of the array for each column: more than enough for a mask."""
    return max(TYPE_BITS[type_] // 8, 1)
