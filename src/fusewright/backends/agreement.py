"""Whether all processes of a group compile the same collectives: asked through the group's store, for each function and
each list of collectives that it has not compiled before.

Takes what a frame is called and its graph; raises CollectiveMismatch where another process's graph begins other
collectives, so that the program ends with the first difference instead of hanging in it. Always holds: a process whose
others compile nothing (they run eagerly, or not yet) waits for PATIENCE at most, once a group, and goes on; a recompile
with collectives that were compared before, whatever their sizes, asks nobody, since a process may need one that the
others do not; after `fusewright.reset()` everything is compared again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.fx

from fusewright.base.errors import CollectiveMismatch
from fusewright.graph.collectives import Collective, collectives_of, described
from fusewright.graph.printer import print_graph
from fusewright.operators.messages import PAIRED
from fusewright.process import PROCESS, GroupState

PATIENCE = 30.0
"""Seconds to wait for the other processes' lists."""
_UNEVEN = frozenset({"all_to_all_single"})
_ONE_SIDED = frozenset({"gather", "scatter"})
"""Of which one process, named first among the constants, has other sizes than the others."""


def agree(name: str, graph: torch.fx.Graph, tell: Callable[[str], None], whole: bool = False) -> bool:
    """Compares the collectives of the graph of `name` with those of the other processes. `tell`: takes what a user
    should know. `whole`: the graphs are compared, too; gives whether all processes have asked for that, and have the
    same (a recompile: had, when they were asked)."""
    text = digest(graph) if whole else ""
    alike = whole
    by_group: dict[str, list[Collective]] = {}
    for one in collectives_of(graph):
        if one.operator in PAIRED:
            continue
        by_group.setdefault(one.group, []).append(one)
    for group_name, found in by_group.items():
        group = _c10d()._resolve_process_group(group_name)
        state = PROCESS.groups.setdefault(group, GroupState())
        mine, known = [_comparable(one) for one in found], state.asked.setdefault(name, [])
        before = next((same for one, asked, same in known if asked == whole and _all_fit(mine, one)), None)
        if group.size() == 1:
            continue
        if before is None and not state.silent:
            number = len(known) + 1
            before = _compare(f"{name}, list {number}" if known else name, group, [mine, text], tell)
            opened = [[operator, dtype, _open(shapes), rest] for operator, dtype, shapes, rest in mine]
            known.append((opened, whole, before))
        alike &= bool(before)
    return alike


def digest(graph: torch.fx.Graph) -> str:
    """Of the graph as each process would have it on its own GPU."""
    numbers: dict[str, str] = {}
    text = print_graph(graph, locations=False)
    text = re.sub(r"cuda:\d+", lambda found: numbers.setdefault(found[0], f"cuda:{len(numbers)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _comparable(one: Collective) -> list[Any]:
    """What every process must say alike: sizes that vary stand as None."""
    if one.operator in _ONE_SIDED:
        return [one.operator, one.dtype, [], list(one.constants[:1])]
    shapes = [] if one.operator in _UNEVEN else [[s if isinstance(s, int) else None for s in t] for t in one.shapes]
    constants = () if one.operator in _UNEVEN else one.constants
    return [one.operator, one.dtype, shapes, list(constants)]


def _compare(name: str, group: Any, mine: list[Any], tell: Callable[[str], None]) -> bool:
    """Whether all of the group's processes have the same graph, by its digest behind the list."""
    alike = True
    store = _c10d()._get_process_group_store(group)
    rank = group.rank()
    store.set(_key(group, name, rank), json.dumps(mine))
    for other in range(group.size()):
        if other == rank:
            continue
        try:
            store.wait([_key(group, name, other)], timedelta(seconds=PATIENCE))
            theirs = json.loads(store.get(_key(group, name, other)))
        except RuntimeError as error:  # nobody there, or a process has died: the collective itself says so
            PROCESS.groups[group].silent = True
            tell(f"rank {other} of group {group.group_name} has not compiled {name}, its order is unchecked: {error}")
            return False
        alike &= mine[1] == theirs[1]
        for number, (one, its) in enumerate(itertools.zip_longest(mine[0], theirs[0]), 1):
            if one is None or its is None or not _fit(one, its):
                raise CollectiveMismatch(
                    f"{name}: the processes of group {group.group_name} compile different collectives. Number {number} "
                    f"is {_text(one)} on rank {rank}, and {_text(its)} on rank {other}"
                )
    return alike


def _key(group: Any, name: str, rank: int) -> str:
    """Numbered by resets: a list from before the others' reset may be of another function of that name."""
    return f"fusewright/{PROCESS.resets}/{group.group_name}/{name}/{rank}"


def _fit(mine: list[Any], theirs: list[Any]) -> bool:
    (operator, dtype, shapes, constants), (operator2, dtype2, shapes2, constants2) = mine, theirs
    if (operator, dtype, constants, len(shapes)) != (operator2, dtype2, constants2, len(shapes2)):
        return False
    return all(
        len(one) == len(two) and all(a == b or a is None or b is None for a, b in zip(one, two, strict=True))
        for one, two in zip(shapes, shapes2, strict=True)
    )


def _open(shapes: list[list[Any]]) -> list[list[Any]]:
    """Shapes of any size: only how many there are, and of how many dimensions."""
    return [[None] * len(shape) for shape in shapes]


def _all_fit(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(map(_fit, mine, theirs))


def _text(one: list[Any] | None) -> str:
    if one is None:
        return "nothing"
    operator, dtype, shapes, constants = one
    return described(
        operator, dtype, [["?" if size is None else size for size in shape] for shape in shapes], constants
    )
