"""Matrix products on a GPU get sizes whose rows start at multiples of 16 bytes, by padding with zeros (option
`shape_padding`).

Takes and gives a functional graph. A library's quickest kernels load 16 bytes at a time, which rows of 50,257 halves do
not allow.
Always holds: the padded part of a sum is zero times zero, and padded rows and columns are cut off again; results have
the types that they had. Padding copies; it is done where the product gains more than that by the rates below.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.base.thresholds import BANDWIDTH, LAUNCH, RATES
from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten

ALIGNMENT = {"cuda": 16}
"""Bytes that rows start at multiples of, by kind of device; others are left alone."""

_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Where the left factor is among the arguments."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How many zeros the dimensions of a product lack."""

    rows: int
    inner: int
    columns: int


def may_pad(graph: torch.fx.Graph) -> bool:
    """Whether the graph computes on a device whose products are padded."""
    kinds = (_type(node) for node in graph.find_nodes(op="placeholder"))
    return any(kind is not None and kind.device.type in ALIGNMENT for kind in kinds)


def pad_products(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for target, first in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            padding = _padding(node, first)
            if padding is not None and context.allow(f"padded product: {node.name}"):
                with replacing(graph, node) as build:
                    _rewrite(build, node, first, padding)
    return graph


def _padding(node: torch.fx.Node, first: int) -> Padding | None:
    """What is worth padding."""
    left, right = (_type(node.args[first + k]) for k in (0, 1))
    result = node.meta["type"]
    if (
        left is None
        or right is None
        or result.dtype is not left.dtype
        or result.dtype not in RATES
        or result.device.type not in ALIGNMENT
    ):
        return None
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    sizes = (*result.shape[:-2], rows, inner, columns)
    if not all(isinstance(size, int) for size in sizes) or not math.prod(sizes):  # type: ignore[arg-type]
        return None
    step = ALIGNMENT[result.device.type] // result.dtype.itemsize
    short = {"rows": 0, "inner": 0, "columns": 0}
    for kind, names in ((left, ("rows", "inner")), (right, ("inner", "columns")), (result, ("rows", "columns"))):
        along = _unaligned(kind, step)
        if along is not None:
            short[names[along]] = -int(kind.shape[along - 2]) % step  # type: ignore[arg-type]
    padding = Padding(**short)
    return padding if any(short.values()) and _gain(left, right, result, padding) > 0 else None


def _unaligned(kind: TensorType, step: int) -> int | None:
    """The dimension (0 or 1 of the last two) that is contiguous while the other's stride is no multiple of `step`:
    padding mends that."""
    for along in (1, 0):
        other = kind.stride[-1 - along]
        if kind.stride[along - 2] == 1 and kind.shape[-1 - along] != 1:
            return (
                along if isinstance(other, int) and other % step and kind.shape[along - 2] % step else None
            )
    return None


def _gain(left: TensorType, right: TensorType, result: TensorType, padding: Padding) -> float:
    """Seconds that padding saves, by the rates."""
    elements = 0
    kernels = 0
    copies = (
        (left, padding.rows or padding.inner),
        (right, padding.inner or padding.columns),
        (result, padding.columns),
    )
    for kind, padded in copies:
        if padded:
            elements += int(math.prod(kind.shape))  # type: ignore[arg-type]
            kernels += 1
    operations = 2 * int(math.prod((*result.shape, left.shape[-1])))  # type: ignore[arg-type]
    quick, slow = RATES[result.dtype]
    return operations * (1 / slow - 1 / quick) - 2 * elements * result.dtype.itemsize / BANDWIDTH - kernels * LAUNCH


def _type(value: Any) -> TensorType | None:
    kind = value.meta.get("type") if isinstance(value, torch.fx.Node) else None
    return kind if isinstance(kind, TensorType) else None


def _rewrite(build: Builder, node: torch.fx.Node, first: int, padding: Padding) -> None:
    arguments: list[Any] = list(node.args)
    kind: TensorType = node.meta["type"]

    def padded(value: Any, down: int, across: int) -> Any:
        """Zeros below and at the right; laid out as it was: the contiguous dimension stays so."""
        if not down and not across:
            return value
        if _type(value).stride[-2] == 1 and _type(value).stride[-1] != 1:  # type: ignore[union-attr]
            turned = build.call(aten.transpose.int, value, -2, -1)
            return build.call(
                aten.transpose.int, build.call(aten.constant_pad_nd.default, turned, [0, down, 0, across], 0), -2, -1
            )
        return build.call(aten.constant_pad_nd.default, value, [0, across, 0, down], 0)

    arguments[first] = padded(arguments[first], padding.rows, padding.inner)
    arguments[first + 1] = padded(arguments[first + 1], padding.inner, padding.columns)
    if first:  # what is added: where it is not spread along a dimension
        added = arguments[0].meta["type"].shape
        across = padding.columns if added[-1:] == kind.shape[-1:] else 0
        down = padding.rows if added[-2:-1] == kind.shape[-2:-1] else 0
        if down or across:
            arguments[0] = build.call(
                aten.constant_pad_nd.default, arguments[0], [0, across, 0, down][: 2 * len(added)], 0
            )
    target: Any = node.target
    made = build.call(target, *arguments, **node.kwargs)
    if padding.columns:
        made = build.call(aten.slice.Tensor, made, kind.ndim - 1, 0, kind.shape[-1])
    if padding.rows:
        made = build.call(aten.slice.Tensor, made, kind.ndim - 2, 0, kind.shape[-2])
    node.replace_all_uses_with(build.restride(made, kind))
