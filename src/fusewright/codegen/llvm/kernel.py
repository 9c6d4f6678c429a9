"""One kernel as one LLVM function.

Takes a `Kernel` and a `Target`; gives `KernelText`: the function's body (independent of the kernel's names, so that
equal kernels have equal text), its parallel extent and grain. Always holds: iterations begin..end-1 of the parallel
domain write disjoint memory, and read none that another one writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from fusewright.codegen.analysis import Shape, StageView, analyse, reductions_of, scans_of, values_of
from fusewright.codegen.llvm import online, parts, row_memory, staging
from fusewright.codegen.llvm.cost import grain_of
from fusewright.codegen.llvm.emit import reductions, scans
from fusewright.codegen.llvm.emit.builder import Block, Cursor, FunctionBuilder, Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.evaluate import Evaluator
from fusewright.codegen.llvm.emit.loops import Loops, Strip, Turns
from fusewright.codegen.llvm.emit.memory import ZEROS, ZEROS_DEFINITION, Pointer
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emitter import SIGNATURE, KernelText, Pending
from fusewright.codegen.llvm.nans import passed_over, rounds_as_they_are
from fusewright.codegen.llvm.prefetch import distances, gathered_rows, store_distances
from fusewright.codegen.llvm.strategy import Strategy, choose, operation_cost
from fusewright.codegen.llvm.wide import WideTile
from fusewright.loops.ir import Axis, CheckedIndex, Expression
from fusewright.schedule.plan import Define, Kernel, Reduce, ScanStep, Store
from fusewright.sizes import expressions as sizes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim

_POSITION_LIMIT = 1 << 31
# operations of a body that is written twice to save turns, and of one to give the processor two chains
SHORT_BODY, LONG_BODY = 12, 60
LARGE_POINTS = 1 << 20


def emit_kernel(kernel: Kernel, target: Target, declarations: dict[str, str], threads: int = 1) -> KernelText:
    """threads: see `strategy.choose`. Raises ValueError for what cannot be generated (lowering asks `capabilities`
    first)."""
    shape = analyse(kernel)
    return KernelEmitter(shape, choose(shape, target, threads), target, declarations).run()


class KernelEmitter:
    def __init__(self, shape: Shape, strategy: Strategy, target: Target, declarations: dict[str, str]) -> None:
        self.shape = shape
        self.kernel = shape.kernel
        self.strategy = strategy
        self.target = target
        written = {
            dtype for name, dtype in zip(shape.kernel.buffers, shape.kernel.dtypes) if name in shape.kernel.written
        }
        halves = bool(written) and written <= {torch.bfloat16}
        self.b = FunctionBuilder(target, declarations, halves, rounds_as_they_are(shape), passed_over(shape))
        self.b.declarations.setdefault(ZEROS, ZEROS_DEFINITION)
        self.pointers: dict[str, Pointer] = {}
        self.evaluator = Evaluator(self.b, self.pointers, tuple(shape.outer))
        for view in shape.views:
            self.evaluator.maxima |= {
                reduce.local: (view, reduce.value) for reduce in reductions_of(view.stage) if reduce.kind == "max"
            }
        self.indexer = self.evaluator.indexer
        self.loops = Loops(self.b, self.indexer)
        self.freed: list[str] = []
        self.tiles: dict[Expression, str] = {}  # where staged loads lie, see staging.py

    # --- the function

    def run(self) -> KernelText:
        b, strategy = self.b, self.strategy
        entry = Context((b.entry,))
        b.emit("  %failed = alloca i1, align 1")
        b.emit("  store i1 false, ptr %failed")
        self._load_parameters()
        extents = [self._domain_extent(axis, block) for axis, block in strategy.domain]
        extent = sizes.product(extents)
        finish = Block("finish")
        self._leave_early(entry, finish)
        row_memory.place(self, entry, finish)
        self._domain(entry, extents)
        b.scope = b.entry
        for pointer in self.freed:
            b.call_void("free", [Value(pointer, "ptr")])
        b.emit(f"  br label %{finish.label}")
        b.blocks.append(finish)
        self._finish(finish)
        return KernelText(b.text(SIGNATURE), extent, grain_of(self.shape, strategy))

    def _load_parameters(self) -> None:
        b = self.b
        for position, (name, dtype) in enumerate(zip(self.kernel.buffers, self.kernel.dtypes)):
            slot = b.value(f"getelementptr ptr, ptr %buffers, i64 {position}", "ptr").text if position else "%buffers"
            self.pointers[name] = Pointer(b.value(f"load ptr, ptr {slot}, align 8", "ptr").text, dtype)
        for position, symbol in enumerate(self.kernel.sizes):
            slot = b.value(f"getelementptr i64, ptr %sizes, i64 {position}", "ptr").text
            b.entry.defines.add(symbol)
            b.entry.values[symbol] = b.value(f"load i64, ptr {slot}, align 8", "i64")

    def _domain_extent(self, axis: Axis, block: int) -> Dim:
        return sizes.ceil_div(axis.extent, block) if block else axis.extent

    def _leave_early(self, entry: Context, finish: Block) -> None:
        """Nothing to do for an empty range; and where a checked dimension is empty no index can be right, so that none
        may be tried: if the loops around it run at all."""
        b = self.b
        stop = b.compare("icmp sge", Value("%begin", "i64"), Value("%end", "i64"))
        self._branch_out(stop, finish, failed=False)
        for extent, loops in sorted(self._doubtful_extents(), key=str):
            empty = b.compare("icmp sle", self.indexer.scalar(entry, extent), b.const(0, "i64"))
            for loop in loops:
                empty = b.op("and", empty, b.compare("icmp sgt", self.indexer.scalar(entry, loop), b.const(0, "i64")))
            self._branch_out(empty, finish, failed=True)

    def _branch_out(self, condition: Value, finish: Block, failed: bool) -> None:
        b = self.b
        here = b.entry.cursor
        target = finish.label
        if failed:
            block = b.block("empty")
            block.lines.append("  store i1 true, ptr %failed")
            block.lines.append(f"  br label %{finish.label}")
            target = block.label
        following = b.block("body")
        here.block.lines.append(f"  br i1 {condition.text}, label %{target}, label %{following.label}")
        here.block = following

    def _doubtful_extents(self) -> set[tuple[Dim, tuple[Dim, ...]]]:
        """Checked dimensions that may be empty, each with the extents of the loops around it that may be as well."""
        found: set[tuple[Dim, tuple[Dim, ...]]] = set()
        for view in self.shape.views:
            extents = dict.fromkeys(axis.extent for axis in (*self.shape.outer, *view.axes))
            loops = tuple(extent for extent in extents if (sizes.bounds(extent)[0] or 0) <= 0)
            for expr in view.expressions():
                if (
                    isinstance(expr, CheckedIndex)
                    and (sizes.bounds(expr.extent)[0] or 0) <= 0
                    and expr.extent not in loops
                ):
                    found.add((expr.extent, loops))
        return found

    def _finish(self, finish: Block) -> None:
        done = Block("return")
        flagged = Block("flagged")
        finish.lines.append("  %failure = load i1, ptr %failed")
        finish.lines.append("  br i1 %failure, label %flagged, label %return")
        flagged.lines += ["  store i64 1, ptr %status, align 8", "  br label %return"]
        done.lines.append("  ret void")
        self.b.blocks += [flagged, done]

    # --- the parallel domain

    def _domain(self, entry: Context, extents: list[Dim]) -> None:
        """for point in begin..end: the domain's indices are found by division once and then stepped like an
        odometer."""
        b, strategy = self.b, self.strategy
        limits = [self.indexer.scalar(entry, extent) for extent in extents]
        firsts: list[Value] = []
        rest = Value("%begin", "i64")
        for limit in reversed(limits[1:]):
            firsts.append(b.op("urem", rest, limit))
            rest = b.op("udiv", rest, limit)
        firsts = [rest, *reversed(firsts)] if limits else []
        before = b.entry.cursor.block
        loop = b.block("domain")
        scope = Scope(Cursor(loop))
        point = Value(b.name(), "i64", home=scope)
        indices = [Value(b.name(), "i64", home=scope) for _ in limits]
        context = entry.enter(scope)
        b.scope = scope
        starts = []
        for (axis, block), index in zip(strategy.domain, indices):
            if block:
                starts.append(b.op("mul nsw", index, b.const(block, "i64")))
            else:
                scope.defines.add(axis.symbol)
                scope.values[axis.symbol] = index
                starts.append(index)
        self._serial(context, starts)
        b.scope = scope
        stepped = self._odometer(indices, limits)
        following = b.op("add nsw", point, b.const(1, "i64"))
        more = b.compare("icmp slt", following, Value("%end", "i64"))
        done = b.block("done")
        b.emit(f"  br i1 {more.text}, label %{loop.label}, label %{done.label}")
        latch = scope.cursor.block
        before.lines.append(f"  br label %{loop.label}")
        heads = [f"  {point.text} = phi i64 [ %begin, %{before.label} ], [ {following.text}, %{latch.label} ]"]
        for index, first, after in zip(indices, firsts, stepped):
            heads.append(
                f"  {index.text} = phi i64 [ {first.text}, %{before.label} ], [ {after.text}, %{latch.label} ]"
            )
        loop.lines[:0] = heads
        b.entry.cursor.block = done

    def _odometer(self, indices: list[Value], limits: list[Value]) -> list[Value]:
        b = self.b
        stepped: list[Value] = []
        carry = b.const(1, "i64")
        for position in range(len(indices) - 1, -1, -1):
            moved = b.op("add nsw", indices[position], carry)
            if position == 0:
                stepped.append(moved)
                break
            wraps = b.compare("icmp eq", moved, limits[position])
            stepped.append(b.select(wraps, b.const(0, "i64"), moved))
            carry = b.convert("zext", wraps, "i64")
        return stepped[::-1]

    def _serial(self, context: Context, starts: list[Value]) -> None:
        strategy = self.strategy

        def body(contexts: list[Context], _: list[Value]) -> list[Value]:
            self._point(contexts[0], starts)
            return []

        self.loops.nest([context], strategy.serial, [], body)

    def _point(self, context: Context, starts: list[Value]) -> None:
        """One iteration of the domain (and of the serial axes): a scalar point, a block of vectors, or a tile of rows
        of them."""
        strategy = self.strategy
        if strategy.vector is None:
            self._stages([context])
            return
        axis, block = strategy.domain[-1]
        start = starts[-1]

        if strategy.rows is None:
            self._block(context, axis, block, start)
            return
        position = next(i for i, (candidate, _) in enumerate(strategy.domain) if candidate is strategy.rows)
        first = starts[position]
        self._tile(context, strategy.rows, axis, block, first, start)

    def _tile(self, context: Context, rows: Axis, axis: Axis, block: int, row_start: Value, start: Value) -> None:
        """Rows of vectors through a transposed copy. A tile that is not whole is read under masks if it is large; a
        small one is gathered, which compiles faster."""
        b, count = self.b, self.strategy.tile_rows

        def walk(inside: Context, extent: Dim, full: bool) -> None:
            def row(contexts: list[Context], _: list[Value]) -> list[Value]:
                self._block(contexts[0], axis, block, start, full)
                return []

            last = self._clipped(inside, row_start, count, extent)
            self.loops.counted([inside], Turns(rows.symbol, row_start, last, runs=True), [], row)

        def whole(inside: Context, _: list[Value]) -> list[Value]:
            self.evaluator.staged = staging.fill(self, inside, axis, row_start, start, (count, block))
            walk(inside, count, full=True)
            self.evaluator.staged = {}
            return []

        def ragged(inside: Context, _: list[Value]) -> list[Value]:
            walk(inside, rows.extent, full=False)
            return []

        if sizes.is_multiple(rows.extent, count) and sizes.is_multiple(axis.extent, block):
            whole(context, [])
            return
        if self.target.masks and any(size is not None for _, _, size in staging.place(self)):
            saved, b.scope = b.scope, context.here
            height = b.op("sub nsw", self._clipped(context, row_start, count, rows.extent), row_start)
            width = b.op("sub nsw", self._clipped(context, start, block, axis.extent), start)
            b.scope = saved
            self.evaluator.staged = staging.fill(self, context, axis, row_start, start, (height, width))
            walk(context, rows.extent, full=False)
            self.evaluator.staged = {}
            return
        if sizes.known_lt(rows.extent, count) or sizes.known_lt(axis.extent, block):
            ragged(context, [])
            return
        saved, b.scope = b.scope, context.here
        rows_left = b.op("sub nsw", self.indexer.scalar(context.uniform, rows.extent), row_start)
        columns_left = b.op("sub nsw", self.indexer.scalar(context.uniform, axis.extent), start)
        fits = b.op(
            "and",
            b.compare("icmp sge", rows_left, b.const(count, "i64")),
            b.compare("icmp sge", columns_left, b.const(block, "i64")),
        )
        is_whole = b.convert("zext", fits, "i64")
        rest = b.op("xor", is_whole, b.const(1, "i64"))
        self.loops.maybe(context, is_whole, [], whole)
        self.loops.maybe(context, rest, [], ragged)
        b.scope = saved

    def _clipped(self, context: Context, first: Value, count: int, extent: Dim) -> Value:
        """min(first + count, extent)."""
        b = self.b
        saved, b.scope = b.scope, context.here
        last = b.op("add nsw", first, b.const(count, "i64"))
        if not sizes.is_multiple(extent, count):
            last = b.intrinsic("smin", last, self.indexer.scalar(context.uniform, extent))
        b.scope = saved
        return last

    def _block(self, context: Context, axis: Axis, block: int, start: Value, full: bool = False) -> None:
        """The stages over `block` elements of the vector axis from `start`, or what is left of it. `full`: the block is
        known to be whole.
        """
        strategy, b = self.strategy, self.b

        def body(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            self._stages(contexts)
            return groups

        length: int | Value
        whole = any(view.axes for view in self.shape.views)
        if full:
            length = block
        elif isinstance(axis.extent, int) and axis.extent <= block:
            length = axis.extent
        elif sizes.is_multiple(axis.extent, block):
            length = block
        else:
            saved, b.scope = b.scope, context.here
            length = b.op("sub nsw", self._clipped(context, start, block, axis.extent), start)
            b.scope = saved
        lanes, copies = strategy.lanes, strategy.copies
        if strategy.wide:
            WideTile(self, axis, start, length, sizes.is_multiple(axis.extent, lanes)).emit(context)
            return
        if isinstance(length, int) and not whole:
            copies = self._pointwise_copies(length, lanes)
        groups: list[list[Value]] = [[] for _ in range(copies)]
        strip = Strip(axis.symbol, start, length, lanes, copies, sizes.is_multiple(axis.extent, lanes))
        self.loops.vectors(context, strip, groups, body, whole)

    def _pointwise_copies(self, length: int, lanes: int) -> int:
        """Two vectors a turn where the body is small, or the data so large that a second body repays its compilation:
        they take turns."""
        light = sum(operation_cost(view) for view in self.shape.views) <= self._body_written_twice(self.shape.views)
        return 2 if light and length % (2 * lanes) == 0 and length > 2 * lanes else 1

    # --- stages

    def _stages(self, contexts: list[Context]) -> None:
        pairs = online.find_pairs(self.shape, self.strategy.stage_axes) if self.strategy.vector is None else {}
        for number, (view, axis) in enumerate(zip(self.shape.views, self.strategy.stage_axes)):
            if number in pairs and axis is not None:
                online.emit(self, contexts[0], number, pairs[number], axis)
                continue
            if number in pairs.values():
                continue
            self.enter_stage(number)
            if axis is None:
                self._stage_in_place(view, contexts)
            else:
                self._stage_across(view, contexts[0], axis)

    def enter_stage(self, number: int) -> None:
        """What is evaluated from here on belongs to stage `number`."""
        self.evaluator.view = self.shape.views[number]
        self.evaluator.ahead = distances(self.shape, self.strategy, number)
        self.evaluator.next_rows = gathered_rows(self.shape, self.strategy, number)
        self.evaluator.store_ahead = store_distances(self.shape, self.strategy, number)

    def _stage_in_place(self, view: StageView, contexts: list[Context]) -> None:
        """The stage's loops around the contexts as they are (scalars, or vectors of outer points side by side)."""
        b = self.b
        starts = [self._initial(view, ctx.lanes) for ctx in contexts]
        counts = [len(start) for start in starts]

        def body(inside: list[Context], values: list[Value]) -> list[Value]:
            groups, at = [], 0
            for count in counts:
                groups.append(values[at : at + count])
                at += count
            after = self.side_by_side(view, inside, groups, ordered=True, masked=False)
            return [value for group in after for value in group]

        carried = [value for start in starts for value in start]
        loops = parts.Parts(self.loops, parts.in_registers(b, view))
        results = loops.nest(contexts, view.axes, parts.strides(view, view.axes), carried, body)
        at = 0
        for ctx, count in zip(contexts, counts):
            self._bind_results(
                view, ctx, [results[at : at + count]], lambda reduce, state: reductions.finish_lanes(b, reduce, state)
            )
            at += count

    def _stage_across(self, view: StageView, context: Context, axis: Axis) -> None:
        """Vectors along one of the stage's own axes, collapsed to scalars at its end."""
        strategy, b = self.strategy, self.b
        others = [other for other in view.axes if other is not axis]
        ordered = view.axes[-1] is axis
        copies = self._copies(view, axis)
        start = self._initial(view, strategy.lanes)
        carried = [value for _ in range(copies) for value in start]

        def vector_body(inside: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return self.side_by_side(view, inside, groups, ordered)

        def vectors(
            inside: list[Context], first: Value | None, length: Dim | Value, values: list[Value]
        ) -> list[Value]:
            groups = [list(values[k * len(start) : (k + 1) * len(start)]) for k in range(copies)]
            if not isinstance(length, (int, Value)):
                length = self.indexer.scalar(inside[0].uniform, length)
            no_tail = sizes.is_multiple(axis.extent, strategy.lanes)
            strip = Strip(axis.symbol, first or b.const(0, "i64"), length, strategy.lanes, copies, no_tail)
            groups = self.loops.vectors(inside[0], strip, groups, vector_body)
            return [value for group in groups for value in group]

        loops = parts.Parts(self.loops, parts.in_registers(b, view))
        plan = parts.strides(view, [*others, axis], strategy.lanes * copies)

        def body(inside: list[Context], values: list[Value]) -> list[Value]:
            return loops.along(inside, axis, plan[-1], values, vectors)

        results = loops.nest([context], others, plan, carried, body)
        groups = [results[k * len(start) : (k + 1) * len(start)] for k in range(copies)]
        self._bind_results(view, context, groups, lambda reduce, state: reductions.across(b, reduce, state))

    def _body_written_twice(self, views: list[StageView]) -> int:
        """Operations of a body without reductions up to which two vectors are computed side by side: two are rounded to
        bfloat16 at once."""
        stores = [statement for view in views for statement in view.stage.statements if isinstance(statement, Store)]
        dtypes = dict(zip(self.kernel.buffers, self.kernel.dtypes))
        halves = bool(stores) and all(dtypes.get(store.buffer) is torch.bfloat16 for store in stores)
        return LONG_BODY if self._is_large() or (halves and self.target.masks) else SHORT_BODY

    def _is_large(self) -> bool:
        points = max(
            math.prod(estimate(axis.extent) for axis in (*self.shape.outer, *view.axes)) for view in self.shape.views
        )
        return points >= LARGE_POINTS

    def _copies(self, view: StageView, axis: Axis) -> int:
        """Independent accumulators hide the latency of a short body; a long body hides it by itself."""
        cost = operation_cost(view)
        if scans_of(view.stage):
            return 1  # each vector needs the sum of the one before
        if reductions_of(view.stage):
            few, some = (SHORT_BODY * 2, LONG_BODY) if self._is_large() else (10, 40)
            wanted = 4 if cost <= few else 2 if cost <= some else 1
        else:
            wanted = 2 if cost <= self._body_written_twice([view]) else 1
        if isinstance(axis.extent, int):
            full = max(1, -(-axis.extent // self.strategy.lanes))
            while wanted > full:
                wanted //= 2
        return wanted

    def position_type(self, view: StageView) -> str:
        high = sizes.bounds(sizes.product(axis.extent for axis in view.axes))[1]
        return "i32" if high is not None and high < _POSITION_LIMIT else "i64"

    def _initial(self, view: StageView, lanes: int) -> list[Value]:
        """The carried values of all reductions and scans of a stage, in the order of its statements."""
        state: list[Value] = []
        for statement in view.stage.statements:
            if isinstance(statement, Reduce):
                state += reductions.initial(statement, self.position_type(view))
            elif isinstance(statement, ScanStep):
                state += scans.initial(statement)
        return [self.b.splat(value, lanes) for value in state]

    def _position(self, view: StageView, ctx: Context) -> Value:
        """The flattened position in the stage's axes, as i64."""
        flat: Dim = 0
        for axis in view.axes:
            flat = flat * axis.extent + axis.symbol
        saved, self.b.scope = self.b.scope, ctx.here
        value = self.indexer.lanes_i64(ctx, flat)
        self.b.scope = saved
        return value

    def statements(
        self,
        view: StageView,
        ctx: Context,
        state: list[Value],
        mask: Value | None,
        ordered: bool,
        stores: Pending | None = None,
    ) -> list[Value]:
        """One point (or vector of points) of a stage: all values are computed before anything is stored. stores: takes
        what is to be stored, which the caller then does."""
        b, evaluator = self.b, self.evaluator
        after: list[Value] = []
        pending: Pending = [] if stores is None else stores
        at = 0
        for statement in view.stage.statements:
            value = evaluator.value(ctx, statement.value)
            b.scope = ctx.here
            if isinstance(statement, Define):
                self._bind(view, ctx, statement.local, statement.value, value)
            elif isinstance(statement, Store):
                pending.append((statement, value))
            elif isinstance(statement, Reduce):
                count = reductions.width(statement)
                position = None
                if reductions.is_positional(statement):
                    position = self._position(view, ctx)
                    if self.position_type(view) == "i32":
                        position = b.convert("trunc", position, "i32")
                before = state[at : at + count]
                new = reductions.step(b, statement, before, value, position, ordered)
                after += new if mask is None else [b.select(mask, x, y) for x, y in zip(new, before)]
                at += count
            else:
                count = scans.width(statement)
                if any(axis.symbol is ctx.vector for axis in view.axes):
                    sums, running = scans.prefix(b, statement, state[at : at + count], value, mask, ctx.lanes)
                    after += sums
                    at += count
                    self.define(ctx.here, statement.local, running)
                    continue
                position = self._position(view, ctx) if statement.position is not None else None
                new = scans.step(b, statement, state[at : at + count], value, position)
                after += new
                at += count
                self.define(ctx.here, statement.local, new[0])
                if statement.position is not None:
                    self.define(ctx.here, statement.position, new[1])
        if stores is None:
            for store, value in pending:
                evaluator.store(ctx, store, value)
        return after

    def side_by_side(
        self, view: StageView, contexts: list[Context], groups: list[list[Value]], ordered: bool, masked: bool = True
    ) -> list[list[Value]]:
        """`statements` for vectors side by side, their instructions in turns where what one stores no other one
        loads."""
        stores = {
            self.shape.aliases[statement.buffer] for statement in view.stage.statements if isinstance(statement, Store)
        }
        together = len(contexts) > 1 and not any(view.facts(value).volatile & stores for value in values_of(view.stage))
        pairs = bool(stores) and together and self._stores_pairs(view, contexts)
        held: list[tuple[Context, Pending]] = []

        def part(ctx: Context, group: list[Value]) -> list[Value]:
            mask = ctx.mask_at(len(ctx.chain) - 1) if masked else None
            if not pairs:
                return self.statements(view, ctx, group, mask, ordered)
            pending: Pending = []
            after = self.statements(view, ctx, group, mask, ordered, pending)
            held.append((ctx, pending))
            if len(held) == 2:
                (first, low), (second, high) = held
                for (store, left), (_, right) in zip(low, high):
                    self.evaluator.store_pair(first, second, store, left, right)
                held.clear()
            return after

        parts = [partial(part, ctx, group) for ctx, group in zip(contexts, groups)]
        return self.b.interleave(contexts[0].here.cursor, parts) if together else [make() for make in parts]

    def _stores_pairs(self, view: StageView, contexts: list[Context]) -> bool:
        """Whether vectors are stored two at a time: rounding to bfloat16 leaves halves of words, which two vectors
        fill."""
        stores = [statement for statement in view.stage.statements if isinstance(statement, Store)]
        dtypes = dict(zip(self.kernel.buffers, self.kernel.dtypes))
        return (
            self.target.masks and len(contexts) % 2 == 0
            and all(ctx.lanes > 1 and ctx.mask_at(len(ctx.chain) - 1) is None for ctx in contexts)
            and len({store.buffer for store in stores}) == len(stores)
            and all(dtypes.get(store.buffer) is torch.bfloat16 for store in stores)
            and all(store.mode == "write" and not store.bindings for store in stores)
        )  # fmt: skip

    def _bind(self, view: StageView, ctx: Context, name: str, expr: Expression, value: Value) -> None:
        self.define(ctx.chain[ctx.home(view.facts(expr))], name, value)

    def define(self, scope: Scope, name: str, value: Value) -> None:
        scope.defines.add(name)
        scope.values[name] = value

    def _bind_results(
        self, view: StageView, ctx: Context, groups: list[list[Value]], collapse: Callable[[Reduce, list[Value]], Value]
    ) -> None:
        """Merges the copies' accumulators and names the results for later stages."""
        b = self.b
        saved, b.scope = b.scope, ctx.here
        at = 0
        for statement in view.stage.statements:
            if isinstance(statement, Reduce):
                count = reductions.width(statement)
                states = [group[at : at + count] for group in groups]
                at += count
                while len(states) > 1:
                    paired = [reductions.merge(b, statement, x, y) for x, y in zip(states[::2], states[1::2])]
                    states = paired + (states[-1:] if len(states) % 2 else [])
                self.define(ctx.here, statement.local, collapse(statement, states[0]))
            elif isinstance(statement, ScanStep):
                at += scans.width(statement)
        b.scope = saved
