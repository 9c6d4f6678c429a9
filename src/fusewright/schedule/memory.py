"""Where temporaries live: lifetimes over the step order, and offsets in one arena.

Takes a plan's steps and buffers; gives placements, the arena's size, the last use of temporaries with memory of their
own, the pairs of buffers that share memory within a kernel, and which buffers take over the memory that another one had
of its own.
Always holds: buffers whose lifetimes overlap do not overlap in the arena, except pairs in `inplace`; memory that is
taken over belonged to this call alone.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

import torch

from fusewright.base.records import dataclass, field
from fusewright.loops.externs import gives_whole_memory, may_keep_arguments
from fusewright.loops.ir import Buffer, Expression, Output, Store
from fusewright.schedule.axes import same
from fusewright.schedule.dependencies import extern_reads, shared_memory
from fusewright.schedule.expressions import survey
from fusewright.schedule.horizontal_fusion import regions
from fusewright.schedule.plan import Define, Kernel, Placement, RunExtern, Step
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim

ALIGNMENT = 64
VIEW_BYTES = 32 * 1024
"""An output in the memory of a temporary of another shape costs one more tensor object: too much below this."""
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
    """Places every temporary that a kernel or an out= extern writes and that is smaller than `own_bytes` (0: nothing
    shares memory). A temporary that is an output (as a view, say) keeps its memory to the end of the plan, and still
    belongs to the arena: who returns it must copy it or own it."""
    lifetimes: dict[str, Lifetime] = {}
    results: dict[str, Lifetime] = {}  # of what is allocated for the user
    returned: set[str] = set()
    whole: set[str] = set()
    of_externs: set[str] = set()
    seen_outside: set[str] = set()  # by who may keep it, or under another name
    for number, step in zip(regions(steps), steps):
        if isinstance(step, RunExtern):
            extern = step.extern
            touched: list[str] = [
                *extern_reads(extern),
                *(name for name in extern.outputs if name is not None),
                *extern.mutates,
            ]
            of_externs.update(touched)
            if may_keep_arguments(extern.target):
                seen_outside.update(touched)
            if extern.placement == "returned":
                names = {name for name in extern.outputs if name is not None}
                returned |= names
                whole |= names if gives_whole_memory(extern.target) else set()
        else:
            touched = list(kernels[step.kernel].buffers)
        for name in touched:
            role = buffers[name].role
            if role in ("temporary", "output"):
                kept = lifetimes if role == "temporary" else results
                found = kept.get(name)
                if found is None:
                    kept[name] = Lifetime(number, number)
                else:
                    found.last = number
    returns = [output.buffer or (output.ref.buffer if output.ref is not None else "") for output in outputs]
    for name in returns:
        if name in lifetimes:
            lifetimes[name].last = len(steps)
    aliases = shared_memory(step.extern for step in steps if isinstance(step, RunExtern))
    for result, bases in aliases.items():
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
    seen_outside.update(aliases, *aliases.values())
    dying = {
        name: life.last
        for name, life in lifetimes.items()
        if name not in seen_outside and (name not in returned or name in whole)
    }
    fresh = {name: life.first for name, life in (*results.items(), *lifetimes.items()) if name not in returned}
    sharing = _Sharing(buffers, dying, fresh, frozenset(returned), frozenset(of_externs), returns)
    if own_bytes != 0:
        sharing.find(steps, kernels)
    # A block that leaves the plan, or that the arena never had, is an allocation of its own.
    given = results.keys() | alone
    apart = {root for name, root in sharing.roots.items() if name in given or root in given}
    takes_over = {name: read for name, read in sharing.shared.items() if sharing.roots[name] in apart}
    alone = alone | apart | takes_over.keys()
    placed = {name: life for name, life in lifetimes.items() if name not in alone}
    last_use = {name: last_step[life.last] for name, life in lifetimes.items() if name in alone}
    shared = {name: read for name, read in sharing.shared.items() if name not in takes_over}
    placements, arena_size = _assign(placed, sizes, shared)
    return MemoryPlan(placements, arena_size, last_use, sharing.inplace, takes_over)


def _round(size: Dim) -> Dim:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


# --- in place ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sharing:
    """Pairs of a dying temporary and a fresh buffer of the same size, within one kernel, at the same element in the
    same iteration.

    dying, fresh: the region in which a buffer is touched last, and first. returned: what library calls allocate;
    of_externs: what they touch. returns: the buffer of each output. shared: written -> read; roots: written -> the
    buffer whose memory it is; inplace: the pairs of a kernel."""

    buffers: Mapping[str, Buffer]
    dying: Mapping[str, int]
    fresh: Mapping[str, int]
    returned: frozenset[str]
    of_externs: frozenset[str]
    returns: Sequence[str]
    shared: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    inplace: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def find(self, steps: Sequence[Step], kernels: Mapping[str, Kernel]) -> None:
        times = regions(steps)
        # Kernels that touch a buffer in a region: another one would see it overwritten.
        readers: dict[tuple[str, int], int] = {}
        for number, step in zip(times, steps):
            for name in () if isinstance(step, RunExtern) else kernels[step.kernel].buffers:
                readers[name, number] = readers.get((name, number), 0) + 1
        for number, step in zip(times, steps):
            if isinstance(step, RunExtern):
                continue
            kernel = kernels[step.kernel]
            if kernel.product is not None:  # each element of its operands is read for many elements of its result
                continue
            reads = [name for name in kernel.buffers if name not in kernel.written and self.dying.get(name) == number]
            dying = [name for name in reads if readers[name, number] == 1]
            if step.when is not None:  # another kernel writes in place of this one when there is no result of a call
                dying = [name for name in dying if self.roots.get(name, name) not in self.returned]
            fresh = [name for name in kernel.buffers if name in kernel.written and self.fresh.get(name) == number]
            if dying and fresh:
                self._pair(kernel, dying, fresh)

    def _pair(self, kernel: Kernel, dying: list[str], fresh: list[str]) -> None:
        pairs = []
        places = _Places(kernel)
        fresh.sort(key=lambda name: self.buffers[name].role != "output")  # where most is saved
        for written in fresh:
            for read in dying:
                if not self._fits(read, written) or not places.in_place(read, written):
                    continue
                if self.buffers[written].device != _CPU and not places.feeds_only(read, written):
                    continue
                self.shared[written] = read
                self.roots[written] = self.roots.get(read, read)
                pairs.append((read, written))
                dying.remove(read)
                break
        if pairs:
            self.inplace[kernel.name] = tuple(pairs)

    def _fits(self, read: str, written: str) -> bool:
        """Whether the memory of `read` is what `written` needs."""
        a, b = self.buffers[read], self.buffers[written]
        if a.device != b.device or a.element.itemsize != b.element.itemsize or not same(a.span(), b.span()):
            return False
        if b.role != "output":
            return True
        # The user gets the tensor that was made of this memory first, or another one that is a view to nobody.
        root = self.buffers[self.roots.get(read, read)]
        if (root.shape, root.stride, root.dtype) == (b.shape, b.stride, b.dtype):
            return True
        alone = self.returns.count(written) == 1 and written not in self.of_externs
        return alone and root.dtype == b.dtype and estimate(b.span() * b.element.itemsize) >= VIEW_BYTES


class _Places:
    """Where a kernel reads and writes each buffer: (stage, statement, index); index None for a place known only at run
    time."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
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

    def feeds_only(self, read: str, written: str) -> bool:
        """Whether a pointwise kernel uses what it reads of `read` for what it stores to `written`, and for nothing
        else.

        A GPU's block may hold an element in several threads, which load it at different times, and only one of them
        stores it. What that thread stores was computed from loads of this element, which therefore came before this
        only store to it. Another thread's load may come after the store and give the new value: no other result may be
        made of it."""
        if len(self.kernel.stages) != 1 or self.kernel.scratch or self.kernel.attention is not None:
            return False
        names: set[str] = set()
        for statement in self.kernel.stages[0].statements:
            found = survey(_expressions(statement))
            used = bool(names & found.locals) or any(load.buffer == read for load in found.loads)
            if isinstance(statement, Define):
                names |= {statement.local} if used else set()
            elif not isinstance(statement, Store) or (used and statement.buffer != written):
                return False
        return True


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
