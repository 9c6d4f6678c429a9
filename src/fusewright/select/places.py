"""Which places of a row a product need not look at, because its left operand is certainly 0 there.

Takes an expression over a row and a place; gives `Places`: a range of places for a block of rows, and what is worth a
question for each block of places. Always holds: what is left out scores negative infinity, or is 0; an expression with
an index that is checked is left out nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fusewright.base.records import dataclass
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Axis, Constant, Expression, IndexValue, Masked
from fusewright.schedule.expressions import survey
from fusewright.schedule.plan import Places
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr


def of_score(score: Expression, row: Axis, column: Axis) -> Places:
    """Where the score may be above negative infinity."""
    return _places(score, _conditions(score), row, column)


def of_value(value: Expression, row: Axis, column: Axis) -> Places:
    """Where the value may not be 0."""
    return _places(value, _nonzero(value), row, column)


def _conditions(score: Expression) -> list[Expression]:
    """What must hold, all of it, for the score to be above negative infinity."""
    match score:
        case (
            Apply(op="where", args=(mask, inner, Constant(value=value)))
            | Masked(mask=mask, body=inner, other=Constant(value=value))
        ) if value == -math.inf:
            return [*_parts(mask), *_conditions(inner)]
    return []


def _nonzero(value: Expression) -> list[Expression]:
    """What must hold, all of it, for the value not to be 0."""
    match value:
        case Apply(op="cast", args=(inner,)) | Apply(op="where", args=(_, Constant(value=0.0), inner)):
            return _nonzero(inner)
        case (
            Apply(op="where", args=(mask, inner, Constant(value=0.0)))
            | Masked(mask=mask, body=inner, other=Constant(value=0.0))
        ):
            return [*_parts(mask), *_nonzero(inner)]
        case Apply(op="mul", args=(a, b)):
            return [*_nonzero(a), *_nonzero(b)]
        case Apply(op="exp", args=(Apply(op="sub", args=(score, _)),)):
            return _conditions(score)
    return []


def _parts(mask: Expression) -> list[Expression]:
    if isinstance(mask, Apply) and mask.op == "logical_and":
        return [part for arg in mask.args for part in _parts(arg)]
    return [mask]


_BELOW: dict[str, Callable[[Dim, Dim], Dim]] = {
    "ge": lambda a, b: a - b,
    "gt": lambda a, b: a - b - 1,
    "le": lambda a, b: b - a,
    "lt": lambda a, b: b - a - 1,
}
"""What is not negative where the comparison of indices holds."""


def _index(value: Expression) -> Dim | None:
    if isinstance(value, IndexValue):
        return value.index
    return value.value if isinstance(value, Constant) and type(value.value) is int else None


@dataclass(slots=True)
class _Range:
    """Places that a block of rows, `first` to `last`, has scores for."""

    row: Expr
    column: Axis
    first: Expr
    last: Expr
    least: Dim = 0
    end: Dim = 0

    def takes(self, condition: Expression) -> bool:
        """Whether the range now says what the condition says of columns."""
        if not isinstance(condition, Apply) or condition.op not in _BELOW:
            return False
        a, b = map(_index, condition.args)
        if a is None or b is None:
            return False
        left = _BELOW[condition.op](a, b)
        along, down = sizes.coefficient(left, self.column.symbol), sizes.coefficient(left, self.row)
        if along not in (1, -1) or not isinstance(down, int):
            return False
        assert isinstance(along, int)
        rest = sizes.substitute(left, {self.column.symbol: 0, self.row: 0})
        if not isinstance(rest, int):
            return False
        most = rest + down * (self.last if down > 0 else self.first)
        if along < 0:
            self.end = sizes.minimum(self.end, sizes.maximum(most + 1, 0))
        else:
            self.least = sizes.maximum(self.least, 0 - most)
        return True


def _places(value: Expression, conditions: Sequence[Expression], row: Axis, column: Axis) -> Places:
    first, last = (sizes.loop_symbol(f"{name}_row", row.extent) for name in ("first", "last"))
    found = _Range(row.symbol, column, first, last, 0, column.extent)
    if survey([value]).checks:
        return Places(first, last, 0, column.extent)
    left = [condition for condition in conditions if not found.takes(condition)]
    seen = None
    for condition in left:
        if not survey([condition]).locals:
            seen = condition if seen is None else ir.apply("logical_and", seen, condition, dtype=torch.bool)
    return Places(first, last, found.least, found.end, seen)
