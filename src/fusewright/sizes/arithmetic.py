"""Arithmetic beneath the algebra of sizes: on monomials, which are sorted tuples of atoms, and on intervals.

Takes and gives plain tuples; knows nothing of expressions. Always holds: infinity stands for "some large integer", so 0
times it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Bound = int | float  # an int, or plus or minus infinity
Interval = tuple[Bound, Bound]
INFINITY = math.inf
Monomial = tuple[Any, ...]


def monomial_quotient(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """monomial / divisor; None when the divisor is no part of it."""
    left_over = list(monomial)
    for atom in divisor:
        if atom not in left_over:
            return None
        left_over.remove(atom)
    return tuple(left_over)


def shared_atoms(terms: Sequence[tuple[Monomial, int]]) -> Monomial:
    """The greatest common monomial of the terms."""
    shared = list(terms[0][0])
    for monomial, _ in terms[1:]:
        pool = list(monomial)
        kept = []
        for atom in shared:
            if atom in pool:
                pool.remove(atom)
                kept.append(atom)
        shared = kept
    return tuple(shared)


def interval_product(intervals: Sequence[Interval]) -> Interval:
    low, high = intervals[0]
    for other_low, other_high in intervals[1:]:
        corners = [_bound_product(x, y) for x in (low, high) for y in (other_low, other_high)]
        low, high = min(corners), max(corners)
    return low, high


def _bound_product(a: Bound, b: Bound) -> Bound:
    if a == 0 or b == 0:
        return 0  # 0 * infinity is 0 here: infinity stands for "some large integer"
    if abs(a) == INFINITY or abs(b) == INFINITY:  # an int may be too large to be multiplied as a float
        return INFINITY if (a > 0) == (b > 0) else -INFINITY
    return a * b


def floor_corner(a: Bound, b: Bound) -> Bound:
    if abs(a) == INFINITY:
        return a if b > 0 else -a
    if abs(b) == INFINITY:
        return 0 if a == 0 or (a > 0) == (b > 0) else -1
    return a // b


_REACH = 1 << 256
"""Products of many sizes reach further, and have no bound that is worth an integer (nor one that fits a float)."""


def least(bound: Bound) -> Bound:
    return -INFINITY if bound < -_REACH else min(bound, _REACH)


def most(bound: Bound) -> Bound:
    return INFINITY if bound > _REACH else max(bound, -_REACH)


def is_undone(atom: object, divisor: object, terms: Sequence[tuple[Monomial, int]]) -> bool:
    """Whether the terms multiply a quotient by its divisor again, by nothing else: most do not, and it has no bound but
    its interval."""
    if not isinstance(divisor, int) or divisor < 0:
        return False
    return all(len(monomial) == 1 and count % divisor == 0 for monomial, count in terms if atom in monomial)
