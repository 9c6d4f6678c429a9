"""Running accumulations: the start and one step of each kind of scan.

Takes `ScanStep` statements; gives lists of values: the accumulator, and the position of the last extreme where one is
asked for.
Always holds: steps come in order along the scanned axis; lanes, if any, are different outer points, but in `prefix`.
ATen's rules for NaN and ties are kept.
"""

from __future__ import annotations

import math

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.math import call_library, exp
from fusewright.codegen.llvm.emit.reductions import IDENTITIES, State, combine
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, literal, type_text
from fusewright.schedule.plan import ScanStep

Builder = FunctionBuilder


def width(scan: ScanStep) -> int:
    return 2 if scan.position is not None else 1


def initial(scan: ScanStep) -> State:
    element = ELEMENT_TYPES[scan.value.dtype]
    identity = -math.inf if scan.kind == "logaddexp" else IDENTITIES[scan.kind](element)
    start = Value(literal(identity, element.register), element.register)
    return [start] if scan.position is None else [start, Value("0", "i64")]


def step(b: Builder, scan: ScanStep, state: State, value: Value, position: Value | None) -> State:
    """The state after `value` at `position`."""
    lanes = max(state[0].lanes, value.lanes)
    value = b.splat(value, lanes)
    if scan.kind == "logaddexp":
        return [_log_add_exp(b, state[0], value)]
    if scan.kind in ("sum", "prod"):
        return [combine(b, scan.kind, ELEMENT_TYPES[scan.value.dtype], state[0], value)]
    takes = _takes(b, scan, value, state[0])
    new = [b.select(takes, value, state[0])]
    if scan.position is not None:
        assert position is not None
        new.append(b.select(takes, position, state[1]))
    return new


def is_prefix(scan: ScanStep) -> bool:
    """Whether lanes may be neighbours along the scanned axis (`prefix`): sums in a tree are at least as near to the
    truth as one by one."""
    return scan.kind == "sum" and ELEMENT_TYPES[scan.value.dtype].kind in ("float", "int")


def prefix(
    b: Builder, scan: ScanStep, state: State, value: Value, mask: Value | None, lanes: int
) -> tuple[State, Value]:
    """(state after all lanes, sums up to each lane): lanes are neighbours along the scanned axis. The state is the sum
    before them, in all lanes.

    Blocks of doubling length: the upper half of each takes the sum of its lower half. (LLVM makes an expansion of lanes
    moved up past zeros, `vexpandps`, which takes Zen 5 some twenty cycles: 16 floats in 14 ns instead of 3.)"""
    opcode = "fadd" if ELEMENT_TYPES[scan.value.dtype].kind == "float" else "add"
    value = b.splat(value, lanes)
    if mask is not None:
        value = b.select(mask, value, b.constant_like(0, value))
    vector = type_text(value.type, lanes)
    half = 1
    while half < lanes:
        order = ", ".join(f"i32 {k // half * half - 1 if k & half else lanes + k}" for k in range(lanes))
        moved = b.value(
            f"shufflevector {vector} {value.text}, {vector} zeroinitializer, <{lanes} x i32> <{order}>",
            value.type,
            lanes,
        )
        value = b.op(opcode, value, moved)
        half *= 2
    last = ", ".join([f"i32 {lanes - 1}"] * lanes)
    total = b.value(
        f"shufflevector {vector} {value.text}, {vector} poison, <{lanes} x i32> <{last}>", value.type, lanes
    )
    before = b.splat(state[0], lanes)
    return [b.op(opcode, before, total)], b.op(opcode, before, value)


def _takes(b: Builder, scan: ScanStep, value: Value, best: Value) -> Value:
    """Whether `value` becomes the extreme: an equal one does (the last extreme counts), a NaN does, nothing beats a NaN
    but a NaN."""
    element = ELEMENT_TYPES[scan.value.dtype]
    if element.kind == "float":
        better = b.compare("fcmp oge" if scan.kind == "max" else "fcmp ole", value, best)
        return b.op("or", better, b.compare("fcmp uno", value, value))
    letter = "s" if element.kind == "int" and element.signed else "u"
    return b.compare(f"icmp {letter}{'ge' if scan.kind == 'max' else 'le'}", value, best)


def _log_add_exp(b: Builder, x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)) as max + log1p(exp(min - max)); equal infinities stay as they are, NaN propagates."""
    x, y = b.match(x, y)
    high = b.select(b.compare("fcmp ogt", x, y), x, y)
    low = b.select(b.compare("fcmp ogt", x, y), y, x)
    difference = b.op("fsub", low, high)
    power = exp(b, difference) if x.type == "float" else call_library(b, "exp", difference)
    result = b.op("fadd", high, call_library(b, "log1p", power))
    equal = b.op(
        "and", b.compare("fcmp oeq", x, y), b.compare("fcmp oeq", b.intrinsic("fabs", x), b.constant_like(math.inf, x))
    )
    result = b.select(equal, x, result)
    return b.select(b.compare("fcmp uno", x, y), b.op("fadd", x, y), result)
