"""For which values a function of floats is defined: Python raises where the same operation of a tensor gives an
infinity or NaN.

Takes intervals that hold whatever values the arguments may have; says whether the function is defined on all of them,
and which interval holds its results. Always holds: an interval is never too small (float arithmetic is monotonic, so
its corners bound it); what is not known is `ANYTHING`, which includes infinities and NaN.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable

Interval = tuple[float, float]
ANYTHING: Interval = (-math.inf, math.inf)
LARGEST = sys.float_info.max
SMALLEST = math.ulp(0.0)
LARGEST_EXPONENT = 709.0
"""Of math.exp, with a little room."""
PIECES: tuple[Interval, ...] = ((SMALLEST, 1.0), (1.0, LARGEST), (0.0, 0.0), (-LARGEST, -SMALLEST))
"""What an outside float is pinned to when more must be known about it."""


def _divides(left: Interval, right: Interval) -> bool:
    return right[0] > 0 or right[1] < 0


def _powers(base: Interval, exponent: Interval) -> bool:
    positive = base[0] > 0 or (base[0] >= 0 and exponent[0] >= 0)  # of a negative one Python makes a complex number
    return positive and all(abs(corner) < math.inf for corner in _corners(_power, base, exponent))


DEFINED: dict[str, Callable[..., bool]] = {
    "div": _divides,
    "pow": _powers,
    "sqrt": lambda given: given[0] >= 0,
    "log": lambda given: given[0] > 0,
    "exp": lambda given: given[1] <= LARGEST_EXPONENT,
    "sin": lambda given: -math.inf < given[0] and given[1] < math.inf,
    "cos": lambda given: -math.inf < given[0] and given[1] < math.inf,
}
"""Whether the function raises for no values of these intervals. Functions that are not here never raise."""


def _power(base: float, exponent: float) -> float:
    try:
        return operator.pow(base, exponent)
    except OverflowError:
        return math.inf


def _corners(function: Callable[..., float], *given: Interval) -> list[float]:
    return [function(*corner) for corner in itertools.product(*given)]


def _by_corners(function: Callable[..., float]) -> Callable[..., Interval]:
    def bounds(*given: Interval) -> Interval:
        found = _corners(function, *given)
        return ANYTHING if any(corner != corner for corner in found) else (min(found), max(found))

    return bounds


def _absolute(given: Interval) -> Interval:
    least = 0.0 if given[0] <= 0 <= given[1] else min(map(abs, given))
    return least, max(map(abs, given))


_BOUNDS: dict[str, Callable[..., Interval]] = {
    "neg": lambda given: (-given[1], -given[0]),
    "abs": _absolute,
    "add": _by_corners(operator.add),
    "sub": _by_corners(operator.sub),
    "mul": _by_corners(operator.mul),
    "div": _by_corners(operator.truediv),
    "pow": _by_corners(_power),
    "sqrt": _by_corners(math.sqrt),
    "log": _by_corners(math.log),
    "exp": _by_corners(math.exp),
    "tanh": lambda given: (-1.0, 1.0),
    "sin": lambda given: (-1.0, 1.0),
    "cos": lambda given: (-1.0, 1.0),
}


def is_defined(name: str, given: tuple[Interval, ...]) -> bool:
    """Whether the function raises for no values of these intervals."""
    row = DEFINED.get(name)
    return row is None or row(*given)


def bounds(name: str, given: tuple[Interval, ...]) -> Interval:
    """An interval that holds the function's results."""
    unknown = any(part == ANYTHING for part in given) and name not in ("tanh",)
    return ANYTHING if unknown or not is_defined(name, given) else _BOUNDS[name](*given)


def on_all(relation: Callable[[float, float], bool], given: Interval, other: float) -> bool | None:
    """Whether the relation holds for all values of the interval, or for none; None: that is not known."""
    if given == ANYTHING or relation in (operator.eq, operator.ne):
        return None
    lower, upper = (relation(corner, other) for corner in given)
    return lower if lower == upper else None


def piece_of(value: float) -> Interval | None:
    """The one of PIECES that holds this value; None for infinities and NaN."""
    return next((piece for piece in PIECES if piece[0] <= value <= piece[1]), None)
