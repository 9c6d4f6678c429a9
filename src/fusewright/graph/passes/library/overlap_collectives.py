"""Overlap: collectives begin as early, and are waited for as late, as what they need and give, and memory, allow.

Takes and gives a functional graph, at whose end inputs are written to. Always holds: collectives keep their order,
which all processes share, and so does what has other effects or draws random numbers; nothing moves across what writes
to a tensor.
"""

from __future__ import annotations

import itertools
import math
from heapq import heapify, heappop, heappush

import torch.fx
from torch._ops import OpOverload

from fusewright.graph.collectives import is_collective, is_wait
from fusewright.graph.nodes import leaves
from fusewright.graph.passes.clean.dce import must_stay
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.estimate import estimate
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node

MOST_AHEAD = 128 << 20
"""Bytes that collectives under way may take more than they were given, before another one begins: a gather of
parameters is begun before it is needed, but not all of a model's at once. (About a layer's of width 2048.)"""


def overlap_collectives(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    if not any(map(is_collective, graph.nodes)):
        return graph
    segment: list[Node] = []
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "get_attr") or _writes(node):
            _reorder(segment, node, context)
            segment = []
        else:
            segment.append(node)
    return graph


def _reorder(segment: list[Node], end: Node, context: PassContext) -> None:
    """Puts nodes, between which nothing is written to, into a better order in front of `end`."""
    number = sum(map(is_collective, segment))
    if not number:
        return
    order = _Order(segment).found()
    if order != segment and context.allow(f"{number} collectives up to {end.name} begin earlier and end later"):
        for node in order:
            end.prepend(node)


class _Order:
    """List scheduling. What the next collective needs comes first, then what needs no collective that is under way,
    then a wait; among equals the program's order decides."""

    def __init__(self, segment: list[Node]) -> None:
        self.segment = segment
        self.place = {node: position for position, node in enumerate(segment)}
        self.before = [{self.place[one] for one in node.all_input_nodes if one in self.place} for node in segment]
        self.collectives = [position for position, node in enumerate(segment) if is_collective(node)]
        effects = [position for position, node in enumerate(segment) if _is_ordered(node)]
        for chain in (self.collectives, effects):
            for earlier, later in itertools.pairwise(chain):
                self.before[later].add(earlier)
        self.behind: list[list[int]] = [[] for _ in segment]
        for position, before in enumerate(self.before):
            for one in before:
                self.behind[one].append(position)
        self.missing = [len(before) for before in self.before]
        self.done = [False] * len(segment)
        self.order: list[int] = []
        self.target: int | None = None
        self.needed: set[int] = set()  # by the target
        self.urgent: list[int] = []  # heaps of positions
        self.others: list[int] = []
        self.waits: list[int] = []
        self.ahead: dict[int, int] = {}  # a collective that nobody has waited for: the bytes that it takes

    def found(self) -> list[Node]:
        todo = iter(self.collectives)
        self._aim(next(todo, None))
        for position, missing in enumerate(self.missing):
            if not missing:
                self._ready(position)
        while len(self.order) < len(self.segment):
            target = self.target
            if target is not None and not self.missing[target] and (self._fits(target) or self._is_stuck()):
                self.ahead[target] = _growth(self.segment[target])
                self._emit(target)
                self._aim(next(todo, None))
            elif heap := self.urgent or self.others:
                self._emit(heappop(heap))
            else:
                self._emit(self._next_wait())
        return [self.segment[position] for position in self.order]

    def _aim(self, target: int | None) -> None:
        """Makes what the collective needs urgent."""
        self.target, self.needed = target, set()
        pending = [] if target is None else [target]
        while pending:
            for one in self.before[pending.pop()]:
                if not self.done[one] and one not in self.needed:
                    self.needed.add(one)
                    pending.append(one)
        ready = [*self.urgent, *self.others]
        self.urgent = [one for one in ready if one in self.needed]
        self.others = [one for one in ready if one not in self.needed]
        heapify(self.urgent)
        heapify(self.others)

    def _ready(self, position: int) -> None:
        node = self.segment[position]
        if is_wait(node):
            heappush(self.waits, position)
        elif not is_collective(node):
            heappush(self.urgent if position in self.needed else self.others, position)

    def _emit(self, position: int) -> None:
        self.done[position] = True
        self.order.append(position)
        for later in self.behind[position]:
            self.missing[later] -= 1
            if not self.missing[later]:
                self._ready(later)

    def _fits(self, collective: int) -> bool:
        taken = sum(self.ahead.values())
        return not taken or taken + _growth(self.segment[collective]) <= MOST_AHEAD

    def _is_stuck(self) -> bool:
        return not (self.urgent or self.others or self.waits)

    def _next_wait(self) -> int:
        wait = min(self.waits, key=lambda one: (one not in self.needed, one))
        self.waits.remove(wait)
        heapify(self.waits)
        source = self.segment[wait].all_input_nodes[0]
        begun = source if is_collective(source) else next(iter(source.all_input_nodes), source)
        self.ahead.pop(self.place.get(begun, -1), None)
        return wait


def _growth(node: Node) -> int:
    """The bytes that a collective's results take more than what it is given."""
    return max(0, _bytes(node.meta.get("type")) - sum(_bytes(one.meta.get("type")) for one in node.all_input_nodes))


def _bytes(kind: object) -> int:
    return sum(
        math.prod(map(estimate, one.shape)) * one.dtype.itemsize for one in leaves(kind) if isinstance(one, TensorType)
    )


def _is_ordered(node: Node) -> bool:
    """Whether the node has an effect, or draws random numbers, and keeps its place among such."""
    return must_stay(node) and not is_collective(node) and not is_wait(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
