"""Partition: which values the forward saves for the backward, and which ones the backward computes again.

Takes a functionalised `JointGraph`; gives a `Split`. The choice is a minimum cut over bytes: every forward value may be saved at the
cost of its
bytes, or recomputed from other saved values if that is cheap (pointwise operators and views) and allowed (nothing random, no library
operator, no reduction). Always holds: the backward computes what the joint graph would have; only where a value comes from differs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.fx

from fusewright.autograd.joint import JointGraph, Split, backward_nodes, results_of, written_inputs
from fusewright.autograd.max_flow import INFINITE, Network
from fusewright.autograd.recompute import is_cheap
from fusewright.graph.builder import Builder
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
    written = written_inputs(joint.graph)
    for node in forward:
        if node not in needed:
            continue
        entry[node], exit_[node] = network.vertex(), network.vertex()
        kept = node.op in ("placeholder", "get_attr")
        if isinstance(node.meta.get("type"), tuple):
            cost = INFINITE  # several results: each is saved by its getitem
        else:
            # An input is alive anyway (a parameter), or at least not copied; unless it changes before the backward runs.
            cost = 1 if kept and node not in written else saved_bytes(node)
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
    written = written_inputs(joint.graph)
    user = [values[item] if isinstance(item, Node) else item for item in results[: joint.outputs]]
    returned = {item: index for index, item in reversed(list(enumerate(results[: joint.outputs]))) if isinstance(item, Node)}
    extra: list[Node] = []
    places: list[int] = []
    for node in saved:
        if node.op == "placeholder" and node not in written:
            places.append(position[node])
        elif node in returned and node.op != "placeholder":
            places.append(~returned[node])
        else:
            places.append(~(joint.outputs + len(extra)))
            extra.append(_copied(forward, values[node]) if node in written else values[node])
    forward.output((*user, *extra))
    _drop_dead(forward)

    backward = torch.fx.Graph()
    values = {}
    for node in saved:
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
    return Split(forward, backward, tuple(places))



def _copied(graph: torch.fx.Graph, node: Node) -> Node:
    """A copy of an input that changes before the backward runs."""
    build = Builder(graph)
    build.location = node.meta.get("location", ())
    first = next((other for other in graph.nodes if other.meta.get("epilogue")), None)
    with graph.inserting_before(first) if first is not None else nullcontext():
        return build.call(torch.ops.aten.clone.default, node)


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
