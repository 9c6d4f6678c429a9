"""Convolutions over lines (1-D) become convolutions over images of one row, so that the passes for images serve them
too.

Takes and gives a functional inference graph. PyTorch's own 1-D convolution lays the weights out anew at every call, and
runs on channels that lie far apart; as images, chains of them run in channels-last format with packed weights
(`layout`, `pack`).
Always holds: the sums are those of the convolution; results have the types that they had.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
ROWS = 2  # the dimension that is added


def line_convolution(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    if graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        return graph
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _is_quicker(node) and context.allow(f"as an image: {node.name}"):
            with replacing(graph, node) as build:
                _rewrite(build, node)
    return graph


def _is_quicker(node: torch.fx.Node) -> bool:
    """In bfloat16 2 to 8 times; in float32 with several groups 3 to 4 times, with one no quicker (measured)."""
    arguments: Any = node.args
    kind, weight = arguments[0].meta["type"], arguments[1].meta["type"]
    if weight.ndim != 3 or kind.ndim != 3 or kind.device.type != "cpu" or arguments[6]:
        return False
    if not all(isinstance(size, int) and size > 0 for size in (*kind.shape[1:], *weight.shape)):
        return False
    return kind.dtype is torch.bfloat16 or (kind.dtype is torch.float32 and arguments[8] > 1)


def _rewrite(build: Builder, node: torch.fx.Node) -> None:
    arguments: Any = node.args
    x, weight, bias, stride, padding, dilation, _, _, groups = arguments
    kind: TensorType = node.meta["type"]
    images, filters = (build.call(aten.unsqueeze.default, one, ROWS) for one in (x, weight))
    moves = [1, *stride], [0, *padding], [1, *dilation]
    made = build.call(aten.convolution.default, images, filters, bias, *moves, False, [0, 0], groups)
    node.replace_all_uses_with(build.restride(build.call(aten.squeeze.dim, made, ROWS), kind))
