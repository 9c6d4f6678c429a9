"""Linear layers with a bias in bfloat16 go to oneDNN's own operator for them, with the weight as it lies.

Takes and gives a functional graph of training on a CPU (inference packs its weights, see pack.py). `addmm` spreads the
bias over the result before the product accumulates into it: on a processor with matrix units that pass is a third of
the product's time.
Always holds: bias and product are added in float32 and rounded once, as `addmm` does.
"""

from __future__ import annotations

from typing import Any

from fusewright.base.pytorch import torch
from fusewright.graph.builder import Builder
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten


def biased_linear(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return graph
    build = Builder(graph)
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        weight = _weight(node)
        if weight is None or not context.allow(f"linear with bias: {node.name}"):
            continue
        bias, x, _ = node.args
        build.location = node.meta.get("location", ())
        with graph.inserting_before(node):
            made = build.node(
                torch.ops.mkldnn._linear_pointwise.default, (x, weight, bias, "none", [], ""), {}, node.meta["type"]
            )
        made.meta |= node.meta
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return graph


def _weight(node: torch.fx.Node) -> torch.fx.Node | None:
    """The weight (features out x features in) if the node is bias + x @ weight.t() as the library's operator takes
    it."""
    bias, x, turned = node.args
    if not all(isinstance(one, torch.fx.Node) for one in (bias, x, turned)) or any(
        node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")
    ):
        return None
    weight: Any = turned.args[0] if turned.target is aten.t.default else None  # type: ignore[union-attr]
    if not isinstance(weight, torch.fx.Node):
        return None
    kinds: list[TensorType] = [one.meta["type"] for one in (bias, x, weight, node)]  # type: ignore[union-attr]
    result, features = kinds[3], kinds[2].shape[0]
    plain = all(kind.stride == contiguous_strides(kind.shape) and kind.dtype is torch.bfloat16 for kind in kinds)
    static = all(isinstance(size, int) and size > 0 for size in (*result.shape, *kinds[2].shape))
    fits = plain and static and result.device.type == "cpu" and kinds[0].shape == (features,)
    return weight if fits else None
