"""Which outputs lead to which inputs in autograd's graph, and which outputs share no operator with others.

Takes traced outputs and the capture's differentiable inputs; gives the outputs in groups. PyTorch's engine visits exactly the inputs that
the outputs of a `backward()` lead to (their hooks are called, their own graphs run), and each visited operator frees what it saved. Always
holds: two outputs of different groups share no operator, so that the backward of one neither needs nor frees what the other's does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusewright.records import dataclass

MOST_GROUPS = 8
"""Outputs in more groups than that are taken for one: each is compiled by itself."""


@dataclass(frozen=True, slots=True)
class Group:
    """places: of its outputs among all; inputs: for each input that they lead to its key, and the places of those which do."""

    places: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]


def apart(outputs: Sequence[torch.Tensor], ends: Mapping[Any, int]) -> list[Group]:
    """`ends`: the keys of inputs by the autograd node where the capture ends, or by the id of the leaf (an AccumulateGrad node's)."""
    masks: dict[Any, int] = {}
    found: dict[int, int] = {}
    for place, output in enumerate(outputs):
        masks[output.grad_fn] = masks.get(output.grad_fn, 0) | 1 << place
    for node in _in_order(list(masks)):
        mask = masks.get(node, 0)
        if not mask:
            continue  # beyond an end
        leaf = getattr(node, "variable", None)
        key = ends.get(node if leaf is None else id(leaf))
        if key is not None:
            found[key] = found.get(key, 0) | mask
            masks[node] = 0  # shared by all that reach it: its graph was there before
            continue
        for following, _ in node.next_functions:
            if following is not None:
                masks[following] = masks.get(following, 0) | mask
    groups = _joined([1 << place for place in range(len(outputs))], {mask for mask in masks.values() if mask})
    if len(groups) > MOST_GROUPS:
        groups = [(1 << len(outputs)) - 1]
    return [
        Group(_places(group), tuple((key, _places(mask & group)) for key, mask in sorted(found.items()) if mask & group))
        for group in groups
    ]


def _in_order(roots: list[Any]) -> list[Any]:
    """The nodes of the graph, each before those that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    pending = [(root, False) for root in roots]
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending += [(following, False) for following, _ in node.next_functions if following is not None and following not in seen]
    return order[::-1]


def _joined(groups: list[int], shared: set[int]) -> list[int]:
    """Disjoint masks, joined where one of `shared` has bits of both."""
    for mask in shared:
        touched = [group for group in groups if group & mask]
        if len(touched) > 1:
            groups = [group for group in groups if not group & mask] + [sum(touched)]
    return sorted(groups, key=lambda group: group & -group)


def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)
