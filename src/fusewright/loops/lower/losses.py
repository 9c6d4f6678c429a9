"""Losses and their gradients.

Takes predictions and targets; gives lazy values, or reduced ones for "mean" (1) and "sum" (2). Always holds: class
numbers are checked at run time, except those equal to `ignore_index`, which are not used at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.indexing import gathered
from fusewright.loops.lower.pointwise import operand
from fusewright.loops.lower.promotion import computing
from fusewright.loops.lower.reductions import space_of
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axis_symbols, is_one, numel, same_shape
from fusewright.sizes.expressions import Dim

NONE, MEAN, SUM = 0, 1, 2


def reduced_loss(call: Call, like: Value, term: Expression, reduction: int) -> Value:
    """`term` over the elements of `like`, reduced."""
    if reduction == NONE:
        return call.result(term)
    space = space_of(like, None)
    acc = ex.accumulator(term.dtype)
    finish = ex.div(acc, ex.index_as(space.count, term.dtype)) if reduction == MEAN else acc
    return call.lowering.reduce("sum", call.type, (), space.reduced, term, finish)


def must_be_alike(self: Value, target: Value) -> None:
    if not same_shape(self.shape, target.shape):
        raise Fallback("a loss of operands that broadcast")


def elementwise_loss(
    call: Call, self: Value, target: Value, reduction: int, compute: Callable[..., Expression]
) -> Value:
    must_be_alike(self, target)
    dtype = computing((self, target))
    symbols = axis_symbols(self.shape)
    low = call.lowering
    return reduced_loss(
        call, self, compute(low.read(self, symbols, dtype), low.read(target, symbols, dtype)), reduction
    )


def averaged(call: Call, self: Value, grad: Expression, reduction: int) -> Expression:
    return ex.div(grad, ex.index_as(numel(self.shape), grad.dtype)) if reduction == MEAN else grad


@lowers("mse_loss")
def mse_loss(call: Call, self: Value, target: Value, reduction: int = MEAN) -> Value:
    def compute(x: Expression, y: Expression) -> Expression:
        d = ex.sub(x, y)
        return ex.mul(d, d)

    return elementwise_loss(call, self, target, reduction, compute)


@lowers("mse_loss_backward")
def mse_loss_backward(call: Call, grad_output: Value, self: Value, target: Value, reduction: int) -> Value:
    dtype = computing((self, target))
    g, x, y = (operand(call, value, dtype) for value in (grad_output, self, target))
    norm = averaged(call, self, ir.constant(2.0, dtype), reduction)  # first: a large difference would overflow
    return call.result(ex.mul(ex.mul(norm, ex.sub(x, y)), g))


@lowers("smooth_l1_loss")
def smooth_l1_loss(call: Call, self: Value, target: Value, reduction: int = MEAN, beta: float = 1.0) -> Value:
    def compute(x: Expression, y: Expression) -> Expression:
        d = ex.absolute(ex.sub(x, y))
        return (
            ex.where(ex.lt(d, beta), ex.div(ex.mul(ex.mul(d, 0.5), d), beta), ex.sub(d, 0.5 * beta)) if beta > 0 else d
        )

    return elementwise_loss(call, self, target, reduction, compute)


@lowers("huber_loss")
def huber_loss(call: Call, self: Value, target: Value, reduction: int = MEAN, delta: float = 1.0) -> Value:
    def compute(x: Expression, y: Expression) -> Expression:
        d = ex.absolute(ex.sub(x, y))
        return ex.where(ex.le(d, delta), ex.mul(ex.mul(d, 0.5), d), ex.mul(ex.sub(d, 0.5 * delta), delta))

    return elementwise_loss(call, self, target, reduction, compute)


@lowers("binary_cross_entropy_with_logits")
def bce_with_logits(
    call: Call,
    self: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    """(1 - y) * x + w * (log(1 + exp(-|x|)) + max(-x, 0)), w = 1 + (pos_weight - 1) * y."""
    must_be_alike(self, target)
    low = call.lowering
    dtype = computing((self, target))
    symbols = axis_symbols(self.shape)
    x, y = low.read(self, symbols, dtype), low.read(target, symbols, dtype)
    tail = ex.add(ex.log1p(ex.exp(ex.neg(ex.absolute(x)))), ex.maximum(ex.neg(x), 0))
    if pos_weight is not None:
        positive = low.read(pos_weight, low.broadcast(pos_weight, self.shape, symbols), dtype)
        tail = ex.mul(ex.add(ex.mul(ex.sub(positive, 1), y), 1), tail)
    term = ex.add(ex.mul(ex.sub(ir.constant(1, dtype), y), x), tail)
    if weight is not None:
        term = ex.mul(term, low.read(weight, low.broadcast(weight, self.shape, symbols), dtype))
    return reduced_loss(call, self, term, reduction)


# --- negative log likelihood -----------------------------------------------------------------------------------------


class Classes:
    """For each point of a target: the class number, whether it counts, the log-probability's place and the class's
    weight."""

    def __init__(
        self,
        call: Call,
        log_probs: Value,
        target: Value,
        weight: Value | None,
        ignore_index: int,
        symbols: tuple[Dim, ...],
    ) -> None:
        low = call.lowering
        if target.dtype is not torch.int64 or log_probs.ndim not in (1, 2, 4):
            raise Fallback("an unusual target")
        self.dim = 0 if log_probs.ndim == 1 else 1
        self.dtype = ex.compute_dtype(log_probs.dtype)
        classes = log_probs.shape[self.dim]
        raw = low.read(target, symbols)
        self.counts = ex.ne(raw, ignore_index)
        number, self.bindings = low.bind(low.checked(ex.where(self.counts, raw, 0), classes, wrap=False), classes)
        self.place = (*symbols[: self.dim], number, *symbols[self.dim :])
        one = ir.constant(1, self.dtype)
        factor: Expression = one
        if weight is not None:
            factor = ir.cast(ex.widen(gathered(low, weight, (number,), self.bindings)), self.dtype)
        self.weight = ex.where(self.counts, factor, 0)


@lowers("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(
    call: Call, self: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    low = call.lowering
    out_type, total_type = call.type
    symbols = axis_symbols(target.shape)
    classes = Classes(call, self, target, weight, ignore_index, symbols)
    found = gathered(low, self, classes.place, classes.bindings, few=True)
    zero = ir.constant(0, classes.dtype)
    term = ex.masked(classes.counts, ex.neg(ex.mul(ex.widen(found), classes.weight)), zero)
    if reduction == NONE:
        return low.value(out_type, term), low.value(total_type, zero)
    space = space_of(target, None)
    total = low.reduce("sum", total_type, (), space.reduced, classes.weight)
    summed = low.reduce("sum", low.make((), zero, out_type).type, (), space.reduced, term)
    if reduction == SUM:
        return low.value(out_type, low.at(summed, ())), total
    return low.value(out_type, ex.div(low.at(summed, ()), low.read(total, ()))), total


@lowers("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    call: Call,
    grad_output: Value,
    self: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    """-w[t] * g at the target's class (divided by the total weight for a mean), 0 elsewhere: a comparison, no
    scatter."""
    low = call.lowering
    if self.ndim not in (1, 2, 4):
        raise Fallback("an unusual target")
    dim = 0 if self.ndim == 1 else 1
    axes = call.axes
    points = (*axes[:dim], *axes[dim + 1 :])
    dtype = ex.compute_dtype(self.dtype)
    low.keep_if_expensive(target)
    t = low.read(target, points if target.ndim else (), torch.int64)
    number = ir.index_value(axes[dim])
    hit = ex.both(ex.eq(t, number), ex.ne(t, ignore_index))
    g = low.read(grad_output, points if reduction == NONE and grad_output.ndim else (), dtype)
    if weight is not None:
        g = ex.mul(g, low.read(weight, (0 if is_one(weight.shape[0]) else axes[dim],), dtype))
    if reduction == MEAN:
        g = ex.div(g, low.read(total_weight, (), dtype))
    return call.result(ex.where(hit, ex.neg(g), 0))
