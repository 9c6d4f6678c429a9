"""Canonicalise: removes operators that change nothing and joins chains of views and casts.

Takes and gives a functional graph. Always holds: values are equal to the bit (x + 0 stays for floats: it turns -0.0
into 0.0), a node is replaced only by one of the same type and strides, and tensors that leave the graph share storage,
and are objects of their own, as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.graph.builder import Builder
from fusewright.graph.passes.clean.escape import escaping
from fusewright.graph.passes.context import PassContext
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten

Rule = Callable[[Builder, torch.fx.Node], torch.fx.Node | None]


def canonicalise(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    outside = escaping(graph)
    output = next(iter(reversed(graph.nodes)))
    returned = set(output.all_input_nodes)
    build = Builder(graph)
    for node in list(graph.nodes):
        rules = RULES.get(node.target) if node.op == "call_function" else None
        if rules is None or not node.users:
            continue
        rule, shares = rules
        if not shares and (node in outside or node.meta.get("private")):
            continue
        build.location = node.meta.get("location", ())
        with graph.inserting_before(node):
            found = rule(build, node)
        if found is None or (_offset(found) != _offset(node) and _counts_from_storage(node)):
            continue
        # A returned tensor is an object of its own: never the input itself, never the same object twice.
        own_object = node not in returned or (found.op == "call_function" and found not in returned)
        if not own_object or not context.allow(f"canonicalise: {node.name} is {found.name}"):
            if not found.users and found.op == "call_function" and found not in returned:
                graph.erase_node(found)
            if own_object:
                return graph
            continue
        node.replace_all_uses_with(found)
        graph.erase_node(node)
        if node in outside:
            outside.add(found)
        if node in returned:
            returned.add(found)
    return graph


def _offset(node: torch.fx.Node) -> object:
    type_ = _type(node)
    return None if type_ is None else type_.offset


def _counts_from_storage(node: torch.fx.Node) -> bool:
    """Whether a reader says where in the memory it reads, counted from its beginning and not from the tensor's: what
    stands in the tensor's place must begin where it does."""
    for user in node.users:
        if isinstance(user.target, OpOverload) and node in user.args[:1]:
            named = user.target.overloadpacket in _STRIDED
            if named or (facts(user.target).is_view and _counts_from_storage(user)):
                return True
    return False


_STRIDED = frozenset({aten.as_strided, aten.as_strided_, aten.as_strided_scatter, aten.as_strided_copy})


def _type(node: object) -> TensorType | None:
    type_ = node.meta.get("type") if isinstance(node, torch.fx.Node) else None
    return type_ if isinstance(type_, TensorType) else None


def _same(a: TensorType | None, b: TensorType | None) -> bool:
    """With the strides of dimensions of one element: by them operators choose a memory format."""
    return a is not None and b is not None and (a.dtype, a.device) == (b.dtype, b.device) and _strides_agree(a, b)


def _nothing(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    """The operator's own argument, when the result has its type."""
    source = node.args[0]
    if not _same(_type(source), _type(node)) or _type(source).offset != _type(node).offset:  # type: ignore[union-attr]
        return None
    return source  # type: ignore[return-value]


def _copy(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    return node.args[0] if _same(_type(node.args[0]), _type(node)) else None  # type: ignore[return-value]


def _pad(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    """Padding by nothing."""
    is_nothing = all(isinstance(amount, int) and amount == 0 for amount in node.args[1])  # type: ignore[union-attr]
    return _copy(build, node) if is_nothing else None


def _cat(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    """Without pieces of no elements (what a model passes by its rotation, where all is rotated)."""
    made, (pieces, *rest) = _type(node), node.args
    types = [_type(piece) for piece in pieces]  # type: ignore[union-attr]
    if node.meta.get("private") or None in types or not _row_major(made):
        return None
    kept = [piece for piece, type_ in zip(pieces, types) if 0 not in type_.shape]  # type: ignore[arg-type, union-attr]
    if not 0 < len(kept) < len(types) or any(_type(piece).dtype != made.dtype for piece in kept):  # type: ignore[union-attr]
        return None
    if len(kept) > 1:
        return build.node(aten.cat.default, (kept, *rest), dict(node.kwargs), made)
    return build.node(aten.clone.default, (kept[0],), {"memory_format": torch.contiguous_format}, made)


_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})


def _reshape(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    found = _nothing(build, node)
    if found is not None:
        return found
    inner = node.args[0]
    if not isinstance(inner, torch.fx.Node) or inner.target not in _RESHAPES:
        return None
    source = inner.args[0]
    if _same(_type(source), _type(node)):
        return source  # type: ignore[return-value]
    if not _row_major(_type(source)):
        return None  # a view of a view may be legal where the direct one is not
    made = build.node(aten.view.default, (source, list(_type(node).shape)), {}, _type(node))  # type: ignore[union-attr]
    return made


def _row_major(type_: TensorType | None) -> bool:
    if type_ is None:
        return False
    running: object = 1
    for size, stride in zip(reversed(type_.shape), reversed(type_.stride), strict=True):
        if size != 1 and stride != running:
            return False
        running = running * size  # type: ignore[arg-type, operator]
    return True


def _order(node: object) -> tuple[torch.fx.Node, list[int]] | None:
    """(source, order) when the node permutes dimensions."""
    if not isinstance(node, torch.fx.Node) or node.target not in _PERMUTES:
        return None
    source = node.args[0]
    rank = _type(node).ndim  # type: ignore[union-attr]
    if node.target is aten.permute.default:
        return source, [axis % rank for axis in node.args[1]]  # type: ignore[misc, operator, return-value, union-attr]
    order = list(range(rank))
    if rank:
        a, b = (0, 1) if node.target is aten.t.default else (node.args[1] % rank, node.args[2] % rank)  # type: ignore
        if rank > 1:
            order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return source, order  # type: ignore[return-value]


_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})


def _permute(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    outer = _order(node)
    assert outer is not None
    source, order = outer
    if order == sorted(order):
        return source
    inner = _order(source)
    if inner is None:
        return None
    base, first = inner
    joined = [first[axis] for axis in order]
    if joined == sorted(joined):
        return base
    return build.node(aten.permute.default, (base, joined), {}, _type(node))


def _cast(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
    """A cast to the same type, or a cast after an exact widening cast."""
    found = _copy(build, node)
    if found is not None:
        return found
    inner = node.args[0]
    if not isinstance(inner, torch.fx.Node) or inner.target is not aten._to_copy.default:
        return None
    source = inner.args[0]
    first, middle, last = _type(source), _type(inner), _type(node)
    if first is None or middle is None or last is None or first.device != last.device or middle.device != last.device:
        return None
    floats = first.dtype.is_floating_point and middle.dtype.is_floating_point and last.dtype.is_floating_point
    if not floats or not _holds(middle.dtype, first.dtype) or not _strides_agree(first, last):
        return None
    if first.dtype == last.dtype:
        return source  # type: ignore[return-value]
    return build.node(aten._to_copy.default, (source,), {"dtype": last.dtype}, last)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of one floating-point type is a value of the other."""
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.tiny * a.eps <= b.tiny * b.eps


def _strides_agree(a: TensorType, b: TensorType) -> bool:
    return (a.shape, a.stride) == (b.shape, b.stride)


def _neutral(accepts: Callable[[object, bool], bool]) -> Rule:
    """x op number is x; `accepts(number, is_float)` says for which numbers that is exact."""

    def rule(build: Builder, node: torch.fx.Node) -> torch.fx.Node | None:
        source, number = node.args[0], node.args[1]
        type_ = _type(node)
        if not isinstance(number, (int, float)) or isinstance(number, bool) or node.kwargs or len(node.args) > 2:
            return None
        if type_ is None or type_.dtype.is_complex or not _same(_type(source), type_):
            return None
        return source if accepts(number, type_.dtype.is_floating_point) else None  # type: ignore[return-value]

    return rule


def _one(number: object, is_float: bool) -> bool:
    return number == 1


def _adds_nothing(number: object, is_float: bool) -> bool:
    return number == 0 and (not is_float or (isinstance(number, float) and math.copysign(1.0, number) < 0))


def _subtracts_nothing(number: object, is_float: bool) -> bool:
    return number == 0 and not (isinstance(number, float) and math.copysign(1.0, number) < 0)


# operator -> (rule, whether what it gives leaves the graph as the result did: it shares the argument's storage)
RULES: dict[OpOverload, tuple[Rule, bool]] = {
    aten.alias.default: (_nothing, True),
    aten.detach.default: (_nothing, True),
    aten.expand.default: (_nothing, True),
    aten.slice.Tensor: (_nothing, True),
    aten.squeeze.default: (_nothing, True),
    aten.squeeze.dim: (_nothing, True),
    aten.squeeze.dims: (_nothing, True),
    aten.as_strided.default: (_nothing, True),
    aten.view.default: (_reshape, True),
    aten._unsafe_view.default: (_reshape, True),
    aten._reshape_alias.default: (_reshape, True),
    aten.permute.default: (_permute, True),
    aten.transpose.int: (_permute, True),
    aten.t.default: (_permute, True),
    aten.cat.default: (_cat, True),  # it makes a tensor of its own too
    aten.clone.default: (_copy, False),
    aten.lift_fresh_copy.default: (_copy, False),
    aten.constant_pad_nd.default: (_pad, False),
    aten._to_copy.default: (_cast, False),
    aten.mul.Tensor: (_neutral(_one), False),
    aten.mul.Scalar: (_neutral(_one), False),
    aten.div.Tensor: (_neutral(_one), False),
    aten.div.Scalar: (_neutral(_one), False),
    aten.pow.Tensor_Scalar: (_neutral(_one), False),
    aten.add.Tensor: (_neutral(_adds_nothing), False),
    aten.add.Scalar: (_neutral(_adds_nothing), False),
    aten.sub.Tensor: (_neutral(_subtracts_nothing), False),
    aten.sub.Scalar: (_neutral(_subtracts_nothing), False),
}
