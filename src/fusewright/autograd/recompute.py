"""Which operators are cheap enough to be computed twice: views, and pointwise operators (which fuse into what reads
them)."""

from __future__ import annotations

import math

import torch
import torch.fx

from fusewright.graph.nodes import written
from fusewright.graph.passes.clean import escape
from fusewright.operators.schema import ZEROS, facts
from fusewright.sizes.estimate import estimate
from fusewright.sizes.tensor_type import TensorType

CHEAP = frozenset({
    torch.ops.aten.constant_pad_nd.default, torch.ops.aten.full.default, torch.ops.aten.full_like.default,
    torch.ops.aten.ones_like.default, torch.ops.aten.ones.default, *ZEROS,
    torch.ops.aten.scalar_tensor.default, torch.ops.aten.arange.default, torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
})  # fmt: skip
"""Operators beside views and pointwise ones that read each element once at most and compute next to nothing."""


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node only renames its input's elements."""
    return node.target is torch.ops.aten._unsafe_view.default or escape.is_view(node)


SUMS = frozenset({
    torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.default, torch.ops.aten.mean.dim,
})  # fmt: skip


def can_recompute(node: torch.fx.Node) -> bool:
    """Whether computing the node twice gives the same value and does nothing else."""
    if (
        node.op != "call_function"
        or node.meta.get("random")
        or node.meta.get("writes_private")
        or node.meta.get("private")
    ):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not written  # arithmetic on sizes, getitem
    known = facts(target)
    return not (known.written or known.effect)


def is_cheap(node: torch.fx.Node) -> bool:
    """Whether the backward may compute the node again instead of reading a saved value (if it can)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target is torch.ops.aten._to_copy.default:
        # A cast of what was computed fuses into its readers; a weight's to halves is a pass over memory of its own.
        (source,) = node.all_input_nodes
        before, after = (one.meta["type"].dtype.itemsize for one in (source, node))
        return bool(source.op != "placeholder" or before < after)
    if target in SUMS:
        # Of single elements: saved, it would not be what the backward computes them to be, and a quotient of the
        # difference by 0 (of a variance) infinite instead of NaN.
        (source,) = node.all_input_nodes
        return bool(source.meta["type"].numel() == node.meta["type"].numel())
    return torch.Tag.pointwise in target.tags or target in CHEAP or is_view(node)


def elements(kind: TensorType) -> int:
    """How many elements a tensor likely has."""
    return math.prod(map(estimate, kind.shape))


_INNER = {
    # operator: (argument whose last dimension is summed over)
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1,
    "mkldnn::_linear_pointwise": 0,
}  # fmt: skip


def work(node: torch.fx.Node) -> int:
    """An estimate of the arithmetic that the node costs, to rank recomputations by."""
    kinds = node.meta.get("type")
    results = [kind for kind in (kinds if isinstance(kinds, tuple) else (kinds,)) if isinstance(kind, TensorType)]
    total = sum(map(elements, results))
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    arguments = [value.meta["type"] if isinstance(value, torch.fx.Node) else None for value in node.args]
    name = node.target._schema.name
    if name in _INNER:
        inner = arguments[_INNER[name]]
        return 2 * total * (elements(inner) // max(1, elements_but_last(inner))) if inner is not None else total
    if name == "aten::convolution" and len(arguments) > 1 and arguments[1] is not None:
        weight = arguments[1]
        return 2 * total * (elements(weight) // max(1, estimate(weight.shape[0])))
    return total + sum(elements(kind) for kind in arguments if isinstance(kind, TensorType))


def elements_but_last(kind: TensorType) -> int:
    """The elements of one slice along the last dimension."""
    return math.prod(map(estimate, kind.shape[:-1]))
