"""Attention of few queries and keys over sizes that are known, written out (over others: select/attention.py).

Takes and gives a functional graph of inference. On a CPU it becomes loops: the library's operator works through blocks
that suit long sequences, so over one token (64 multiplications a head) it takes 4 to 12 microseconds, loops 0.3. On a
GPU it becomes products, which select/fused_attention.py makes one kernel of: the library takes as long for 16 keys as
for 300, and clears memory first.
Always holds: scores, probabilities and sums are float32, as in the operator; a query whose keys are all masked gives
zeros, as there; results have the types that they had.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.base.thresholds import (
    LEAST_GPU_QUERIES,
    MOST_GPU_KEYS,
    MOST_GPU_QUERIES,
    MOST_GPU_WORK,
    MOST_SHORT_WORK,
    MOST_WHOLE_KEYS,
)
from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

HALVES = (torch.bfloat16, torch.float16)
LEAST_FEATURES, MOST_FEATURES = 16, 256
"""That a generated product takes."""
LEAST_BLOCK = 16
"""Queries that a kernel's program computes at least."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """An operator's arguments: what is the same for all of them."""

    query: Node
    key: Node
    value: Node
    mask: Node | None
    causal: bool
    scale: float

    @property
    def kinds(self) -> list[TensorType]:
        return [one.meta["type"] for one in (self.query, self.key, self.value)]


def short_attention(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for target, form in FORMS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            if is_short(node) and context.allow(f"attention: {node.name}"):
                with replacing(graph, node) as build:
                    _write_out(build, node, form)
    return graph


def may_write_out(graph: torch.fx.Graph) -> bool:
    """Whether there is attention to be written out: not in training, whose gradients read what the operator saves."""
    return any(is_short(node) for target in FORMS for node in graph.find_nodes(op="call_function", target=target))


def _given(node: Node) -> dict[str, Any]:
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return dict(zip(names, node.args)) | node.kwargs


def _attention(node: Node) -> _Attention:
    given = _given(node)
    mask = given.get("attn_mask", given.get("attn_bias"))
    features: Any = given["query"].meta["type"].shape[3]
    scale = given.get("scale")
    scale = 1.0 / math.sqrt(features) if scale is None else scale
    return _Attention(given["query"], given["key"], given["value"], mask, bool(given.get("is_causal")), scale)


def is_short(node: Node) -> bool:
    given = _given(node)
    kinds: list[TensorType] = [given[name].meta["type"] for name in ("query", "key", "value")]
    if given.get("dropout_p", 0.0) != 0.0 or given.get("return_debug_mask"):
        return False
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return False
    form = FORMS[node.target]  # type: ignore[index]
    if any(kind.ndim != 4 or kind.dtype is not kinds[0].dtype or kind.device.type != form.device for kind in kinds):
        return False
    if not all(isinstance(size, int) and size > 0 for kind in kinds for size in kind.shape):
        return False
    attention = _attention(node)
    mask = attention.mask
    if mask is not None and not mask.meta["type"].dtype.is_floating_point:
        return False
    return form.suits(attention)


def _suits_loops(attention: _Attention) -> bool:
    query, key, value = attention.kinds
    batch, heads, rows, features = query.shape
    columns = key.shape[2]
    fits = key.shape == (batch, heads, columns, features) and value.shape[:3] == (batch, heads, columns)
    work: Any = batch * heads * rows * columns * features  # type: ignore[operator]
    return fits and query.dtype in (torch.float32, *HALVES) and work <= MOST_SHORT_WORK


def _suits_products(attention: _Attention) -> bool:
    query, key, value = attention.kinds
    sizes: Any = query.shape
    batch, heads, rows, features = sizes
    groups: Any = key.shape[1]
    columns: Any = key.shape[2]
    fits = (key.shape[0], key.shape[3]) == (batch, features) and value.shape[:3] == key.shape[:3]
    fits = fits and heads % groups == 0 and not (attention.causal and rows != columns)
    widths: Any = (features, value.shape[3])
    fits = fits and all(LEAST_FEATURES <= one <= MOST_FEATURES for one in widths)
    work = batch * heads * max(rows, LEAST_BLOCK) * columns * features
    whole = columns <= MOST_WHOLE_KEYS or (batch * heads * rows >= LEAST_GPU_QUERIES and columns <= MOST_GPU_KEYS)
    return fits and whole and rows <= MOST_GPU_QUERIES and work <= MOST_GPU_WORK and query.dtype in HALVES


def _write_out(build: Builder, node: Node, form: Form) -> None:
    found = form.written(build, _attention(node))
    for reader in list(node.users):
        like: TensorType = reader.meta["type"]
        kind: TensorType = found.meta["type"]
        narrow = found if like.dtype is kind.dtype else build.call(aten._to_copy.default, found, dtype=like.dtype)
        reader.replace_all_uses_with(build.restride(narrow, like))
        build.graph.erase_node(reader)


def _wide(build: Builder, one: Node) -> Node:
    narrow = one.meta["type"].dtype is not torch.float32
    return build.call(aten._to_copy.default, one, dtype=torch.float32) if narrow else one


def _masked(build: Builder, attention: _Attention, scores: Node) -> Node:
    """The scores with what is added to them, and without later keys."""
    call = build.call
    kind, keys, _ = attention.kinds
    if attention.mask is not None:
        scores = call(aten.add.Tensor, scores, _wide(build, attention.mask))
    if attention.causal:
        sizes = (keys.shape[2], kind.shape[2])
        numbers = [call(aten.arange.default, size, device=kind.device) for size in sizes]
        places = [call(aten.unsqueeze.default, number, axis) for axis, number in enumerate(numbers)]
        scores = call(aten.masked_fill.Scalar, scores, call(aten.gt.Tensor, *places), -math.inf)
    return scores


def _as_products(build: Builder, attention: _Attention) -> Node:
    call = build.call
    sizes: Any = attention.kinds[0].shape
    batch, heads, rows, _ = sizes

    def matrices(one: Node) -> Node:
        """As a batch of matrices for each of the queries' heads."""
        shape: Any = one.meta["type"].shape
        group = heads // shape[1]
        if group > 1:
            one = call(aten.unsqueeze.default, one, 2)
            one = call(aten.expand.default, one, [batch, shape[1], group, *shape[2:]])
        return call(aten.reshape.default, one, [batch * heads, *shape[2:]])

    query, key, value = (matrices(one) for one in (attention.query, attention.key, attention.value))
    columns = key.meta["type"].shape[1]
    across = call(aten.transpose.int, _wide(build, key), 1, 2)
    scores = call(aten.mul.Scalar, call(aten.bmm.default, _wide(build, query), across), attention.scale)
    scores = _masked(build, attention, call(aten.view.default, scores, [batch, heads, rows, columns]))
    weights = call(aten._safe_softmax.default, scores, -1)
    weights = call(aten._to_copy.default, weights, dtype=value.meta["type"].dtype)
    weights = call(aten.view.default, weights, [batch * heads, rows, columns])
    result = call(aten.bmm.default, weights, value)
    return call(aten.view.default, result, [batch, heads, rows, value.meta["type"].shape[2]])


def _as_loops(build: Builder, attention: _Attention) -> Node:
    call = build.call

    def beside(one: Node, axis: int) -> Node:
        return call(aten.unsqueeze.default, _wide(build, one), axis)

    query, key = beside(attention.query, 3), beside(attention.key, 2)
    scores = call(aten.sum.dim_IntList, call(aten.mul.Tensor, query, key), [-1])
    scores = _masked(build, attention, call(aten.mul.Scalar, scores, attention.scale))
    largest = call(aten.amax.default, scores, [-1], True)
    largest = call(aten.masked_fill.Scalar, largest, call(aten.eq.Scalar, largest, -math.inf), 0.0)
    powers = call(aten.exp.default, call(aten.sub.Tensor, scores, largest))
    total = call(aten.sum.dim_IntList, powers, [-1], True)
    total = call(aten.masked_fill.Scalar, total, call(aten.eq.Scalar, total, 0.0), 1.0)
    shares = call(aten.unsqueeze.default, call(aten.div.Tensor, powers, total), 4)
    return call(aten.sum.dim_IntList, call(aten.mul.Tensor, shares, beside(attention.value, 2)), [-2])


class Form(NamedTuple):
    """What an operator's calls become on a device, where they suit that."""

    device: str
    suits: Callable[[_Attention], bool]
    written: Callable[[Builder, _Attention], Node]


_PRODUCTS = Form("cuda", _suits_products, _as_products)
FORMS: dict[Any, Form] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: Form("cpu", _suits_loops, _as_loops),
    aten._scaled_dot_product_flash_attention.default: _PRODUCTS,
    aten._scaled_dot_product_efficient_attention.default: _PRODUCTS,
    aten._scaled_dot_product_cudnn_attention.default: _PRODUCTS,
}
