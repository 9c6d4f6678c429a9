"""Long sums in parts: each part is summed from 0, and then added to the sum of those before it.

Takes the axes of a reduction's loops; gives loops in which no float accumulator takes more than `PART` elements one
after another, nor a sum of parts more than `PART` parts, and so on. Always holds: the parts depend on extents alone,
and the points come in the order of the plain loops.

Rounding errors of a sum grow with the number of additions that one element goes through: of a column of a million
equal float32 numbers, summed one by one, four digits are right; in parts, all but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.codegen.analysis import StageView
from fusewright.codegen.llvm.emit import reductions, scans
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.loops import Body, Loops, Turns
from fusewright.loops.ir import Axis
from fusewright.schedule.plan import Reduce, ScanStep
from fusewright.sizes import expressions as sizes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim

PART = 64
Part = Callable[[list[Context], list[Value], Body], list[Value]]
"""Takes what is carried around a part, and what emits the part's loops; gives what is carried after it."""
Walk = Callable[[list[Context], "Value | None", "Dim | Value", list[Value]], list[Value]]
"""Emits the innermost loop of an axis: from where (None: from 0), over how many elements, with what carried."""


Strides = tuple[int, ...]
"""Elements of an axis that one turn of each loop takes, the outermost loop's first; the innermost loop takes each of
the last stride's elements by itself."""


def strides(view: StageView, axes: Sequence[Axis], together: int = 1) -> list[Strides]:
    """How each axis is walked; empty where one loop does. together: neighbours on the last axis that different
    accumulators take."""
    if not any(sums_of(view)):
        return [()] * len(axes)
    found: list[Strides] = []
    taken, unit = 1, together
    for axis in reversed(axes):
        most = _most(axis.extent)
        step, steps = max(PART // taken, 1) * unit, []
        while step < most:
            steps.append(step)
            step *= PART
        taken = -(-most // steps[-1]) if steps else taken * -(-most // unit)
        found.append(tuple(reversed(steps)))
        unit = 1
    return found[::-1]


def _most(extent: Dim) -> int:
    """The greatest extent that counts; of one without bounds, what three loops walk."""
    high = sizes.bounds(extent)[1]
    most = max(estimate(extent), PART**3)
    return most if high is None else min(high, most)


def sums_of(view: StageView) -> list[Reduce | None]:
    """For each value that a stage's loops carry: the sum of floats that it is, if it is one."""
    found: list[Reduce | None] = []
    for statement in view.stage.statements:
        if isinstance(statement, Reduce):
            is_sum = statement.kind == "sum" and reductions.element_of(statement).kind == "float"
            found += [statement if is_sum else None] * reductions.width(statement)
        elif isinstance(statement, ScanStep):
            found += [None] * scans.width(statement)
    return found


class Parts:
    """Loops in parts. part: see `Part`."""

    def __init__(self, loops: Loops, part: Part) -> None:
        self.b, self.loops, self.part = loops.b, loops, part

    def nest(
        self, contexts: list[Context], axes: Sequence[Axis], plan: Sequence[Strides], carried: list[Value], body: Body
    ) -> list[Value]:
        """`body` at every point of `axes`, the last one fastest."""
        if not axes:
            return body(contexts, carried)
        axis = axes[0]

        def inner(inside: list[Context], values: list[Value]) -> list[Value]:
            return self.nest(inside, axes[1:], plan[1:], values, body)

        def walk(inside: list[Context], start: Value | None, length: Dim | Value, values: list[Value]) -> list[Value]:
            if start is None:
                return self.loops.counted(inside, Turns(axis.symbol, 0, length), values, inner)
            stop = self._after(inside[0], start, length)
            return self.loops.counted(inside, Turns(axis.symbol, start, stop, runs=True), values, inner)

        return self.along(contexts, axis, plan[0], carried, walk)

    def along(
        self, contexts: list[Context], axis: Axis, steps: Strides, carried: list[Value], walk: Walk,
        start: Value | None = None, length: Dim | Value | None = None,
    ) -> list[Value]:  # fmt: skip
        """`walk` over all of `axis`, or over `length` elements from `start`."""
        b, length = self.b, axis.extent if length is None else length
        if not steps:
            return walk(contexts, start, length, carried)
        step, symbol = steps[0], sizes.loop_symbol("part", axis.extent)
        stop = self._after(contexts[0], start, length)

        def turn(inside: list[Context], values: list[Value]) -> list[Value]:
            at = inside[0].uniform.here.values[symbol]

            def run(within: list[Context], state: list[Value]) -> list[Value]:
                count: Dim | Value = step
                if not sizes.is_multiple(axis.extent, step):
                    b.scope = within[0].here
                    last = stop if isinstance(stop, Value) else self.loops.indexer.scalar(within[0].uniform, stop)
                    count = b.intrinsic("smin", b.op("sub nsw", last, at), b.const(step, "i64"))
                return self.along(within, axis, steps[1:], state, walk, at, count)

            return self.part(inside, values, run)

        turns = Turns(symbol, start or 0, stop, step, runs=start is not None)
        return self.loops.counted(contexts, turns, carried, turn)

    def _after(self, ctx: Context, start: Value | None, length: Dim | Value) -> Dim | Value:
        """start + length."""
        if start is None:
            return length
        b = self.b
        saved, b.scope = b.scope, ctx.here
        amount = length if isinstance(length, Value) else self.loops.indexer.scalar(ctx.uniform, length)
        stop = b.op("add nsw", start, amount)
        b.scope = saved
        return stop


def in_registers(b: FunctionBuilder, view: StageView) -> Part:
    """A part whose sums are carried values."""
    sums = sums_of(view)

    def part(inside: list[Context], carried: list[Value], run: Body) -> list[Value]:
        kinds = sums * (len(carried) // len(sums))
        begun = [
            value if reduce is None else b.splat(reductions.initial(reduce, "")[0], value.lanes)
            for reduce, value in zip(kinds, carried)
        ]
        after = run(inside, begun)
        b.scope = inside[0].here
        return [
            new if reduce is None else reductions.merge(b, reduce, [old], [new])[0]
            for reduce, old, new in zip(kinds, carried, after)
        ]

    return part
