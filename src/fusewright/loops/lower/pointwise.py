"""Elementwise arithmetic, comparison, logic, rounding and conversion.

Takes operands that broadcast; gives lazy values. Always holds: an operator computes in the promoted dtype of its
operands, as TensorIterator does (half types in float32), and the result's dtype is the one that its type says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.promotion import computing, number, promoted_dtype, refuse_checked
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value


def operand(call: Call, value: Any, dtype: torch.dtype) -> Expression:
    """A tensor (broadcast to the result), number or size as an expression of `dtype`."""
    if isinstance(value, Value):
        indices = call.lowering.broadcast(value, call.type.shape, call.axes)
        return call.lowering.read(value, indices, dtype)
    if isinstance(value, float) and not dtype.is_floating_point:
        raise Fallback("a float number in integer arithmetic")
    return number(value, dtype)


def fill_value(call: Call, value: Any) -> Expression:
    """What writing `value`, a tensor without dimensions or a number, leaves in elements of the result."""
    dtype = ex.compute_dtype(call.type.dtype)
    return operand(call, value, dtype) if isinstance(value, Value) else number(value, dtype, call.type.dtype)


def elementwise(
    call: Call, compute: Callable[..., Expression], operands: Sequence[Any], as_float: bool = False
) -> Value:
    dtype = computing(operands, as_float)
    return call.result(compute(*(operand(call, value, dtype) for value in operands)))


def _applied(op: str, result: torch.dtype | None = None) -> Callable[..., Expression]:
    return lambda *args: ex.apply(op, *args, dtype=result or args[0].dtype)


# --- one argument ----------------------------------------------------------------------------------------------------

FLOAT_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf erfc erfinv lgamma digamma"
).split()
"""Operators that make a float of an integer."""

BOUNDED = frozenset("log log2 log10 log1p sqrt rsqrt asin acos acosh atanh".split())
"""Those of them that give NaN beyond an end of where they are defined."""

SAME_UNARY = ("neg", "abs")
ROUNDING = ("floor", "ceil", "round", "trunc")
"""Rounding leaves integers as they are."""


def _register_unary() -> None:
    for name in FLOAT_UNARY:
        lowers(name)(lambda call, self, name=name: elementwise(call, _float(name, self), (self,), as_float=True))
    for name in SAME_UNARY:
        lowers(name)(lambda call, self, name=name: elementwise(call, _applied(name), (self,)))
    for name in ROUNDING:
        lowers(name)(lambda call, self, name=name: elementwise(call, lambda x: _whole(name, self, x), (self,)))


def _float(name: str, of: Value) -> Callable[[Expression], Expression]:
    return functools.partial(_step, name, of) if name in BOUNDED else _applied(name)


def _whole(name: str, of: Value, x: Expression) -> Expression:
    return _step(name, of, x) if x.dtype.is_floating_point else x


def _step(name: str, of: Any, *args: Expression) -> Expression:
    """A half is rounded first: what has near results for near arguments is computed in float32, but this has not (a
    difference that eager rounds to 0 may be less, and has no root)."""
    first, *rest = args
    return ex.apply(name, _rounded(of, first), *rest, dtype=first.dtype)


def _rounded(of: Any, x: Expression) -> Expression:
    half = isinstance(of, Value) and of.dtype in ex.HALF and x.dtype is torch.float32
    return ex.rounded(x, of.dtype) if half else x


_register_unary()


@lowers("bitwise_not")
def bitwise_not(call: Call, self: Value) -> Value:
    return elementwise(
        call, lambda x: ex.invert(x) if x.dtype is torch.bool else ex.apply("bitwise_not", x, dtype=x.dtype), (self,)
    )


@lowers("frac")
def frac(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: _step("frac", self, x), (self,))


@lowers("sign", "sgn")
def sign(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: x if x.dtype is torch.bool else ex.apply("sign", x, dtype=x.dtype), (self,))


@lowers("square")
def square(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.mul(x, x), (self,))


@lowers("positive")
def positive(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: x, (self,))


@lowers("sinc")
def sinc(call: Call, self: Value) -> Value:
    def compute(x: Expression) -> Expression:
        product = ex.mul(x, torch.pi)
        return ex.where(ex.eq(x, 0), 1, ex.div(ex.apply("sin", product, dtype=x.dtype), product))

    return elementwise(call, compute, (self,), as_float=True)


@lowers("round.decimals")
def round_decimals(call: Call, self: Value, *, decimals: int) -> Value:
    if not self.dtype.is_floating_point or self.dtype in ex.HALF:
        raise Fallback("rounding of half or integer values to decimals")
    scale = 10.0 ** abs(decimals)

    def compute(x: Expression) -> Expression:
        if decimals >= 0:
            return ex.div(ex.apply("round", ex.mul(x, scale), dtype=x.dtype), scale)
        return ex.mul(ex.apply("round", ex.div(x, scale), dtype=x.dtype), scale)

    return elementwise(call, compute, (self,))


@lowers("logical_not")
def logical_not(call: Call, self: Value) -> Value:
    return call.result(ex.invert(operand(call, self, torch.bool)))


@lowers("isnan", "isinf", "isfinite")
def classify(call: Call, self: Value) -> Value:
    name = call.target._schema.name.partition("::")[2]

    def compute(x: Expression) -> Expression:
        if x.dtype.is_floating_point:
            return ex.apply(name, x, dtype=torch.bool)
        return ir.constant(name == "isfinite", torch.bool)

    return elementwise(call, compute, (self,))


@lowers("isposinf", "isneginf")
def signed_infinity(call: Call, self: Value) -> Value:
    bound = float("inf") if "posinf" in call.target._schema.name else float("-inf")
    return elementwise(
        call, lambda x: ex.eq(x, bound) if x.dtype.is_floating_point else ir.constant(False, torch.bool), (self,)
    )


@lowers("signbit")
def signbit(call: Call, self: Value) -> Value:
    def compute(x: Expression) -> Expression:
        if x.dtype is torch.bool:
            return ir.constant(False, torch.bool)
        return ex.apply("signbit", x, dtype=torch.bool) if x.dtype.is_floating_point else ex.lt(x, 0)

    return elementwise(call, compute, (self,))


@lowers("nan_to_num")
def nan_to_num(
    call: Call, self: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    limits = torch.finfo(self.dtype) if self.dtype.is_floating_point else None

    def compute(x: Expression) -> Expression:
        if limits is None:
            return x
        high = limits.max if posinf is None else posinf
        low = limits.min if neginf is None else neginf
        finite = ex.where(ex.eq(x, float("inf")), high, ex.where(ex.eq(x, float("-inf")), low, x))
        return ex.where(ex.isnan(x), 0.0 if nan is None else nan, finite)

    return elementwise(call, compute, (self,))


@lowers("logit")
def logit(call: Call, self: Value, eps: float | None = None) -> Value:
    def compute(x: Expression) -> Expression:
        if eps is not None:
            x = ex.where(ex.lt(x, eps), eps, ex.where(ex.gt(x, 1 - eps), 1 - eps, x))
        return ex.log(ex.div(x, ex.sub(ir.constant(1, x.dtype), x)))

    return elementwise(call, compute, (self,), as_float=True)


@lowers("deg2rad", "rad2deg")
def angle_unit(call: Call, self: Value) -> Value:
    factor = torch.pi / 180 if "deg2rad" in call.target._schema.name else 180 / torch.pi
    return elementwise(call, lambda x: ex.mul(x, factor), (self,), as_float=True)


# --- two arguments ---------------------------------------------------------------------------------------------------


def plus(call: Call, first: Any, second: Any, alpha: Any, minus: bool = False) -> Value:
    """first + alpha * second, or their difference. A scaled float is not rounded before it is added, as in eager, whose
    CPU kernel rounds the factor of halves."""
    dtype = computing((first, second))
    a, b = operand(call, first, dtype), operand(call, second, dtype)
    combine = ex.sub if minus else ex.either if dtype is torch.bool else ex.add
    if isinstance(alpha, (int, float)) and alpha == 1:
        return call.result(combine(a, b))
    factor = operand(call, alpha, dtype)
    if dtype is not call.type.dtype and call.type.dtype.is_floating_point and call.type.device.type == "cpu":
        factor = ex.widen(ir.cast(factor, call.type.dtype))
    if dtype.is_floating_point:
        return call.result(ex.fused_multiply_add(b, ex.neg(factor) if minus else factor, a))
    return call.result(combine(a, ex.mul(b, factor)))


@lowers("add.Tensor", "add.Scalar")
def add(call: Call, self: Value, other: Any, alpha: Any = 1) -> Value:
    return plus(call, self, other, alpha)


@lowers("sub.Tensor", "sub.Scalar")
def sub(call: Call, self: Value, other: Any, alpha: Any = 1) -> Value:
    return plus(call, self, other, alpha, minus=True)


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(call: Call, self: Value, other: Any, alpha: Any = 1) -> Value:
    return plus(call, other, self, alpha, minus=True)


@lowers("mul.Tensor", "mul.Scalar")
def mul(call: Call, self: Value, other: Any) -> Value:
    return elementwise(call, lambda a, b: ex.both(a, b) if a.dtype is torch.bool else ex.mul(a, b), (self, other))


@lowers("div.Tensor", "div.Scalar")
def div(call: Call, self: Value, other: Any) -> Value:
    return elementwise(call, ex.div, (self, other), as_float=True)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(call: Call, self: Value, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(call, self, other)
    if rounding_mode == "floor":
        return floor_divide(call, self, other)
    if call.type.dtype in ex.HALF:
        raise Fallback("the integer part of a quotient whose rounding to half precision shows")
    return elementwise(call, _applied("trunc_divide"), (self, other))


@lowers("floor_divide", "floor_divide.Scalar")
def floor_divide(call: Call, self: Value, other: Any) -> Value:
    if call.type.dtype in ex.HALF:
        raise Fallback("a floor of a quotient whose rounding to half precision shows")
    return elementwise(call, _applied("floor_divide"), (self, other))


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(call: Call, self: Any, other: Any) -> Value:
    return elementwise(call, lambda *args: _step("remainder", self, *args), (self, other))


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(call: Call, self: Value, other: Any) -> Value:
    return elementwise(call, lambda *args: _step("fmod", self, *args), (self, other))


@lowers("atan2", "hypot", "nextafter", "copysign.Tensor", "copysign.Scalar")
def float_binary(call: Call, self: Value, other: Any) -> Value:
    name = call.target._schema.name.partition("::")[2]
    if promoted_dtype((self, other)) in ex.HALF and name == "nextafter":
        raise Fallback("nextafter of half values")
    return elementwise(call, _applied(name), (self, other), as_float=True)


@lowers("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(call: Call, self: Any, exponent: Any) -> Value:
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and isinstance(self, Value):
        special = POWERS.get(float(exponent))
        dtype = computing((self, exponent))
        if self.dtype is torch.float16 and abs(exponent) == 0.5:
            special = None  # ATen calls C's pow for halves, and their roots of -inf are other ones
        if special is not None and (dtype.is_floating_point or exponent in (0, 1, 2, 3)):
            given = operand(call, self, dtype)
            return call.result(special(_rounded(self, given) if abs(exponent) == 0.5 else given))
    return elementwise(call, lambda *args: _step("pow", self, *args), (self, exponent))


POWERS: dict[float, Callable[[Expression], Expression]] = {
    0.0: lambda x: ir.constant(1, x.dtype),
    0.5: ex.sqrt,
    1.0: lambda x: x,
    2.0: lambda x: ex.mul(x, x),
    3.0: lambda x: ex.mul(ex.mul(x, x), x),
    -0.5: ex.rsqrt,
    -1.0: ex.reciprocal,
    -2.0: lambda x: ex.reciprocal(ex.mul(x, x)),
}
"""The exponents that ATen's CPU kernel treats apart (pow.Tensor_Scalar)."""


@lowers("maximum", "minimum", "fmax", "fmin")
def extremum(call: Call, self: Value, other: Value) -> Value:
    name = call.target._schema.name.partition("::")[2]

    def compute(a: Expression, b: Expression) -> Expression:
        if a.dtype is torch.bool:
            return (ex.either if name in ("maximum", "fmax") else ex.both)(a, b)
        plain = {"fmax": "maximum", "fmin": "minimum"}.get(name, name)
        return ex.apply(name if a.dtype.is_floating_point else plain, a, b, dtype=a.dtype)

    return elementwise(call, compute, (self, other))


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(call: Call, self: Value, end: Value, weight: Any) -> Value:
    """ATen's formula: the form that is exact at the nearer end. The product is not rounded, as in eager."""
    dtype = computing((self, end))

    def compute(a: Expression, b: Expression, w: Expression) -> Expression:
        span = ex.sub(b, a)
        rest = ex.sub(ir.constant(1, dtype), w)
        from_start, from_end = ex.fused_multiply_add(w, span, a), ex.fused_multiply_add(ex.neg(span), rest, b)
        return ex.where(ex.lt(ex.absolute(w), 0.5), from_start, from_end)

    return call.result(compute(operand(call, self, dtype), operand(call, end, dtype), operand(call, weight, dtype)))


@lowers("addcmul", "addcdiv")
def add_scaled(call: Call, self: Value, tensor1: Value, tensor2: Value, *, value: Any = 1) -> Value:
    dtype = computing((self, tensor1, tensor2))
    a, b, c = (operand(call, item, dtype) for item in (self, tensor1, tensor2))
    scaled = ex.mul(operand(call, value, dtype), b)
    if "addcdiv" in call.target._schema.name:
        return call.result(ex.add(a, ex.div(scaled, c)))
    if dtype.is_floating_point:  # the product is not rounded, as in eager
        return call.result(ex.fused_multiply_add(scaled, c, a))
    return call.result(ex.add(a, ex.mul(scaled, c)))


@lowers("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self", "special_xlog1py", "special_xlog1py.other_scalar")
def xlogy(call: Call, self: Any, other: Any) -> Value:
    logarithm = ex.log1p if "xlog1py" in call.target._schema.name else ex.log

    def compute(x: Expression, y: Expression) -> Expression:
        return ex.where(ex.isnan(y), float("nan"), ex.where(ex.eq(x, 0), 0, ex.mul(x, logarithm(y))))

    return elementwise(call, compute, (self, other), as_float=True)


@lowers("logaddexp", "logaddexp2")
def logaddexp(call: Call, self: Value, other: Value) -> Value:
    two = "logaddexp2" in call.target._schema.name

    def compute(a: Expression, b: Expression) -> Expression:
        distance = ex.neg(ex.absolute(ex.sub(a, b)))
        if two:
            tail = ex.mul(ex.log1p(ex.apply("exp2", distance, dtype=a.dtype)), 1.4426950408889634)
        else:
            tail = ex.log1p(ex.exp(distance))
        return ex.where(ex.both(ex.isinf(a), ex.eq(a, b)), a, ex.add(ex.maximum(a, b), tail))

    return elementwise(call, compute, (self, other), as_float=True)


@lowers("heaviside")
def heaviside(call: Call, self: Value, values: Value) -> Value:
    def compute(x: Expression, at_zero: Expression) -> Expression:
        if x.dtype is torch.bool:
            return ex.either(x, at_zero)
        return ex.where(ex.eq(x, 0), at_zero, ir.cast(ex.gt(x, 0), x.dtype))

    return elementwise(call, compute, (self, values))


# --- comparison and logic --------------------------------------------------------------------------------------------


@lowers(*(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")))
def compare(call: Call, self: Value, other: Any) -> Value:
    name = call.target._schema.name.partition("::")[2]
    dtype = computing((self, other))

    def compared(value: Any) -> Expression:
        found = operand(call, value, dtype)
        if dtype is torch.bool:
            return ir.cast(found, torch.uint8)
        return ex.rounded(found, value.dtype) if isinstance(value, Value) else found

    return call.result(ex.apply(name, compared(self), compared(other), dtype=torch.bool))


@lowers("logical_and", "logical_or", "logical_xor")
def logical(call: Call, self: Value, other: Value) -> Value:
    name = call.target._schema.name.partition("::")[2]
    return call.result(
        ex.apply(name, operand(call, self, torch.bool), operand(call, other, torch.bool), dtype=torch.bool)
    )


@lowers(*(f"bitwise_{name}.{kind}" for name in ("and", "or", "xor") for kind in ("Tensor", "Scalar", "Scalar_Tensor")))
@lowers("__and__.Tensor", "__and__.Scalar", "__or__.Tensor", "__or__.Scalar", "__xor__.Tensor", "__xor__.Scalar")
def bitwise(call: Call, self: Any, other: Any) -> Value:
    name = call.target._schema.name.partition("::")[2].strip("_").removeprefix("bitwise_")

    def compute(a: Expression, b: Expression) -> Expression:
        return ex.apply(f"{'logical' if a.dtype is torch.bool else 'bitwise'}_{name}", a, b, dtype=a.dtype)

    return elementwise(call, compute, (self, other))


@lowers(
    *(
        f"bitwise_{side}_shift.{kind}"
        for side in ("left", "right")
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    )
)
@lowers("__lshift__.Tensor", "__lshift__.Scalar", "__rshift__.Tensor", "__rshift__.Scalar")
def shift(call: Call, self: Any, other: Any) -> Value:
    """Shifts by 0 .. bits - 1; ATen's rule for other amounts: 0 for left shifts, the sign for right shifts."""
    left = "left" in call.target._schema.name or "lshift" in call.target._schema.name
    dtype = computing((self, other))
    if dtype.is_floating_point or dtype is torch.bool:
        raise Fallback("a shift of floats")
    a, b = operand(call, self, dtype), operand(call, other, dtype)
    bits = torch.iinfo(dtype).bits
    last = bits - 1 if left or dtype is not torch.uint8 else bits
    outside = ex.either(ex.lt(b, 0), ex.ge(b, bits)) if dtype.is_signed else ex.ge(b, bits)
    amount = ex.where(outside, 0, b)
    if left:
        return call.result(ex.where(outside, 0, ex.apply("shift_left", a, amount, dtype=dtype)))
    limit = (
        ex.apply("shift_right", a, ir.constant(last, dtype), dtype=dtype) if dtype.is_signed else ir.constant(0, dtype)
    )
    return call.result(ex.where(outside, limit, ex.apply("shift_right", a, amount, dtype=dtype)))


@lowers("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(call: Call, condition: Value, self: Any, other: Any) -> Value:
    dtype = computing((self, other))
    chosen, rest = operand(call, self, dtype), operand(call, other, dtype)
    return call.result(ex.apply("where", operand(call, condition, torch.bool), chosen, rest, dtype=dtype))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(call: Call, self: Value, mask: Value, value: Any) -> Value:
    refuse_checked(self, value)
    dtype = ex.compute_dtype(self.dtype)
    chosen, kept = fill_value(call, value), operand(call, self, dtype)
    return call.result(ex.apply("where", operand(call, mask, torch.bool), chosen, kept, dtype=dtype))


# --- bounds ----------------------------------------------------------------------------------------------------------


@lowers("clamp", "clamp.Tensor")
def clamp(call: Call, self: Value, min: Any = None, max: Any = None) -> Value:
    """min(max(x, low), high), NaN of any of them propagating; where low > high the result is high."""
    dtype = computing((self, min, max))
    if dtype is torch.bool:
        raise Fallback("bounds of bools")
    value = operand(call, self, dtype)
    if min is not None:
        value = ex.maximum(value, operand(call, min, dtype))
    if max is not None:
        value = ex.minimum(value, operand(call, max, dtype))
    return call.result(value)


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(call: Call, self: Value, min: Any) -> Value:
    return clamp(call, self, min, None)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(call: Call, self: Value, max: Any) -> Value:
    return clamp(call, self, None, max)


# --- conversion and copies -------------------------------------------------------------------------------------------


@lowers("_to_copy", "prims::convert_element_type")
def to_copy(call: Call, self: Value, dtype: torch.dtype | None = None, **options: Any) -> Value:
    """An explicit conversion rounds, even between operators that would otherwise stay in float32."""
    if self.type.device != call.type.device:
        raise Fallback("a copy between devices")
    value = call.lowering.at(self, call.axes)
    if ex.compute_dtype(call.type.dtype) is not call.type.dtype and ex.compute_dtype(self.dtype) is self.dtype:
        return call.result(ir.cast(value, call.type.dtype))
    return call.result(ir.cast(ex.widen(ir.cast(value, self.dtype)), call.type.dtype))


@lowers("clone", "lift_fresh_copy", "contiguous")
def clone(call: Call, self: Value, **options: Any) -> Value:
    return call.result(call.lowering.at(self, call.axes))


@lowers("copy")
def copy(call: Call, self: Value, src: Value, non_blocking: bool = False) -> Value:
    dtype = ex.compute_dtype(call.type.dtype)
    return call.result(operand(call, src, dtype))


@lowers("fill.Scalar", "fill.Tensor")
def fill(call: Call, self: Value, value: Any) -> Value:
    return call.result(fill_value(call, value))


@lowers("threshold_backward")
def threshold_backward(call: Call, grad_output: Value, self: Value, threshold: Any) -> Value:
    dtype = computing((grad_output, self))
    grad, x = operand(call, grad_output, dtype), operand(call, self, dtype)
    return call.result(ex.where(ex.le(x, operand(call, threshold, dtype)), 0, grad))
