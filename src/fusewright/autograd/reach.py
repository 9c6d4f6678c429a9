"""Which outputs lead to which inputs in autograd's graph, and which outputs share no operator with others.

Takes traced outputs and the capture's differentiable inputs; gives the outputs in groups. PyTorch's engine visits
exactly the inputs that the outputs of a `backward()` lead to (their hooks are called, their own graphs run), and each
visited operator frees what it saved. Always holds: two outputs of different groups share no operator, so that the
backward of one neither needs nor frees what the other's does; groups and inputs stand in the order in which the engine
comes to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fusewright.base.records import dataclass

MOST_GROUPS = 8
"""Outputs in more groups than that are taken for one: each group is compiled by itself."""


@dataclass(frozen=True, slots=True)
class Group:
    """Outputs, by their places among all, and the inputs that they lead to.

    exits   the outputs by the operator that made them (by its elements, if it is one on lists)
    frees   the outputs by what they have in common that a backward frees: operators that save a tensor
    inputs  for each input its key, and the outputs that lead to it
    """

    exits: tuple[tuple[int, ...], ...]
    frees: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(sorted(place for exit in self.exits for place in exit))


_TOGETHER = {"NativeGroupNormBackward0": (1, 2)}
"""Results of an operator. PyTorch's formula leaves out their gradients unless all of them have one."""


def apart(outputs: Sequence[torch.Tensor], ends: Mapping[Any, int]) -> tuple[list[Group], list[Any], list[Any]]:
    """The groups; the nodes that lead to no input, which PyTorch's engine runs all the same; and those that compute
    something else where only some of the outputs have a gradient.

    `ends`: the keys of inputs by the autograd node where the capture ends, or by the id of the leaf (an AccumulateGrad
    node's). An output that the others' gradients are to come to, as to an input, stands there by its edge."""
    masks: dict[Any, int] = {}
    parts: dict[Any, dict[int, int]] = {}  # for each result of a node
    for place, output in enumerate(outputs):
        _reach(masks, parts, output.grad_fn, output.output_nr, 1 << place)
    own = {node: [*parts[node].values()] if _on_lists(node) else [mask] for node, mask in masks.items()}
    roots = sorted(masks, key=lambda root: int(root._sequence_nr()))
    order, reached = _graph(roots, ends)
    for node in order:
        own_parts = parts[node] if _on_lists(node) else None
        for place, (following, number) in enumerate(_following(node, ends)):
            if following is not None:
                mask = masks[node] if own_parts is None else own_parts.get(place % len(node._input_metadata), 0)
                _reach(masks, parts, following, number, mask)
    single = [1 << place for place in range(len(outputs))]
    groups = _joined(single, (masks[node] for node in order))
    frees = _joined(single, (masks[node] for node in order if masks[node] & masks[node] - 1 and _saves(node)))
    if len(groups) > MOST_GROUPS:
        groups = [(1 << len(outputs)) - 1]
    # The engine begins with what was made last, and so it does with the groups: those stand first whose nodes are made
    # first.
    groups.sort(key=lambda group: max(root._sequence_nr() for root in roots if masks[root] & group))
    by_time = sorted(order, key=lambda node: -int(node._sequence_nr()))
    made = []
    for group in groups:
        # Leaves by when their gradients are complete (the engine accumulates them at once), then what it comes to at
        # last.
        edges = (edge for node in by_time if masks[node] & group for edge, _ in _following(node, ends))
        complete = {edge: time for time, edge in enumerate(edges)}
        mine = [node for node in reached if masks[node] & group]
        mine.sort(key=lambda node: (not hasattr(node, "variable"), complete.get(node, -1)))
        made.append(
            Group(
                tuple(_places(mask) for root in roots for mask in own[root] if mask & group),
                tuple(_places(part) for part in frees if part & group),
                tuple((reached[node], _places(masks[node] & group)) for node in mine),
            )
        )
    leading = set(reached)
    for node in reversed(order):
        if any(following in leading for following, _ in _following(node, ends)):
            leading.add(node)
    together = [[parts[node].get(one) for one in _TOGETHER.get(node.name(), ())] for node in order]
    uneven = [node for node, masks in zip(order, together) if len({mask for mask in masks if mask}) > 1]
    return made, [node for node in order if node not in leading], uneven


def _reach(masks: dict[Any, int], parts: dict[Any, dict[int, int]], node: Any, number: int, mask: int) -> None:
    """Adds outputs that come to a node at its result of this number."""
    masks[node] = masks.get(node, 0) | mask
    held = parts.setdefault(node, {})
    held[number] = held.get(number, 0) | mask


def _on_lists(node: Any) -> bool:
    """Whether each result has gradients of its own, which go to the elements of its number in each list."""
    return bool(node.name().startswith("Foreach"))


def _graph(roots: list[Any], ends: Mapping[Any, int]) -> tuple[list[Any], dict[Any, int]]:
    """The nodes of the capture, each before those that it leads to, and those at its ends with their keys."""
    keys: dict[Any, int | None] = {}
    order: list[Any] = []
    pending = [(root, False) for root in roots]
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
        elif node not in keys:
            leaf = getattr(node, "variable", None)
            keys[node] = ends.get(node if leaf is None else id(leaf))
            if keys[node] is None:
                pending.append((node, True))
                edges = _following(node, ends)
                pending += [(following, False) for following, _ in edges if following is not None]
    order.reverse()
    return order, {node: key for node, key in keys.items() if key is not None}


def _following(node: Any, ends: Mapping[Any, int]) -> list[tuple[Any, int]]:
    """The edges behind a node; one that is among the ends stands for what it leads to."""
    return [(edge, 0) if edge in ends else edge for edge in node.next_functions]


def in_order(groups: Sequence[Group], positions: Sequence[int]) -> list[Group]:
    """The groups, each behind those whose outputs it has among its inputs (~n: the output at position n). One that
    waits for itself is left out, with all that wait for it."""
    ordered: list[Group] = []
    known: set[int] = set()
    waiting = list(groups)
    while ready := [one for one in waiting if known.issuperset(~key for key, _ in one.inputs if key < 0)]:
        ordered.append(ready[0])
        waiting.remove(ready[0])
        known.update(positions[place] for place in ready[0].places)
    return ordered


def nested(sets: Sequence[frozenset[int]]) -> list[tuple[int, ...]]:
    """For each set the places of those that include it, without those which include one of them. The sets differ; large
    ones first."""
    found: list[tuple[int, ...]] = []
    for place, inner in enumerate(sets):
        around = [other for other in range(place) if inner < sets[other]]
        found.append(
            tuple(
                other
                for other in around
                if not any(sets[between] < sets[other] for between in around if between > other)
            )
        )
    return found


def taken(ready: Sequence[int]) -> list[int]:
    """In which order the engine takes nodes that become ready one after the other: it keeps them in a binary heap (of
    the C++ library), where nodes of equal priority, as all leaves are, change places. ready: their priorities."""
    heap: list[int] = []

    def rise(hole: int, one: int) -> None:
        while hole > 0 and ready[heap[(hole - 1) // 2]] < ready[one]:
            heap[hole] = heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        heap[hole] = one

    for one in range(len(ready)):
        heap.append(one)
        rise(one, one)
    order: list[int] = []
    while heap:
        order.append(heap[0])
        moved = heap.pop()
        hole = 0
        while (child := 2 * hole + 2) <= len(heap):
            if child == len(heap) or ready[heap[child]] < ready[heap[child - 1]]:
                child -= 1
            heap[hole] = heap[child]
            hole = child
        if heap:
            rise(hole, moved)
    return order


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def _saves(node: Any) -> bool:
    """Whether the node holds a tensor, which a second backward through it would miss."""
    return not readable(node) or any(isinstance(one, torch.Tensor) for one in _saved(node))


def readable(node: Any) -> bool:
    """Whether what the node has saved is still there, and is what it was."""
    try:
        return all(True for _ in _saved(node))
    except RuntimeError:
        return False


def _saved(node: Any) -> Iterator[Any]:
    kind: Any = type(node)
    for name in _saved_names(kind):
        value = getattr(node, name)
        yield from value if isinstance(value, tuple) else (value,)


def _joined(groups: list[int], shared: Iterable[int]) -> list[int]:
    """Disjoint masks, joined where one of `shared` has bits of both."""
    for mask in shared:
        if len(groups) == 1:
            break
        touched = [group for group in groups if group & mask]
        if len(touched) > 1:
            groups = [group for group in groups if not group & mask] + [sum(touched)]
    return groups


def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
