"""Symbolic numbers where Python needs the number itself: text, keys, methods, operators other than plain arithmetic.

Takes any value; gives it with the symbolic numbers in it replaced by the numbers that they are in this capture. Always
holds: asking a symbolic number for its value guards it, so the capture serves that value alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright import _native
from fusewright._native import isinstance
from fusewright.sizes.expressions import Relation
from fusewright.sizes.symfloat import has_root, is_share
from fusewright.sizes.symint import SymNode

SYMBOLIC: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_LOOKED_INTO = (*SYMBOLIC, set)
NUMBERS: frozenset[type] = frozenset({int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool})
# Operators that give a symbolic number for symbolic numbers, as Python's give one for ints and floats.
ARITHMETIC = frozenset({"+", "-", "*", "/", "//", "%", "**"})


def concrete(value: Any) -> Any:
    """`value`, or the number that it stands for."""
    convert = SYMBOLIC.get(type(value))
    return value if convert is None else convert(value)


def is_open(value: Any) -> bool:
    """Whether this is a comparison of a size that depends on data, which nothing decides: it may be stated
    (torch._check), not asked."""
    if type(value) is not torch.SymBool or not isinstance(value.node, SymNode):
        return False
    relation = value.node.value
    return isinstance(relation, Relation) and not value.node.has_hint() and value.node.env.known(relation) is None


def one_small(left: Any, right: Any) -> bool:
    """Whether two ints, some of them symbolic, are one object because CPython has one alone of each small int."""
    return bool(left == right) and bool(left >= -5) and bool(left <= 256)


def concrete_inside(value: Any) -> Any:
    """`value` with the numbers in builtin containers too; the same object where nothing was symbolic."""
    return _concrete(value, {}) if _native.may_hold(value, _LOOKED_INTO) else value


def _concrete(value: Any, made: dict[int, Any]) -> Any:
    """made: by identity, what stands for a container that is met again: one may hold itself."""
    kind = type(value)
    if kind in SYMBOLIC:
        return SYMBOLIC[kind](value)
    if kind not in _CONTAINERS or not holds_symbols(value):
        return value
    if id(value) in made:
        return made[id(value)]
    if kind is dict:
        pairs = made[id(value)] = {}
        pairs.update((key, _concrete(element, made)) for key, element in value.items())
        return pairs
    if kind is list:
        elements = made[id(value)] = []
        elements.extend(_concrete(element, made) for element in value)
        return elements
    parts = [_concrete(element, made) for element in value]
    if id(value) not in made:  # else a list in it, which holds it, has come to it
        # (a set in its order, which follows from all that was ever added and removed)
        filled = _native.set_filled(kind, _native.set_layout(value), (), parts) if kind is set else kind(parts)
        made[id(value)] = filled
    return made[id(value)]


_CONTAINERS = (list, tuple, dict, set, torch.Size)


def holds_symbols(container: Any) -> bool:
    """Whether a symbolic number is in a builtin container, or in one in it. One may hold itself, and often."""
    pending, seen = [container], {id(container)}
    for part in pending:
        for element in part.values() if type(part) is dict else part:
            if type(element) in SYMBOLIC:
                return True
            if type(element) in _CONTAINERS and id(element) not in seen:
                seen.add(id(element))
                pending.append(element)
    return False


def stays_symbolic(op: str, left: Any, right: Any) -> bool:
    """Whether `left op right` may be computed on the symbols."""
    left_type, right_type = type(left), type(right)
    if op not in ARITHMETIC or left_type not in NUMBERS or right_type not in NUMBERS:
        return False
    if op in ("//", "%"):  # of floats: Python's rounding, and its error for zero
        return float not in (left_type, right_type) and torch.SymFloat not in (left_type, right_type)
    if op == "**":  # Python's float power raises where IEEE overflows or leaves the reals
        if (left_type in (int, float) and 0 < left <= 1) or (right_type is int and 0 <= right <= 4):
            return True
        return (right_type is float and abs(right) <= 1 and has_root(left)) or is_share(left)
    return True
