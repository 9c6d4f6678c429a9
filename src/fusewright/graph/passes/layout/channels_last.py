"""Layout: chains of convolutions run in channels-last memory format.

Takes and gives a functional graph, of inference or joint. The CPU's convolutions are quickest on channels-last tensors,
and what stands between them (normalisation, activation, pooling, residual additions) does not care. The input of each
2-D convolution is brought to channels-last where it is not, and so is the gradient of its result; results carry the
format on through operators of `AGNOSTIC` and views of `VIEWS`; every other reader, and the user, gets the layout it had
before.
Always holds: the values and the outputs' strides are those of the graph before the pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import LEAST_CONVOLUTIONS
from fusewright.graph.builder import Builder, argument_types
from fusewright.graph.passes.clean.escape import escaping
from fusewright.graph.passes.context import PassContext
from fusewright.operators.derive import derive
from fusewright.operators.rules.common import is_surely_channels_last
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType, contiguous_strides, same_strides

aten = torch.ops.aten
Node = torch.fx.Node

AGNOSTIC = frozenset({
    aten.convolution.default, aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default,
    aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.mean.dim,
    aten.sum.dim_IntList,
    aten.cat.default, aten.constant_pad_nd.default, aten.clone.default, aten._to_copy.default,
    aten.upsample_nearest2d.vec,
    aten.convolution_backward.default, aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
})  # fmt: skip
"""Operators whose result does not depend on how their arguments lie in memory; those of POINTWISE are so too."""

POINTWISE = frozenset({
    aten.hardtanh_backward.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default, aten.softplus_backward.default, aten.mish_backward.default,
    aten._prelu_kernel_backward.default,
})  # fmt: skip
"""Pointwise operators beside those that PyTorch has tagged so."""

VIEWS = frozenset({
    aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
})  # fmt: skip
"""Views that exist for any strides; they carry a layout on unless their storage leaves the graph."""


def _pointwise(target: Any) -> bool:
    tagged = (
        isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags and not facts(target).written
    )
    return tagged or target in POINTWISE


def _wants_channels_last(node: Node, joint: bool) -> bool:
    """Whether this is a convolution that is quicker on channels-last tensors."""
    if node.op != "call_function" or node.target is not aten.convolution.default:
        return False
    kind, weight = node.args[0].meta["type"], node.args[1].meta["type"]  # type: ignore[union-attr]
    # A GPU's matrix units take channels last: cuDNN would convert at every convolution. In training in full precision a
    # GPU's or a CPU's other order of summation would show: batch norms over few elements make percents of rounding in
    # gradients.
    half = kind.dtype in (torch.bfloat16, torch.float16)
    place = half or (kind.device.type == "cpu" and not joint)
    static = (*(kind.shape if joint else kind.shape[1:2]), *weight.shape)
    return kind.ndim == 4 and place and not node.args[6] and all(isinstance(d, int) for d in static)


def _shape(node: Node) -> tuple[Any, ...]:
    kind = node.meta.get("type")
    return kind.shape if isinstance(kind, TensorType) else ()


def _explicit_format(node: Node) -> bool:
    """A copy that names its own memory format keeps it."""
    return node.kwargs.get("memory_format", torch.preserve_format) not in (None, torch.preserve_format)


class _Layout:
    """One run over a graph: `original` holds the types that nodes had before."""

    def __init__(self, graph: torch.fx.Graph, context: PassContext, joint: bool) -> None:
        self.graph = graph
        self.context = context
        self.build = Builder(graph)
        self.joint = joint
        self.original: dict[Node, Any] = {}
        self.restored: dict[Node, Node] = {}
        self.converted: dict[Node, Node] = {}
        self.escaping = escaping(graph)

    def as_before(self, node: Node, reader: Node) -> Node:
        """`node` in the layout that it had before the pass, in front of `reader`."""
        kind = self.original.get(node)
        if not isinstance(kind, TensorType) or (kind.stride == node.meta["type"].stride):
            return node
        found = self.restored.get(node)
        if found is None:
            with self.graph.inserting_before(reader):
                self.build.location = node.meta.get("location", ())
                if same_strides(node.meta["type"], kind):  # what differs are strides of dimensions of one element
                    if kind.stride != contiguous_strides(kind.shape):
                        return node
                    flat = self.build.call(aten.view.default, node, [kind.numel()])
                    found = self.build.call(aten.view.default, flat, list(kind.shape))
                else:
                    found = self.build.restride(node, kind)
                self.restored[node] = found
        return found

    def channels_last(self, node: Node, reader: Node) -> Node:
        """`node` in channels-last format, in front of `reader`."""
        if is_surely_channels_last(node.meta["type"]):
            return node
        found = self.converted.get(node)
        if found is None:
            with self.graph.inserting_before(reader):
                self.build.location = reader.meta.get("location", ())
                found = self.converted[node] = self.build.call(
                    aten.clone.default, node, memory_format=torch.channels_last
                )
        return found

    def visit(self, node: Node) -> None:
        if _wants_channels_last(node, self.joint) and self.context.allow(f"channels-last: {node.name}"):
            node.update_arg(0, self.channels_last(node.args[0], node))  # type: ignore[arg-type]
            self.retype(node)
            return
        moved = [argument for argument in node.all_input_nodes if argument in self.original]
        if not moved or node.meta.get("type") is None:
            return
        if node.target is aten.convolution_backward.default:
            self.backward(node)
            return
        if _pointwise(node.target):
            self.agree(node)
        carries = (
            _pointwise(node.target) or node.target in AGNOSTIC or (node.target in VIEWS and node not in self.escaping)
        )
        if carries and not (_explicit_format(node) or node.meta.get("private")):
            self.retype(node)
            return
        if node.target is operator.getitem:
            self.getitem(node)
            return
        self.restore_arguments(node, moved)

    def backward(self, node: Node) -> None:
        """The gradients of a convolution: in the layout that the forward chose."""
        gradient, input, weight = node.args[:3]
        if input in self.converted:  # the forward reads the copy
            input = self.converted[input]  # type: ignore[index]
            node.update_arg(1, input)
        if any(is_surely_channels_last(one.meta["type"]) for one in (input, weight)):  # type: ignore[union-attr]
            node.update_arg(0, self.channels_last(gradient, node))  # type: ignore[arg-type]
        self.retype(node)

    def agree(self, node: Node) -> None:
        """Arguments of a pointwise operator that are as large as its result all become channels-last where one of them
        is, so that the result is too: what is contiguous would win over it."""
        whole = [one for one in node.all_input_nodes if _shape(one) == _shape(node) and len(_shape(node)) == 4]
        if any(one in self.original and is_surely_channels_last(one.meta["type"]) for one in whole):
            for one in whole:
                node.replace_input_with(one, self.channels_last(one, node))

    def getitem(self, node: Node) -> None:
        """One result of several: it has the type that its producer has now."""
        producer = node.args[0]
        kind = producer.meta["type"][node.args[1]]  # type: ignore[union-attr]
        self.record(node, kind)

    def retype(self, node: Node) -> None:
        """Gives `node` the type that follows from its arguments' new layouts."""
        kind = derive(
            node.target,  # type: ignore[arg-type]
            [argument_types(argument) for argument in node.args],
            {name: argument_types(value) for name, value in node.kwargs.items()},
            self.build.env,
        )
        self.record(node, kind)

    def record(self, node: Node, kind: Any) -> None:
        before = node.meta["type"]
        if kind != before:
            self.original.setdefault(node, before)
            node.meta["type"] = kind

    def restore_arguments(self, node: Node, moved: list[Node], place: Node | None = None) -> None:
        """Gives `node` its arguments in the layout that they had, made in front of `place` (the node itself)."""
        for argument in moved:
            before = self.as_before(argument, place or node)
            if before is not argument:
                node.replace_input_with(argument, before)


def layout(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    joint = any(node.target is aten.convolution_backward.default for node in graph.nodes)
    if sum(_wants_channels_last(node, joint) for node in graph.nodes) < LEAST_CONVOLUTIONS:
        return graph
    run = _Layout(graph, context, joint)
    nodes = list(graph.nodes)
    # nothing is computed after it
    end = next(node for node in nodes if node.op == "output" or node.meta.get("epilogue"))
    for node in nodes:
        if node.op == "output" or node.meta.get("epilogue"):
            run.restore_arguments(
                node, [argument for argument in node.all_input_nodes if argument in run.original], end
            )
        elif node.op == "call_function":
            run.visit(node)
    return graph
