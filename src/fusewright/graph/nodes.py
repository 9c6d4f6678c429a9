"""Nodes of operators, and what their arguments hold: what every stage does thousands of times for a deep model.

Takes a torch.fx graph; gives new nodes, and the leaves of arguments. Always holds: the result is what
`graph.call_function`, `graph.placeholder` and `torch.utils._pytree.tree_leaves` would give for arguments made of
tuples, lists and dicts. FX looks through all arguments for raw symbolic numbers (of which there are none here) and
derives a name anew for each node: two thirds of a node's cost. The quick way is taken only where this version of FX
keeps its books as it is known to (`_keeps_known_books`).
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch.fx

_BORDER = re.compile("(?<=[a-z])([A-Z])")
_NO_IDENTIFIER = re.compile("[^0-9a-zA-Z_]+")
_NUMBERED = re.compile(r"_\d+\Z").search
_TAKEN = frozenset((*keyword.kwlist, *vars(builtins), *getattr(torch.fx.graph, "_illegal_names", ())))


@cache
def _stem(name: str) -> str:
    """What FX would call the node."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _NO_IDENTIFIER.sub("_", _BORDER.sub(r"_\1", name).lower())


@cache
def _is_plain(stem: str) -> bool:
    """Whether FX would use the name as it stands, or number it where it is taken already."""
    return (
        stem.isidentifier() and stem.isascii() and stem not in _TAKEN and not (_NUMBERED(stem) or stem.startswith("_"))
    )


def add_call(
    graph: torch.fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> torch.fx.Node:
    """A call_function node at the graph's insertion point."""
    return add_node(graph, "call_function", target, args, kwargs or {})


def add_node(
    graph: torch.fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.fx.Node:
    """A node of a call at the graph's insertion point."""
    stem = _stem(target if isinstance(target, str) else target.__name__)
    if _quick and _is_plain(stem):
        return _add(graph, stem, op, target, args, kwargs)
    node = graph.create_node(op, target, (), {}, name=stem)
    node.args, node.kwargs = args, kwargs
    return node


def add_placeholder(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    """A placeholder at the graph's insertion point. Its target, the argument's name in the graph's text, is its own
    name: two objects may lie at places of one name."""
    stem = _stem(name)
    node = _add(graph, stem, "placeholder", name, (), {}) if _quick and _is_plain(stem) else graph.placeholder(name)
    node.target = node.name
    return node


def _add(graph: Any, stem: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """What Graph.create_node comes to for such arguments, in a graph that no module has hooks for."""
    names = graph._graph_namespace
    used, counts, name = names._used_names, names._base_count, stem
    count = counts.get(stem, 0)
    while name in used:
        count += 1
        name = f"{stem}_{count}"
    used.add(name)
    counts[stem] = count
    node = torch.fx.Node(graph, name, op, target, args, kwargs)
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def written(value: Any, by: Any) -> Any:
    """Target of a node: the private copy `value` after the operator `by` has written to it. So whatever reads the new
    value follows a data edge to the write, and no pass need know of writes."""
    return value


def _keeps_known_books() -> bool:
    """Whether FX's own way and the quick one leave the same behind."""

    def books(graph: Any) -> object:
        names = graph._graph_namespace
        table = {key: list(map(str, nodes)) for key, nodes in graph._find_nodes_lookup_table.table.items() if nodes}
        known = sorted(vars(graph)), sorted(vars(names)), sorted(vars(graph._find_nodes_lookup_table))
        objects = [(str(node), name) for node, name in names._obj_to_name.items()]
        nodes = [
            (node.name, node.op, node.target, str(node.args), str(node.kwargs), list(map(str, node.users)))
            for node in graph.nodes
        ]
        return known, table, len(graph.nodes), names._used_names, names._base_count, objects, nodes

    def of_fx(
        graph: Any, stem: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.fx.Node:
        return graph.create_node(op, target, args, kwargs, name=stem)

    made = []
    try:
        for add in (of_fx, _add):
            graph = torch.fx.Graph()
            x = add(graph, "weight", "placeholder", "weight", (), {})
            y = add(graph, "weight", "call_function", callable, (x, [x, 2]), {"out": (x,)})
            with graph.inserting_after(x):
                add(graph, "weight", "call_function", callable, (x,), {})
            add(graph, "other", "call_function", callable, (y, slice(None, x)), {})
            made.append(books(graph))
    except (AttributeError, TypeError):
        return False
    return made[0] == made[1]


_quick = _keeps_known_books()


def ancestors(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """These nodes and all that they are computed from."""
    seen: set[torch.fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return seen


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
