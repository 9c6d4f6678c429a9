"""Packing: linear layers and convolutions by parameters go to oneDNN's operators, with weights in the layout that those like best.

Takes and gives a functional inference graph whose parameter inputs carry meta["stable"]. Also folds a BatchNorm in evaluation into the
convolution before it, and an activation behind it into the operator. The new nodes that depend on parameters alone (packed weights,
folded statistics) are computed once: see passes/prepare.py.
Always holds: values equal those before within rounding, NaN and infinities included (oneDNN's ReLU and GELU lose them, so those stay
loops).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder
from fusewright.graph.passes.runner import Rewrites
from fusewright.graph.passes.stable import stable_nodes
from fusewright.graph.sizes import Dim
from fusewright.graph.types import TensorType, contiguous_strides

aten = torch.ops.aten
Node = torch.fx.Node

LEAST_ROWS = {torch.float32: 8, torch.bfloat16: 1}
"""Fewest rows of a matrix product for which the packed operator is the quicker one (a product by one row is a matter of bandwidth)."""

LEAST_SIZE = 8
"""Smaller matrices are not worth a layout of their own."""

ACTIVATIONS: dict[Any, str] = {aten.silu.default: "swish", aten.hardswish.default: "hardswish"}
"""Activations that the library fuses exactly, and their names there."""


def pack(graph: torch.fx.Graph, rewrites: Rewrites) -> torch.fx.Graph:
    if not torch.backends.mkldnn.is_available():
        return graph
    run = _Packing(graph, rewrites)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        row = _ROWS.get(node.target)
        if row is not None:
            row(run, node)
    return graph


class _Packing:
    def __init__(self, graph: torch.fx.Graph, rewrites: Rewrites) -> None:
        self.graph = graph
        self.rewrites = rewrites
        self.build = Builder(graph)
        self.stable = stable_nodes(graph)
        self.packed: dict[Any, Node] = {}

    def example(self, size: Dim) -> int:
        """A size as the library is told it when it chooses a layout, which any other size may then use too."""
        if isinstance(size, int):
            return size
        return LEAST_SIZE if self.build.env is None else self.build.env.hint(size)

    def is_stable(self, *nodes: Any) -> bool:
        return all(node is None or node in self.stable for node in nodes)

    def new(self, target: Any, args: Sequence[Any], type_: TensorType, at: Node) -> Node:
        """A node in front of `at`, stable when all its tensors are."""
        self.build.location = at.meta.get("location", ())
        with self.graph.inserting_before(at):
            made = self.build.node(target, args, {}, type_)
        if made.all_input_nodes and self.is_stable(*made.all_input_nodes):
            self.stable.add(made)
        return made

    def call(self, target: Any, *args: Any, at: Node) -> Node:
        self.build.location = at.meta.get("location", ())
        with self.graph.inserting_before(at):
            made = self.build.call(target, *args)
        self.stable.add(made)
        return made

    # --- linear layers -----------------------------------------------------------------------------------------------

    def mm(self, node: Node) -> None:
        x, weight = node.args
        self.linear(node, x, weight, None)  # type: ignore[arg-type]

    def addmm(self, node: Node) -> None:
        bias, x, weight = node.args
        plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
        if plain and bias.meta["type"].ndim == 1 and bias.meta["type"].shape == node.meta["type"].shape[1:]:  # type: ignore[union-attr]
            self.linear(node, x, weight, bias)  # type: ignore[arg-type]

    def linear(self, node: Node, x: Node, weight: Node, bias: Node | None) -> None:
        type_: TensorType = node.meta["type"]
        least = LEAST_ROWS.get(type_.dtype)
        rows, columns = type_.shape
        if least is None or type_.device.type != "cpu" or not self.is_stable(weight, bias) or weight.meta["type"].dtype != type_.dtype:
            return
        inner = weight.meta["type"].shape[0]
        if not isinstance(columns, int) or not isinstance(inner, int) or min(columns, inner) < LEAST_SIZE:
            return
        if (isinstance(rows, int) and rows < least) or (type_.dtype is torch.bfloat16 and not _has_bf16()):
            return
        if not _is_plain(x.meta["type"]) or not self.rewrites.allow(f"packed weight: {node.name}"):
            return
        hint = rows if isinstance(rows, int) else None
        packed = self.packed.get((weight, hint))
        if packed is None:
            whole = self.call(aten.t.default, weight, at=node)
            dense = self.call(aten.clone.default, whole, at=node) if not _is_plain(whole.meta["type"]) else whole
            packed = self.new(torch.ops.mkldnn._reorder_linear_weight.default, (dense, hint), dense.meta["type"], node)
            self.packed[weight, hint] = packed
        dense_type = replace(type_, stride=contiguous_strides(type_.shape))
        made = self.new(torch.ops.mkldnn._linear_pointwise.default, (x, packed, bias, "none", [], ""), dense_type, node)
        self.replace(node, made)
        self.fuse_activation(made, 3)

    # --- convolutions ------------------------------------------------------------------------------------------------

    def convolution(self, node: Node) -> None:
        x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        type_, kind = node.meta["type"], weight.meta["type"]  # type: ignore[union-attr]
        if transposed or type_.ndim != 4 or type_.device.type != "cpu" or not self.is_stable(weight, bias) or kind.dtype != type_.dtype:
            return
        if type_.dtype not in LEAST_ROWS or (type_.dtype is torch.bfloat16 and not _has_bf16()):
            return
        if not all(isinstance(size, int) for size in kind.shape):
            return
        if 0 in type_.shape or not self.rewrites.allow(f"packed weight: {node.name}"):
            return
        norm = self.norm_after(node) if type_.dtype is torch.float32 else None
        after = node
        if norm is not None:
            weight, bias = self.folded(node, norm, weight, bias)  # type: ignore[arg-type]
            after = next(iter(norm.users))
        kind, sizes = weight.meta["type"], [self.example(size) for size in x.meta["type"].shape]  # type: ignore[union-attr]
        reorder = torch.ops.mkldnn._reorder_convolution_weight.default
        packed = self.new(reorder, (weight, padding, stride, dilation, groups, sizes), kind, node)
        made = self.new(
            torch.ops.mkldnn._convolution_pointwise.default,
            (x, packed, bias, padding, stride, dilation, groups, "none", [], ""),
            node.meta["type"],
            after,
        )
        self.replace(after, made)
        if norm is not None:
            self.graph.erase_node(norm)
            self.graph.erase_node(node)
        self.fuse_activation(made, 7)

    def norm_after(self, node: Node) -> Node | None:
        """The BatchNorm in evaluation, by parameters, that alone reads a convolution's result and whose first result alone is read."""
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if reader is None or reader.target is not aten.native_batch_norm.default or reader.args[0] is not node or reader.args[5]:
            return None
        results = list(reader.users)
        whole = len(results) == 1 and results[0].target is operator.getitem and results[0].args[1] == 0
        return reader if whole and None not in reader.args[3:5] and self.is_stable(*reader.args[1:5]) else None

    def folded(self, node: Node, norm: Node, weight: Node, bias: Node | None) -> tuple[Node, Node]:
        """Weight and bias of the one convolution that does what the convolution and the normalisation did."""
        _, gamma, beta, mean, variance, _, _, epsilon = norm.args
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Scalar, variance, epsilon, at=node), at=node)
        if gamma is not None:
            scale = self.call(aten.mul.Tensor, scale, gamma, at=node)
        shape = [weight.meta["type"].shape[0], 1, 1, 1]
        scaled = self.call(aten.mul.Tensor, weight, self.call(aten.reshape.default, scale, shape, at=node), at=node)
        shift = self.call(aten.neg.default, mean, at=node) if bias is None else self.call(aten.sub.Tensor, bias, mean, at=node)
        shift = self.call(aten.mul.Tensor, shift, scale, at=node)
        return scaled, shift if beta is None else self.call(aten.add.Tensor, shift, beta, at=node)

    # --- both --------------------------------------------------------------------------------------------------------

    def replace(self, node: Node, made: Node) -> None:
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def fuse_activation(self, node: Node, position: int) -> None:
        """Gives the operator the activation that alone reads its result."""
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        name = None if reader is None else ACTIVATIONS.get(reader.target)
        if name is None or reader is None or reader.meta["type"] != node.meta["type"] or not self.rewrites.allow(f"fused: {name}"):
            return
        node.update_arg(position, name)
        self.replace(reader, node)


_ROWS: dict[Any, Any] = {
    aten.mm.default: _Packing.mm,
    aten.addmm.default: _Packing.addmm,
    aten.convolution.default: _Packing.convolution,
}


def _is_plain(type_: TensorType) -> bool:
    return type_.stride == contiguous_strides(type_.shape)


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
