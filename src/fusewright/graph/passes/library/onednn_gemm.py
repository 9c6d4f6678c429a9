"""Large matrix products in float32 go to oneDNN where that is much quicker than eager's library.

Takes and gives a functional graph, of training or of inference (there what multiplies by parameters is pack.py's, which
packs them). MKL uses half the width of the registers on processors that are not Intel's: on two cores of Zen 5,
512x768x3072, it takes 14.7 ms and oneDNN 6.5, with operands as they lie. Always holds: the same sums in the same
precision, in another order; NaN and infinities included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import LEAST_ONEDNN_SIZE, LEAST_ONEDNN_WORK
from fusewright.graph.builder import building_for, env_of
from fusewright.graph.passes.context import PassContext
from fusewright.graph.passes.parameters.stable import stable_nodes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.shape_env import ShapeEnv, examples_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten
Node = torch.fx.Node

_LEFT: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Where the left factor is among the arguments."""


def quick_products(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    """`context.has_quick_onednn` is asked where there is such a product."""
    nodes = [node for target in _LEFT for node in graph.find_nodes(op="call_function", target=target)]
    stable, env = (stable_nodes(graph), env_of(graph)) if nodes else (set(), None)
    for node in nodes:
        fits = node.args[_LEFT[node.target] + 1] not in stable and _fits(node, env)
        if fits and context.has_quick_onednn() and context.allow(f"by oneDNN: {node.name}"):
            _rewrite(graph, node)
    return graph


def _fits(node: Node, env: ShapeEnv | None) -> bool:
    kinds: list[TensorType] = [one.meta["type"] for one in (*node.all_input_nodes, node)]
    if any(kind.dtype is not torch.float32 or kind.device.type != "cpu" for kind in kinds):
        return False
    x, weight = (one.meta["type"] for one in node.args[_LEFT[node.target] :][:2])  # type: ignore[union-attr]
    result = kinds[-1]
    sizes = [estimate(size, examples_of(env)) for size in (x.shape[0], *weight.shape)]
    if (
        math.prod(sizes) < LEAST_ONEDNN_WORK
        or min(sizes) < LEAST_ONEDNN_SIZE
        or result.stride != contiguous_strides(result.shape)
    ):
        return False
    return _lies_by_lines(weight) and (node.target is aten.mm.default or _adds_one_row(node))


def _lies_by_lines(weight: TensorType) -> bool:
    """Whether rows or columns lie side by side in memory, one behind the other."""
    return weight.stride == contiguous_strides(weight.shape) or weight.stride == (1, weight.shape[0])


def _adds_one_row(node: Node) -> bool:
    bias: Any = node.args[0]
    kind: TensorType = bias.meta["type"]
    as_it_is = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
    return as_it_is and kind.shape == node.meta["type"].shape[1:] and kind.stride == (1,)


def _rewrite(graph: torch.fx.Graph, node: Node) -> None:
    build = building_for(graph, node)
    x, weight = node.args[_LEFT[node.target] :][:2]
    bias = None if node.target is aten.mm.default else node.args[0]
    with graph.inserting_before(node):
        by_outputs = (
            weight.args[0] if weight.target is aten.t.default else build.call(aten.t.default, weight)  # type: ignore
        )
        made = build.node(
            torch.ops.mkldnn._linear_pointwise.default, (x, by_outputs, bias, "none", [], ""), {}, node.meta["type"]
        )
    made.meta |= node.meta
    node.replace_all_uses_with(made)
    graph.erase_node(node)
