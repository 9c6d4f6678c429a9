"""In which order kernels and externs run.

Takes groups with their edges; gives them in a topological order. Always holds: an operation runs after everything that
it depends on; ordered externs keep their order (it is among the edges).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from fusewright.loops.ir import Buffer, Extern
from fusewright.schedule.dependencies import Dependencies
from fusewright.schedule.fuse import Group
from fusewright.sizes.estimate import estimate


def order_groups(groups: Sequence[Group], dependencies: Dependencies, buffers: Mapping[str, Buffer]) -> list[Group]:
    """Topological order that follows the program (its last fused operation decides), except that a group which frees
    more memory than it allocates runs as soon as it can (a wait for a collective does not). Raises ValueError if the
    groups form a cycle."""
    owner = {position: group.id for group in groups for position in group.positions}
    by_id = {group.id: group for group in groups}
    successors: dict[int, set[int]] = {group.id: set() for group in groups}
    missing: dict[int, int] = {group.id: 0 for group in groups}
    for group in groups:
        before = {owner[p] for position in group.positions for p in dependencies.predecessors[position]} - {group.id}
        missing[group.id] = len(before)
        for p in before:
            successors[p].add(group.id)
    growth = _growth(groups, dependencies, buffers)
    ready: list[tuple[bool, int, int]] = []

    def push(group: Group) -> None:
        heappush(ready, (growth[group.id] >= 0, max(group.positions), group.id))

    for group in groups:
        if not missing[group.id]:
            push(group)
    result: list[Group] = []
    while ready:
        group = by_id[heappop(ready)[2]]
        result.append(group)
        for successor in sorted(successors[group.id]):
            missing[successor] -= 1
            if not missing[successor]:
                push(by_id[successor])
    if len(result) != len(groups):
        raise ValueError("the fused groups form a cycle")
    return result


def _growth(groups: Sequence[Group], dependencies: Dependencies, buffers: Mapping[str, Buffer]) -> dict[int, int]:
    """Bytes of temporaries that a group writes, less those that it alone reads."""
    growth: dict[int, int] = {}
    for group in groups:
        inside = set(group.positions)
        total = 0
        for position in group.positions:
            touch, operation = dependencies.touches[position], dependencies.operations[position]
            if isinstance(operation, Extern) and operation.keeps and operation.mutates:
                continue
            for name in touch.writes:
                if buffers[name].role == "temporary" and not inside.issuperset(dependencies.readers.get(name, ())):
                    total += estimate(buffers[name].span()) * buffers[name].element.itemsize
            for name in touch.reads:
                if (
                    name not in dependencies.kept
                    and name in dependencies.writers
                    and inside.isdisjoint(dependencies.writers[name])
                ):
                    if inside.issuperset(dependencies.readers[name]):
                        total -= estimate(buffers[name].span()) * buffers[name].element.itemsize
        growth[group.id] = total
    return growth
