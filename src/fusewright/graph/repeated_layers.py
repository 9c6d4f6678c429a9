"""Bodies that repeat: where the layers of a deep model stand in a functional graph, and the graph with a few of them
only.

Takes a functional graph; gives `Bodies`, and by `shortened` a graph in which `KEPT` of them stand for all. Always
holds: body k + 1 has the operators of body k, with equal constants and types, in the same order; what one of its
operators reads is, of what the same operator of body k reads, the successor, or the same value from in front of all
bodies, or an input of its own in the place of one of body k's. Nothing but the next body reads a body, save the last,
so a graph with another number of them computes the same but for that number.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.base.location import Location, attributed
from fusewright.base.records import dataclass
from fusewright.graph.nodes import add_call, add_placeholder
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node

LEAST = 8
"""Bodies from which on it pays to work on few of them."""
KEPT = 5
"""Bodies that stand for all: two that begin (the first reads what stands in front), two whose work is compared, one
that ends."""
MOST_TIMES, CANDIDATES = 4, 4
"""How many of a call that tells its length a body may hold, and how many lengths are looked at: layers of two kinds by
turns have calls in common."""

_MARKS = frozenset({"type", "location", "no_grad", "recompute", "random", "saved"})
_PLAIN = (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, Expr)


@dataclass(frozen=True, slots=True)
class Bodies:
    """calls: the graph's calls in order; body k is calls[first + k * period :][:period] for k < count. own: an input
    that body k reads → the one that body k + 1 has in its place."""

    calls: tuple[Node, ...]
    first: int
    period: int
    count: int
    own: dict[Node, Node]


@dataclass(frozen=True, slots=True)
class Short:
    """graph: has all inputs of the whole graph, in their order, and `KEPT` bodies. body: of a node's name in it, the
    body (0..KEPT - 1) that the node is in. following: a node's name → the name of the same node of the next body. own:
    the position of an input of one body's own → the position of the next body's. left_out: how many bodies."""

    graph: torch.fx.Graph
    body: dict[str, int]
    following: dict[str, str]
    own: dict[int, int]
    left_out: int


# --- finding them -----------------------------------------------------------------------------------------------------


def find(graph: torch.fx.Graph) -> Bodies | None:
    """The longest run of bodies, if there are at least LEAST."""
    calls = tuple(node for node in graph.nodes if node.op == "call_function")
    tokens = _tokens(calls)
    runs = [(*_longest_run([a is b for a, b in zip(tokens, tokens[period:])]), period) for period in _periods(tokens)]
    runs = [run for run in runs if run[1] - run[0] >= (LEAST - 1) * run[2]]
    return _wired(calls, *max(runs, key=lambda run: (run[1] - run[0] + run[2], -run[2]))) if runs else None


def _tokens(calls: tuple[Node, ...]) -> list[object]:
    """For each call an object; calls that do the same to values of the same types have the same one."""
    known: dict[Hashable, object] = {}
    numbers: dict[object, int] = {}
    types: dict[int, int] = {}  # by identity: a type hashes for longer than all else takes

    def number(node: Node) -> int:
        type_ = node.meta["type"]
        found = types.get(id(type_))
        if found is None:
            found = types[id(type_)] = numbers.setdefault(type_, len(numbers))
        return found

    found: list[object] = []
    for node in calls:
        key = _shape_of_call(node, number)
        found.append(object() if key is None else known.setdefault(key, key))
    return found


def _shape_of_call(node: Node, number: Callable[[Node], int]) -> Hashable | None:
    """What a call does, its operands by the numbers of their types alone; None where nothing else may be taken for
    it."""
    target, meta = node.target, node.meta
    if not _MARKS.issuperset(meta):
        return None
    if isinstance(target, OpOverload):
        known = facts(target)
        if known.written or known.effect:
            return None
    elif target is not operator.getitem:
        return None
    try:
        operands = [_skeleton(value, number) for value in node.args]
        for name, value in node.kwargs.items():
            operands += name, _skeleton(value, number)
    except TypeError:
        return None
    marks = [name for name in meta if name not in ("type", "location") and meta[name]]
    return id(target), number(node), len(node.args), *sorted(marks), *operands


def _skeleton(value: object, number: Callable[[Node], int]) -> Hashable:
    """An argument with each node replaced by its type's number. Raises TypeError for what is not known to compare
    exactly."""
    if isinstance(value, Node):
        return Node, number(value)
    if isinstance(value, (tuple, list)):
        return (type(value), *[_skeleton(item, number) for item in value])
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, _PLAIN):
        return type(value), value
    raise TypeError(f"an argument of type {type(value)}")


def _periods(tokens: list[object]) -> list[int]:
    """The distances at which most calls come again, the most frequent first."""
    places: dict[int, list[int]] = {}
    for position, token in enumerate(tokens):
        places.setdefault(id(token), []).append(position)
    votes: Counter[int] = Counter()
    for positions in places.values():
        for times in range(1, MOST_TIMES + 1) if len(positions) >= LEAST else ():  # so often a body holds such a call
            gap, count = Counter(after - before for before, after in zip(positions, positions[times:])).most_common(1)[
                0
            ]
            votes[gap] += 2 * count > len(positions)
    return [gap for gap, _ in votes.most_common(CANDIDATES)]


def _longest_run(truths: list[bool]) -> tuple[int, int]:
    """(first, end) of the longest run of True."""
    best = 0, 0
    first = 0
    for position, truth in enumerate([*truths, False]):
        if truth:
            continue
        if position - first > best[1] - best[0]:
            best = first, position
        first = position + 1
    return best


def _wired(calls: tuple[Node, ...], first: int, end: int, period: int) -> Bodies | None:
    """The bodies in calls[first : end + period], of which calls[k] and calls[k + period] do the same for first <= k <
    end."""
    index = {node: position for position, node in enumerate(calls)}
    leaves = [tuple(_leaves(node)) for node in calls]
    while True:
        count = (end - first) // period + 1
        if count < LEAST:
            return None
        last = first + (count - 1) * period
        found = _pairs(leaves, index, first, last, period)
        if isinstance(found, dict):
            break
        if found <= first or found > last:
            return None
        if found - first >= last - found:
            end = found - 1
        else:
            first = found
    bodies = Bodies(calls, first, period, count, found)
    return bodies if _is_closed(bodies, index) else None


def _pairs(
    leaves: list[tuple[Node, ...]], index: dict[Node, int], first: int, end: int, period: int
) -> dict[Node, Node] | int:
    """The inputs of their own that bodies have, if the calls read what they should; else the place behind what is in
    the way. `leaves`: what each call reads."""
    own: dict[Node, Node] = {}
    shared: set[Node] = set()
    behind = first
    for position in range(first, end):
        body = (position - first) // period
        for left, right in zip(leaves[position], leaves[position + period], strict=True):
            before, after = index.get(left), index.get(right)
            if left is right:
                shared.add(left)
                if before is not None:
                    behind = max(behind, before + 1)
            elif before is not None and after is not None:
                distance = body - (before - first) // period
                if after - before != period or distance > 1 or (distance == 1 and not _is_float(left)):
                    return position + 1
            elif left.op != "placeholder" or right.op != "placeholder" or own.setdefault(left, right) is not right:
                return position + 1
    if behind > first:  # that is shared by all bodies, so it stands in front of them
        return behind
    apart = len(set(own.values())) == len(own) and shared.isdisjoint(own) and shared.isdisjoint(own.values())
    return own if apart else end + 1


def _leaves(node: Node) -> Iterator[Node]:
    """The nodes among the arguments, in order."""
    stack: list[Any] = [*reversed(node.kwargs.values()), *reversed(node.args)]
    while stack:
        value = stack.pop()
        if isinstance(value, Node):
            yield value
        elif isinstance(value, (tuple, list)):
            stack.extend(reversed(value))


def _is_float(node: Node) -> bool:
    """What is known of integers (their range) might not be the same in every body."""
    type_ = node.meta["type"]
    return all(
        isinstance(one, TensorType) and one.dtype.is_floating_point
        for one in (type_ if isinstance(type_, tuple) else (type_,))
    )


def _is_closed(bodies: Bodies, index: dict[Node, int]) -> bool:
    """Whether only bodies read what all but the last one compute, and what they have of their own."""
    end = bodies.first + bodies.count * bodies.period

    def inside(node: Node) -> bool:
        return bodies.first <= index.get(node, -1) < end

    computed = bodies.calls[bodies.first : end - bodies.period]
    return all(inside(user) for node in (*computed, *bodies.own, *bodies.own.values()) for user in node.users)


# --- the shortened graph ----------------------------------------------------------------------------------------------


def shortened(graph: torch.fx.Graph, bodies: Bodies) -> Short:
    """The graph with the first KEPT bodies, the last of which stands for the last."""
    left_out = bodies.count - KEPT
    first, period, last = bodies.first, bodies.period, bodies.first + (bodies.count - 1) * bodies.period
    skipped = frozenset(bodies.calls[first + KEPT * period : last + period])
    new = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            if node not in skipped:
                copies[node] = add_call(
                    new, node.target, _moved(node.args, copies), _moved(node.kwargs, copies)
                )
                if node is bodies.calls[first + KEPT * period - 1]:
                    end = bodies.calls[last : last + period]
                    copies.update(
                        (late, copies[early]) for early, late in zip(bodies.calls[first + (KEPT - 1) * period :], end)
                    )
        elif node.op == "placeholder":
            numbers[node] = len(numbers)
            copies[node] = add_placeholder(new, str(node.target))
        else:
            copies[node] = new.node_copy(node, copies.__getitem__)
        if node in copies:
            copies[node].meta = node.meta
    places = {copies[node].name: k // period for k, node in enumerate(bodies.calls[first : first + KEPT * period])}
    names = list(places)
    own = {numbers[before]: numbers[after] for before, after in bodies.own.items()}
    return Short(new, places, dict(zip(names, names[period:])), own, left_out)


def moved_lines(bodies: Bodies) -> tuple[dict[Location, Location], ...]:
    """For 1, 2, ... bodies that are left out: to what an operator of one of the bodies that are compared, or of the one
    behind them, is put down so many bodies later."""
    lines = [attributed(node.meta.get("location", ())) for node in bodies.calls]
    begin, end = (bodies.first + body * bodies.period for body in (KEPT - 3, KEPT))
    turns = range(bodies.period, (bodies.count - KEPT + 1) * bodies.period, bodies.period)
    return tuple(
        {old: new for old, new in zip(lines[begin:end], lines[begin + turn :]) if old is not None and new is not None}
        for turn in turns
    )


def _moved(value: Any, copies: dict[Node, Node]) -> Any:
    """An argument with each node replaced by its copy."""
    if isinstance(value, Node):
        return copies[value]
    if isinstance(value, (tuple, list)):
        return type(value)([_moved(item, copies) for item in value])
    if isinstance(value, dict):
        return {name: _moved(item, copies) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(_moved(value.start, copies), _moved(value.stop, copies), _moved(value.step, copies))
    return value
