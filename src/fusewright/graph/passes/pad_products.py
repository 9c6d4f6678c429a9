"""Matrix products on a GPU get sizes whose rows start at multiples of 16 bytes, by padding with zeros (option `shape_padding`).

Takes and gives a functional graph. A library's quickest kernels load 16 bytes at a time, which rows of 50,257 halves do not allow.
Always holds: the padded part of a sum is zero times zero, and padded columns are cut off again; results have the types that they had.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.runner import Rewrites
from fusewright.graph.types import TensorType

aten = torch.ops.aten

ALIGNMENT = {"cuda": 16}
"""Bytes that rows start at multiples of, by kind of device; others are left alone."""
LEAST_REUSE = 256
"""rows * columns / (rows + columns) from which a product gains more than copying its factors costs: copies move
4 * (rows + columns) * inner bytes at some 4 TB/s, a product does 2 * rows * columns * inner operations at some 400 TFLOP/s, at half of
that where it is not aligned."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Where the left factor is among the arguments."""


def pad_products(graph: torch.fx.Graph, rewrites: Rewrites) -> torch.fx.Graph:
    for target, first in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            more = _missing(node, first)
            if any(more) and rewrites.allow(f"padded product: {node.name}"):
                with replacing(graph, node) as build:
                    _rewrite(build, node, first, *more)
    return graph


def _missing(node: torch.fx.Node, first: int) -> tuple[int, int]:
    """How many zeros the inner dimension and the columns lack."""
    left, right = (_type(node.args[first + k]) for k in (0, 1))
    result = node.meta["type"]
    if left is None or right is None or result.dtype is not left.dtype or result.dtype not in FLOATS:
        return 0, 0
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if result.device.type not in ALIGNMENT or not isinstance(rows, int) or not isinstance(inner, int) or not isinstance(columns, int):
        return 0, 0
    if rows * columns < LEAST_REUSE * (rows + columns) or inner < 16:
        return 0, 0
    step = ALIGNMENT[result.device.type] // result.dtype.itemsize
    # The columns matter where rows of the right factor or of the result are contiguous: the result's always are.
    return -inner % step, -columns % step


def _type(value: Any) -> TensorType | None:
    kind = value.meta.get("type") if isinstance(value, torch.fx.Node) else None
    return kind if isinstance(kind, TensorType) else None


def _rewrite(build: Builder, node: torch.fx.Node, first: int, inner: int, columns: int) -> None:
    arguments: list[Any] = list(node.args)
    kind: TensorType = node.meta["type"]
    left, right = arguments[first], arguments[first + 1]
    if inner:
        arguments[first] = build.call(aten.constant_pad_nd.default, left, [0, inner], 0)
    arguments[first + 1] = build.call(aten.constant_pad_nd.default, right, [0, columns, 0, inner], 0)
    if first and columns and arguments[0].meta["type"].shape[-1:] == kind.shape[-1:]:  # what is added, unless spread along the columns
        arguments[0] = build.call(aten.constant_pad_nd.default, arguments[0], [0, columns], 0)
    target: Any = node.target
    made = build.call(target, *arguments, **node.kwargs)
    if columns:
        made = build.call(aten.slice.Tensor, made, kind.ndim - 1, 0, kind.shape[-1])
    node.replace_all_uses_with(build.restride(made, kind))
