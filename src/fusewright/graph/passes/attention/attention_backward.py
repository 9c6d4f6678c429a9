"""Gradients of attention over short sequences, written out as batched products and loops.

Takes and gives a functional graph of training on a CPU. PyTorch's fused backward works through blocks that suit long
sequences; where the matrix of probabilities is small, five products and a fused softmax gradient take less than half of
its time. The probabilities are those of the scores that it computes, whose softmax is made anew: with the forward's
logarithm of their sum, the roundings of two products of large scores would not cancel.
Always holds: scores and their gradients are float32, as in the fused operator, whatever the inputs are; results have
its types.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import MOST_PROBABILITY_BYTES
from fusewright.graph.builder import Builder
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node


def attention_backward(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ):
        if _is_short(node) and context.allow(f"attention gradient: {node.name}"):
            _write_out(graph, node)
    return graph


def _is_short(node: Node) -> bool:
    kinds: list[TensorType] = [one.meta["type"] for one in node.args[:4]]  # type: ignore[union-attr]
    if node.args[6] != 0.0 or node.kwargs.get("attn_mask") is not None or not _has_own_statistics(node):
        return False
    if not all(isinstance(size, int) and size > 0 for kind in kinds for size in kind.shape) or any(
        kind.ndim != 4 for kind in kinds
    ):
        return False
    dtype = kinds[1].dtype
    same = all(kind.dtype is dtype for kind in kinds) and dtype in (torch.float32, torch.bfloat16)
    batch, heads, rows, features = kinds[1].shape
    columns = kinds[2].shape[2]
    fits = kinds[2].shape == kinds[3].shape == (batch, heads, columns, features)
    probabilities: Any = batch * heads * rows * columns
    return same and fits and probabilities * 4 <= MOST_PROBABILITY_BYTES


def _has_own_statistics(node: Node) -> bool:
    """Whether the result and the logarithms of sums that it is given are those of its own scores: a part of a longer
    attention (ring attention) has those of the whole."""
    *_, out, logsumexp, dropout, causal = node.args
    made: Any = out.args[0] if out.target is operator.getitem else out  # type: ignore[union-attr]
    reads = [(one.target, one.args) for one in (out, logsumexp)]  # type: ignore[union-attr]
    if reads != [(operator.getitem, (made, place)) for place in range(2)]:
        return False
    if made.target is not aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    given = [*made.args, *(0.0, False)[len(made.args) - 3 :]]
    return given == [*node.args[1:4], dropout, causal] and all(
        made.kwargs.get(name) == node.kwargs.get(name) for name in ("attn_mask", "scale")
    )


def _write_out(graph: torch.fx.Graph, node: Node) -> None:
    gradient, query, key, value, *_, causal = node.args
    kind: TensorType = query.meta["type"]  # type: ignore[union-attr]
    batch, heads, rows, features = kind.shape
    columns = key.meta["type"].shape[2]  # type: ignore[union-attr]
    scale: Any = node.kwargs.get("scale")
    scale = 1.0 / math.sqrt(features) if scale is None else scale  # type: ignore[arg-type]
    build = Builder(graph)
    build.location = node.meta.get("location", ())
    # the probabilities depend on no tangent: without this the forward would save them
    build.marks = {"recompute": True}

    def matrices(one: Any, dtype: torch.dtype) -> Node:
        cast = one if one.meta["type"].dtype is dtype else build.call(aten._to_copy.default, one, dtype=dtype)
        shape = one.meta["type"].shape
        return build.call(aten.reshape.default, cast, [batch * heads, *shape[2:]])

    def turned(one: Node) -> Node:
        return build.call(aten.transpose.int, one, 1, 2)

    def narrow(one: Node) -> Node:
        return one if kind.dtype is torch.float32 else build.call(aten._to_copy.default, one, dtype=kind.dtype)

    with graph.inserting_before(node):
        wide = {one: matrices(one, torch.float32) for one in dict.fromkeys((query, key, value, gradient))}
        own = {one: matrices(one, kind.dtype) for one in dict.fromkeys((query, key, gradient))}
        scores = build.call(aten.mul.Scalar, build.call(aten.bmm.default, wide[query], turned(wide[key])), scale)
        if causal:
            places = [
                build.call(aten.unsqueeze.default, build.call(aten.arange.default, size, device=kind.device), axis)
                for size, axis in ((columns, 0), (rows, 1))
            ]
            scores = build.call(aten.masked_fill.Scalar, scores, build.call(aten.gt.Tensor, *places), -math.inf)
        largest = build.call(aten.amax.default, scores, [-1], True)
        powers = build.call(aten.exp.default, build.call(aten.sub.Tensor, scores, largest))
        powers = build.call(aten.div.Tensor, powers, build.call(aten.sum.dim_IntList, powers, [-1], True))
        along = build.call(aten.bmm.default, wide[gradient], turned(wide[value]))
        product = build.call(aten.mul.Tensor, along, powers)
        mean = build.call(aten.sum.dim_IntList, product, [-1], True)
        slope = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, along, mean), powers)
        slope = narrow(build.call(aten.mul.Scalar, slope, scale))
        found = (
            build.call(aten.bmm.default, slope, own[key]),
            build.call(aten.bmm.default, turned(slope), own[query]),
            build.call(aten.bmm.default, turned(narrow(powers)), own[gradient]),
        )
        for position, (result, like) in enumerate(zip(found, node.meta["type"])):
            whole = build.restride(build.call(aten.view.default, result, list(like.shape)), like)
            for reader in [user for user in node.users if user.target is operator.getitem and user.args[1] == position]:
                reader.replace_all_uses_with(whole)
                graph.erase_node(reader)
    graph.erase_node(node)
