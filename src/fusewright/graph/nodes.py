"""Nodes of operators, and what their arguments hold: what every stage does thousands of times for a deep model.

Takes a torch.fx graph; gives new nodes, and the leaves of arguments. Always holds: the result is what `graph.call_function` and
`torch.utils._pytree.tree_leaves` would give for arguments made of tuples, lists and dicts. FX looks through all arguments for raw
symbolic numbers (of which there are none here) and derives a name anew for each node: two thirds of a node's cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch.fx

_SET_ARGUMENTS = getattr(torch.fx.Node, "_update_args_kwargs", None)
"""What the setters of `args` and `kwargs` end in. They take the node out of the graph's look-up tables and back, once each."""
_BORDER = re.compile("(?<=[a-z])([A-Z])")


@cache
def _name(target: Callable[..., Any]) -> str:
    """What FX would call the node."""
    return _BORDER.sub(r"_\1", target.__name__).lower()


def add_call(
    graph: torch.fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> torch.fx.Node:
    """A call_function node at the graph's insertion point."""
    node = graph.create_node("call_function", target, (), {}, name=_name(target))
    if _SET_ARGUMENTS is not None:
        _SET_ARGUMENTS(node, args, kwargs or {})
    else:
        node.args, node.kwargs = args, kwargs or {}
    return node


def leaves(value: object) -> Iterator[Any]:
    """What stands in nested tuples, lists and dicts, from left to right."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value
