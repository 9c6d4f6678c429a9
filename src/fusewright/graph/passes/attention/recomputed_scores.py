"""Gradients of a softmax between two products, in the form that needs no probabilities from the forward.

Takes and gives a functional graph of training. On a GPU, where scores are products of halves, the forward keeps of each
row the logarithm of its sum of exponentials: the backward computes scores again, and what the probabilities' gradients
sum to along a row is the product of the result with its gradient. So nothing as large as the scores lies between the
halves, and `select/chained_products.py` finds products whose operands are expressions of other products.
Always holds: scores, exponentials and gradients of weights are float32; operands of products are rounded to the type
that the scores' own operands have, as the gradients that they sum to are; rows without a score above negative infinity
give what the softmax gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.graph.builder import Builder
from fusewright.graph.passes.clean.escape import is_view
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

DEVICES = {"cuda"}
HALVES = (torch.bfloat16, torch.float16)
LEAST, MOST_FEATURES = 16, 256
"""Rows, columns and features that a generated kernel takes."""

_SOFTMAX = (aten._safe_softmax.default, aten._softmax.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CASTS = (aten._to_copy.default,)
_COPIES = (aten.clone.default, *_VIEWS, *_CASTS)


def recomputed_scores(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default):
        found = _found(node)
        if found is not None and context.allow(f"softmax gradient: {node.name}"):
            _rewrite(graph, found)
    return graph


@dataclass(frozen=True, slots=True)
class _Found:
    """node: the softmax's gradient; weights: its result; narrow: that as the second product reads it; product: that
    product; again: the chain of nodes from the scores' product to the softmax, with the casts of its operands; along:
    the product that gives the gradient of the weights; turned: the transposed weights that the gradient of the values
    reads; half: the type of the scores' operands; last: products of the scores' gradient."""

    node: Node
    weights: Node
    narrow: Node
    product: Node
    along: Node
    again: tuple[Node, ...]
    turned: tuple[Node, ...]
    half: torch.dtype
    last: tuple[Node, ...]


def _kind(node: Node) -> TensorType:
    kind: TensorType = node.meta["type"]
    return kind


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _is_matrix_view(node: Node) -> bool:
    """Whether the node casts, or joins or splits dimensions before the last two."""
    if node.target in _CASTS:
        return True
    return node.target in _VIEWS and _kind(node).shape[-2:] == _kind(node.args[0]).shape[-2:]  # type: ignore[arg-type]


def _turned(node: object) -> Node | None:
    """What the node is the transposed matrix of."""
    if isinstance(node, Node) and node.target is aten.transpose.int:
        ndim = _kind(node).ndim
        if {axis % ndim for axis in node.args[1:]} == {ndim - 2, ndim - 1}:  # type: ignore[operator]
            return node.args[0]  # type: ignore[return-value]
    return None


def _source(node: object) -> Node | None:
    """What the matrices are casts and views of."""
    while isinstance(node, Node) and _is_matrix_view(node):
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _users(node: Node) -> Iterator[Node]:
    """What reads the matrices, through casts and views."""
    for user in node.users:
        if _is_matrix_view(user):
            yield from _users(user)
        else:
            yield user


def _found(node: Node) -> _Found | None:
    gradient, weights, axis = node.args[:3]
    along = _source(gradient)
    if not isinstance(weights, Node) or weights.target not in _SOFTMAX or along is None:
        return None
    kind = _kind(weights)
    shape = [size for size in kind.shape if isinstance(size, int)]
    if len(shape) != kind.ndim or kind.ndim < 3 or axis not in (-1, kind.ndim - 1):
        return None
    if kind.device.type not in DEVICES or kind.dtype not in (torch.float32, *HALVES) or min(shape[-2:]) < LEAST:
        return None
    products, turned = [], []
    for user in _users(weights):
        if user.target is aten.bmm.default and _source(user.args[0]) is weights:
            products.append(user)
        elif _turned(user) is not None:
            turned.append(user)
        elif user is not node:
            return None
    if len(products) != 1 or along.target is not aten.bmm.default:
        return None
    (product,) = products
    narrow = product.args[0]
    assert isinstance(narrow, Node)
    if any(not _is_alike(_kind(one.args[0]), _kind(narrow)) for one in turned):  # type: ignore[arg-type]
        return None
    values, across = product.args[1], along.args[1]
    if _turned(across) is not values and _turned(values) is not across:
        return None
    again = _again(weights.args[0])
    last = _last(node)
    scores = [one for one in again if one.target is aten.bmm.default]
    if len(scores) != 1 or not last:
        return None
    half, other = (_half(operand) for operand in scores[0].args)
    widths = (_kind(product).shape[-1], _kind(scores[0].args[0]).shape[-1])  # type: ignore[arg-type]
    fits = all(isinstance(width, int) and LEAST <= width <= MOST_FEATURES for width in widths)
    if half is None or half is not other or not fits:
        return None
    return _Found(node, weights, narrow, product, along, tuple(again), tuple(turned), half, tuple(last))


def _is_alike(kind: TensorType, other: TensorType) -> bool:
    return (kind.shape, kind.dtype) == (other.shape, other.dtype)


def _half(operand: object) -> torch.dtype | None:
    """The half type that the operand's elements have, cast or not."""
    while isinstance(operand, Node):
        if _kind(operand).dtype in HALVES:
            return _kind(operand).dtype
        if not (operand.target in _CASTS or operand.target in _VIEWS or _turned(operand) is not None):
            return None
        operand = operand.args[0]
    return None


def _again(scores: object) -> list[Node]:
    """What is computed again for the scores: pointwise operators, views and reads at indices down to products, and what
    casts, turns and repeats the products' operands."""
    found: dict[Node, None] = {}
    pending: list[tuple[Any, bool]] = [(scores, False)]
    while pending:
        node, is_operand = pending.pop()
        if not isinstance(node, Node) or node in found or node.op != "call_function":
            continue
        is_product = node.target is aten.bmm.default
        if node.target in _COPIES or is_view(node) or (not is_operand and (is_product or _is_plain(node))):
            found[node] = None
            pending.extend((one, is_operand or is_product) for one in node.all_input_nodes)
    return list(found)


def _is_plain(node: Node) -> bool:
    return node.target is aten.index.Tensor or _is_pointwise(node)


def _last(node: Node) -> list[Node]:
    """The products that read the scores' gradient, through pointwise operators and views."""
    found: dict[Node, None] = {}
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user.target is aten.bmm.default:
                found[user] = None
            elif user not in seen and (_is_pointwise(user) or _is_matrix_view(user)):
                seen.add(user)
                pending.append(user)
    return list(found)


def _rewrite(graph: torch.fx.Graph, found: _Found) -> None:
    weights, kind, shape = found.weights, _kind(found.weights), _kind(found.weights).shape
    build = Builder(graph)
    build.location = weights.meta.get("location", ())

    def wide(node: Node) -> Node:
        return (
            node if _kind(node).dtype is torch.float32 else build.call(aten._to_copy.default, node, dtype=torch.float32)
        )

    scores = weights.args[0]
    assert isinstance(scores, Node)
    with graph.inserting_before(weights):
        if kind.dtype is not torch.float32:  # in float32 inside, as the operator's own is
            inside = build.call(weights.target, wide(scores), *weights.args[1:])  # type: ignore[arg-type]
            weights.replace_all_uses_with(build.call(aten._to_copy.default, inside, dtype=kind.dtype))
        total = build.call(aten.logsumexp.default, wide(scores), [-1], True)
        # where the largest is infinite, all weights of the row are NaN
        total = build.call(
            aten.where.ScalarOther, build.call(aten.lt.Scalar, total, math.inf), total, math.nan
        )  # fmt: skip
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min((found.node, found.along, *found.turned), key=order.__getitem__)
    for node in found.again:
        node.meta["recompute"] = True
    build.marks = {"recompute": True}
    with graph.inserting_before(first):
        power = build.call(aten.exp.default, build.call(aten.sub.Tensor, wide(scores), total))
        if weights.target is aten._safe_softmax.default:
            power = build.call(aten.masked_fill.Scalar, power, build.call(aten.eq.Scalar, total, -math.inf), 0)
        narrow = power
        if _kind(found.narrow).dtype is not torch.float32:
            narrow = build.call(aten._to_copy.default, power, dtype=_kind(found.narrow).dtype)
        narrow = build.call(aten.view.default, narrow, list(_kind(found.narrow).shape))
    for node in found.turned:
        node.replace_input_with(node.args[0], narrow)  # type: ignore[arg-type]
    build.marks = {}
    build.location = found.node.meta.get("location", ())
    with graph.inserting_before(found.node):
        gradient = found.along.args[0]
        assert isinstance(gradient, Node)
        product = build.call(aten.mul.Tensor, wide(gradient), wide(found.product))
        mean = build.call(aten.sum.dim_IntList, product, [-1], True)
        mean = build.call(aten.view.default, mean, [*shape[:-1], 1])
        slope = build.call(aten.sub.Tensor, _in_float32(build, found), mean)
        slope = build.call(aten.mul.Tensor, power, slope)
        if kind.dtype is not torch.float32:
            slope = build.call(aten._to_copy.default, slope, dtype=kind.dtype)
    found.node.replace_all_uses_with(slope)
    graph.erase_node(found.node)
    for node in found.last:
        _narrowed(graph, node, found.half, _reads(node, slope))


def _in_float32(build: Builder, found: _Found) -> Node:
    """The gradient of the weights before it is rounded: along a row it is near its mean, which is taken from it."""
    given = found.node.args[0]
    assert isinstance(given, Node)
    operands = [operand for operand in found.along.args if isinstance(operand, Node)]
    if _kind(found.along).dtype is not torch.float32:
        wide = [build.call(aten._to_copy.default, operand, dtype=torch.float32) for operand in operands]
        return build.call(aten.view.default, build.call(aten.bmm.default, *wide), list(_kind(given).shape))
    wider = _kind(given).dtype is not torch.float32
    return build.call(aten._to_copy.default, given, dtype=torch.float32) if wider else given


def _reads(product: Node, slope: Node) -> int:
    """Which operand of the product is made of the slope."""
    seen: set[Node] = set()
    pending = [product.args[1]]
    while pending:
        node = pending.pop()
        if node is slope:
            return 1
        if isinstance(node, Node) and node not in seen and (_is_pointwise(node) or _is_matrix_view(node)):
            seen.add(node)
            pending.extend(node.args)  # type: ignore[arg-type]
    return 0


def _narrowed(graph: torch.fx.Graph, product: Node, half: torch.dtype, side: int) -> None:
    """The product of halves, with the scores' gradient on the left."""
    build = Builder(graph)
    build.location = product.meta.get("location", ())
    slope, other = product.args[side], product.args[1 - side]
    assert isinstance(slope, Node) and isinstance(other, Node)
    if _half(other) is not half:
        return
    with graph.inserting_before(product):
        other = _uncast(build, other)
        if _kind(slope).dtype is not half:
            slope = build.call(aten._to_copy.default, slope, dtype=half)
        if side == 0:
            made = build.call(aten.bmm.default, slope, other)
        else:
            turned = [build.call(aten.transpose.int, one, 1, 2) for one in (slope, other)]
            made = build.call(aten.transpose.int, build.call(aten.bmm.default, *turned), 1, 2)
            made = build.restride(made, _kind(product))
        if _kind(product).dtype is not half:
            made = build.call(aten._to_copy.default, made, dtype=_kind(product).dtype)
    product.replace_all_uses_with(made)
    graph.erase_node(product)


def _uncast(build: Builder, node: Node) -> Node:
    """The matrices as they were before they were cast."""
    if _kind(node).dtype in HALVES:
        return node
    source = node.args[0]
    assert isinstance(source, Node)
    if node.target in _CASTS:
        return _uncast(build, source)
    return build.call(node.target, _uncast(build, source), *node.args[1:])  # type: ignore[arg-type]
