"""The maximum of a row and the sum of exponentials below it, in one pass over memory.

Takes two stages of a kernel, `max of v` and `sum of exp(v - max)`, that reduce the same long row; writes them as one
loop over chunks of the row: the chunk's maximum comes from memory, its exponentials from the cache, and while they are
computed the next chunk is fetched. What was summed, or kept for later stages, below an older maximum is scaled. The
maximum is that of numbers; a sum that is NaN has the row searched once more. Always holds: the results are eager's for
rows with NaN, infinities or nothing but -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fusewright.base.records import replace
from fusewright.codegen.analysis import Shape, StageView, reductions_of, same_walk
from fusewright.codegen.llvm.emit import math as functions, reductions
from fusewright.codegen.llvm.emit.builder import Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.loops import Strip, Turns
from fusewright.codegen.llvm.emit.memory import Place
from fusewright.codegen.llvm.nans import passed_over
from fusewright.codegen.llvm.prefetch import streamed
from fusewright.loops.ir import Apply, Axis, Expression, LocalValue
from fusewright.schedule.plan import Define, Reduce, Store
from fusewright.sizes import expressions as sizes

if TYPE_CHECKING:
    from fusewright.codegen.llvm.emitter import KernelEmitter

CHUNK = 8192
"""Bytes of a chunk: a part of a first-level cache, and long enough that its end costs little."""


def find_pairs(shape: Shape, axes: list[Axis | None]) -> dict[int, int]:
    """Number of the stage that makes a maximum → number of the stage that sums exponentials below it, where one loop
    pays."""
    found: dict[int, int] = {}
    for number, (view, axis) in enumerate(zip(shape.views, axes)):
        if axis is None or not _is_long(shape, view, axis):
            continue
        for later, other in enumerate(shape.views[number + 1 :], number + 1):
            if _belong_together(shape, view, other):
                found[number] = later
                break
    return found


def _is_long(shape: Shape, view: StageView, axis: Axis) -> bool:
    loads = streamed(shape, view, axis)
    return bool(loads) and isinstance(axis.extent, int) and axis.extent >= 2 * _chunk(loads.values())


def _chunk(bytes_of_elements: Iterable[int]) -> int:
    """Elements of a chunk."""
    return CHUNK // max(bytes_of_elements)


def _belong_together(shape: Shape, first: StageView, second: StageView) -> bool:
    if len(first.stage.statements) != 1 or len(first.axes) != 1:
        return False
    (top,) = first.stage.statements
    found = _sum_of_powers(shape, second)
    if found is None or not (isinstance(top, Reduce) and top.kind == "max") or not same_walk(first, second):
        return False
    if first.facts(top.value).volatile or not top.value.dtype.is_floating_point:
        return False
    if found[2] is not None and top.local not in passed_over(shape):
        return False  # what is kept of a row with NaN would be that below the maximum of its numbers
    power = found[1]
    if not (
        isinstance(power, Apply)
        and power.op == "exp"
        and isinstance(power.args[0], Apply)
        and power.args[0].op == "sub"
    ):
        return False
    value, below = power.args[0].args
    return value == top.value and isinstance(below, LocalValue) and below.name == top.local


def _sum_of_powers(shape: Shape, view: StageView) -> tuple[Reduce, Expression, Store | None] | None:
    """(the only reduction of a stage, a sum; what it adds up; the store that keeps it in scratch memory) if that is all
    that it does."""
    defined = {statement.local: statement.value for statement in view.stage.statements if isinstance(statement, Define)}
    kept: Store | None = None
    total: Reduce | None = None
    for statement in view.stage.statements:
        if isinstance(statement, Reduce) and statement.kind == "sum" and total is None:
            total = statement
        elif (
            isinstance(statement, Store)
            and kept is None
            and statement.buffer in {scratch.name for scratch in shape.kernel.scratch}
        ):
            kept = statement
        elif not isinstance(statement, Define):
            return None
    if total is None or len(defined) > 1:
        return None
    value = total.value
    power = defined.get(value.name, value) if isinstance(value, LocalValue) else value
    if kept is not None and (
        kept.value not in (value, power) or kept.mode != "write" or kept.bindings or len(view.axes) != 1
    ):
        return None
    return total, power, kept


def _greater_number(emitter: KernelEmitter, ctx: Context, top: Reduce, best: Value) -> Value:
    """One instruction: a NaN is passed over here, and found in the sum."""
    b = emitter.b
    value = emitter.evaluator.value(ctx, top.value)
    b.scope, mask = ctx.here, ctx.mask_at(len(ctx.chain) - 1)
    greater = b.select(b.compare("fcmp ogt", value, best), value, best)
    return greater if mask is None else b.select(mask, greater, best)


def emit(emitter: KernelEmitter, context: Context, first: int, second: int, axis: Axis) -> None:
    """Both stages at one outer point; names both results."""
    b, loops, lanes = emitter.b, emitter.loops, emitter.strategy.lanes
    one, other = emitter.shape.views[first], emitter.shape.views[second]
    (top,), (total,) = reductions_of(one.stage), reductions_of(other.stage)
    found = _sum_of_powers(emitter.shape, other)
    kept = None if found is None else found[2]
    element = reductions.element_of(top)
    loads = streamed(emitter.shape, one, axis)
    length = _chunk(loads.values())
    assert isinstance(axis.extent, int)
    chunk = sizes.loop_symbol("chunk", -(-axis.extent // length))
    low = b.const(-math.inf, element.register)
    copies = 4
    turns = -(-axis.extent // length)
    tops_of_chunks = b.name()
    if kept is not None:
        b.blocks[0].lines.insert(0, f"  {tops_of_chunks} = alloca [{turns} x {element.register}], align 64")

    def top_of(at: Context) -> str:
        return b.value(
            f"getelementptr {element.register}, ptr {tops_of_chunks}, i64 {at.here.values[chunk].text}", "ptr"
        ).text

    def bounds(at: Context) -> tuple[Value, int | Value]:
        start = b.op("mul nsw", at.here.values[chunk], b.const(length, "i64"))
        if axis.extent % length == 0:  # type: ignore[operator]
            return start, length
        return start, b.intrinsic(
            "smin", b.op("sub nsw", b.const(axis.extent, "i64"), start), b.const(length, "i64")  # type: ignore
        )

    def body(inside: list[Context], carried: list[Value]) -> list[Value]:
        here, (best, *sums) = inside[0], carried
        b.scope = here.here
        start, count = bounds(here)
        no_tail = sizes.is_multiple(axis.extent, lanes)
        emitter.enter_stage(first)
        emitter.evaluator.ahead = {}

        def step(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return emitter.side_by_side(emitter.evaluator.view, contexts, groups, ordered=True)

        def numbers(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return [[_greater_number(emitter, ctx, top, *group)] for ctx, group in zip(contexts, groups)]

        tops = [[b.splat(low, lanes)] for _ in range(copies)]
        strip = Strip(axis.symbol, start, count, lanes, copies, no_tail)
        groups = loops.vectors(here, strip, tops, numbers)
        b.scope = here.here
        while len(groups) > 1:
            groups = [reductions.merge(b, top, x, y) for x, y in zip(groups[::2], groups[1::2])]
        higher = reductions.combine(b, "max", element, best, reductions.across(b, top, groups[0]))
        # Nothing but -inf so far: exponentials are taken below 0, where they are 0.
        below = b.select(b.compare("fcmp oeq", higher, low), b.const(0.0, element.register), higher)
        difference = b.op("fsub", best, higher)
        shrink = (
            functions.exp(b, difference)
            if element.register == "float"
            else functions.call_library(b, "exp", difference)
        )
        shrink = b.select(b.compare("fcmp oeq", best, higher), b.const(1.0, element.register), shrink)
        sums = [b.op("fmul", value, b.splat(shrink, lanes)) for value in sums]
        emitter.define(here.here, top.local, below)
        if kept is not None:
            b.emit(f"  store {higher.typed}, ptr {top_of(here)}, align 4")
        emitter.enter_stage(second)
        emitter.evaluator.ahead = dict.fromkeys(loads, CHUNK)
        groups = loops.vectors(here, replace(strip, copies=len(sums)), [[nothing]] * len(sums), step)
        b.scope = here.here
        return [higher, *(b.op("fadd", before, group[0]) for before, group in zip(sums, groups))]

    def lift(inside: list[Context], _: list[Value]) -> list[Value]:
        """What was kept of a chunk below an older maximum is scaled as its sum was."""
        here = inside[0]
        b.scope = here.here
        older = b.value(f"load {element.register}, ptr {top_of(here)}, align 4", element.register)
        start, count = bounds(here)

        def scale(within: Context, _: list[Value]) -> list[Value]:
            b.scope = within.here
            difference = b.op("fsub", older, best)
            factor = (
                functions.exp(b, difference)
                if element.register == "float"
                else functions.call_library(b, "exp", difference)
            )
            assert kept is not None
            place = Place(emitter.pointers[kept.buffer], other.dim(kept.index), {})

            def vectors(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
                memory = emitter.evaluator.memory
                for ctx in contexts:
                    b.scope, mask = ctx.here, ctx.mask_at(len(ctx.chain) - 1)
                    value = memory.load(ctx, place, mask)
                    memory.store(ctx, place, b.op("fmul", value, b.splat(factor, ctx.lanes)), mask, "write")
                return groups

            strip = Strip(axis.symbol, start, count, lanes, 2, sizes.is_multiple(axis.extent, lanes))
            loops.vectors(within, strip, [[], []], vectors)
            return []

        loops.maybe(here, b.convert("zext", b.compare("fcmp olt", older, best), "i64"), [], scale)
        return []

    saved, b.scope = b.scope, context.here
    nothing = b.splat(b.const(0.0, element.register), lanes)
    best, *sums = loops.counted([context], Turns(chunk, 0, turns), [low, *[nothing] * 4], body)
    if kept is not None:
        loops.counted([context], Turns(chunk, 0, turns), [], lift)
    b.scope = context.here
    while len(sums) > 1:
        sums = [b.op("fadd", x, y) for x, y in zip(sums[::2], sums[1::2])]
    whole = reductions.across(b, total, sums)

    def again(inside: Context, _: list[Value]) -> list[Value]:
        """The row holds a NaN or an infinity: which of them is the maximum."""
        emitter.enter_stage(first)
        start = [reductions.initial(top, "i32")]

        def step(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return emitter.side_by_side(one, contexts, groups, ordered=True)

        start = [[b.splat(value, lanes) for value in state] for state in start]
        strip = Strip(axis.symbol, b.const(0, "i64"), axis.extent, lanes, 1)  # type: ignore[arg-type]
        (state,) = loops.vectors(inside, strip, start, step)
        b.scope = inside.here
        return [reductions.across(b, top, state)]

    (best,) = loops.maybe(context, b.convert("zext", b.compare("fcmp uno", whole, whole), "i64"), [best], again)
    b.scope = context.here
    emitter.define(context.here, top.local, best)
    whole = b.select(b.compare("fcmp oeq", best, low), b.const(math.nan, element.register), whole)
    emitter.define(context.here, total.local, whole)
    b.scope = saved
