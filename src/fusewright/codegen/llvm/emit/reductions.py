"""Accumulators of reductions: their start, a step, the merging of two, and the collapse of a vector to one value.

Takes `Reduce` statements; gives lists of values (one for most kinds, value and position for argmax and argmin). Always
holds: max and min propagate NaN (not the maxima that nans.py passes over); argmax and argmin give the first extreme, or
the first NaN; lanes that do not count leave the accumulator as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.expressions import extreme
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, TYPE_BITS, ElementType, literal
from fusewright.schedule.plan import Reduce

Builder = FunctionBuilder
State = list[Value]


def lowest(element: ElementType) -> float | int:
    """The identity of max."""
    if element.kind == "float":
        return -math.inf
    if element.kind == "bool" or not element.signed:
        return 0
    return -(1 << (TYPE_BITS[element.register] - 1))


def highest(element: ElementType) -> float | int:
    """The identity of min."""
    if element.kind == "float":
        return math.inf
    bits = TYPE_BITS[element.register]
    return (1 << (bits - 1 if element.signed and element.kind == "int" else bits)) - 1


IDENTITIES: dict[str, Callable[[ElementType], float | int]] = {
    "sum": lambda element: 0,
    "xor_sum": lambda element: 0,
    "prod": lambda element: 1,
    "any": lambda element: 0,
    "all": lambda element: 1,
    "max": lowest,
    "min": highest,
    "argmax": lowest,
    "argmin": highest,
}

_INSTRUCTIONS: dict[str, dict[str, str]] = {
    "sum": {"float": "fadd contract", "int": "add", "bool": "or"},
    "prod": {"float": "fmul contract", "int": "mul", "bool": "and"},
    "any": {"bool": "or", "int": "or"},
    "all": {"bool": "and", "int": "and"},
    "xor_sum": {"bool": "xor", "int": "xor"},
}
_ACROSS: dict[str, dict[str, str]] = {
    "sum": {"float": "fadd", "int": "add", "bool": "or"},
    "prod": {"float": "fmul", "int": "mul", "bool": "and"},
    "any": {"bool": "or", "int": "or"},
    "all": {"bool": "and", "int": "and"},
    "xor_sum": {"bool": "xor", "int": "xor"},
}


def element_of(reduce: Reduce) -> ElementType:
    return ELEMENT_TYPES[reduce.value.dtype]


def is_positional(reduce: Reduce) -> bool:
    return reduce.kind in ("argmax", "argmin")


def width(reduce: Reduce) -> int:
    return 2 if is_positional(reduce) else 1


def initial(reduce: Reduce, position_type: str) -> State:
    """The identity; a position that was never set is the greatest of its type."""
    element = element_of(reduce)
    start = Value(literal(IDENTITIES[reduce.kind](element), element.register), element.register)
    if not is_positional(reduce):
        return [start]
    return [start, Value(str(_unset(position_type)), position_type)]


def _unset(position_type: str) -> int:
    return (1 << (TYPE_BITS[position_type] - 1)) - 1


def combine(b: Builder, kind: str, element: ElementType, accumulator: Value, value: Value) -> Value:
    """One step of a kind without positions."""
    if kind in ("max", "min"):
        return extreme(b, element, kind == "max", value, accumulator)
    return b.op(_INSTRUCTIONS[kind][element.kind], accumulator, value)


def step(b: Builder, reduce: Reduce, state: State, value: Value, position: Value | None, ordered: bool) -> State:
    """The state after `value`. `ordered`: positions grow from step to step, so that an equal value never replaces."""
    lanes = max(state[0].lanes, value.lanes)
    value = b.splat(value, lanes)
    if reduce.local in b.passed_over:
        return [b.select(b.compare("fcmp ogt", value, state[0]), value, state[0])]
    if position is None:
        return [combine(b, reduce.kind, element_of(reduce), state[0], value)]
    position = b.splat(position, lanes)
    wins = _wins(b, reduce, value, state[0])
    if not ordered:
        wins = b.op(
            "or", wins, b.op("and", _ties(b, reduce, value, state[0]), b.compare("icmp slt", position, state[1]))
        )
    return [b.select(wins, value, state[0]), b.select(wins, position, state[1])]


def _wins(b: Builder, reduce: Reduce, value: Value, best: Value) -> Value:
    element, largest = element_of(reduce), reduce.kind == "argmax"
    if element.kind == "float":
        better = b.compare("fcmp ogt" if largest else "fcmp olt", value, best)
        return b.op("or", better, b.op("and", b.compare("fcmp uno", value, value), b.compare("fcmp ord", best, best)))
    letter = "s" if element.kind == "int" and element.signed else "u"
    return b.compare(f"icmp {letter}{'gt' if largest else 'lt'}", value, best)


def _ties(b: Builder, reduce: Reduce, value: Value, best: Value) -> Value:
    if element_of(reduce).kind != "float":
        return b.compare("icmp eq", value, best)
    nans = b.op("and", b.compare("fcmp uno", value, value), b.compare("fcmp uno", best, best))
    return b.op("or", b.compare("fcmp oeq", value, best), nans)


def merge(b: Builder, reduce: Reduce, first: State, second: State) -> State:
    """The state of both sets of elements."""
    if is_positional(reduce):
        return step(b, reduce, first, second[0], second[1], ordered=False)
    return step(b, reduce, first, second[0], None, ordered=True)


def across(b: Builder, reduce: Reduce, state: State) -> Value:
    """The result of all lanes together, positions as i64."""
    value = _value_across(b, reduce, state[0])
    if not is_positional(reduce):
        return value
    position = state[1]
    unset = b.const(_unset(position.type), position.type)
    if position.lanes > 1:
        candidate = b.select(_ties(b, reduce, state[0], value), position, unset)
        position = b.intrinsic("vector.reduce.umin", candidate, type_=position.type, lanes=1)
    # Nothing ever beat the identity: every element equals it, and the first one is the answer.
    position = b.select(b.compare("icmp eq", position, unset), b.const(0, position.type), position)
    return position if position.type == "i64" else b.convert("zext", position, "i64")


def finish_lanes(b: Builder, reduce: Reduce, state: State) -> Value:
    """The result of each lane by itself (the lanes are different outer points)."""
    if not is_positional(reduce):
        return state[0]
    position = state[1]
    unset = b.const(_unset(position.type), position.type)
    position = b.select(b.compare("icmp eq", position, unset), b.const(0, position.type), position)
    return position if position.type == "i64" else b.convert("zext", position, "i64")


def _value_across(b: Builder, reduce: Reduce, value: Value) -> Value:
    if value.lanes == 1:
        return value
    element = element_of(reduce)
    kind = {"argmax": "max", "argmin": "min"}.get(reduce.kind, reduce.kind)
    if kind in ("max", "min"):
        if element.kind == "float":
            return _float_extreme_across(b, kind, value, numbers=reduce.local in b.passed_over)
        if element.kind == "bool":
            return b.intrinsic("vector.reduce." + ("or" if kind == "max" else "and"), value, type_="i1", lanes=1)
        return b.intrinsic(f"vector.reduce.{'s' if element.signed else 'u'}{kind}", value, type_=value.type, lanes=1)
    name = _ACROSS[kind][element.kind]
    if element.kind == "float":
        start = b.const(0.0 if kind == "sum" else 1.0, value.type)
        symbol = f"llvm.vector.reduce.{name}.v{value.lanes}f{TYPE_BITS[value.type]}"
        return b.call(symbol, [start, value], value.type, 1, flags="reassoc")
    return b.intrinsic("vector.reduce." + name, value, type_=value.type, lanes=1)


def _float_extreme_across(b: Builder, kind: str, value: Value, numbers: bool) -> Value:
    """NaNs are set aside, so that the tree is one maxps a level. numbers: there are none."""
    if numbers:
        return b.intrinsic(f"vector.reduce.f{kind}", value, type_=value.type, lanes=1, flags="nnan")
    nans = b.compare("fcmp uno", value, value)
    neutral = b.const(-math.inf if kind == "max" else math.inf, value.type)
    clean = b.select(nans, neutral, value)
    best = b.intrinsic(f"vector.reduce.f{kind}", clean, type_=value.type, lanes=1, flags="nnan")
    return b.select(b.any_lane(nans), b.const(math.nan, value.type), best)
