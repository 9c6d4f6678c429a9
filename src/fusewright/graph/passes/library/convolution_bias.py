"""Convolutions on a GPU get their bias from a kernel of ours, and so does the bias its gradient.

Takes and gives a functional graph, of inference or joint. PyTorch calls cuDNN without the bias and adds it in a pass
over the result (10% of ConvNeXt's forward on an H200); the gradient is a sum in another pass (6% of its step). As
operators of their own both join the loops beside them. Always holds: the result is rounded to its type before the bias
is added, as it is by that pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import building_for
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

DEVICES = {"cuda"}
"""Kinds of device whose library takes no bias."""


def convolution_bias(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _adds(node) and context.allow(f"bias added: {node.name}"):
            _add(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if _sums(node) and context.allow(f"bias gradient: {node.name}"):
            _sum(graph, node)
    return graph


def _adds(node: Node) -> bool:
    bias: Any = node.args[2]
    kind: TensorType = node.meta["type"]
    return bias is not None and kind.device.type in DEVICES and bias.meta["type"].dtype is kind.dtype


def _add(graph: torch.fx.Graph, node: Node) -> None:
    bias: Any = node.args[2]
    kind: TensorType = node.meta["type"]
    build = building_for(graph, node)
    node.update_arg(2, None)
    with graph.inserting_before(node.next):
        channels = build.call(aten.view.default, bias, [kind.shape[1], *[1] * (kind.ndim - 2)])
        result = build.call(aten.add.Tensor, node, channels)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _sums(node: Node) -> bool:
    gradient: Any = node.args[0]
    wanted: Any = node.args[10]
    kinds = node.meta["type"]
    return (
        bool(wanted[2])
        and gradient.meta["type"].device.type in DEVICES
        and kinds[2].dtype is gradient.meta["type"].dtype
    )


def _sum(graph: torch.fx.Graph, node: Node) -> None:
    gradient: Any = node.args[0]
    wanted: Any = node.args[10]
    build = building_for(graph, node)
    readers = [user for user in node.users if user.target is operator.getitem and user.args[1] == 2]
    with graph.inserting_before(node):
        dims = [axis for axis in range(gradient.meta["type"].ndim) if axis != 1]
        made = build.call(aten.sum.dim_IntList, gradient, dims)
    for reader in readers:
        reader.replace_all_uses_with(made)
        graph.erase_node(reader)
    node.update_arg(10, [*wanted[:2], False])
    node.meta["type"] = (*node.meta["type"][:2], None)
    if not node.users:
        graph.erase_node(node)
