"""Nodes made the quick way against those that FX makes: names, books, order, users."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.fx

from fusewright.graph import nodes
from fusewright.graph.nodes import add_call, add_placeholder

aten = torch.ops.aten
NAMES = [
    "x",
    "weight",
    "weight",
    "layers_0_weight",
    "Weight",
    "_hidden",
    "__call__",
    "sum",
    "class",
    "torch",
    "bias_1",
    "bias",
    "bias",
    "x_1",
    "x",
]
TARGETS = [
    aten.add.Tensor,
    aten.add.Tensor,
    operator.getitem,
    aten._unsafe_view.default,
    aten.native_layer_norm.default,
    aten.add.Tensor,
]


def by_fx(names: list[str]) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    made = [graph.placeholder(name) for name in names]
    for node in made:
        node.target = node.name  # FX keeps the name that was asked for, which two may share
    for target in TARGETS * 2:
        made.append(graph.call_function(target, (made[0], [made[-1], 2]), {"alpha": (made[1],)}))
    graph.output(tuple(made))
    return graph


def by_us(names: list[str]) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    made = [add_placeholder(graph, name) for name in names]
    for target in TARGETS * 2:
        made.append(add_call(graph, target, (made[0], [made[-1], 2]), {"alpha": (made[1],)}))
    graph.output(tuple(made))
    return graph


def described(graph: torch.fx.Graph) -> list[object]:
    return [
        (
            n.name,
            n.op,
            n.target,
            str(n.args),
            str(n.kwargs),
            [u.name for u in n.users],
            [i.name for i in n.all_input_nodes],
        )
        for n in graph.nodes
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_as_fx_makes_them(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes._quick, "this version of FX keeps other books than the quick way knows"
    monkeypatch.setattr(nodes, "_quick", quick)
    ours, theirs = by_us(NAMES), by_fx(NAMES)
    assert described(ours) == described(theirs)
    ours.lint()
    assert len(ours.nodes) == len(theirs.nodes)
    for op, target in [("placeholder", None), *(("call_function", target) for target in TARGETS)]:
        found = [[node.name for node in graph.find_nodes(op=op, target=target)] for graph in (ours, theirs)]
        assert found[0] == found[1]


def test_what_fx_adds_later_has_names_of_its_own() -> None:
    graph = by_us(NAMES)
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        for target in TARGETS * 3:
            graph.call_function(target, (next(iter(graph.nodes)),))
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    graph.lint()


def test_they_can_be_erased_and_copied() -> None:
    graph = by_us(["x", "y"])
    output = next(iter(reversed(graph.nodes)))
    output.args = (next(iter(graph.nodes)),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function":
            graph.erase_node(node)
    graph.lint()
    assert [node.op for node in graph.nodes] == ["placeholder", "placeholder", "output"]
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    assert [node.name for node in copy.nodes] == ["x", "y", "output"]


def test_a_version_with_other_books_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    created = torch.fx.Graph.create_node

    def counting(self: torch.fx.Graph, *args: object, **kwargs: object) -> torch.fx.Node:
        made = created(self, *args, **kwargs)  # type: ignore[arg-type]
        self.made_so_far = getattr(self, "made_so_far", 0) + 1  # type: ignore[attr-defined]
        return made

    assert nodes._keeps_known_books()
    monkeypatch.setattr(torch.fx.Graph, "create_node", counting)
    assert not nodes._keeps_known_books()
