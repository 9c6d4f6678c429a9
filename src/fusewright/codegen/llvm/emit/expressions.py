"""Elementwise operations: one row an operation, from operands to the value, for scalars and vectors alike.

Takes the `Apply` node (for dtypes and constant arguments), the builder and the operands; gives the result. Always
holds: an integer division never traps (a zero divisor is reported through `builder.report` and gives 0), integers wrap
around, minimum and maximum propagate NaN.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable

import torch

from fusewright.codegen.llvm.emit import math, special
from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES, INTEGER_OF, TYPE_BITS, ElementType, suffix
from fusewright.loops.ir import Apply, Constant

Builder = FunctionBuilder
Emitter = Callable[[Builder, Apply, list[Value]], Value]


def _element(node: Apply, position: int = 0) -> ElementType:
    return ELEMENT_TYPES[node.args[position].dtype]


def _by_kind(float_op: str, int_op: str, bool_op: str | None = None) -> Emitter:
    """Two-argument instruction chosen by the kind of the operands."""

    def emit(b: Builder, node: Apply, args: list[Value]) -> Value:
        kind = _element(node).kind
        opcode = float_op if kind == "float" else int_op if kind == "int" else bool_op
        if opcode is None:
            raise ValueError(f"{node.op} on {node.args[0].dtype} is not supported")
        return b.op(opcode, *args)

    return emit


def _compare(float_code: str, signed_code: str, unsigned_code: str) -> Emitter:
    def emit(b: Builder, node: Apply, args: list[Value]) -> Value:
        element = _element(node)
        if element.kind == "float":
            return b.compare("fcmp " + float_code, *args)
        signed = element.kind == "int" and element.signed
        return b.compare("icmp " + (signed_code if signed else unsigned_code), *args)

    return emit


def _zero(b: Builder, like: Value) -> Value:
    return b.const(0, like.type)


# --- minimum and maximum ----------------------------------------------------------------------------------------------


def _is_number(node: Apply, position: int) -> bool:
    arg = node.args[position]
    return isinstance(arg, Constant) and arg.value == arg.value


def extreme(
    b: Builder, element: ElementType, largest: bool, a: Value, c: Value, first_is_number: bool = False
) -> Value:
    """min/max; on floats NaN propagates. `x > y ? x : y` is one maxps that gives y when either is NaN, so that only a
    NaN in x needs a select.
    """
    if element.kind == "float":
        chosen = b.select(b.compare("fcmp ogt" if largest else "fcmp olt", a, c), a, c)
        return chosen if first_is_number else b.select(b.compare("fcmp uno", a, a), a, chosen)
    if element.kind == "bool":
        return b.op("or" if largest else "and", a, c)
    prefix = "s" if element.signed else "u"
    return b.intrinsic(prefix + ("max" if largest else "min"), a, c)


def _extreme(largest: bool) -> Emitter:
    def emit(b: Builder, node: Apply, args: list[Value]) -> Value:
        a, c = args
        if _is_number(node, 1) and not _is_number(node, 0):
            a, c = c, a
        return extreme(b, _element(node), largest, a, c, _is_number(node, 0) or _is_number(node, 1))

    return emit


def _number_extreme(largest: bool) -> Emitter:
    """fmin/fmax: a NaN loses against a number."""

    def emit(b: Builder, node: Apply, args: list[Value]) -> Value:
        element = _element(node)
        if element.kind != "float":
            return extreme(b, element, largest, args[0], args[1])
        a, c = args
        chosen = b.select(b.compare("fcmp ogt" if largest else "fcmp olt", c, a), c, a)  # the first of two zeros
        return b.select(b.compare("fcmp uno", a, a), c, chosen)

    return emit


# --- division ---------------------------------------------------------------------------------------------------------


def _integer_division(b: Builder, node: Apply, args: list[Value]) -> tuple[Value, Value, Value, Value]:
    """(quotient truncated, remainder, safe divisor, zero divisor mask): neither 0 nor the overflowing -1 reaches the
    divide instruction."""
    element = _element(node)
    a, d = b.match(*args)
    zero = b.compare("icmp eq", d, _zero(b, d))
    if not isinstance(node.args[1], Constant) or node.args[1].value == 0:
        b.report(zero)
    one = b.const(1, d.type)
    if not element.signed:
        safe = b.select(zero, one, d)
        quotient = b.op("udiv", a, safe)
    else:
        minus = b.compare("icmp eq", d, b.const(-1, d.type))
        safe = b.select(b.op("or", zero, minus), one, d)
        quotient = b.op("sdiv", a, safe)
        quotient = b.select(minus, b.op("sub", _zero(b, a), quotient), quotient)
    remainder = b.op("sub", a, b.op("mul", quotient, d))
    quotient = b.select(zero, _zero(b, a), quotient)
    remainder = b.select(zero, _zero(b, a), remainder)
    return quotient, remainder, d, zero


def _needs_floor(b: Builder, remainder: Value, divisor: Value) -> Value:
    """Whether a truncated division must be moved one towards minus infinity: a remainder whose sign is not the
    divisor's."""
    differs = b.compare("icmp slt", b.op("xor", remainder, divisor), _zero(b, divisor))
    return b.op("and", differs, b.compare("icmp ne", remainder, _zero(b, remainder)))


def _trunc_divide(b: Builder, node: Apply, args: list[Value]) -> Value:
    if _element(node).kind == "float":
        return b.intrinsic("trunc", b.op("fdiv", *args))
    return _integer_division(b, node, args)[0]


def _div(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.op("fdiv", *args) if _element(node).kind == "float" else _trunc_divide(b, node, args)


def _floor_divide(b: Builder, node: Apply, args: list[Value]) -> Value:
    element = _element(node)
    if element.kind == "float":
        return _floor_divide_float(b, *b.match(*args))
    quotient, remainder, divisor, _ = _integer_division(b, node, args)
    if not element.signed:
        return quotient
    return b.select(_needs_floor(b, remainder, divisor), b.op("sub", quotient, b.const(1, quotient.type)), quotient)


def _floor_divide_float(b: Builder, x: Value, y: Value) -> Value:
    """Python's algorithm, as c10::div_floor_floating: exact even where x / y rounds up to an integer."""
    zero, one = b.constant_like(0.0, x), b.constant_like(1.0, x)
    modulus = math.fmod(b, x, y)
    quotient = b.op("fdiv", b.op("fsub", x, modulus), y)
    opposite = b.op("xor", b.compare("fcmp olt", y, zero), b.compare("fcmp olt", modulus, zero))
    inexact = b.op("and", b.compare("fcmp une", modulus, zero), opposite)
    quotient = b.select(inexact, b.op("fsub", quotient, one), quotient)
    floored = b.intrinsic("floor", quotient)
    too_low = b.compare("fcmp ogt", b.op("fsub", quotient, floored), b.constant_like(0.5, x))
    floored = b.select(too_low, b.op("fadd", floored, one), floored)
    ratio = b.op("fdiv", x, y)
    result = b.select(b.compare("fcmp une", quotient, zero), floored, b.intrinsic("copysign", zero, ratio))
    return b.select(b.compare("fcmp oeq", y, zero), ratio, result)


def _remainder(b: Builder, node: Apply, args: list[Value]) -> Value:
    element = _element(node)
    if element.kind == "float":
        x, y = b.match(*args)
        zero = b.constant_like(0.0, x)
        modulus = math.fmod(b, x, y)
        opposite = b.op("xor", b.compare("fcmp olt", y, zero), b.compare("fcmp olt", modulus, zero))
        move = b.op("and", b.compare("fcmp une", modulus, zero), opposite)
        return b.select(move, b.op("fadd", modulus, y), modulus)
    _, remainder, divisor, _ = _integer_division(b, node, args)
    if not element.signed:
        return remainder
    return b.select(_needs_floor(b, remainder, divisor), b.op("add", remainder, divisor), remainder)


def _fmod(b: Builder, node: Apply, args: list[Value]) -> Value:
    if _element(node).kind == "float":
        return math.fmod(b, *b.match(*args))
    return _integer_division(b, node, args)[1]


# --- powers, signs, rounding ------------------------------------------------------------------------------------------


def _power_of_half(b: Builder, x: Value) -> Value:
    """C's pow(x, 0.5), which is no root of -0 and -inf: 0 and inf."""
    root = b.intrinsic("fabs", b.intrinsic("sqrt", x))
    lowest = b.compare("fcmp oeq", x, b.constant_like(-pymath.inf, x))
    return b.select(lowest, b.constant_like(pymath.inf, x), root)


_POWERS: dict[float, Callable[[Builder, Value], Value]] = {  # a few exponents of which `pow` is something quicker
    2.0: lambda b, x: b.op("fmul", x, x),
    3.0: lambda b, x: b.op("fmul", b.op("fmul", x, x), x),
    0.5: _power_of_half,
    -0.5: lambda b, x: b.op("fdiv", b.constant_like(1.0, x), _power_of_half(b, x)),
    -1.0: lambda b, x: b.op("fdiv", b.constant_like(1.0, x), x),
    -2.0: lambda b, x: b.op("fdiv", b.constant_like(1.0, x), b.op("fmul", x, x)),
    1.0: lambda b, x: x,
}


def _pow(b: Builder, node: Apply, args: list[Value]) -> Value:
    exponent = node.args[1]
    element = _element(node)
    if element.kind == "int":
        return special.integer_power(b, args[0], args[1], signed=element.signed)
    if isinstance(exponent, Constant) and exponent.value in _POWERS:
        return _POWERS[float(exponent.value)](b, args[0])
    return math.call_library(b, "pow", *args)


def _neg(b: Builder, node: Apply, args: list[Value]) -> Value:
    (x,) = args
    return b.op("fneg", x) if _element(node).kind == "float" else b.op("sub", b.splat(_zero(b, x), x.lanes), x)


def _abs(b: Builder, node: Apply, args: list[Value]) -> Value:
    (x,) = args
    element = _element(node)
    if element.kind == "float":
        return b.intrinsic("fabs", x)
    if not element.signed:
        return x
    return b.select(b.compare("icmp slt", x, _zero(b, x)), b.op("sub", b.splat(_zero(b, x), x.lanes), x), x)


def _sign(b: Builder, node: Apply, args: list[Value]) -> Value:
    (x,) = args
    element = _element(node)
    if element.kind == "float":
        zero = b.constant_like(0.0, x)
        low = b.select(b.compare("fcmp olt", x, zero), b.constant_like(-1.0, x), zero)
        return b.select(b.compare("fcmp ogt", x, zero), b.constant_like(1.0, x), low)
    zero, one = _zero(b, x), b.const(1, x.type)
    if not element.signed:
        return b.select(b.compare("icmp ne", x, zero), one, zero)
    low = b.select(b.compare("icmp slt", x, zero), b.const(-1, x.type), zero)
    return b.select(b.compare("icmp sgt", x, zero), one, low)


def _rounding(name: str) -> Emitter:
    def emit(b: Builder, node: Apply, args: list[Value]) -> Value:
        return b.intrinsic(name, args[0]) if _element(node).kind == "float" else args[0]

    return emit


def _sqrt(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.intrinsic("sqrt", args[0])


def _rsqrt(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.op("fdiv", b.splat(b.constant_like(1.0, args[0]), args[0].lanes), b.intrinsic("sqrt", args[0]))


def _reciprocal(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.op("fdiv", b.splat(b.constant_like(1.0, args[0]), args[0].lanes), args[0])


def _frac(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.op("fsub", args[0], b.intrinsic("trunc", args[0]))


def _copysign(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.intrinsic("copysign", *args)


def _nextafter(b: Builder, node: Apply, args: list[Value]) -> Value:
    """One step in the ordered integers that floats are, away from 0 or towards it."""
    x, y = b.match(*args)
    integer = INTEGER_OF[x.type]
    zero = b.constant_like(0.0, x)
    bits = b.convert("bitcast", x, integer)
    away = b.op("xor", b.compare("fcmp olt", x, y), b.compare("fcmp olt", x, zero))
    stepped = b.op("add", bits, b.select(away, b.const(1, integer), b.const(-1, integer)))
    smallest = b.convert("bitcast", b.splat(b.const(1, integer), x.lanes), x.type)
    result = b.select(
        b.compare("fcmp oeq", x, zero), b.intrinsic("copysign", smallest, y), b.convert("bitcast", stepped, x.type)
    )
    result = b.select(b.compare("fcmp oeq", x, y), y, result)
    return b.select(b.compare("fcmp uno", x, y), b.op("fadd", x, y), result)


# --- bits and masks ---------------------------------------------------------------------------------------------------


def _bits(opcode: str) -> Emitter:
    return lambda b, node, args: b.op(opcode, *args)


def _not(b: Builder, node: Apply, args: list[Value]) -> Value:
    (x,) = args
    return b.op("xor", x, b.const(1 if x.type == "i1" else -1, x.type))


def _shift_left(b: Builder, node: Apply, args: list[Value]) -> Value:
    a, n = b.match(*args)
    bits = b.const(TYPE_BITS[a.type], a.type)
    good = b.compare("icmp ult", n, bits)
    shifted = b.op("shl", a, b.select(good, n, _zero(b, n)))
    return b.select(good, shifted, _zero(b, a))


def _shift_right(b: Builder, node: Apply, args: list[Value]) -> Value:
    a, n = b.match(*args)
    signed = _element(node).signed
    last = b.const(TYPE_BITS[a.type] - 1, a.type)
    good = b.compare("icmp ule", n, last)
    shifted = b.op("ashr" if signed else "lshr", a, b.select(good, n, last))
    return shifted if signed else b.select(good, shifted, _zero(b, a))


def _where(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.select(*args)


def _isnan(b: Builder, node: Apply, args: list[Value]) -> Value:
    return b.compare("fcmp uno", args[0], args[0]) if _element(node).kind == "float" else b.const(0, "i1")


def _isinf(b: Builder, node: Apply, args: list[Value]) -> Value:
    if _element(node).kind != "float":
        return b.const(0, "i1")
    return b.compare("fcmp oeq", b.intrinsic("fabs", args[0]), b.constant_like(pymath.inf, args[0]))


def _isfinite(b: Builder, node: Apply, args: list[Value]) -> Value:
    if _element(node).kind != "float":
        return b.const(1, "i1")
    return b.compare("fcmp olt", b.intrinsic("fabs", args[0]), b.constant_like(pymath.inf, args[0]))


def _signbit(b: Builder, node: Apply, args: list[Value]) -> Value:
    (x,) = args
    element = _element(node)
    if element.kind == "float":
        x = b.convert("bitcast", x, INTEGER_OF[x.type])
    elif not element.signed:
        return b.const(0, "i1")
    return b.compare("icmp slt", x, _zero(b, x))


# --- conversions ------------------------------------------------------------------------------------------------------


def convert(b: Builder, value: Value, source: torch.dtype, target: torch.dtype) -> Value:
    """`value` from dtype to dtype, as C++'s static_cast does it in ATen: floats truncate, integers wrap, anything to
    bool is `!= 0`."""
    if source == target:
        return value
    from_, to = ELEMENT_TYPES[source], ELEMENT_TYPES[target]
    if from_.kind == "half":
        return convert(b, _widen_half(b, value, source), torch.float32, target)
    if to.kind == "half":
        return _narrow_half(b, convert(b, value, source, torch.float32), target)
    if to.kind == "bool":
        zero = b.const(0, value.type)
        return b.compare("fcmp une" if from_.kind == "float" else "icmp ne", value, zero)
    if from_.kind == "float":
        if to.kind == "float":
            return b.convert("fpext" if to.size > from_.size else "fptrunc", value, to.register)
        return _float_to_int(b, value, to)
    unsigned = from_.kind == "bool" or not from_.signed
    if to.kind == "float":
        return b.convert("uitofp" if unsigned else "sitofp", value, to.register)
    width, wanted = TYPE_BITS[value.type], TYPE_BITS[to.register]
    if width == wanted:
        return value
    return b.convert("trunc" if wanted < width else "zext" if unsigned else "sext", value, to.register)


def _float_to_int(b: Builder, value: Value, to: ElementType) -> Value:
    """Narrow targets go through i32, as x86 compilers do: 300.0 becomes the uint8 44, -1.0 becomes 255. What is out of
    range is what the processor makes of it: LLVM's `fptosi` has no value there, and where LLVM finds the number itself
    it takes what lies in a register. It finds nothing behind the constrained form, which is the same instruction."""
    if to.size == 8:
        return _truncate(b, "fptosi" if to.signed else "fptoui", value, "i64")
    wide = not to.signed and (to.size == 4 or value.type == "double")  # as ATen does: the uint8 of 4294967295.0 is 255
    return b.convert("trunc", _truncate(b, "fptosi", value, "i64" if wide else "i32"), to.register)


def _truncate(b: Builder, opcode: str, value: Value, type_: str) -> Value:
    symbol = f"llvm.experimental.constrained.{opcode}.{suffix(type_, value.lanes)}.{suffix(value.type, value.lanes)}"
    return b.call(symbol, [value, Value('!"fpexcept.ignore"', "metadata")], type_, value.lanes)


def _widen_half(b: Builder, value: Value, source: torch.dtype) -> Value:
    if source is torch.float16:
        return b.convert("fpext", value, "float")
    wide = b.op("shl", b.convert("zext", value, "i32"), b.const(16, "i32"))
    return b.convert("bitcast", wide, "float")


def _narrow_half(b: Builder, value: Value, target: torch.dtype) -> Value:
    """Round to nearest even. Not AVX512-BF16's instruction: it takes subnormals (below 1.2e-38) for 0, where eager
    keeps them."""
    if target is torch.float16:
        return b.convert("fptrunc", value, "half")
    bits = b.convert("bitcast", value, "i32")
    below = b.op("add", bits, b.const(0x7FFF, "i32"))
    if b.target.masks and value.lanes > 1:  # three instructions, where the shift below takes four
        odd = b.compare("icmp ne", b.op("and", bits, b.const(1 << 16, "i32")), b.const(0, "i32"))
        rounded = b.select(odd, b.op("add", bits, b.const(0x8000, "i32")), below)
    else:
        rounded = b.op("add", below, b.op("and", b.op("lshr", bits, b.const(16, "i32")), b.const(1, "i32")))
    if not b.plain_nans:
        rounded = b.select(b.compare("fcmp uno", value, value), b.const(0x7FC00000, "i32"), rounded)
    result = b.convert("trunc", b.op("lshr", rounded, b.const(16, "i32")), "i16")
    b.unrounded[result.text] = value
    return result


def _cast(b: Builder, node: Apply, args: list[Value]) -> Value:
    return convert(b, args[0], node.args[0].dtype, node.dtype)


def _bitcast(b: Builder, node: Apply, args: list[Value]) -> Value:
    source, target = _element(node), ELEMENT_TYPES[node.dtype]
    if source.size != target.size or "bool" in (source.kind, target.kind):
        raise ValueError(f"bitcast of {node.args[0].dtype} to {node.dtype}: not the same width")
    return args[0] if args[0].type == target.register else b.convert("bitcast", args[0], target.register)


def _unary(op: str) -> Emitter:
    emit = math.unary(op)
    return lambda b, node, args: emit(b, args[0])


def _binary_library(op: str) -> Emitter:
    return lambda b, node, args: math.call_library(b, op, *args)


EMITTERS: dict[str, Emitter] = {
    # A product is rounded before it is added to, as by eager, and so is one number wherever it is computed: exp(s * x
    # - max(s * x)) is at most 1, and a gradient finds its forward's scores. Only a sum over a loop takes it unrounded.
    "add": _by_kind("fadd", "add", "or"),
    "sub": _by_kind("fsub", "sub"),
    "mul": _by_kind("fmul contract", "mul", "and"),
    "div": _div,
    "floor_divide": _floor_divide,
    "trunc_divide": _trunc_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "pow": _pow,
    "fma": lambda b, node, args: b.intrinsic("fmuladd", *args),  # two roundings where the processor has no such unit
    "minimum": _extreme(largest=False),
    "maximum": _extreme(largest=True),
    "fmin": _number_extreme(largest=False),
    "fmax": _number_extreme(largest=True),
    "eq": _compare("oeq", "eq", "eq"),
    "ne": _compare("une", "ne", "ne"),
    "lt": _compare("olt", "slt", "ult"),
    "le": _compare("ole", "sle", "ule"),
    "gt": _compare("ogt", "sgt", "ugt"),
    "ge": _compare("oge", "sge", "uge"),
    "logical_and": _bits("and"),
    "logical_or": _bits("or"),
    "logical_xor": _bits("xor"),
    "logical_not": _not,
    "bitwise_and": _bits("and"),
    "bitwise_or": _bits("or"),
    "bitwise_xor": _bits("xor"),
    "bitwise_not": _not,
    "shift_left": _shift_left,
    "shift_right": _shift_right,
    "where": _where,
    "cast": _cast,
    "bitcast": _bitcast,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "round": _rounding("roundeven"),
    "trunc": _rounding("trunc"),
    "frac": _frac,
    "isnan": _isnan,
    "isinf": _isinf,
    "isfinite": _isfinite,
    "signbit": _signbit,
    "copysign": _copysign,
    "nextafter": _nextafter,
    **{
        op: _unary(op)
        for op in (*math.INLINE, "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")
    },
    **{op: _unary(op) for op in ("asinh", "acosh", "atanh", "erfc", "lgamma")},
    **{op: _binary_library(op) for op in ("atan2", "hypot")},
    "erfinv": lambda b, node, args: special.erfinv(b, *args),
    "digamma": lambda b, node, args: special.digamma(b, *args),
}
