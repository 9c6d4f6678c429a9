"""Rare functions, computed in double whatever the operand's type: erfinv, digamma; and integer powers.

Takes a builder and operands; gives the value. Always holds: correct to an ulp or two of the operand's type away from
roots; eager's results at poles, infinities and NaN. These are written for size and exactness, not speed.
"""

from __future__ import annotations

import math as pymath

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.math import by_lane, call_library, polynomial

Builder = FunctionBuilder


def _constant(b: Builder, value: float) -> Value:
    return b.const(value, "double")


def erfinv(b: Builder, x: Value) -> Value:
    """Winitzki's closed form (2e-3), then three Halley steps; for |y| > 1/2 the residual is taken from erfc, where 1 -
    |y| is exact."""
    y = b.convert("fpext", x, "double")
    a = b.intrinsic("fabs", y)
    one, zero = _constant(b, 1.0), _constant(b, 0.0)
    complement = b.op("fsub", b.splat(one, y.lanes), a)
    log = call_library(b, "log", b.op("fmul", complement, b.op("fadd", a, one)))
    t = b.fma(log, _constant(b, 0.5), _constant(b, 2.0 / (pymath.pi * 0.147)))
    root = b.intrinsic("sqrt", b.op("fsub", b.op("fmul", t, t), b.op("fmul", log, _constant(b, 1.0 / 0.147))))
    guess = b.intrinsic("sqrt", b.op("fsub", root, t))
    upper = b.compare("fcmp ogt", a, _constant(b, 0.5))
    for _ in range(3):
        residual = b.select(
            upper,
            b.op("fsub", complement, call_library(b, "erfc", guess)),
            b.op("fsub", call_library(b, "erf", guess), a),
        )
        slope = b.op(
            "fmul",
            call_library(b, "exp", b.op("fneg", b.op("fmul", guess, guess))),
            _constant(b, 2.0 / pymath.sqrt(pymath.pi)),
        )
        newton = b.op("fdiv", residual, slope)
        guess = b.op("fsub", guess, b.op("fdiv", newton, b.fma(guess, newton, one)))
    guess = b.select(b.compare("fcmp oeq", a, zero), zero, guess)
    edge = b.select(b.compare("fcmp oeq", a, one), _constant(b, pymath.inf), _constant(b, pymath.nan))
    result = b.select(b.compare("fcmp olt", a, one), guess, edge)
    return b.convert("fptrunc", b.intrinsic("copysign", result, y), x.type)


_ASYMPTOTIC = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)  # B_2k / 2k, in 1/x^2


def digamma(b: Builder, x: Value) -> Value:
    """Reflection below 0, the recurrence up to 10, then the asymptotic series (Abramowitz and Stegun 6.3.7, 6.3.5,
    6.3.18)."""
    y = b.convert("fpext", x, "double")
    zero, one, ten = _constant(b, 0.0), _constant(b, 1.0), _constant(b, 10.0)
    negative = b.compare("fcmp olt", y, zero)
    z = b.select(negative, b.op("fsub", b.splat(one, y.lanes), y), y)
    total = b.splat(zero, y.lanes)
    for _ in range(10):
        low = b.compare("fcmp olt", z, ten)
        total = b.select(low, b.op("fsub", total, b.op("fdiv", b.splat(one, y.lanes), z)), total)
        z = b.select(low, b.op("fadd", z, one), z)
    inverse = b.op("fdiv", b.splat(one, y.lanes), b.op("fmul", z, z))
    series = b.op("fmul", inverse, polynomial(b, inverse, _ASYMPTOTIC))
    main = b.op("fsub", b.op("fsub", call_library(b, "log", z), b.op("fdiv", _half(b, y), z)), series)
    result = b.op("fadd", total, main)
    part = b.op("fsub", y, b.intrinsic("trunc", y))
    cotangent = b.op(
        "fdiv",
        b.splat(_constant(b, pymath.pi), y.lanes),
        call_library(b, "tan", b.op("fmul", part, _constant(b, pymath.pi))),
    )
    result = b.select(negative, b.op("fsub", result, cotangent), result)
    at_pole = b.op("and", b.compare("fcmp oeq", part, zero), negative)
    result = b.select(at_pole, _constant(b, pymath.nan), result)
    at_zero = b.intrinsic("copysign", b.splat(_constant(b, pymath.inf), y.lanes), b.op("fneg", y))
    result = b.select(b.compare("fcmp oeq", y, zero), at_zero, result)
    infinite = b.compare("fcmp oeq", b.intrinsic("fabs", y), _constant(b, pymath.inf))
    result = b.select(infinite, b.select(negative, _constant(b, pymath.nan), y), result)
    return b.convert("fptrunc", result, x.type)


def _half(b: Builder, like: Value) -> Value:
    return b.splat(_constant(b, 0.5), like.lanes)


_INTEGER_POWER = """define internal {type} @{symbol}({type} %base, {type} %exponent) {{
entry:
  %negative = icmp slt {type} %exponent, 0
  br i1 %negative, label %inverse, label %start
inverse:
  %one = icmp eq {type} %base, 1
  %minus = icmp eq {type} %base, -1
  %odd = trunc {type} %exponent to i1
  %sign = select i1 %odd, {type} -1, {type} 1
  %fraction = select i1 %minus, {type} %sign, {type} 0
  %inverted = select i1 %one, {type} 1, {type} %fraction
  ret {type} %inverted
start:
  br label %loop
loop:
  %result = phi {type} [ 1, %start ], [ %next, %loop ]
  %square = phi {type} [ %base, %start ], [ %squared, %loop ]
  %left = phi {type} [ %exponent, %start ], [ %halved, %loop ]
  %bit = trunc {type} %left to i1
  %multiplied = mul {type} %result, %square
  %next = select i1 %bit, {type} %multiplied, {type} %result
  %squared = mul {type} %square, %square
  %halved = lshr {type} %left, 1
  %more = icmp ne {type} %halved, 0
  br i1 %more, label %loop, label %done
done:
  ret {type} %next
}}"""


def integer_power(b: Builder, base: Value, exponent: Value, signed: bool) -> Value:
    """By squaring, wrapping around; a negative exponent gives 0 but for bases 1 and -1, as ATen has it."""
    symbol = f"fw.power.{'s' if signed else 'u'}{base.type}"
    text = _INTEGER_POWER.format(type=base.type, symbol=symbol)
    # no unsigned value is below 0
    b.declarations.setdefault(symbol, text if signed else text.replace("icmp slt", "icmp ult"))
    return by_lane(b, symbol, b.match(base, exponent))
