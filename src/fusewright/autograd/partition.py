"""Partition: which values the forward saves for the backward, and which ones the backward computes again.

Takes a functionalised `JointGraph`; gives a `Split`. The choice is a minimum cut over bytes: every forward value may be saved at the
cost of its
bytes, or recomputed from other saved values if that is cheap (pointwise operators and views) and allowed (nothing random, no library
operator, no reduction). Always holds: the backward computes what the joint graph would have; only where a value comes from differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fusewright.autograd.joint import JointGraph, Split, backward_nodes, results_of
from fusewright.autograd.max_flow import INFINITE, Network
from fusewright.autograd.recompute import is_cheap
from fusewright.graph.types import TensorType

Node = torch.fx.Node


def saved_bytes(node: Node) -> int:
    """Bytes that saving the value of `node` keeps alive (a symbolic size counts as its hint, or 64)."""
    kind = node.meta.get("type")
    if not isinstance(kind, TensorType):
        return 8
    elements = 1
    for size in kind.shape:
        elements *= size if isinstance(size, int) else 64
    return max(1, elements * kind.dtype.itemsize)


def choose_saved(joint: JointGraph, recompute: bool = True) -> list[Node]:
    """The forward nodes (inputs included) whose values the backward reads, in graph order."""
    backward = backward_nodes(joint.graph, joint.inputs)
    forward = [node for node in joint.graph.nodes if node not in backward and node.op not in ("output",)]
    gradient_arguments = results_of(joint.graph)[joint.outputs :]
    wanted = {argument for node in backward for argument in node.all_input_nodes if argument not in backward} | {
        node for node in gradient_arguments if isinstance(node, Node) and node not in backward
    }
    if not wanted:
        return []
    network = Network()
    source, sink = network.vertex(), network.vertex()
    entry: dict[Node, int] = {}
    exit_: dict[Node, int] = {}
    needed = _ancestors(wanted)
    for node in forward:
        if node not in needed:
            continue
        entry[node], exit_[node] = network.vertex(), network.vertex()
        kept = node.op in ("placeholder", "get_attr")
        if isinstance(node.meta.get("type"), tuple):
            cost = INFINITE  # several results: each is saved by its getitem
        else:
            cost = 1 if kept else saved_bytes(node)  # an input is alive anyway (a parameter) or at least not copied
        network.edge(entry[node], exit_[node], cost)
        if kept or not (recompute and is_cheap(node)):
            network.edge(source, entry[node], INFINITE)
        for argument in node.all_input_nodes:
            if argument in exit_:
                network.edge(exit_[argument], entry[node], INFINITE)
        if node in wanted:
            network.edge(exit_[node], sink, INFINITE)
    near = network.source_side(source, sink)
    return [node for node in forward if node in entry and entry[node] in near and exit_[node] not in near]


def _ancestors(nodes: set[Node]) -> set[Node]:
    seen: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return seen


def _copy(node: Node, graph: torch.fx.Graph, values: dict[Node, Any]) -> Node:
    made = graph.node_copy(node, lambda argument: values[argument])
    made.meta = dict(node.meta)
    return made


def split(joint: JointGraph, recompute: bool = True) -> Split:
    """Cuts a joint graph. `recompute=False` saves every forward value that the backward reads."""
    saved = choose_saved(joint, recompute)
    backward_set = backward_nodes(joint.graph, joint.inputs)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    results = results_of(joint.graph)
    position = {node: index for index, node in enumerate(placeholders)}

    forward = torch.fx.Graph()
    values: dict[Node, Any] = {}
    for node in joint.graph.nodes:
        if node.op == "output" or node in backward_set:
            continue
        values[node] = _copy(node, forward, values)
    computed = [node for node in saved if node.op != "placeholder"]
    user = [values[item] if isinstance(item, Node) else item for item in results[: joint.outputs]]
    forward.output((*user, *(values[node] for node in computed)))
    _drop_dead(forward)

    backward = torch.fx.Graph()
    values = {}
    ordered = [node for node in saved if node.op == "placeholder"] + computed
    for node in ordered:
        values[node] = backward.placeholder(f"saved_{node.name}")
        values[node].meta = dict(node.meta)
    for node in placeholders[joint.inputs :]:
        values[node] = _copy(node, backward, values)
    needed = _needed({item for item in results[joint.outputs :] if isinstance(item, Node)}, set(values))
    for node in joint.graph.nodes:
        if node.op != "output" and node in needed and node not in values:
            values[node] = _copy(node, backward, values)
    backward.output(tuple(values[item] if isinstance(item, Node) else item for item in results[joint.outputs :]))
    _drop_dead(backward)
    backward.lint()
    forward.lint()
    return Split(forward, backward, tuple(position.get(node, -1) for node in ordered))


def _needed(roots: set[Node], available: set[Node]) -> set[Node]:
    """The nodes to compute in the backward: everything between `roots` and what is available."""
    seen: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in seen or node in available:
            continue
        seen.add(node)
        pending.extend(node.all_input_nodes)
    return seen


def _drop_dead(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(node.meta.get("random")) or (schema is not None and schema.is_mutable)
