"""The results of a batch normalisation by its own statistics and of a log-softmax are written out: pointwise in their
input and what is known of each channel or row.

Takes and gives a functional joint graph. The batch normalisation's operator keeps the sums (and the running
statistics); its result becomes x * alpha + beta. A log-softmax whose gradient is computed becomes (x - maximum) -
log(sum). So the partition sees that the backward can compute the result, and the activation behind it, again from what
it reads anyway, and does not save them beside it: nor as float32 what is in memory as halves. The running statistics
that the gradient is handed, and does not look at, are taken from it: and not saved.
Always holds: the arithmetic is that of the operator's own kernel (see loops/lower/norms.py), in the type in which it
    computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx

from fusewright.graph.builder import Builder, building_for
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.expressions import known_lt
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

TRAINS: dict[torch._ops.OpOverload, Callable[[tuple[object, ...]], bool]] = {
    aten.native_batch_norm.default: lambda args: args[5] is True,
    aten._native_batch_norm_legit_functional.default: lambda args: args[5] is True,
    aten._native_batch_norm_legit.no_stats: lambda args: args[3] is True,
}
"""Operators whose first arguments are (input, weight, bias) and results (result, mean, 1 / deviation, ...) → whether
they use the batch's own statistics."""


def norm_results(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for target, trains in TRAINS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if trains(node.args) and context.allow(f"normalised: {node.name}"):
                _write_out(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        gradient, x, weight, mean, var, saved_mean, saved_root, train, *rest = node.args
        if (
            train is True
            and saved_mean is not None
            and saved_root is not None
            and (mean is not None or var is not None)
        ):
            if not context.allow(f"running statistics: {node.name}"):
                break
            node.args = (gradient, x, weight, None, None, saved_mean, saved_root, train, *rest)
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        if any(user.target is aten._log_softmax_backward_data.default for user in node.users):
            if _has_rows(node) and context.allow(f"log-softmax: {node.name}"):
                _write_out_log_softmax(graph, node)
    return graph


def _has_rows(node: Node) -> bool:
    kind: TensorType = node.meta["type"]
    return kind.ndim > 0 and known_lt(0, kind.shape[node.args[1]]) is True  # type: ignore[index]


def _write_out_log_softmax(graph: torch.fx.Graph, node: Node) -> None:
    x, dim = node.args[:2]
    assert isinstance(x, Node)
    kind: TensorType = node.meta["type"]
    build = building_for(graph, node)
    with graph.inserting_before(node):
        wide = _as(build, x, _working(kind))
        shifted = build.call(aten.sub.Tensor, wide, build.call(aten.amax.default, wide, [dim], True))
        total = build.call(aten.sum.dim_IntList, build.call(aten.exp.default, shifted), [dim], True)
        result = build.call(aten.sub.Tensor, shifted, build.call(aten.log.default, total))
        node.replace_all_uses_with(build.restride(_as(build, result, kind.dtype), kind))
    graph.erase_node(node)


def _write_out(graph: torch.fx.Graph, node: Node) -> None:
    x, weight, bias = node.args[:3]
    kinds = node.meta["type"]
    kind: TensorType = x.meta["type"]  # type: ignore[union-attr]
    working = _working(kind)
    readers = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if (
        not readers
        or kind.ndim < 2
        or not all(isinstance(one, TensorType) and one.dtype is working for one in kinds[1:3])
    ):
        return  # statistics that were rounded are not what the operator computes with
    build = building_for(graph, node)

    def channels(one: object) -> Node:
        """A value for each channel, against the input's dimensions."""
        made = _as(build, one, working)
        return build.call(aten.view.default, made, [*made.meta["type"].shape, *[1] * (kind.ndim - 2)])

    behind = node.next
    while behind.target is operator.getitem and behind.args[0] is node:
        behind = behind.next  # `_item` may put another in its place
    with graph.inserting_before(behind):
        mean, scale = channels(_item(build, node, 1)), channels(_item(build, node, 2))
        if weight is not None:
            scale = build.call(aten.mul.Tensor, scale, channels(weight))
        shift = build.call(aten.mul.Tensor, mean, scale)
        shift = (
            build.call(aten.neg.default, shift) if bias is None else build.call(aten.sub.Tensor, channels(bias), shift)
        )
        result = build.call(aten.add.Tensor, build.call(aten.mul.Tensor, _as(build, x, working), scale), shift)
        result = build.restride(_as(build, result, kind.dtype), kinds[0])
    for reader in readers:
        reader.replace_all_uses_with(result)
        graph.erase_node(reader)


def _working(kind: TensorType) -> torch.dtype:
    """In which type the operators compute."""
    return torch.float64 if kind.dtype is torch.float64 else torch.float32


def _as(build: Builder, one: object, dtype: torch.dtype) -> Node:
    assert isinstance(one, Node)
    return one if one.meta["type"].dtype is dtype else build.call(aten._to_copy.default, one, dtype=dtype)


def _item(build: Builder, node: Node, index: int) -> Node:
    """Result `index` of `node`, in front of all that reads it."""
    made = build.item(node, index)
    for other in [
        user for user in node.users if user.target is operator.getitem and user.args[1] == index and user is not made
    ]:
        other.replace_all_uses_with(made)
        build.graph.erase_node(other)
    return made
