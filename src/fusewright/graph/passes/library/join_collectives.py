"""Joins collectives that begin one after the other into one, which costs the latency of one.

Takes and gives a functional graph. Always holds: the order of collectives is kept; what is joined does not depend on
sizes, since another process may have compiled the same program for other ones (whether all of them compile it is asked
beforehand: backends/agreement.py).
"""

from __future__ import annotations

import operator

import torch.fx
from torch._ops import OpOverload

from fusewright.graph.collectives import is_collective, is_wait
from fusewright.graph.nodes import add_call, ancestors
from fusewright.graph.passes.clean.dce import must_stay
from fusewright.graph.passes.context import PassContext
from fusewright.operators.rules.collectives import NAMESPACE
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node

_JOINED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def join_collectives(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for run in _runs(graph):
        if len(run) > 1 and context.allow(f"{len(run)} collectives up to {run[-1].name} become one"):
            _join(graph, run)
    return graph


def _runs(graph: torch.fx.Graph) -> list[list[Node]]:
    """Neighbours among the collectives that are alike and need nothing of each other, and between which nothing has
    another effect."""
    found: list[list[Node]] = []
    current: list[Node] = []
    for node in graph.nodes:
        if is_collective(node):
            key = _key(node)
            if not current or key != _key(current[0]) or _must_wait(node, current):
                current = []
                found.append(current)
            if key is not None:
                current.append(node)
        elif node.op == "call_function" and must_stay(node) and not is_wait(node):
            current = []
            found.append(current)
    return found


def _must_wait(node: Node, others: list[Node]) -> bool:
    """Whether the collective needs one of the others, or something that takes long and that they do not need."""
    needed = ancestors(node.all_input_nodes)
    more = needed - ancestors(others)
    return not needed.isdisjoint(others) or any(
        isinstance(one.target, OpOverload) and facts(one.target).product for one in more
    )


def _key(node: Node) -> object:
    """What collectives that can be joined have in common; None for one that cannot."""
    if node.meta.get("piece"):  # it was cut off another one
        return None
    name = str(node.target).partition(".")[2].removesuffix(".default")
    kind = node.args[0].meta.get("type") if isinstance(node.args[0], Node) else None
    if not str(node.target).startswith(f"{NAMESPACE}.") or name not in _JOINED or not isinstance(kind, TensorType):
        return None
    return name, node.args[1:], kind.dtype, kind.device


def _join(graph: torch.fx.Graph, run: list[Node]) -> None:
    last = run[-1]
    later: list[Node] = []  # what stands in front of the last one, and needs an earlier one
    given, node = {*run}, run[0]
    while node is not last:
        if node not in run and not given.isdisjoint(node.all_input_nodes):
            given.add(node)
            later.append(node)
        node = node.next
    name = str(last.target).partition(".")[2].removesuffix(".default")
    target = getattr(getattr(torch.ops, NAMESPACE), f"{name}_coalesced").default
    with graph.inserting_before(last):
        joined = add_call(graph, target, ([one.args[0] for one in run], *last.args[1:]))
        joined.meta = dict(last.meta) | {"type": tuple(one.meta["type"] for one in run)}
        results = [add_call(graph, operator.getitem, (joined, place)) for place in range(len(run))]
    for one, result in zip(run, results, strict=True):
        result.meta = dict(one.meta)
        one.replace_all_uses_with(result)
    behind = results[-1]
    for node in later:
        behind.append(node)
        behind = node
    for one in run:
        graph.erase_node(one)
