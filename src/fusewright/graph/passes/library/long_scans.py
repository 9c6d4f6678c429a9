"""Running sums of few long rows on a GPU, cut into parts.

Takes and gives a functional graph. A row is summed up by one program, so few rows leave most of the GPU idle: here each
part of a row becomes a row of its own, and starts at the sum of those before it. Always holds: sums are in the type
that the operator sums in; rows whose length has no part that divides it stay whole.
"""

from __future__ import annotations

import math

import torch
import torch.fx

from fusewright.base.thresholds import LONG_SCAN, MOST_SCAN_ROWS, SCAN_PART
from fusewright.graph.builder import building_for
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
DEVICES = ("cuda",)
Node = torch.fx.Node


def long_scans(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    pending = list(graph.find_nodes(op="call_function", target=aten.cumsum.default))
    while pending:
        node = pending.pop()
        part = _part(node)
        if part and context.allow(f"long scan: {node.name}"):
            pending.append(_cut(graph, node, part))
    return graph


def _part(node: Node) -> int:
    """Elements of a part; 0 where the scan is not cut."""
    kind: TensorType = node.args[0].meta["type"]  # type: ignore[union-attr]
    if kind.device.type not in DEVICES or kind.ndim == 0 or node.args[1] not in (-1, kind.ndim - 1):
        return 0
    shape = [size for size in kind.shape if isinstance(size, int) and size > 0]
    if len(shape) != kind.ndim or kind.dtype.is_complex:
        return 0
    rows, length, step = math.prod(shape[:-1]), shape[-1], 1
    for size, stride in zip(reversed(shape), reversed(kind.stride)):
        if size != 1 and stride != step:
            return 0
        step *= size
    part = SCAN_PART
    while part >= SCAN_PART // 16 and length % part:
        part //= 2
    return part if length % part == 0 and length >= LONG_SCAN and rows <= MOST_SCAN_ROWS else 0


def _cut(graph: torch.fx.Graph, node: Node, part: int) -> Node:
    """The scan over parts in place of the node; gives the scan of the parts' sums."""
    result: TensorType = node.meta["type"]
    given = node.args[0]
    assert isinstance(given, Node)
    shape = given.meta["type"].shape
    working = result.dtype
    if working.is_floating_point and working is not torch.float64:
        working = torch.float32
    build = building_for(graph, node)
    with graph.inserting_before(node):
        wide = given
        if given.meta["type"].dtype is not working:
            wide = build.call(aten._to_copy.default, given, dtype=working)
        parts = build.call(aten.view.default, wide, [*shape[:-1], shape[-1] // part, part])
        sums = build.call(aten.sum.dim_IntList, parts, [-1])
        total = build.call(aten.cumsum.default, sums, -1)
        before = build.call(aten.slice.Tensor, total, -1, 0, shape[-1] // part - 1)
        before = build.call(aten.unsqueeze.default, build.call(aten.constant_pad_nd.default, before, [1, 0], 0), -1)
        made = build.call(aten.add.Tensor, build.call(aten.cumsum.default, parts, -1), before)
        made = build.call(aten.view.default, made, list(shape))
        if working is not result.dtype:
            made = build.call(aten._to_copy.default, made, dtype=result.dtype)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return total
