"""The maximum of a row and the sum of exponentials below it, in one pass over memory.

Takes two stages of a kernel, `max of v` and `sum of exp(v - max)`, that reduce the same long row; writes them as one loop over chunks of
the row: the chunk's maximum comes from memory, its exponentials from the cache, and while they are computed the next chunk is fetched.
What was summed below an older maximum is scaled. The maximum is that of numbers; a sum that is NaN has the row searched once more. Always
holds: the results are eager's for rows with NaN, infinities or nothing but -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fusewright.codegen.llvm import math as functions
from fusewright.codegen.llvm import reductions
from fusewright.codegen.llvm.analysis import Shape, StageView, reductions_of, same_walk
from fusewright.codegen.llvm.builder import Value
from fusewright.codegen.llvm.context import Context
from fusewright.codegen.llvm.prefetch import streamed
from fusewright.graph import sizes
from fusewright.loops.ir import Apply, Axis, LocalValue
from fusewright.schedule.plan import Reduce

if TYPE_CHECKING:
    from fusewright.codegen.llvm.kernel import KernelEmitter

CHUNK = 8192
"""Bytes of a chunk: a part of a first-level cache, and long enough that its end costs little."""


def find_pairs(shape: Shape, axes: list[Axis | None]) -> dict[int, int]:
    """Number of the stage that makes a maximum → number of the stage that sums exponentials below it, where one loop pays."""
    found: dict[int, int] = {}
    for number, (view, axis) in enumerate(zip(shape.views, axes)):
        if axis is None or not _is_long(shape, view, axis):
            continue
        for later, other in enumerate(shape.views[number + 1 :], number + 1):
            if _belong_together(view, other):
                found[number] = later
                break
    return found


def _is_long(shape: Shape, view: StageView, axis: Axis) -> bool:
    loads = streamed(shape, view, axis)
    return bool(loads) and isinstance(axis.extent, int) and axis.extent >= 2 * _chunk(loads.values())


def _chunk(bytes_of_elements: Iterable[int]) -> int:
    """Elements of a chunk."""
    return CHUNK // max(bytes_of_elements)


def _belong_together(first: StageView, second: StageView) -> bool:
    if len(first.stage.statements) != 1 or len(second.stage.statements) != 1 or len(first.axes) != 1:
        return False
    (top,), (total,) = first.stage.statements, second.stage.statements
    if not (isinstance(top, Reduce) and isinstance(total, Reduce) and top.kind == "max" and total.kind == "sum"):
        return False
    if not same_walk(first, second):
        return False
    if first.facts(top.value).volatile or not top.value.dtype.is_floating_point:
        return False
    power = total.value
    if not (isinstance(power, Apply) and power.op == "exp" and isinstance(power.args[0], Apply) and power.args[0].op == "sub"):
        return False
    value, below = power.args[0].args
    return value == top.value and isinstance(below, LocalValue) and below.name == top.local


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
    element = reductions.element_of(top)
    loads = streamed(emitter.shape, one, axis)
    length = _chunk(loads.values())
    assert isinstance(axis.extent, int)
    chunk = sizes.loop_symbol("chunk", -(-axis.extent // length))
    low = b.const(-math.inf, element.register)
    copies = 4

    def body(inside: list[Context], carried: list[Value]) -> list[Value]:
        here, (best, *sums) = inside[0], carried
        b.scope = here.here
        start = b.op("mul nsw", here.here.values[chunk], b.const(length, "i64"))
        count: int | Value = length
        if axis.extent % length:  # type: ignore[operator]
            count = b.intrinsic("smin", b.op("sub nsw", b.const(axis.extent, "i64"), start), b.const(length, "i64"))  # type: ignore[arg-type]
        no_tail = sizes.is_multiple(axis.extent, lanes)
        emitter.enter_stage(first)
        emitter.evaluator.ahead = {}

        def step(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return emitter.side_by_side(emitter.evaluator.view, contexts, groups, ordered=True)

        def numbers(contexts: list[Context], groups: list[list[Value]]) -> list[list[Value]]:
            return [[_greater_number(emitter, ctx, top, *group)] for ctx, group in zip(contexts, groups)]

        tops = [[b.splat(low, lanes)] for _ in range(copies)]
        groups = loops.vectors(here, axis.symbol, start, count, lanes, copies, tops, numbers, no_tail=no_tail)
        b.scope = here.here
        while len(groups) > 1:
            groups = [reductions.merge(b, top, x, y) for x, y in zip(groups[::2], groups[1::2])]
        higher = reductions.combine(b, "max", element, best, reductions.across(b, top, groups[0]))
        # Nothing but -inf so far: exponentials are taken below 0, where they are 0.
        below = b.select(b.compare("fcmp oeq", higher, low), b.const(0.0, element.register), higher)
        difference = b.op("fsub", best, higher)
        shrink = functions.exp(b, difference) if element.register == "float" else functions.call_library(b, "exp", difference)
        shrink = b.select(b.compare("fcmp oeq", best, higher), b.const(1.0, element.register), shrink)
        sums = [b.op("fmul", value, b.splat(shrink, lanes)) for value in sums]
        emitter.define(here.here, top.local, below)
        emitter.enter_stage(second)
        emitter.evaluator.ahead = dict.fromkeys(loads, CHUNK)
        groups = loops.vectors(here, axis.symbol, start, count, lanes, len(sums), [[value] for value in sums], step, no_tail=no_tail)
        return [higher, *(group[0] for group in groups)]

    saved, b.scope = b.scope, context.here
    nothing = b.splat(b.const(0.0, element.register), lanes)
    best, *sums = loops.counted([context], chunk, 0, -(-axis.extent // length), [low, *[nothing] * 4], body)
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
        (state,) = loops.vectors(inside, axis.symbol, b.const(0, "i64"), axis.extent, lanes, 1, start, step)  # type: ignore[arg-type]
        b.scope = inside.here
        return [reductions.across(b, top, state)]

    (best,) = loops.maybe(context, b.convert("zext", b.compare("fcmp uno", whole, whole), "i64"), [best], again)
    b.scope = context.here
    emitter.define(context.here, top.local, best)
    whole = b.select(b.compare("fcmp oeq", best, low), b.const(math.nan, element.register), whole)
    emitter.define(context.here, total.local, whole)
    b.scope = saved
