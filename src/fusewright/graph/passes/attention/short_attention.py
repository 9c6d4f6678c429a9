"""Attention of few queries and keys over sizes that are known, written out as loops (over others: select/attention.py).

Takes and gives a functional graph of inference on a CPU. The library's operator works through blocks that suit long
sequences: over one token (64 multiplications a head) it takes 4 to 12 microseconds, loops 0.3.
Always holds: scores, probabilities and sums are float32, as in the operator; a query whose keys are all masked gives
zeros, as there; results have the types that they had.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from fusewright.base.thresholds import MOST_SHORT_WORK
from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def short_attention(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        if is_short(node) and context.allow(f"attention: {node.name}"):
            with replacing(graph, node) as build:
                _write_out(build, node)
    return graph


def may_write_out(graph: torch.fx.Graph) -> bool:
    """Whether there is attention to be written out: not in training, whose gradients read what the operator saves."""
    return any(map(is_short, graph.find_nodes(op="call_function", target=ATTENTION)))


def is_short(node: Node) -> bool:
    query, key, value = node.args[:3]
    kinds: list[TensorType] = [one.meta["type"] for one in (query, key, value)]  # type: ignore[union-attr]
    if node.args[3:4] not in ((), (0.0,)) or any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        return False
    if kinds[0].device.type != "cpu" or any(kind.ndim != 4 or kind.dtype is not kinds[0].dtype for kind in kinds):
        return False
    if not all(isinstance(size, int) and size > 0 for kind in kinds for size in kind.shape):
        return False
    batch, heads, rows, features = kinds[0].shape
    columns = kinds[1].shape[2]
    fits = kinds[1].shape == (batch, heads, columns, features) and kinds[2].shape[:3] == (batch, heads, columns)
    mask: Any = node.kwargs.get("attn_mask")
    if mask is not None and not mask.meta["type"].dtype.is_floating_point:
        return False
    work: Any = batch * heads * rows * columns * features  # type: ignore[operator]
    return fits and kinds[0].dtype in (torch.float32, torch.bfloat16, torch.float16) and work <= MOST_SHORT_WORK


def _write_out(build: Builder, node: Node) -> None:
    arguments: Any = node.args
    query, key, value = arguments[:3]
    causal = len(arguments) > 4 and bool(arguments[4])
    kind: TensorType = query.meta["type"]
    rows, columns = kind.shape[2], key.meta["type"].shape[2]
    given: Any = node.kwargs.get("scale")
    scale = 1.0 / math.sqrt(kind.shape[3]) if given is None else given  # type: ignore[arg-type]
    call = build.call

    def wide(one: Any) -> Any:
        return one if one.meta["type"].dtype is torch.float32 else call(aten._to_copy.default, one, dtype=torch.float32)

    def beside(one: Any, axis: int) -> Node:
        return call(aten.unsqueeze.default, wide(one), axis)

    scores = call(aten.sum.dim_IntList, call(aten.mul.Tensor, beside(query, 3), beside(key, 2)), [-1])
    scores = call(aten.mul.Scalar, scores, scale)
    mask: Any = node.kwargs.get("attn_mask")
    if mask is not None:
        scores = call(aten.add.Tensor, scores, wide(mask))
    if causal:
        numbers = [call(aten.arange.default, size, device=kind.device) for size in (columns, rows)]
        places = [call(aten.unsqueeze.default, number, axis) for axis, number in enumerate(numbers)]
        scores = call(aten.masked_fill.Scalar, scores, call(aten.gt.Tensor, *places), -math.inf)
    largest = call(aten.amax.default, scores, [-1], True)
    largest = call(aten.masked_fill.Scalar, largest, call(aten.eq.Scalar, largest, -math.inf), 0.0)
    powers = call(aten.exp.default, call(aten.sub.Tensor, scores, largest))
    total = call(aten.sum.dim_IntList, powers, [-1], True)
    total = call(aten.masked_fill.Scalar, total, call(aten.eq.Scalar, total, 0.0), 1.0)
    shares = call(aten.unsqueeze.default, call(aten.div.Tensor, powers, total), 4)
    found = call(aten.sum.dim_IntList, call(aten.mul.Tensor, shares, beside(value, 2)), [-2])
    for reader in list(node.users):
        like: TensorType = reader.meta["type"]
        narrow = found if like.dtype is torch.float32 else call(aten._to_copy.default, found, dtype=like.dtype)
        reader.replace_all_uses_with(build.restride(narrow, like))
        build.graph.erase_node(reader)
