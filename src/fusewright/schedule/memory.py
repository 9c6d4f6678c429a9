"""Where temporaries live: lifetimes over the step order, and offsets in one arena.

Takes a plan's steps and buffers; gives placements, the arena's size, the last use of temporaries with memory of their
own, the pairs of buffers that share memory within a kernel, and which temporaries take over the memory that another one
had of its own.
Always holds: buffers whose lifetimes overlap do not overlap in the arena, except pairs in `inplace`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

import torch

from fusewright.base.records import dataclass
from fusewright.loops.ir import Buffer, Expression, Output, Store
from fusewright.schedule.axes import same
from fusewright.schedule.dependencies import extern_reads, shared_memory
from fusewright.schedule.expressions import survey
from fusewright.schedule.horizontal_fusion import regions
from fusewright.schedule.plan import Kernel, Placement, RunExtern, Step
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim

ALIGNMENT = 64
_CPU = torch.device("cpu")


@dataclass(slots=True)
class Lifetime:
    """first: the step that writes it first; last: the last step that touches it (the number of steps if it outlives the
    plan)."""

    first: int
    last: int


@dataclass(slots=True)
class MemoryPlan:
    placements: dict[str, Placement]
    arena_size: Dim
    last_use: dict[str, int]
    inplace: dict[str, tuple[tuple[str, str], ...]]
    takes_over: dict[str, str]


def plan_memory(
    steps: Sequence[Step],
    kernels: Mapping[str, Kernel],
    buffers: Mapping[str, Buffer],
    outputs: Sequence[Output],
    own_bytes: int | None = None,
) -> MemoryPlan:
    """Places every temporary that a kernel or an out= extern writes and that is smaller than `own_bytes`. A temporary
    that is an output (as a view, say) keeps its memory to the end of the plan, and still belongs to the arena: who
    returns it must copy it or own it."""
    lifetimes: dict[str, Lifetime] = {}
    returned: set[str] = set()
    for number, step in zip(regions(steps), steps):
        if isinstance(step, RunExtern):
            extern = step.extern
            touched: list[str] = [
                *extern_reads(extern),
                *(name for name in extern.outputs if name is not None),
                *extern.mutates,
            ]
            if extern.placement == "returned":
                returned.update(name for name in extern.outputs if name is not None)
        else:
            touched = list(kernels[step.kernel].buffers)
        for name in touched:
            if buffers[name].role == "temporary":
                found = lifetimes.get(name)
                if found is None:
                    lifetimes[name] = Lifetime(number, number)
                else:
                    found.last = number
    for output in outputs:
        name = output.buffer if output.kind == "buffer" else output.ref.buffer if output.ref is not None else ""
        if name in lifetimes:
            lifetimes[name].last = len(steps)
    for result, bases in shared_memory(step.extern for step in steps if isinstance(step, RunExtern)).items():
        for name in bases & lifetimes.keys():
            lifetimes[name].last = max(
                lifetimes[name].last, lifetimes[result].last if result in lifetimes else len(steps)
            )
    last_step = {region: number for number, region in enumerate(regions(steps))} | {len(steps): len(steps)}
    sizes = {name: _round(buffers[name].span() * buffers[name].element.itemsize) for name in lifetimes}
    alone = (
        returned
        if own_bytes is None
        else returned | {name for name, size in sizes.items() if estimate(size) >= own_bytes}
    )
    last_use = {name: last_step[life.last] for name, life in lifetimes.items() if name in alone}
    placed = {name: life for name, life in lifetimes.items() if name not in alone}
    own = {
        name: life
        for name, life in lifetimes.items()
        if name in alone and name not in returned and life.last < len(steps)
    }
    shared, inplace = _share_in_place(steps, kernels, buffers, placed)
    takes_over, more = _share_in_place(steps, kernels, buffers, own)
    for name, pairs in more.items():
        inplace[name] = (*inplace.get(name, ()), *pairs)
    placements, arena_size = _assign(placed, sizes, shared)
    return MemoryPlan(placements, arena_size, last_use, inplace, takes_over)


def _round(size: Dim) -> Dim:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


# --- in place ---------------------------------------------------------------------------------------------------------


def _share_in_place(
    steps: Sequence[Step],
    kernels: Mapping[str, Kernel],
    buffers: Mapping[str, Buffer],
    lifetimes: Mapping[str, Lifetime],
) -> tuple[dict[str, str], dict[str, tuple[tuple[str, str], ...]]]:
    """Pairs of a dying temporary and a fresh one of the same size, within one kernel, at the same element in the same
    iteration."""
    shared: dict[str, str] = {}
    inplace: dict[str, tuple[tuple[str, str], ...]] = {}
    times = regions(steps)
    readers: dict[
        tuple[str, int], int
    ] = {}  # kernels that touch a buffer in a region: another one would see it overwritten
    for number, step in zip(times, steps):
        for name in () if isinstance(step, RunExtern) else kernels[step.kernel].buffers:
            readers[name, number] = readers.get((name, number), 0) + 1
    for number, step in zip(times, steps):
        if isinstance(step, RunExtern):
            continue
        kernel = kernels[step.kernel]
        if kernel.product is not None:  # each element of its operands is read for many elements of its result
            continue
        candidates = [
            b for b in kernel.buffers if b in lifetimes and b not in kernel.written and lifetimes[b].last == number
        ]
        dying = [b for b in candidates if readers[b, number] == 1]
        fresh = [b for b in kernel.buffers if b in lifetimes and b in kernel.written and lifetimes[b].first == number]
        if not dying or not fresh:
            continue
        pairs = []
        places = _Places(kernel)
        for written in fresh:
            for read in dying:
                a, b = buffers[read], buffers[written]
                # On a GPU another thread of the block may write an element than the one that reads it, and nothing
                # orders the two.
                width = a.element.itemsize == b.element.itemsize
                alike = width and a.device == b.device == _CPU and same(a.span(), b.span())
                if not alike or not places.in_place(read, written):
                    continue
                shared[written] = read
                pairs.append((read, written))
                dying.remove(read)
                break
        if pairs:
            inplace[kernel.name] = tuple(pairs)
    return shared, inplace


class _Places:
    """Where a kernel reads and writes each buffer: (stage, statement, index); index None for a place known only at run
    time."""

    def __init__(self, kernel: Kernel) -> None:
        self.reads: dict[str, list[tuple[int, int, Dim | None]]] = {}
        self.writes: dict[str, list[tuple[int, int, Dim | None]]] = {}
        for s, stage in enumerate(kernel.stages):
            for k, statement in enumerate(stage.statements):
                for load in survey(_expressions(statement)).loads:
                    self.reads.setdefault(load.buffer, []).append((s, k, None if load.bindings else load.index))
                if isinstance(statement, Store):
                    plain = not statement.bindings and statement.mode == "write"
                    self.writes.setdefault(statement.buffer, []).append((s, k, statement.index if plain else None))

    def in_place(self, read: str, written: str) -> bool:
        """Whether the kernel reads each element of `read` only before, and in the same iteration as, it writes it to
        `written`."""
        reads, writes = self.reads.get(read, []), self.writes.get(written, [])
        if not reads or len(writes) != 1 or written in self.reads:
            return False
        stage, statement, index = writes[0]
        return index is not None and all(s == stage and k <= statement and place == index for s, k, place in reads)


def _expressions(statement: object) -> list[Expression]:
    if isinstance(statement, Store):
        return [statement.value, *(value for _, value in statement.bindings)]
    return [statement.value]  # type: ignore[attr-defined]


# --- offsets ----------------------------------------------------------------------------------------------------------


def _assign(
    lifetimes: Mapping[str, Lifetime], sizes: Mapping[str, Dim], shared: Mapping[str, str]
) -> tuple[dict[str, Placement], Dim]:
    """Best fit, largest blocks first (then the longest lived); blocks of symbolic size follow one another behind the
    static ones."""
    blocks: dict[str, Lifetime] = {}
    root_of: dict[str, str] = {}
    for name, life in sorted(lifetimes.items(), key=lambda item: item[1].first):
        root = root_of[shared[name]] if name in shared else name
        root_of[name] = root
        if root in blocks:
            blocks[root].first, blocks[root].last = (
                min(blocks[root].first, life.first),
                max(blocks[root].last, life.last),
            )
        else:
            blocks[root] = Lifetime(life.first, life.last)
    offsets: dict[str, Dim] = {}
    static = [(name, size) for name in blocks if isinstance(size := sizes[name], int)]
    static.sort(key=lambda item: (-item[1], blocks[item[0]].first - blocks[item[0]].last, blocks[item[0]].first))
    settled: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), by offset
    top = 0
    for name, size in static:
        life = blocks[name]
        offset = _best_gap(settled, life, size)
        offsets[name] = offset
        insort(settled, (offset, offset + size, life.first, life.last))
        top = max(top, offset + size)
    total: Dim = top
    for name, place, end in _symbolic_slots(blocks, sizes, top):
        offsets[name] = place
        total = end
    placements = {name: Placement(offsets[root_of[name]], sizes[name]) for name in lifetimes}
    return placements, total


def _best_gap(settled: Sequence[tuple[int, int, int, int]], life: Lifetime, size: int) -> int:
    """The offset of the smallest gap of at least `size` bytes among the blocks alive during `life`."""
    best, best_gap = -1, 0
    at = 0
    for offset, end, first, last in settled:
        if last < life.first or life.last < first:
            continue
        gap = offset - at
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = at, gap
        at = max(at, end)
    return best if best >= 0 else at


def _symbolic_slots(blocks: Mapping[str, Lifetime], sizes: Mapping[str, Dim], start: int) -> list[tuple[str, Dim, Dim]]:
    """Places for blocks of symbolic size: a free slot of exactly the same size is used again, else a new one is opened
    at the end. Gives (name, offset, end of the arena after it)."""
    slots: list[tuple[Dim, Dim, int]] = []  # (size, offset, busy until)
    result: list[tuple[str, Dim, Dim]] = []
    end: Dim = start
    for name in sorted((n for n in blocks if not isinstance(sizes[n], int)), key=lambda n: (blocks[n].first, n)):
        life, size = blocks[name], sizes[name]
        for k, (slot_size, offset, busy) in enumerate(slots):
            if busy < life.first and same(slot_size, size):
                slots[k] = (slot_size, offset, life.last)
                break
        else:
            offset = end
            end = end + size
            slots.append((size, offset, life.last))
        result.append((name, offset, end))
    return result
