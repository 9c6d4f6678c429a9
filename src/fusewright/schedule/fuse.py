"""Which operations share a kernel: greedy fusion of loop operations into groups.

Takes `Dependencies`; gives `Group`s. Always holds: the groups and externs form no cycle; inside a group, running the
nests in program order at one outer point after the other gives what running them one after the other gives.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from fusewright.base.records import dataclass, field
from fusewright.loops.ir import Buffer, Extern, Reduction, Scan
from fusewright.schedule.align import Link, Shape, align, identity, links_hold
from fusewright.schedule.axes import Access, Nest, Recipe, main_access, make_nest
from fusewright.schedule.dependencies import Dependencies
from fusewright.schedule.options import ScheduleOptions
from fusewright.schedule.split import SHORT_RUN, SHORT_RUN_ROWS
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, product

Touching = tuple[Nest, Access]
VECTOR = 16
"""Elements that a machine handles at once, about: loops shorter than this are not worth vectorising."""

SMALL_REDUCTIONS = 16
"""Times the points of a tiny loop that a reduction may walk and still be tiny on a GPU."""
SHORT, LONG = 64, 256
"""Rows that a tile of columns may pass over to store them: many pages at once. LONG where whole rows of memory traffic
are saved: a softmax or a norm over 100 to 256 rows is then 1.1 to 1.8 times as quick, but a mean that is only
subtracted 0.55 to 1 times."""


@dataclass(slots=True, eq=False)
class Group:
    """Operations that run in one kernel. flat: no nest has inner axes. lane: where the neighbouring elements of memory
    are met, in the "inner" or the "outer" axes (None: no preference). mask/ancestors: bit sets of group ids (its own;
    those that must run before)."""

    id: int
    nests: list[Nest]
    outer: tuple[Dim, ...]
    flat: bool
    lane: str | None
    touching: dict[str, list[Touching]]
    written: set[str]
    mask: int
    ancestors: int
    direct: set[int]
    extern: Extern | None = None
    positions: list[int] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return Shape(self.outer, not self.flat)


def lane_of(nest: Nest, recipe: Recipe | None = None) -> str | None:
    """Whether consecutive elements of the nest's main access lie along an inner or an outer axis; None without inner
    axes."""
    extents, outer = nest.extents, nest.outer
    if recipe is not None:
        extents, outer = recipe.extents(extents), len(recipe.outer)
    if outer == len(extents):
        return None
    main = main_access(nest)
    if main is None:
        return None
    coefficients = nest.table[main.index][1]
    if recipe is not None:
        coefficients = recipe.vector(coefficients)
    for k in range(len(coefficients) - 1, -1, -1):
        if type(coefficients[k]) is int and coefficients[k] == 1:
            return "inner" if k >= outer else "outer"
    return None


class Fuser:
    """The state of the greedy search."""

    def __init__(self, dependencies: Dependencies, buffers: dict[str, Buffer], options: ScheduleOptions) -> None:
        self.dependencies, self.buffers, self.options = dependencies, buffers, options
        self.groups: dict[int, Group] = {}
        self.group_of: list[int] = []
        self.merges = 0
        self.bytes = {name: estimate(buffer.span()) * buffer.element.itemsize for name, buffer in buffers.items()}
        # Positions, as bits, of library calls and of waits for collectives among them; and what collectives read.
        self.calls, self.waits, self.sent = 0, 0, set[str]()
        for position, operation in enumerate(dependencies.operations):
            if isinstance(operation, Extern):
                self.calls |= 1 << position
                self.waits |= bool(operation.keeps and operation.mutates) << position
                self.sent.update(ref.buffer for ref in operation.keeps)

    def run(self) -> list[Group]:
        """All groups (externs are groups of their own), in no particular order."""
        for position in range(len(self.dependencies.operations)):
            group = self._open(position)
            if group.extern is None and self.options.fusion:
                self._join_producers(group)
        if self.options.fusion:
            self._join_sharers()
            self._join_tiny()
        return list(self.groups.values())

    # --- groups -------------------------------------------------------------------------------------------------------

    def _open(self, position: int) -> Group:
        operation = self.dependencies.operations[position]
        direct = {self.group_of[p] for p in self.dependencies.predecessors[position]}
        ancestors = 0
        for p in direct:
            before = self.groups[p]
            ancestors |= before.ancestors | before.mask
        if isinstance(operation, Extern):
            group = Group(
                position, [], (), False, None, {}, set(), 1 << position, ancestors, direct, operation, [position]
            )
        else:
            touch = self.dependencies.touches[position]
            nest = make_nest(position, operation, touch)
            touching: dict[str, list[Touching]] = {}
            for access in nest.accesses:
                touching.setdefault(access.buffer, []).append((nest, access))
            flat = nest.outer == len(nest.extents)
            group = Group(
                position,
                [nest],
                nest.extents[: nest.outer],
                flat,
                lane_of(nest),
                touching,
                set(touch.writes),
                1 << position,
                ancestors,
                direct,
            )
            group.positions.append(position)
        self.groups[position] = group
        self.group_of.append(position)
        return group

    def _join_producers(self, group: Group) -> None:
        candidates = [self.groups[p] for p in sorted(group.direct) if self.groups[p].extern is None]
        if len(candidates) > 1:
            candidates.sort(key=lambda other: (-self._score(other, group), other.id))
        for other in candidates:
            if self.groups.get(other.id) is other and other is not group:
                group = self.try_merge(other, group) or group

    def _join_sharers(self) -> None:
        """Merges groups that read (or write and read) the same buffer, largest saving first."""
        touched: dict[str, list[int]] = {}
        for group in self.groups.values():
            for name in group.touching:
                touched.setdefault(name, []).append(group.id)
        pairs: set[tuple[int, int]] = set()
        for ids in touched.values():
            ids.sort()
            pairs.update(pairwise(ids))
            pairs.update((ids[0], other) for other in ids[1:8])
        scored = [(self._score(self.groups[a], self.groups[b]), a, b) for a, b in pairs]
        scored.sort(key=lambda item: (-item[0], abs(item[1] - item[2]), item[1], item[2]))
        for score, a, b in scored:
            left, right = self._find(a), self._find(b)
            if left is not right and score > 0:
                self.try_merge(left, right)

    def _join_tiny(self) -> None:
        """Merges neighbouring groups of few iterations over the same space: each kernel costs a launch."""
        spaces: dict[tuple[Dim, ...], list[int]] = {}
        for group in sorted(self.groups.values(), key=lambda g: g.id):
            if group.extern is None and self._is_tiny(group):
                spaces.setdefault(group.outer, []).append(group.id)
        for ids in spaces.values():
            current = self.groups[ids[0]]
            for other in ids[1:]:
                current = self.try_merge(current, self.groups[other]) or self.groups[other]

    def _is_tiny(self, group: Group) -> bool:
        """Whether the launch is most of its cost. (On a CPU, neighbouring small reductions share a parallel region
        anyway.)"""
        if group.flat:
            return estimate(product(group.outer)) <= self.options.tiny_points
        return (
            self.options.lanes > 1
            and max(nest.points() for nest in group.nests) <= SMALL_REDUCTIONS * self.options.tiny_points
        )

    def _find(self, group_id: int) -> Group:
        return self.groups[self.group_of[group_id]]

    # --- one merge ----------------------------------------------------------------------------------------------------

    def try_merge(self, a: Group, b: Group) -> Group | None:
        """Merges the groups if that is legal and good; gives the merged group."""
        if a.id > b.id:
            a, b = b, a
        if 0 <= self.options.fuse_limit <= self.merges or not self._fits(a, b) or self._would_cycle(a, b):
            return None
        links = self._links(a, b)
        recipes = self._recipes(a, b, links)
        if recipes is None or not self._worthwhile(a, b, *recipes):
            return None
        self.merges += 1
        return self._commit(a, b, *recipes)

    def _fits(self, a: Group, b: Group) -> bool:
        options = self.options
        if len(a.nests) + len(b.nests) > options.max_statements // 3 or self._device(a) != self._device(b):
            return False
        if (
            sum(nest.masks for group in (a, b) for nest in group.nests) > 32
            or sum(n.nodes for g in (a, b) for n in g.nests) > 2000
        ):
            return False
        if self.dependencies.shared and (self._meets(a, b) or self._meets(b, a)):
            return False
        if self.sent and not (self._communicates_alike(a, b) and self._communicates_alike(b, a)):
            return False
        if (self._checks(a) and self._updates(b)) or (self._checks(b) and self._updates(a)):
            return False  # a kernel that fails a check has written part of what it writes
        names = a.touching.keys() | b.touching.keys()
        tiny = a.flat and b.flat and max(estimate(product(a.outer)), estimate(product(b.outer))) <= options.tiny_points
        most = options.max_buffers * (4 if tiny else 1)  # where hardly any data moves, only the launch counts
        if len(names) <= most:
            return True
        inside = set(a.positions) | set(b.positions)
        return sum(1 for name in names if not self._internal(name, inside)) <= most

    def _communicates_alike(self, group: Group, other: Group) -> bool:
        """Whether `group`, in one kernel with `other`, needs nothing later than before: no library call before what a
        collective reads, no wait for a collective before what others need."""
        more = other.ancestors & ~(group.ancestors | group.mask)
        if more & self.calls and group.written & self.sent:
            return False
        return not more & self.waits or not self._stores_outside(group, other)

    def _checks(self, group: Group) -> bool:
        surveys = (self.dependencies.touches[position].survey for position in group.positions)
        return any(found is not None and found.checks for found in surveys)

    def _updates(self, group: Group) -> bool:
        """Whether the group writes to what exists before the call."""
        return any(self.buffers[name].role in ("input", "constant") for name in group.written)

    def _meets(self, writer: Group, other: Group) -> bool:
        """Whether one writes memory that the other knows by another name (the result of an in-place library call)."""
        shared = self.dependencies.shared
        if any(shared.get(name, frozenset()) & other.touching.keys() for name in writer.written):
            return True
        return any(shared[name] & writer.written for name in other.touching if name in shared)

    def _device(self, group: Group) -> torch.device:
        return self.buffers[next(iter(group.written))].device

    def _internal(self, name: str, inside: set[int]) -> bool:
        """Whether a buffer is written and read by these operations alone."""
        dependencies = self.dependencies
        if name in dependencies.kept or name not in dependencies.writers:
            return False
        return inside.issuperset(dependencies.writers[name]) and inside.issuperset(dependencies.readers.get(name, ()))

    def _would_cycle(self, a: Group, b: Group) -> bool:
        """Whether some path from one group to the other runs through a third one."""
        for first, second in ((a, b), (b, a)):
            if second.ancestors & first.mask:
                for p in second.direct:
                    between = self.groups[self.group_of[p]]
                    if between is not first and between is not second and between.ancestors & first.mask:
                        return True
        return False

    def _links(self, a: Group, b: Group) -> list[Link]:
        found = []
        small, large = (a.touching, b.touching) if len(a.touching) <= len(b.touching) else (b.touching, a.touching)
        for name in small:
            if name not in large:
                continue
            dependency = name in a.written or name in b.written
            for left in a.touching[name]:
                for right in b.touching[name]:
                    if not dependency or left[1].store or right[1].store:
                        found.append(Link(name, left, right, dependency))
        return found

    def _recipes(self, a: Group, b: Group, links: list[Link]) -> tuple[Recipe, Recipe] | None:
        """The first alignment under which every link holds."""
        if any(link.dependency and not (link.left[1].affine and link.right[1].affine) for link in links):
            return None
        if a.flat == b.flat or not a.flat:
            same_axes = identity(a.shape, b.shape)
            if same_axes is not None and links_hold(links, *same_axes):
                if not any(link.dependency for link in links) and not self._agrees(links, *same_axes):
                    return None
                return same_axes
        candidates = [link for link in links if link.left[1].affine and link.right[1].affine]
        candidates.sort(key=lambda link: (not link.dependency, -self.bytes[link.buffer]))
        for link in candidates[:3]:
            recipes = align(a.shape, b.shape, link)
            if recipes is not None and links_hold(links, *recipes):
                return recipes
        return None

    def _agrees(self, links: list[Link], left: Recipe, right: Recipe) -> bool:
        """Whether groups without a dependency, put under the same loops, read what they share at the same points (or
        share nothing)."""
        affine = [link for link in links if link.left[1].affine and link.right[1].affine]
        outer = len(left.outer)
        return not affine or any(
            link.left[0].table[link.left[1].index][1][:outer] == link.right[0].table[link.right[1].index][1][:outer]
            for link in affine
        )

    def _worthwhile(self, a: Group, b: Group, recipe_a: Recipe, recipe_b: Recipe) -> bool:
        options = self.options
        outer = estimate(product(recipe_a.outer_extents()))
        if options.lanes > 1 and (self._is_scanned(a), self._reads_call(b)) == (True, True) and not self._reads_call(a):
            return False
        lanes = set()
        for group, recipe, other in ((a, recipe_a, b), (b, recipe_b, a)):
            if not recipe.inner:
                lanes.add(group.lane)
                continue
            rows = max(options.small_points, outer * options.longest_row(outer))
            columns = max(options.small_points, outer * options.whole_column)
            if outer < options.min_parallel and max(nest.points() for nest in group.nests) > rows:
                return False
            if options.lanes > 1 and group.flat and self._cuts_runs(group, recipe):
                return False
            sunk = {lane_of(nest, recipe) for nest in group.nests}
            if "outer" in sunk and (
                other.flat
                or (outer // VECTOR < options.min_parallel and group.nests[0].points() > columns)
            ):
                return False
            if "outer" in sunk and self._stores_outside(group, other) and self._too_many_rows(group, other, recipe):
                return False
            lanes |= sunk
        lanes.discard(None)
        if len(lanes) > 1:
            return False
        if not (a.flat and b.flat):
            return True
        if not recipe_a.inner and not recipe_b.inner:
            return self._same_direction(a, b, recipe_a, recipe_b)
        return self._rows_pay(a, b, recipe_a, recipe_b, outer)

    def _rows_pay(self, a: Group, b: Group, recipe_a: Recipe, recipe_b: Recipe, outer: int) -> bool:
        """Whether two pointwise groups over different elements of the same rows should become stages of one kernel: the
        rows are long enough to vectorise and many enough to run in parallel, and both do about the same amount of work
        (or one works once a row)."""
        points = [max(nest.points() for nest in group.nests) for group in (a, b)]
        if outer < self.options.min_parallel and max(points) > self.options.tiny_points:
            return False
        lengths = [estimate(product(self._sunk_extents(recipe))) for recipe in (recipe_a, recipe_b) if recipe.inner]
        innermost = [estimate(self._sunk_extents(recipe)[-1]) for recipe in (recipe_a, recipe_b) if recipe.inner]
        if min(innermost) < VECTOR and max(points) > self.options.tiny_points:
            return False
        if self.options.lanes > 1 and len(set(lengths)) > 1:
            return False  # a GPU keeps a row in registers, where only rows of the same length meet
        return len(lengths) < 2 or max(lengths) <= 4 * min(lengths)

    def _is_scanned(self, group: Group) -> bool:
        return any(isinstance(self.dependencies.operations[position], Scan) for position in group.positions)

    def _reads_call(self, group: Group) -> bool:
        """Whether the group reads what a library call gave: on a GPU it may become part of the call's kernel, which
        scans nothing."""
        writers = (place for name in group.touching for place in self.dependencies.writers.get(name, ()))
        return any(isinstance(self.dependencies.operations[place], Extern) for place in writers)

    def _too_many_rows(self, group: Group, other: Group, recipe: Recipe) -> bool:
        """Whether `group` would store more rows from a tile of columns than pays. A GPU's block of columns stores as it
        goes, unless it must know a result of all its rows first: then it holds them, where there are blocks enough."""
        if self.options.lanes > 1:
            columns = estimate(product(recipe.outer_extents()))
            held = self.options.held_rows if columns // VECTOR >= self.options.min_parallel else SHORT
            most = held if other.written & group.touching.keys() else None
        else:
            most = LONG if self._is_reduced_next(group, other) or self._saves_rows(group, other) else SHORT
        return most is not None and estimate(product(self._sunk_extents(recipe))) > most

    def _cuts_runs(self, group: Group, recipe: Recipe) -> bool:
        """Whether a row of the group would be many short pieces of memory, between them those of other rows (a group of
        channels, in channels-last images)."""
        outer = len(recipe.outer)
        accesses = ((nest, access) for nest in group.nests for access in nest.accesses if access.affine)
        for nest, access in accesses:
            extents = recipe.extents(nest.extents)[outer:]
            steps = recipe.vector(nest.table[access.index][1])[outer:]
            runs = [estimate(extent) for extent, step in zip(extents, steps) if type(step) is int and step == 1]
            walked = estimate(product(extent for extent, step in zip(extents, steps) if step != 0))
            width = self.buffers[access.buffer].element.itemsize
            if runs and runs[-1] * width < SHORT_RUN and walked >= SHORT_RUN_ROWS * runs[-1]:
                return True
        return False

    def _sunk_extents(self, recipe: Recipe) -> list[Dim]:
        return [recipe.parts[axis][part] for axis, part in recipe.inner]

    def _stores_outside(self, group: Group, other: Group) -> bool:
        """Whether something that `group` stores is needed outside both groups."""
        inside = set(group.positions) | set(other.positions)
        return any(not self._internal(name, inside) for name in group.written)

    def _is_reduced_next(self, group: Group, other: Group) -> bool:
        """Whether what `group` stores for others goes into a reduction and no further than loops, which may join as
        well (a softmax over columns, or their variance): then it need not be in memory at all."""
        dependencies = self.dependencies
        inside = set(group.positions) | set(other.positions)
        for name in group.written:
            if self._internal(name, inside):
                continue
            readers = [dependencies.operations[p] for p in dependencies.readers.get(name, ()) if p not in inside]
            if name in dependencies.kept or any(isinstance(reader, Extern) for reader in readers):
                return False
            if not any(isinstance(reader, Reduction) for reader in readers):
                return False
        return True

    def _saves_rows(self, group: Group, other: Group) -> bool:
        """Whether `group` is the last to read something of its own size that `other` makes: then that need not be in
        memory."""
        inside = set(group.positions) | set(other.positions)
        points = max(nest.points() for nest in group.nests)
        return any(
            name in other.written and self._internal(name, inside) and estimate(self.buffers[name].span()) >= points
            for name in group.touching
        )

    def _same_direction(self, a: Group, b: Group, recipe_a: Recipe, recipe_b: Recipe) -> bool:
        """Two pointwise groups must store along the same axis, unless all that one stores stays inside."""
        units = []
        for group, recipe, other in ((a, recipe_a, b), (b, recipe_b, a)):
            main = main_access(group.nests[-1])
            if main is None or not self._stores_outside(group, other):
                continue
            coefficients = recipe.vector(group.nests[-1].table[main.index][1])
            units.append([k for k, c in enumerate(coefficients) if type(c) is int and c == 1])
        return len(units) < 2 or not units[0] or not units[1] or units[0][-1] == units[1][-1]

    def _score(self, a: Group, b: Group) -> int:
        """Bytes of memory traffic that merging saves."""
        small, large = (a.touching, b.touching) if len(a.touching) <= len(b.touching) else (b.touching, a.touching)
        saved = 0
        for name in small:
            if name in large:
                saved += self.bytes[name] * (2 if name in a.written or name in b.written else 1)
        return saved

    def _commit(self, a: Group, b: Group, recipe_a: Recipe, recipe_b: Recipe) -> Group:
        for group, recipe in ((a, recipe_a), (b, recipe_b)):
            if not recipe.identity:
                for nest in group.nests:
                    nest.transform(recipe)
        a.outer = recipe_a.outer_extents()
        a.nests = sorted([*a.nests, *b.nests], key=lambda nest: nest.position)
        a.flat = all(nest.outer == len(nest.extents) for nest in a.nests)
        a.lane = next((lane for lane in map(lane_of, a.nests) if lane is not None), None)
        for name, accesses in b.touching.items():
            a.touching.setdefault(name, []).extend(accesses)
        a.written |= b.written
        a.positions += b.positions
        a.mask |= b.mask
        before = a.ancestors | b.ancestors
        a.ancestors = before & ~a.mask
        a.direct = {self.group_of[p] for p in a.direct | b.direct} - {a.id, b.id}
        for position in b.positions:
            self.group_of[position] = a.id
        del self.groups[b.id]
        closure = a.ancestors | a.mask
        for group in self.groups.values():
            if group.ancestors & a.mask and group is not a:
                group.ancestors |= closure
        return a


def fuse(dependencies: Dependencies, buffers: dict[str, Buffer], options: ScheduleOptions) -> list[Group]:
    return Fuser(dependencies, buffers, options).run()
