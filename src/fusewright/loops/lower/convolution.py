"""Depthwise convolution as loops: each channel of a channels-last image with its own small window.

Takes what `graph/passes/parameters/pack.py` leaves as `aten.convolution`: weights whose channels lie side by side.
Gives a sum over the window's places, so that padding and activation before it, and activation and residual behind it,
are computed in the same kernel. Always holds: products are summed in float32; what lies outside the image is not
multiplied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fusewright.loops import ir
from fusewright.loops.ir import Axis, Expression
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.pooling import Windows
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value
from fusewright.sizes.expressions import loop_symbol
from fusewright.sizes.tensor_type import TensorType

WRITTEN_OUT = 9
"""Windows of so many places are written out; larger ones are loops."""

REPEATED_WORK = 12
"""What is computed from one load with so much work is computed again for each place of the window, rather than
stored."""


def is_depthwise(images: Any, weight: Any, result: Any, transposed: bool, groups: int) -> bool:
    """Whether the call, told by its TensorTypes, is one of those that loops are made for."""
    if transposed or not all(isinstance(kind, TensorType) and kind.ndim == 4 for kind in (images, weight, result)):
        return False
    sizes = (*images.shape, *weight.shape, *result.shape)
    return (
        all(isinstance(size, int) for size in sizes)
        and groups == images.shape[1] == weight.shape[0] == result.shape[1] != 1
        and images.device.type == "cpu"
        and images.dtype == weight.dtype == result.dtype
        and weight.stride[0] == result.stride[1] == 1
        and images.stride[1] == 1
    )


def _accepts(node: Node) -> bool:
    arguments: Any = node.args
    kinds = (arguments[0].meta.get("type"), arguments[1].meta.get("type"), node.meta.get("type"))
    return is_depthwise(*kinds, arguments[6], arguments[8])


@lowers("convolution", accepts=_accepts)
def depthwise_convolution(
    call: Call,
    self: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    if not is_depthwise(self.type, weight.type, call.type, transposed, groups):
        raise Fallback("no depthwise convolution with channels side by side")
    low = call.lowering
    price = ex.cost(self.expression)
    if price.loads > 1 or price.work > REPEATED_WORK:
        low.realize(self)
    kernel = tuple(size for size in weight.shape[2:] if isinstance(size, int))
    windows = Windows(self, call.axes, kernel, stride, padding, dilation)
    channel = call.axes[1]

    def term(*offsets: Any) -> Expression:
        place, inside = windows.place(offsets)
        product = ex.mul(low.read(self, place, torch.float32), low.read(weight, (channel, 0, *offsets), torch.float32))
        return product if inside is None else ex.masked(inside, product, ir.constant(0, torch.float32))

    first = None if bias is None else low.read(bias, (channel,), torch.float32)
    if math.prod(kernel) <= WRITTEN_OUT:
        for offsets in windows.offsets():
            first = term(*offsets) if first is None else ex.add(first, term(*offsets))
        assert first is not None
        return call.result(first)
    symbols = [0 if size == 1 else loop_symbol(f"k{k}", size) for k, size in enumerate(kernel)]
    axes = tuple(Axis(symbol, size) for symbol, size in zip(symbols, kernel) if not isinstance(symbol, int))
    total = ex.accumulator(torch.float32)
    return low.reduce(
        "sum", call.type, call.axes, axes, term(*symbols), total if first is None else ex.add(total, first)
    )
