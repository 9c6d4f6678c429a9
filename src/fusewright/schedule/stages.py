"""Which inner loops of a kernel run together: list scheduling of a group's nests into stages.

Takes a group's nests, all with the same outer axes; gives `StagePlan`s in order. Always holds: what a unit reads at an
outer point was produced in an earlier stage, or in its own stage by an earlier unit at the same inner point; within a
stage units keep program order.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.base.records import dataclass, field
from fusewright.loops.ir import Pointwise, Scan
from fusewright.schedule.axes import Access, Nest, Recipe, divide, is_zero, merge_axes, same, same_all
from fusewright.schedule.expressions import survey
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim


@dataclass(slots=True, eq=False)
class Unit:
    """A part of a nest: "pointwise", "reduce" (the accumulation), "finish" (a reduction's epilogue, once for each outer
    point) or "scan"."""

    nest: Nest
    role: str
    stage: int = -1

    @property
    def inner(self) -> tuple[Dim, ...]:
        """Extents of its inner loops now (`Stager` may split them while it looks for a stage)."""
        return () if self.role == "finish" else self.nest.extents[self.nest.outer :]


@dataclass(slots=True, eq=False)
class StagePlan:
    """inner: extents of the inner axes. fixed: holds a scan, so the axes may not be split or merged."""

    inner: tuple[Dim, ...]
    units: list[Unit] = field(default_factory=list)
    fixed: bool = False


def at_inner(nest: Nest, access: Access) -> tuple[Dim, tuple[Dim, ...]]:
    """(offset, inner coefficients) of an access."""
    offset, coefficients = nest.table[access.index]
    return offset, coefficients[nest.outer :]


def elementwise(writer: Nest, stored: Access, reader: Nest, loaded: Access) -> bool:
    """Whether both touch the same element at the same inner point (along the same loops, or along none)."""
    (offset_w, w), (offset_r, r) = at_inner(writer, stored), at_inner(reader, loaded)
    return same(offset_w, offset_r) and (same_all(w, r) or (all(map(is_zero, w)) and all(map(is_zero, r))))


class Stager:
    """Places units one after the other, each in the earliest stage that may hold it."""

    def __init__(self, nests: Sequence[Nest]) -> None:
        self.nests = nests
        self.stages: list[StagePlan] = []
        self.written: dict[str, list[tuple[Unit, Access]]] = {}
        self.units: dict[int, Unit] = {}  # by position: the unit that stores
        self.read: dict[str, list[tuple[Unit, Access]]] = {}

    def run(self) -> list[StagePlan]:
        for nest in self.nests:
            self._place(nest)
        self._sink()
        self.stages = [stage for stage in self.stages if stage.units]
        for number, stage in enumerate(self.stages):
            stage.units.sort(key=lambda unit: unit.nest.position)
            for unit in stage.units:
                unit.stage = number
        for stage in self.stages:
            if not stage.fixed and len(stage.inner) > 1:
                nests = [unit.nest for unit in stage.units]
                merge_axes(nests, nests[0].outer, len(nests[0].extents))
                stage.inner = nests[0].extents[nests[0].outer :]
        return self.stages

    # --- placing ------------------------------------------------------------------------------------------------------

    def _place(self, nest: Nest) -> None:
        dependencies = self._dependencies(nest)
        if isinstance(nest.operation, Pointwise):
            unit = self._put(Unit(nest, "pointwise"), dependencies, 0)
        elif isinstance(nest.operation, Scan):
            unit = self._put(Unit(nest, "scan"), dependencies, 0)
        else:
            reduce = self._put(Unit(nest, "reduce"), dependencies, 0)
            least = max(
                [reduce.stage + 1, *(item.stage + bool(self.stages[item.stage].inner) for item, _, _ in dependencies)]
            )
            loads = {(load.buffer, load.index) for load in survey([nest.operation.finish]).loads}
            late = [item for item in dependencies if item[2].store or (item[2].buffer, item[2].index) in loads]
            unit = self._put(Unit(nest, "finish"), late, least)
            for access in nest.accesses:  # the value is read where it is reduced
                if not access.store:
                    self.read.setdefault(access.buffer, []).append((reduce, access))
        self.units[nest.position] = unit
        for access in nest.accesses:
            if access.store:
                self.written.setdefault(access.buffer, []).append((unit, access))
            else:
                self.read.setdefault(access.buffer, []).append((unit, access))

    def _dependencies(self, nest: Nest) -> list[tuple[Unit, Access, Access]]:
        """(earlier unit, its access, this nest's access) for each value or place that the nest needs settled."""
        found: list[tuple[Unit, Access, Access]] = []
        for access in nest.accesses:
            if not access.store:  # stores of one buffer never meet
                found.extend((*writer, access) for writer in self.written.get(access.buffer, ()))
            else:
                found.extend(
                    (*reader, access) for reader in self.read.get(access.buffer, ()) if reader[0].nest is not nest
                )
        return found

    def _put(self, unit: Unit, dependencies: list[tuple[Unit, Access, Access]], least: int) -> Unit:
        least = max([least, *(earlier.stage for earlier, _, _ in dependencies)])
        for number in range(least, len(self.stages)):
            if self._fits(number, unit, dependencies):
                break
        else:
            number = len(self.stages)
            self.stages.append(StagePlan(unit.inner))
        self.stages[number].units.append(unit)
        self.stages[number].fixed |= unit.role == "scan"
        unit.stage = number
        return unit

    def _fits(self, number: int, unit: Unit, dependencies: list[tuple[Unit, Access, Access]]) -> bool:
        stage = self.stages[number]
        here = [dependency for dependency in dependencies if dependency[0].stage == number]
        if unit.role == "finish" and stage.inner:
            return False
        if unit.role in ("reduce", "scan") and any(item.role == "scan" for item in stage.units):
            return False
        if unit.role == "scan" and any(item.role == "reduce" for item in stage.units):
            return False
        if not same_all(stage.inner, unit.inner):
            if not here or stage.fixed or unit.role == "scan" or not self._refine(stage, unit.nest, unit.inner):
                return False
        return all(
            elementwise(earlier.nest, theirs, unit.nest, ours) and earlier.role in ("pointwise", "finish", "scan")
            for earlier, theirs, ours in here
        )

    def _refine(self, stage: StagePlan, nest: Nest, inner: tuple[Dim, ...]) -> bool:
        """Splits the inner axes of the stage and of the nest alike, if their extents have a common refinement."""
        common = common_refinement(stage.inner, inner)
        if common is None or not all(map(same, common[0], common[1])):
            return False
        for unit in stage.units:
            split_inner(unit.nest, common[2])
        split_inner(nest, common[3])
        stage.inner = tuple(common[0])
        return True

    # --- sinking ------------------------------------------------------------------------------------------------------

    def _sink(self) -> None:
        """Moves pointwise units to the stage of their only readers, where that saves a row of memory.

        A unit may move when the values that it reads from its own stage are kept for later stages anyway.
        """
        for nest in reversed(self.nests):
            if not isinstance(nest.operation, Pointwise) or nest.outer == len(nest.extents):
                continue
            stores = {access.buffer: access for access in nest.accesses if access.store}
            readers = [reader for name in stores for reader in self.read.get(name, ()) if reader[0].nest is not nest]
            unit = self.units[nest.position]
            if not readers or any(len(self.written[name]) > 1 for name in stores):
                continue
            target = min(reader.stage for reader, _ in readers)
            if target <= unit.stage or not same_all(self.stages[target].inner, nest.extents[nest.outer :]):
                continue
            if any(reader.stage != target or reader.role == "finish" for reader, _ in readers):
                continue
            if not all(elementwise(nest, stores[access.buffer], reader.nest, access) for reader, access in readers):
                continue
            if all(self._stays(unit, access, target) for access in nest.accesses if not access.store):
                self.stages[unit.stage].units.remove(unit)
                self.stages[target].units.append(unit)
                unit.stage = target

    def _stays(self, unit: Unit, access: Access, target: int) -> bool:
        """Whether the loaded value is still there in stage `target` at no cost."""
        producers = self.written.get(access.buffer, [])
        if not producers:
            return True
        if len(producers) > 1 or producers[0][0].nest.position > unit.nest.position:
            return False
        made = producers[0][0].stage
        if not self.stages[made].inner:
            return True
        return any(reader.stage > made and reader is not unit for reader, _ in self.read[access.buffer])


def common_refinement(
    a: Sequence[Dim], b: Sequence[Dim]
) -> tuple[list[Dim], list[Dim], tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]] | None:
    """Row-major extents into which both lists split: (for a, for b, parts of each axis of a, parts of each axis of
    b)."""
    parts_a: list[list[Dim]] = [[] for _ in a]
    parts_b: list[list[Dim]] = [[] for _ in b]
    i, j = len(a) - 1, len(b) - 1
    if i < 0 or j < 0:
        return None
    left, right = a[i], b[j]
    while i >= 0 and j >= 0:
        if same(left, right):
            size = left
        elif estimate(left) < estimate(right):
            size = left
        else:
            size = right
        rest_left, rest_right = divide(left, size), divide(right, size)
        if rest_left is None or rest_right is None:
            return None
        parts_a[i].append(size)
        parts_b[j].append(size)
        left, right = rest_left, rest_right
        if type(left) is int and left == 1:
            i -= 1
            left = a[i] if i >= 0 else 1
        if type(right) is int and right == 1:
            j -= 1
            right = b[j] if j >= 0 else 1
    if i >= 0 or j >= 0:
        return None
    split_a = tuple(tuple(reversed(parts)) for parts in parts_a)
    split_b = tuple(tuple(reversed(parts)) for parts in parts_b)
    return [e for parts in split_a for e in parts], [e for parts in split_b for e in parts], split_a, split_b


def split_inner(nest: Nest, parts: tuple[tuple[Dim, ...], ...]) -> None:
    """Splits each inner axis of `nest` into `parts`."""
    if all(len(p) == 1 for p in parts):
        return
    every = (*((e,) for e in nest.extents[: nest.outer]), *parts)
    inner = tuple((nest.outer + axis, part) for axis, p in enumerate(parts) for part in range(len(p)))
    recipe = Recipe(every, tuple((k, 0) for k in range(nest.outer)), inner)
    nest.transform(recipe)
