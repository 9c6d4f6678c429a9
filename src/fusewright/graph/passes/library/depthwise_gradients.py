"""Gradients of the weights of depthwise convolutions over small images are computed on contiguous copies, not on
channels-last tensors.

Takes and gives a functional graph of training on a CPU. On channels-last tensors the library sums a depthwise weight's
gradient in some 250 matrices of its own and adds them up at the end: where there are few positions, making and adding
these is most of the work (11 ms instead of 2 for 768 channels, 7x7 weights and two images of 7x7), and they take more
memory than the layer.
Always holds: results have the types that they had; the sums are those of the convolution, in another order.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import MATRICES, MOST_KEPT_BYTES
from fusewright.graph.builder import Builder
from fusewright.graph.passes.context import PassContext
from fusewright.operators.rules.common import is_surely_channels_last
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node


def depthwise_gradients(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if _is_dear(node) and context.allow(f"depthwise gradient: {node.name}"):
            _split(graph, node)
    return graph


def _is_dear(node: Node) -> bool:
    """Whether the library's sums outweigh the products (thresholds: measured, see docs/architecture.md)."""
    gradient, x, weight = node.args[:3]
    kinds: list[TensorType] = [one.meta["type"] for one in (gradient, x, weight)]  # type: ignore[union-attr]
    wanted: Any = node.args[10]
    if not wanted[1] or node.args[7] or kinds[1].ndim != 4 or kinds[1].device.type != "cpu":
        return False
    sizes = (*kinds[0].shape, *kinds[1].shape, *kinds[2].shape)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or not is_surely_channels_last(kinds[1]):
        return False
    channels, _, height, width = kinds[2].shape
    if node.args[9] != channels or kinds[1].shape[1] != channels:
        return False
    batch, _, rows, columns = kinds[0].shape
    area: Any = height * width  # type: ignore[operator]
    if kinds[1].dtype is torch.bfloat16:
        return area >= 25 and rows * columns <= 196  # type: ignore[no-any-return, operator]
    mapped = MATRICES * channels * area * 4 > MOST_KEPT_BYTES
    return kinds[1].dtype is torch.float32 and mapped and batch * rows * columns <= 2 * MATRICES  # type: ignore


def _split(graph: torch.fx.Graph, node: Node) -> None:
    gradient, x, weight, bias, *geometry, _ = node.args
    wanted: Any = node.args[10]
    build = Builder(graph)
    build.location = node.meta.get("location", ())
    with graph.inserting_before(node):
        build.marks = {"recompute": True}  # the copy depends on no tangent: without this the forward would save it
        images = build.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        build.marks = {}
        slopes = build.call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
        # The bias's gradient comes with the weight's: asked for alone, the library computes both.
        own = build.call(
            aten.convolution_backward.default, slopes, images, weight, bias, *geometry, [False, True, wanted[2]]
        )
        others = None
        if wanted[0]:
            others = build.call(
                aten.convolution_backward.default, gradient, x, weight, bias, *geometry, [True, False, False]
            )
        for reader in list(node.users):
            assert reader.target is operator.getitem
            position: Any = reader.args[1]
            source = others if position == 0 else own
            if wanted[position] and source is not None:
                reader.replace_all_uses_with(_as(build, build.item(source, position), node.meta["type"][position]))
            graph.erase_node(reader)
    graph.erase_node(node)


def _as(build: Builder, node: Node, kind: TensorType) -> Node:
    """`node` with the strides of `kind`, also where a dimension of one element has another one."""
    dense = build.restride(node, kind)
    if dense.meta["type"].stride == kind.stride:
        return dense
    return build.call(aten.as_strided.default, dense, list(kind.shape), list(kind.stride), 0)
