"""Elementary functions: inline polynomials for the hot float32 ones, calls of SLEEF's vector functions (in
libtorch_cpu) for the rest.

Takes a builder and operands (scalars or vectors of float or double); gives the value. Always holds: at most 2 ulp from
the correctly rounded result over the whole range, with eager's results for infinities, NaN and signed zeros; no
fast-math flag is set here, because the error terms rely on each rounding.

The polynomials are ours: Lawson-weighted least squares on Chebyshev nodes (near minimax), coefficients rounded to
float32 one at a time from the lowest, the rest refitted. The reductions are the textbook ones (Cody and Waite for exp,
the split at sqrt(1/2) for log).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusewright.codegen.llvm.emit import lookup
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.types import TYPE_BITS, type_text

Builder = FunctionBuilder

_ROUND_BITS = 0x4B400000
# _ROUND_BITS as float32, 1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to the nearest integer
_ROUND = 12582912.0
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH = 0.693147182464599609375  # ln 2 rounded to float32
_LN2_LOW = math.log(2.0) - _LN2_HIGH
# (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2, relative to exp and to expm1
_EXP = (0.4999999403953552, 0.1666651964187622, 0.04166826233267784, 0.008368857204914093, 0.001382144633680582)
_EXPM1 = (0.4999999701976776, 0.1666654348373413, 0.04166746884584427, 0.008366592228412628, 0.0013867863453924656)
# One term less where only halves are stored: 1.1e-7 of exp; the low part of ln 2 is left out there as well (2.4e-7 at
# 88).
_EXP_OF_HALVES = (0.499992311000824, 0.16667114198207855, 0.041890114545822144, 0.008312525227665901)
# (2^r - 1) / r on |r| <= 1/2
_EXP2 = (
    0.6931471824645996,
    0.24022647738456726,
    0.05550359562039375,
    0.009618500247597694,
    0.0013390971580520272,
    0.0001532892492832616,
)
# (log(1+f) - f + f^2/2) / f^3 on sqrt(1/2) <= 1+f < sqrt(2)
_LOG = (
    0.3333331346511841, -0.25000011920928955, 0.20002074539661407, -0.1666785627603531, 0.14220191538333893,
    -0.12408135831356049, 0.11886491626501083, -0.11661187559366226, 0.06732989102602005,
)  # fmt: skip
# (tanh(x)/x - 1) / x^2 in x^2 for |x| <= 0.625
_TANH = (
    -0.3333333134651184,
    0.13333220779895782,
    -0.05394819751381874,
    0.021707117557525635,
    -0.008190861903131008,
    0.0021537139546126127,
)
# log2(erfc(a)) / a on 0 .. 3.95, relative to erf
_ERF = (
    -1.6279070377349854, -0.9184474945068359, -0.14827850461006165, 0.027638297528028488, 0.00021804262360092252,
    -0.0023898123763501644, 0.0009036210831254721, -0.0001667840697336942, 1.2989032256882638e-05,
)  # fmt: skip
# The same where only halves are stored: 4e-5 of 1 - erf, 3e-6 of the power; a rounding to bfloat16 is 2e-3.
_ERF_OF_HALVES = (-1.62784541, -0.919043961, -0.148456329, 0.0305671113, -0.00385983277, 0.000218220563)
_EXP2_OF_HALVES = (0.69312418, 0.24024099, 0.05590651, 0.00958286)


def polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's scheme in fused multiply-adds; coefficients from the constant upwards."""
    result = b.constant_like(coefficients[-1], x)
    for c in reversed(coefficients[:-1]):
        result = b.fma(result, x, b.constant_like(c, x))
    return result


def _times_polynomial(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """x * polynomial(x) with the leading term last, so that one rounding dominates the error."""
    rest = b.op("fmul", b.op("fmul", x, x), polynomial(b, x, coefficients[1:]))
    return b.fma(x, b.constant_like(coefficients[0], x), rest)


def maximum_number(b: Builder, limit: float, x: Value) -> Value:
    """max(limit, x), NaN kept: one maxps."""
    bound = b.constant_like(limit, x)
    return b.select(b.compare("fcmp ogt", bound, x), bound, x)


def minimum_number(b: Builder, limit: float, x: Value) -> Value:
    bound = b.constant_like(limit, x)
    return b.select(b.compare("fcmp olt", bound, x), bound, x)


def _round(b: Builder, x: Value, scale: float) -> tuple[Value, Value]:
    """(t, n): n is the integer (as float32) nearest to x * scale, and the low bits of t's representation are n in two's
    complement."""
    magic = b.constant_like(_ROUND, x)
    t = b.fma(x, b.constant_like(scale, x), magic)
    return t, b.op("fsub", t, magic)


def _power_of_two(b: Builder, t: Value, offset: int = 0) -> Value:
    """2^(n + offset), in -126 .. 127, from the t of `_round`."""
    shifted = b.op("shl", b.convert("bitcast", t, "i32"), b.const(23, "i32"))
    return b.convert("bitcast", b.op("add", shifted, b.const((127 + offset) << 23, "i32")), "float")


def _scale(b: Builder, x: Value, t: Value, n: Value, keep: Value) -> Value:
    """x * 2^n for integral n in -160 .. 160 where `keep`, else 0; overflow and subnormal results are right.

    Results that underflow to 0 must not be computed: the processor takes an assist of some 150 cycles for each, and
    softmax of masked scores is full of them.
    """
    if b.target.scalef and n.lanes == 16:
        bits = b.value(f"bitcast {b.splat(keep, 16).typed} to i16", "i16")
        zero = Value("zeroinitializer", "float", 16)
        return b.call("llvm.x86.avx512.mask.scalef.ps.512", [x, n, zero, bits, Value("4", "i32")], "float", 16)
    i = b.op("sub", b.convert("bitcast", t, "i32"), b.const(_ROUND_BITS, "i32"))
    half = b.op("ashr", i, b.const(1, "i32"))
    result = b.select(keep, x, b.constant_like(0.0, x))
    for part in (half, b.op("sub", i, half)):
        bits = b.op("shl", b.op("add", part, b.const(127, "i32")), b.const(23, "i32"))
        result = b.op("fmul", result, b.convert("bitcast", bits, "float"))
    return result


def _reduce_exp(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """(t, n, r) with x = n ln 2 + r and |r| <= ln(2)/2; t as in `_round`."""
    t, n = _round(b, x, _LOG2_E)
    r = b.fma(n, b.constant_like(-_LN2_HIGH, x), x)
    return t, n, b.fma(n, b.constant_like(-_LN2_LOW, x), r)


def _exp_reduced(b: Builder, r: Value) -> Value:
    """exp(r) for |r| <= ln(2)/2, all of it by Horner's scheme: one instruction less than adding r and 1 apart, for a
    tenth of an ulp."""
    return polynomial(b, r, (1.0, 1.0, *_EXP))


def exp(b: Builder, x: Value, at_most_zero: bool = False) -> Value:
    """at_most_zero: or NaN."""
    keep = b.compare("fcmp uge", x, b.constant_like(-103.98, x))
    if not at_most_zero:
        x = minimum_number(b, 89.0, x)
    if not (b.target.scalef and x.lanes == 16):  # whose mask alone keeps what is below out
        x = maximum_number(b, -104.0, x)
    if b.halves:
        t, n = _round(b, x, _LOG2_E)
        r = b.fma(n, b.constant_like(-_LN2_HIGH, x), x)
        return _scale(b, polynomial(b, r, (1.0, 1.0, *_EXP_OF_HALVES)), t, n, keep)
    t, n, r = _reduce_exp(b, x)
    return _scale(b, _exp_reduced(b, r), t, n, keep)


def exp2(b: Builder, x: Value) -> Value:
    keep = b.compare("fcmp uge", x, b.constant_like(-150.0, x))
    x = minimum_number(b, 129.0, maximum_number(b, -151.0, x))
    t, n = _round(b, x, 1.0)
    r = b.op("fsub", x, n)
    return _scale(b, b.fma(polynomial(b, r, _EXP2), r, b.constant_like(1.0, x)), t, n, keep)


def _expm1_reduced(b: Builder, r: Value) -> Value:
    return b.fma(polynomial(b, r, _EXPM1), b.op("fmul", r, r), r)


def expm1(b: Builder, x: Value) -> Value:
    """2 (2^(n-1) p + 2^(n-1) - 1/2): halves keep the largest results finite until the last step. Tiny x is its own
    result."""
    clamped = minimum_number(b, 89.0, maximum_number(b, -20.0, x))
    t, _, r = _reduce_exp(b, clamped)
    p = _expm1_reduced(b, r)
    half = _power_of_two(b, t, -1)
    result = b.fma(half, p, b.op("fsub", half, b.constant_like(0.5, x)))
    result = b.op("fadd", result, result)
    return b.select(b.compare("fcmp olt", b.intrinsic("fabs", x), b.constant_like(1e-10, x)), x, result)


def sigmoid(b: Builder, x: Value) -> Value:
    one = b.constant_like(1.0, x)
    return b.op("fdiv", one, b.op("fadd", one, exp(b, b.op("fneg", x))))


def tanh(b: Builder, x: Value) -> Value:
    """x + x^3 P(x^2) near 0, else 1 - 2 / (exp(2|x|) + 1) with the sign put back; both are computed, one is taken."""
    if lookup.applies(b, x):
        return lookup.tanh(b, x)
    a = b.intrinsic("fabs", x)
    square = b.op("fmul", x, x)
    small = b.fma(b.op("fmul", x, square), polynomial(b, square, _TANH), x)
    one = b.constant_like(1.0, x)
    t, _, r = _reduce_exp(b, minimum_number(b, 20.0, b.op("fadd", a, a)))
    p = b.fma(polynomial(b, r, _EXP), b.op("fmul", r, r), r)
    power = _power_of_two(b, t)
    e = b.op("fadd", b.fma(power, p, power), one)
    large = b.op("fsub", one, b.op("fdiv", b.splat(b.constant_like(2.0, x), x.lanes), e))
    return b.intrinsic("copysign", b.select(b.compare("fcmp olt", a, b.constant_like(0.625, x)), small, large), x)


def erf(b: Builder, x: Value) -> Value:
    """1 - 2^t with t = log2(erfc(|x|)), as -(2^n (2^r - 1) + 2^n - 1): precise near 0 too, where n is 0. NaN passes
    through the polynomial.
    """
    if lookup.applies(b, x):
        return lookup.erf(b, x)
    a = minimum_number(b, 3.95, b.intrinsic("fabs", x))
    t = _times_polynomial(b, a, _ERF_OF_HALVES if b.halves else _ERF)
    magic = b.constant_like(_ROUND, x)
    shifted = b.op("fadd", t, magic)
    r = b.op("fsub", t, b.op("fsub", shifted, magic))
    p = _times_polynomial(b, r, _EXP2_OF_HALVES if b.halves else _EXP2)
    power = _power_of_two(b, shifted)
    return b.intrinsic("copysign", b.fma(power, p, b.op("fsub", power, b.constant_like(1.0, x))), x)


def log(b: Builder, x: Value) -> Value:
    tiny = b.compare("fcmp olt", x, b.constant_like(1.1754943508222875e-38, x))
    scaled = b.select(tiny, b.op("fmul", x, b.constant_like(8388608.0, x)), x)
    bits = b.convert("bitcast", scaled, "i32")
    e = b.op("ashr", b.op("sub", bits, b.const(0x3F3504F3, "i32")), b.const(23, "i32"))
    m = b.convert("bitcast", b.op("sub", bits, b.op("shl", e, b.const(23, "i32"))), "float")
    exponent = b.convert("sitofp", e, "float")
    exponent = b.select(tiny, b.op("fsub", exponent, b.constant_like(23.0, x)), exponent)
    f = b.op("fsub", m, b.constant_like(1.0, x))
    square = b.op("fmul", f, f)
    y = b.op("fmul", b.op("fmul", f, square), polynomial(b, f, _LOG))
    y = b.fma(exponent, b.constant_like(-2.12194440e-4, x), y)
    y = b.fma(square, b.constant_like(-0.5, x), y)
    y = b.op("fadd", f, y)
    result = b.fma(exponent, b.constant_like(0.693359375, x), y)  # 9 bits: exponent * it is exact
    zero = b.constant_like(0.0, x)
    pole = b.select(b.compare("fcmp oeq", x, zero), b.constant_like(-math.inf, x), b.constant_like(math.nan, x))
    result = b.select(b.compare("fcmp ole", x, zero), pole, result)
    return b.select(b.compare("fcmp uge", x, b.constant_like(math.inf, x)), x, result)


INLINE: dict[str, Callable[[Builder, Value], Value]] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "sigmoid": sigmoid, "tanh": tanh, "erf": erf, "log": log,
}  # fmt: skip

# operation -> (SLEEF's stem, its error bound in 1/10 ulp, the C library's name)
LIBRARY: dict[str, tuple[str, str, str]] = {
    "exp": ("exp", "u10", "exp"), "exp2": ("exp2", "u10", "exp2"), "expm1": ("expm1", "u10", "expm1"),
    "log": ("log", "u10", "log"), "log2": ("log2", "u10", "log2"), "log10": ("log10", "u10", "log10"),
    "log1p": ("log1p", "u10", "log1p"),
    "sin": ("sin", "u10", "sin"), "cos": ("cos", "u10", "cos"), "tan": ("tan", "u10", "tan"),
    "asin": ("asin", "u10", "asin"), "acos": ("acos", "u10", "acos"), "atan": ("atan", "u10", "atan"),
    "atan2": ("atan2", "u10", "atan2"),
    "sinh": ("sinh", "u10", "sinh"), "cosh": ("cosh", "u10", "cosh"), "tanh": ("tanh", "u10", "tanh"),
    "asinh": ("asinh", "u10", "asinh"), "acosh": ("acosh", "u10", "acosh"), "atanh": ("atanh", "u10", "atanh"),
    "erf": ("erf", "u10", "erf"), "erfc": ("erfc", "u15", "erfc"), "lgamma": ("lgamma", "u10", "lgamma"),
    "pow": ("pow", "u10", "pow"), "hypot": ("hypot", "u05", "hypot"), "fmod": ("fmod", "", "fmod"),
}  # fmt: skip


def _exp_any(b: Builder, x: Value) -> Value:
    return exp(b, x) if x.type == "float" else call_library(b, "exp", x)


def hyperbolic(op: str) -> Callable[[Builder, Value], Value]:
    """sinh and cosh: SLEEF overflows where exp does, a little early; there both are exp(|x| - 1) e/2 (the subtraction
    is exact)."""

    def emit(b: Builder, x: Value) -> Value:
        a = b.intrinsic("fabs", x)
        far = b.op("fmul", _exp_any(b, b.op("fsub", a, b.constant_like(1.0, x))), b.constant_like(math.e / 2, x))
        far = b.intrinsic("copysign", far, x) if op == "sinh" else far
        is_large = b.compare("fcmp ogt", a, b.constant_like(88.0 if x.type == "float" else 709.0, x))
        return b.select(is_large, far, call_library(b, op, x))

    return emit


def inverse_hyperbolic(op: str) -> Callable[[Builder, Value], Value]:
    """asinh and acosh: SLEEF squares its argument, which overflows; for large |x| both are log(2|x|) to within an ulp.
    Tiny x is its own asinh."""

    def emit(b: Builder, x: Value) -> Value:
        near = call_library(b, op, x)
        a = b.intrinsic("fabs", x)
        is_large = b.compare(
            "fcmp ogt", x if op == "acosh" else a, b.constant_like(1e9 if x.type == "float" else 1e17, x)
        )
        logarithm = log(b, a) if x.type == "float" else call_library(b, "log", a)
        far = b.op("fadd", logarithm, b.constant_like(math.log(2.0), x))
        if op == "acosh":
            return b.select(is_large, far, near)
        tiny = b.compare("fcmp olt", a, b.constant_like(1e-5 if x.type == "float" else 1e-9, x))
        return b.select(tiny, x, b.select(is_large, b.intrinsic("copysign", far, x), near))

    return emit


def call_library(b: Builder, op: str, *arguments: Value) -> Value:
    """`op` through SLEEF in whole registers; the C library's function lane by lane where SLEEF's is not to be found."""
    stem, bound, c_name = LIBRARY[op]
    values = b.match(*arguments)
    type_, lanes = values[0].type, values[0].lanes
    native = b.target.vector_bits // TYPE_BITS[type_]
    letter = "f" if type_ == "float" else "d"
    symbol = f"Sleef_{stem}{letter}{native}" + (f"_{bound}" if bound else "")
    if not b.target.has_symbol(symbol):
        return by_lane(b, c_name + ("f" if type_ == "float" else ""), values)
    if lanes == native:
        return b.call(symbol, values, type_, native)
    if lanes < native:
        wide = [_slice(b, v, 0, native) for v in values]
        return _slice(b, b.call(symbol, wide, type_, native), 0, lanes)
    parts = [
        b.call(symbol, [_slice(b, v, at, native) for v in values], type_, native) for at in range(0, lanes, native)
    ]
    return concatenate(b, parts)


def fmod(b: Builder, x: Value, y: Value) -> Value:
    """Exact for float, in double: SLEEF's for float gives NaN where x / y is large. For double it is SLEEF's, as
    eager's."""
    if x.type != "float":
        return call_library(b, "fmod", x, y)
    wide = [b.convert("fpext", value, "double") for value in (x, y)]
    return b.convert("fptrunc", call_library(b, "fmod", *wide), "float")


def _slice(b: Builder, value: Value, start: int, count: int) -> Value:
    """`count` lanes of `value` from lane `start`; lanes beyond its end repeat lane 0 (a value the function is defined
    for)."""
    if count == 1:
        return b.lane(value, start)
    if value.lanes == 1:
        return b.splat(value, count)
    indices = ", ".join(f"i32 {start + i if start + i < value.lanes else 0}" for i in range(count))
    vector = type_text(value.type, value.lanes)
    return b.value(
        f"shufflevector {vector} {value.text}, {vector} poison, <{count} x i32> <{indices}>", value.type, count
    )


def concatenate(b: Builder, parts: list[Value]) -> Value:
    """The lanes of `parts` (a power of two of them, of equal length) one after another."""
    while len(parts) > 1:
        joined = []
        for low, high in zip(parts[::2], parts[1::2]):
            vector, count = type_text(low.type, low.lanes), 2 * low.lanes
            indices = ", ".join(f"i32 {i}" for i in range(count))
            joined.append(
                b.value(
                    f"shufflevector {vector} {low.text}, {vector} {high.text}, <{count} x i32> <{indices}>",
                    low.type,
                    count,
                )
            )
        parts = joined
    return parts[0]


def by_lane(b: Builder, symbol: str, values: list[Value]) -> Value:
    """A scalar function applied to each lane in turn."""
    type_, lanes = values[0].type, values[0].lanes
    if lanes == 1:
        return b.call(symbol, values, type_)
    result = Value("poison", type_, lanes)
    for i in range(lanes):
        one = b.call(symbol, [b.lane(v, i) for v in values], type_)
        result = b.value(f"insertelement {result.typed}, {one.typed}, i64 {i}", type_, lanes)
    return result


def unary(op: str) -> Callable[[Builder, Value], Value]:
    """The emitter of a one-argument function: inline for float32 where there is a polynomial, else the library's."""
    if op in ("asinh", "acosh"):
        return inverse_hyperbolic(op)
    if op in ("sinh", "cosh"):
        return hyperbolic(op)
    inline = INLINE.get(op)

    def emit(b: Builder, x: Value) -> Value:
        if x.type == "float" and inline is not None:
            return inline(b, x)
        if op == "sigmoid":
            one = b.constant_like(1.0, x)
            return b.op("fdiv", one, b.op("fadd", one, call_library(b, "exp", b.op("fneg", x))))
        return call_library(b, op, x)

    return emit
