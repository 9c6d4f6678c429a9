"""Maxima of long rows and the sums of exponentials beside them, in one loop instead of two (an online softmax).

Takes the stages of a kernel; gives which pairs of them are one loop, and emits that loop's body. Always holds: the sum
is what the two loops give, but for the order of rounding: after each block of the row it is scaled by exp(old maximum -
new maximum), which is at most 1. A row of negative infinities has the sum NaN, as it has in two loops, and so has one
with a positive infinity or a NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Shape, StageView, values_of, walk
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Expression, Load, LocalValue, Store
from fusewright.schedule.expressions import Rewriter
from fusewright.schedule.plan import Define, Reduce

if TYPE_CHECKING:
    from fusewright.codegen.triton.values import Emitter

STEP = 4096
"""Elements of the row in one step of the loop; with 32 of them a thread, and three steps of loads on their way, a row
of 32,768 bfloat16 goes at 92% of a copy's speed (two loops: 75%)."""
ELEMENTS_A_THREAD = 32
STAGES = 3
LOADED = 16
"""Bytes that a thread loads at once."""


@dataclass(frozen=True, slots=True)
class Pair:
    """first, second: places of the two stages; reductions: each maximum of the first, and its sum in the second."""

    first: int
    second: int
    reductions: tuple[tuple[Reduce, Reduce], ...]


def pairs_of(shape: Shape) -> tuple[Pair, ...]:
    """The stages that make one loop: maxima of some values over a row, then for each the sum of exp(value - maximum)
    over the same row, with nothing in between that the second reads."""
    found: list[Pair] = []
    for first, view in enumerate(shape.views):
        maxima = _reductions(view, "max")
        if not maxima:
            continue
        for second in range(first + 1, len(shape.views)):
            later = shape.views[second]
            totals = _reductions(later, "sum") if _same_row(view, later) else {}
            matched = [
                (maximum, total)
                for maximum, value in maxima.items()
                for total, summed in totals.items()
                if _is_shifted(summed, value, maximum.local)
            ]
            if matched:
                if len(matched) == len(maxima) == len(totals) and not _reads_what_is_written(shape, first, second):
                    found.append(Pair(first, second, tuple(matched)))
                break
    return tuple(found)


def _reductions(view: StageView, kind: str) -> dict[Reduce, Expression]:
    """The reductions of a stage that holds nothing else but values for them, each with its value without the stage's
    own locals; none if any is of another kind."""
    reductions = [statement for statement in view.stage.statements if isinstance(statement, Reduce)]
    if not view.axes or not all(isinstance(statement, Define | Reduce) for statement in view.stage.statements):
        return {}
    if any(one.kind != kind or one.value.dtype is not torch.float32 for one in reductions):
        return {}
    return {one: _inlined(view, one.value) for one in reductions}


def _inlined(view: StageView, value: Expression) -> Expression:
    """The value without the stage's own locals."""
    defined: dict[str, Expression] = {}

    def local(node: LocalValue) -> Expression:
        return defined.get(node.name, node)

    rewriter = Rewriter(dim=lambda index: index, load=lambda node: None, local=local, bind=lambda old, _: old)
    for statement in view.stage.statements:
        if isinstance(statement, Define):
            defined[statement.local] = rewriter.visit(statement.value)
    return rewriter.visit(value)


def _same_row(a: StageView, b: StageView) -> bool:
    return a.stage.axes == b.stage.axes


def _is_shifted(value: Expression, shifted: Expression, maximum: str) -> bool:
    """Whether `value` is exp(shifted - maximum)."""
    if not (isinstance(value, Apply) and value.op == "exp"):
        return False
    difference = value.args[0]
    return difference == ir.apply("sub", shifted, ir.local_value(maximum, torch.float32), dtype=torch.float32)


def _reads_what_is_written(shape: Shape, first: int, second: int) -> bool:
    written = {
        shape.aliases.get(statement.buffer, statement.buffer)
        for view in shape.views[first:second]
        for statement in view.stage.statements
        if isinstance(statement, Store)
    }
    reads = [expr for expr in walk(values_of(shape.views[second].stage)) if isinstance(expr, Load)]
    return any(shape.aliases.get(load.buffer, load.buffer) in written for load in reads)


def begin(e: Emitter, pair: Pair) -> None:
    """The accumulators, before the loop: a maximum and a sum for each group of neighbours in a step, which one thread
    loads together. So no step waits for other threads."""
    for reductions in pair.reductions:
        maximum, total = _names(reductions)
        groups = f"[X, R // {_group(reductions)}]"
        e.lines[0].append(f'{maximum} = tl.full({groups}, float("-inf"), tl.float32)')
        e.lines[0].append(f"{total} = tl.full({groups}, 0, tl.float32)")


def body(e: Emitter, pair: Pair) -> None:
    """One step of the loop. A place that does not exist counts as negative infinity, whose exponential is 0."""
    for reductions in pair.reductions:
        maximum, total = _names(reductions)
        value = e.filled(e.evaluate(reductions[0].value))
        if e.row_mask is not None:
            text = f'tl.where({e.row_mask.text}, {value.text}, float("-inf"))'
            value = e.bind(text, value.dims, e.level_of(value, e.row_mask))
        group = _group(reductions)
        e.lines[1] += [
            f"{maximum}_all = tl.reshape({value.text}, [X, R // {group}, {group}])",
            f"{maximum}_now = lib.maximum({maximum}, tl.reduce({maximum}_all, 2, lib.maximum))",
            f"{maximum}_finite = {_finite(f'{maximum}_now')}",
            f"{total} = {total} * tl.exp({maximum} - {maximum}_finite)",
            f"{total} += tl.sum(tl.exp({maximum}_all - {maximum}_finite[:, :, None]), 2)",
            f"{maximum} = {maximum}_now",
        ]


def close(e: Emitter, pair: Pair) -> None:
    """The results, after the loop."""
    row = frozenset("x")
    for reductions in pair.reductions:
        maximum, total = _names(reductions)
        most = e.bind(f"tl.reduce({maximum}, 1, lib.maximum)[:, None]", row, 0)
        finite = e.bind(_finite(most.text), row, 0)
        sums = f"tl.sum({total} * tl.exp({maximum} - {finite.text}), 1)[:, None]"
        e.locals[reductions[0].local] = most
        text = f'tl.where({most.text} == float("-inf"), float("nan"), {sums})'
        e.locals[reductions[1].local] = e.bind(text, row, 0)


def _finite(maximum: str) -> str:
    """Nothing can be subtracted from a maximum of negative infinity: what it is of adds zeros."""
    return f'tl.where({maximum} == float("-inf"), 0.0, {maximum})'


def _group(reductions: tuple[Reduce, Reduce]) -> int:
    """Elements of the row that a thread loads at once."""
    widths = [expr.dtype.itemsize for expr in walk([reductions[0].value]) if isinstance(expr, Load)]
    return LOADED // max([*widths, 2])


def _names(reductions: tuple[Reduce, Reduce]) -> tuple[str, str]:
    maximum, total = reductions
    return f"{maximum.local}_so_far", f"{total.local}_sum"
