"""Activation functions and their gradients, with ATen's formulas.

Takes operands that broadcast; gives lazy values computed in float32 for half inputs. Always holds: the selection (which
side of a kink, what a NaN does) is ATen's CPU kernel's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.expressions import fused_multiply_add as fma
from fusewright.loops.lower.pointwise import elementwise, operand
from fusewright.loops.lower.promotion import computing
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axis_symbols, is_one, normalize_dim

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


@lowers("relu")
def relu(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.maximum(x, 0), (self,))


@lowers("hardtanh", "relu6")
def hardtanh(call: Call, self: Value, min_val: Any = -1, max_val: Any = 1) -> Value:
    if "relu6" in call.target._schema.name:
        min_val, max_val = 0, 6
    dtype = ex.compute_dtype(self.dtype)
    low, high = operand(call, min_val, dtype), operand(call, max_val, dtype)
    return call.result(ex.minimum(ex.maximum(operand(call, self, dtype), low), high))


@lowers("leaky_relu")
def leaky_relu(call: Call, self: Value, negative_slope: float = 0.01) -> Value:
    return elementwise(call, lambda x: ex.where(ex.gt(x, 0), x, ex.mul(x, negative_slope)), (self,))


@lowers("_prelu_kernel")
def prelu(call: Call, self: Value, weight: Value) -> Value:
    return elementwise(call, lambda x, w: ex.where(ex.gt(x, 0), x, ex.mul(w, x)), (self, weight))


@lowers("elu")
def elu(call: Call, self: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    def compute(x: Expression) -> Expression:
        negative = ex.mul(ex.expm1(ex.mul(x, input_scale)), float(alpha) * float(scale))
        return ex.where(ex.lt(x, 0), negative, ex.mul(x, float(scale)))

    return elementwise(call, compute, (self,))


@lowers("celu")
def celu(call: Call, self: Value, alpha: float = 1.0) -> Value:
    return elu(call, self, alpha, 1.0, 1.0 / alpha)


@lowers("gelu")
def gelu(call: Call, self: Value, *, approximate: str = "none") -> Value:
    def compute(x: Expression) -> Expression:
        half = ex.mul(x, 0.5)
        if approximate == "tanh":
            inner = ex.mul(fma(ex.mul(ex.mul(x, x), x), GELU_CUBIC, x), SQRT_2_OVER_PI)
            return ex.mul(half, ex.add(ex.tanh(inner), 1))
        return ex.mul(half, ex.add(ex.erf(ex.mul(x, SQRT_HALF)), 1))

    return elementwise(call, compute, (self,))


@lowers("silu")
def silu(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.mul(x, ex.sigmoid(x)), (self,))


def softplus_of(x: Expression, beta: float = 1.0, threshold: float = 20.0) -> Expression:
    scaled = ex.mul(x, beta)
    return ex.where(ex.gt(scaled, threshold), x, ex.div(ex.log1p(ex.exp(scaled)), beta))


@lowers("softplus")
def softplus(call: Call, self: Value, beta: float = 1, threshold: float = 20) -> Value:
    return elementwise(call, lambda x: softplus_of(x, float(beta), float(threshold)), (self,))


@lowers("mish")
def mish(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.mul(x, ex.tanh(ex.log1p(ex.exp(x)))), (self,))


@lowers("hardsigmoid")
def hardsigmoid(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.div(_clamped(ex.add(x, 3)), 6), (self,))


@lowers("hardswish")
def hardswish(call: Call, self: Value) -> Value:
    return elementwise(call, lambda x: ex.div(ex.mul(x, _clamped(ex.add(x, 3))), 6), (self,))


def _clamped(x: Expression) -> Expression:
    return ex.minimum(ex.maximum(x, 0), 6)


@lowers("hardshrink")
def hardshrink(call: Call, self: Value, lambd: float = 0.5) -> Value:
    inside = lambda x: ex.both(ex.ge(x, -lambd), ex.le(x, lambd))  # noqa: E731
    return elementwise(call, lambda x: ex.where(inside(x), 0, x), (self,))


@lowers("softshrink")
def softshrink(call: Call, self: Value, lambd: float = 0.5) -> Value:
    def compute(x: Expression) -> Expression:
        shrunk = ex.where(ex.gt(x, lambd), ex.sub(x, lambd), ex.where(ex.lt(x, -lambd), ex.add(x, lambd), 0))
        return ex.where(ex.isnan(x), x, shrunk)

    return elementwise(call, compute, (self,))


@lowers("threshold")
def threshold(call: Call, self: Value, threshold: Any, value: Any) -> Value:
    dtype = ex.compute_dtype(self.dtype)
    x = operand(call, self, dtype)
    return call.result(ex.where(ex.le(x, operand(call, threshold, dtype)), operand(call, value, dtype), x))


@lowers("log_sigmoid_forward")
def log_sigmoid(call: Call, self: Value) -> tuple[Value, Value]:
    """min(x, 0) - log1p(exp(-|x|)); the second result is a buffer that the gradient's CPU kernel would read."""
    low = call.lowering
    type_, buffer_type = call.type
    x = low.read(self, axis_symbols(self.shape))
    z = ex.exp(ex.neg(ex.absolute(x)))
    result = low.value(type_, ex.sub(ex.minimum(x, 0), ex.log1p(z)))
    if buffer_type.shape != type_.shape:
        return result, low.value(buffer_type, ir.constant(0, ex.compute_dtype(type_.dtype)))
    return result, low.value(buffer_type, z)


@lowers("glu")
def glu(call: Call, self: Value, dim: int = -1) -> Value:
    a, b = _halves(call, self, dim)
    return call.result(ex.mul(a, ex.sigmoid(b)))


def _halves(call: Call, value: Value, dim: int) -> tuple[Expression, Expression]:
    dim = normalize_dim(dim, value.ndim)
    half = call.type.shape[dim]
    axes = list(call.axes)
    first = call.lowering.read(value, axes)
    axes[dim] = axes[dim] + half
    return first, call.lowering.read(value, axes)


# --- gradients -------------------------------------------------------------------------------------------------------


@lowers("sigmoid_backward")
def sigmoid_backward(call: Call, grad_output: Value, output: Value) -> Value:
    one = lambda y: ex.sub(ir.constant(1, y.dtype), y)  # noqa: E731
    return elementwise(call, lambda g, y: ex.mul(ex.mul(g, one(y)), y), (grad_output, output))


@lowers("tanh_backward")
def tanh_backward(call: Call, grad_output: Value, output: Value) -> Value:
    return elementwise(call, lambda g, y: ex.mul(g, fma(ex.neg(y), y, 1)), (grad_output, output))


@lowers("gelu_backward")
def gelu_backward(call: Call, grad_output: Value, self: Value, *, approximate: str = "none") -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        if approximate == "tanh":
            squared = ex.mul(x, x)
            inner = ex.mul(fma(ex.mul(squared, x), GELU_CUBIC, x), SQRT_2_OVER_PI)
            t = ex.tanh(inner)
            slope = ex.mul(fma(squared, 3 * GELU_CUBIC, 1), SQRT_2_OVER_PI)
            right = ex.mul(ex.mul(ex.mul(x, 0.5), fma(ex.neg(t), t, 1)), slope)
            return ex.mul(g, fma(ex.add(t, 1), 0.5, right))
        cdf = ex.mul(ex.add(ex.erf(ex.mul(x, SQRT_HALF)), 1), 0.5)
        pdf = ex.mul(ex.exp(ex.mul(ex.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return ex.mul(g, fma(x, pdf, cdf))

    return elementwise(call, compute, (grad_output, self))


@lowers("silu_backward")
def silu_backward(call: Call, grad_output: Value, self: Value) -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        s = ex.sigmoid(x)
        return ex.mul(ex.mul(g, s), fma(x, ex.sub(ir.constant(1, x.dtype), s), 1))

    return elementwise(call, compute, (grad_output, self))


@lowers("elu_backward")
def elu_backward(
    call: Call,
    grad_output: Value,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Value,
) -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        if is_result:
            negative = ex.mul(ex.mul(g, float(input_scale)), ex.add(x, float(alpha) * float(scale)))
        else:
            grown = ex.exp(ex.mul(x, float(input_scale)))
            negative = ex.mul(ex.mul(g, float(input_scale) * float(alpha) * float(scale)), grown)
        positive = ex.mul(g, float(scale))
        if _has_vectors(call):
            return ex.where(ex.gt(x, 0), positive, negative)
        return ex.where(ex.le(x, 0), negative, positive)

    return elementwise(call, compute, (grad_output, self_or_result))


@lowers("leaky_relu_backward")
def leaky_relu_backward(
    call: Call, grad_output: Value, self: Value, negative_slope: float, self_is_result: bool
) -> Value:
    return elementwise(
        call, lambda g, x: ex.where(ex.gt(x, 0), g, ex.mul(g, float(negative_slope))), (grad_output, self)
    )


@lowers("hardtanh_backward")
def hardtanh_backward(call: Call, grad_output: Value, self: Value, min_val: float, max_val: float) -> Value:
    if _has_vectors(call):
        inside = lambda x: ex.both(ex.gt(x, min_val), ex.lt(x, max_val))  # noqa: E731
        return elementwise(call, lambda g, x: ex.where(inside(x), g, 0), (grad_output, self))
    outside = lambda x: ex.either(ex.le(x, min_val), ex.ge(x, max_val))  # noqa: E731
    return elementwise(call, lambda g, x: ex.where(outside(x), 0, g), (grad_output, self))


def _has_vectors(call: Call) -> bool:
    """Whether eager's kernel is a vectorised one, which decides by other comparisons what the gradient at a NaN is than
    a GPU's (and than the CPU's own of the last few elements)."""
    return call.type.device.type == "cpu"


@lowers("hardsigmoid_backward")
def hardsigmoid_backward(call: Call, grad_output: Value, self: Value) -> Value:
    inside = lambda x: ex.both(ex.gt(x, -3), ex.lt(x, 3))  # noqa: E731
    return elementwise(call, lambda g, x: ex.where(inside(x), ex.mul(g, 1 / 6), 0), (grad_output, self))


@lowers("hardswish_backward")
def hardswish_backward(call: Call, grad_output: Value, self: Value) -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        middle = ex.mul(g, ex.add(ex.div(x, 3), 0.5))
        upper = ex.where(ex.ge(x, 3), g, middle) if _has_vectors(call) else ex.where(ex.lt(x, 3), middle, g)
        return ex.where(ex.le(x, -3), 0, upper)

    return elementwise(call, compute, (grad_output, self))


@lowers("softplus_backward")
def softplus_backward(call: Call, grad_output: Value, self: Value, beta: float, threshold: float) -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        scaled = ex.mul(x, float(beta))
        return ex.where(ex.gt(scaled, float(threshold)), g, ex.mul(g, _logistic(scaled)))

    return elementwise(call, compute, (grad_output, self))


@lowers("mish_backward")
def mish_backward(call: Call, grad_output: Value, self: Value) -> Value:
    def compute(g: Expression, x: Expression) -> Expression:
        s = ex.sigmoid(x)
        t = ex.tanh(ex.log1p(ex.exp(x)))
        return ex.mul(g, fma(ex.mul(x, s), fma(ex.neg(t), t, 1), t))

    return elementwise(call, compute, (grad_output, self))


@lowers("log_sigmoid_backward")
def log_sigmoid_backward(call: Call, grad_output: Value, self: Value, buffer: Value) -> Value:
    return elementwise(call, lambda g, x: ex.mul(g, _logistic(ex.neg(x))), (grad_output, self))


def _logistic(x: Expression) -> Expression:
    """The sigmoid, also where it is so small that `exp(-x)` overflows."""
    z = ex.exp(ex.neg(ex.absolute(x)))
    return ex.div(ex.where(ex.gt(x, 0), 1, z), ex.add(z, 1))


@lowers("hardshrink_backward", "softshrink_backward")
def shrink_backward(call: Call, grad_output: Value, self: Value, lambd: float) -> Value:
    if _has_vectors(call):
        outside = lambda x: ex.either(ex.lt(x, -lambd), ex.gt(x, lambd))  # noqa: E731
        return elementwise(call, lambda g, x: ex.where(outside(x), g, 0), (grad_output, self))
    inside = lambda x: ex.both(ex.ge(x, -lambd), ex.le(x, lambd))  # noqa: E731
    return elementwise(call, lambda g, x: ex.where(inside(x), 0, g), (grad_output, self))


@lowers("_prelu_kernel_backward")
def prelu_backward(call: Call, grad_output: Value, self: Value, weight: Value) -> tuple[Value, Value]:
    low, shape = call.lowering, call.type[0].shape
    operands = grad_output, self, weight
    dtype, axes = computing(operands), axis_symbols(shape)
    g, x, w = (low.read(one, low.broadcast(one, shape, axes), dtype) for one in operands)
    positive = ex.gt(x, 0)
    return (
        low.value(call.type[0], ex.where(positive, g, ex.mul(w, g))),
        low.value(call.type[1], ex.where(positive, 0, ex.mul(x, g))),
    )


@lowers("glu_backward")
def glu_backward(call: Call, grad_output: Value, self: Value, dim: int) -> Value:
    low = call.lowering
    dim = normalize_dim(dim, self.ndim)
    half = grad_output.shape[dim]
    axes = call.axes
    axis = axes[dim]
    is_first = ex.lt(ir.index_value(axis), ir.index_value(half))
    place = list(axes)
    place[dim] = 0 if is_one(half) else axis % half
    g = low.read(grad_output, place)
    a = low.read(self, place)
    place[dim] = place[dim] + half
    s = ex.sigmoid(low.read(self, place))
    slope = ex.mul(ex.sub(ir.constant(1, s.dtype), s), s)  # first: the product of the others may overflow
    second = ex.mul(ex.mul(slope, a), g)
    return call.result(ex.masked(is_first, ex.mul(g, s), second))


@lowers("native_dropout_backward")
def native_dropout_backward(call: Call, grad_output: Value, mask: Value, scale: float) -> Value:
    dtype = ex.compute_dtype(call.type.dtype)
    if mask.dtype != torch.bool:
        raise Fallback("a mask of numbers")
    kept = operand(call, mask, torch.bool)
    return call.result(ex.mul(ex.mul(operand(call, grad_output, dtype), ir.cast(kept, dtype)), float(scale)))
