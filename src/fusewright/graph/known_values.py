"""Values of tensors that the program made from Python data alone: `torch.tensor(n)`, `torch.arange(4)`, and what it
computed from them.

Takes a node of the graph being recorded; gives the real tensor that it will hold at every call, or None. Always holds:
nothing that it depends on comes from outside, is random, has a symbolic size, or is written to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from fusewright.graph.nodes import leaves
from fusewright.operators.schema import facts, written_by
from fusewright.sizes.expressions import Expr

LITERAL = "literal"
"""Marks (in `node.meta`) the copy of a constant that native code made from Python data."""
NUMBER = "number"
"""Where `node.meta` of such a constant of one element keeps that."""
_MOST_NODES, _MOST_ELEMENTS = 64, 4096


def known_value(
    node: torch.fx.Node, constants: Mapping[str, torch.Tensor], as_made: bool = False
) -> torch.Tensor | None:
    """The tensor that `node` holds at every call, or None when it may differ. `as_made`: before the program writes to
    it."""
    order = _computed_from(node)
    if order is None or any(_is_written(one) for one in (order[:-1] if as_made else order)):
        return None
    values: dict[torch.fx.Node, torch.Tensor] = {}
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        for one in order:
            if one.meta.get(LITERAL):
                values[one] = constants[one.args[0].target]  # type: ignore[union-attr, index]
                continue
            args, kwargs = torch.fx.map_arg((one.args, one.kwargs), values.__getitem__)
            values[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def _computed_from(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The nodes that give the value, in order, or None when one of them depends on the call."""
    order: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()

    def visit(one: torch.fx.Node) -> bool:
        if one in seen:
            return True
        seen.add(one)
        if len(seen) > _MOST_NODES or not _is_fixed(one):
            return False
        if not one.meta.get(LITERAL) and not all(visit(source) for source in one.all_input_nodes):
            return False
        order.append(one)
        return True

    return order if visit(node) else None


def _is_fixed(node: torch.fx.Node) -> bool:
    """Whether the node computes the same from the same operands, and little of it."""
    if node.meta.get(LITERAL):
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    known, type_ = facts(node.target), node.meta.get("type")
    if (
        written_by(node.target, node.args)
        or known.random
        or known.effect
        or any(isinstance(leaf, Expr) for leaf in leaves((node.args, node.kwargs)))
    ):
        return False
    shape = getattr(type_, "shape", None)
    if (
        shape is None
        or not all(isinstance(size, int) for size in shape)
        or node.target.overloadpacket in _UNINITIALISED
    ):
        return False
    return torch.Size(shape).numel() <= _MOST_ELEMENTS


_UNINITIALISED = frozenset(
    {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
)


def _is_written(node: torch.fx.Node) -> bool:
    """Whether the program writes to the tensor, or to a view of it."""
    for user in node.users:
        if not isinstance(user.target, OpOverload) or written_by(user.target, user.args):
            return True
        if any(result.alias_info is not None for result in user.target._schema.returns) and _is_written(user):
            return True
    return False
