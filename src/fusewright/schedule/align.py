"""Finds how the axes of two groups correspond, so that both can run under the same outer loops.

Takes two groups and the buffers that they share; gives a `Recipe` for each, or None. Always holds: after both recipes,
every buffer that one of them writes is accessed by both at the same outer point (`same_point`), so running them one
outer point at a time keeps every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fusewright.base.records import dataclass
from fusewright.schedule.axes import (
    Access,
    Nest,
    Recipe,
    Vector,
    coalesced,
    divide,
    identity_recipe,
    is_zero,
    place_in_block,
    same,
    same_all,
    strides_of,
)
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, known_le

Part = tuple[int, int]
"""(axis, part of it); part 0 is the most significant."""


MISSING: Part = (-1, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """One buffer that both groups touch. `dependency`: one of them writes it."""

    buffer: str
    left: tuple[Nest, Access]
    right: tuple[Nest, Access]
    dependency: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """What alignment needs to know of a group: its outer extents, and whether some of its nests have inner axes (rigid:
    the outer axes may be split and permuted, but none may leave or join them)."""

    outer: tuple[Dim, ...]
    rigid: bool


# --- common refinement of two indices into one buffer -----------------------------------------------------------------


class _Side:
    """The axes of one nest while they are split; parts are collected least significant first."""

    __slots__ = ("at", "current", "parts", "terms")

    def __init__(self, terms: list[tuple[Dim, Dim, int]]) -> None:
        self.terms = terms
        self.at = 0
        self.parts: dict[int, list[Dim]] = {axis: [] for _, _, axis in terms}
        self.current: tuple[Dim, Dim] = terms[0][:2] if terms else (0, 1)

    @property
    def done(self) -> bool:
        return self.at >= len(self.terms)

    def emit(self, extent: Dim) -> Part:
        """Closes a part of the current axis; its place counts from the least significant part."""
        axis = self.terms[self.at][2]
        self.parts[axis].append(extent)
        return axis, len(self.parts[axis]) - 1

    def step(self, stride: Dim = 0, extent: Dim = 1) -> None:
        """Goes on with what is left of the axis (stride, extent), or with the next axis."""
        if type(extent) is int and extent == 1:
            self.at += 1
            if not self.done:
                self.current = self.terms[self.at][:2]
        else:
            self.current = (stride, extent)


def refine(
    left: list[tuple[Dim, Dim, int]], right: list[tuple[Dim, Dim, int]]
) -> tuple[_Side, _Side, list[tuple[Part, Part]]]:
    """Splits the axes of two indices, (stride, extent, axis) with the smallest stride first, until equal strides meet
    equal extents."""
    a, b = _Side(left), _Side(right)
    pairs: list[tuple[Part, Part]] = []
    while not a.done and not b.done:
        (s, e), (t, f) = a.current, b.current
        if same(s, t):
            if same(e, f):
                pairs.append((a.emit(e), b.emit(f)))
                a.step()
                b.step()
            elif _leave_gap(a, b) or _leave_gap(b, a):
                continue
            elif (rest := divide(e, f)) is not None:
                pairs.append((a.emit(f), b.emit(f)))
                a.step(s * f, rest)
                b.step()
            elif (rest := divide(f, e)) is not None:
                pairs.append((a.emit(e), b.emit(e)))
                a.step()
                b.step(t * e, rest)
            else:
                a.emit(e)
                b.emit(f)
                a.step()
                b.step()
        elif estimate(s) < estimate(t):
            _skip(a, s, e, t)
        else:
            _skip(b, t, f, s)
    for side in (a, b):
        while not side.done:
            side.emit(side.current[1])
            side.step()
    return a, b, pairs


def _leave_gap(short: _Side, long: _Side) -> bool:
    """A short row inside a longer one (a part of a concatenation): the rows match, the elements within them do not."""
    if short.at + 1 >= len(short.terms):
        return False
    (stride, extent), (_, whole) = short.current, long.current
    room = divide(short.terms[short.at + 1][0], stride)
    rest = divide(whole, room) if room is not None else None
    if room is None or rest is None or estimate(room) <= estimate(extent):
        return False
    short.emit(extent)
    short.step()
    long.emit(room)
    long.step(stride * room, rest)
    return True


def _skip(side: _Side, stride: Dim, extent: Dim, target: Dim) -> None:
    """Passes over the part of the current axis that lies below stride `target`, which the other side does not have."""
    ratio = divide(target, stride)
    rest = divide(extent, ratio) if ratio is not None else None
    if ratio is not None and rest is not None and estimate(rest) > 1:
        side.emit(ratio)
        side.step(target, rest)
    else:
        side.emit(extent)
        side.step()


# --- alignment --------------------------------------------------------------------------------------------------------


Walk = tuple[tuple[Dim, ...], tuple[Dim, ...]]
"""(strides, extents) of one access over the axes of its nest."""


def align(left: Shape, right: Shape, link: Link) -> tuple[Recipe, Recipe] | None:
    """Recipes that give both groups the same outer axes, matched through `link`.

    Rigid groups must match in all outer axes. A flat group hands over to its inner axes what a rigid partner does not
    have. Of two flat groups, the axes that match become the outer ones; where one depends on the other, the rest (if
    any) become inner axes.
    """
    (nest_a, access_a), (nest_b, access_b) = link.left, link.right
    strides_a, strides_b = nest_a.table[access_a.index][1], nest_b.table[access_b.index][1]
    return _align(left, right, (strides_a, nest_a.extents), (strides_b, nest_b.extents), link.dependency)


@lru_cache(maxsize=1 << 12)
def _align(left: Shape, right: Shape, access_a: Walk, access_b: Walk, dependency: bool) -> tuple[Recipe, Recipe] | None:
    sides = (strides_of((0, strides), extents, 0) for strides, extents in (access_a, access_b))
    side_a, side_b, pairs = refine(*sides)
    parts_a, parts_b = _parts(left.outer, side_a), _parts(right.outer, side_b)
    to_b: dict[Part, Part] = {}
    for part_a, part_b in pairs:
        to_b[_significant(side_a, part_a)] = _significant(side_b, part_b)
    to_a = {b: a for a, b in to_b.items()}
    all_a = [(axis, part) for axis, parts in enumerate(parts_a) for part in range(len(parts))]
    all_b = [(axis, part) for axis, parts in enumerate(parts_b) for part in range(len(parts))]
    if left.rigid:
        outer_a, outer_b = all_a, [to_b.get(part, MISSING) for part in all_a]
    elif right.rigid:
        outer_a, outer_b = [to_a.get(part, MISSING) for part in all_b], all_b
    else:
        outer_a = [part for part in all_a if part in to_b]
        outer_b = [to_b[part] for part in outer_a]
    inner_a = [part for part in all_a if part not in outer_a]
    inner_b = [part for part in all_b if part not in outer_b]
    if any(not 0 <= axis < len(parts_a) for axis, _ in outer_a) or any(
        not 0 <= axis < len(parts_b) for axis, _ in outer_b
    ):
        return None
    if (inner_a and left.rigid) or (inner_b and right.rigid) or ((inner_a or inner_b) and not dependency):
        return None
    return Recipe(parts_a, tuple(outer_a), tuple(inner_a)), Recipe(parts_b, tuple(outer_b), tuple(inner_b))


def _parts(outer: tuple[Dim, ...], side: _Side) -> tuple[tuple[Dim, ...], ...]:
    return tuple(
        tuple(reversed(side.parts[axis])) if axis in side.parts else (extent,) for axis, extent in enumerate(outer)
    )


def _significant(side: _Side, part: Part) -> Part:
    axis, from_low = part
    return axis, len(side.parts[axis]) - 1 - from_low


def identity(left: Shape, right: Shape) -> tuple[Recipe, Recipe] | None:
    """The alignment of groups whose outer axes are the same already."""
    if not same_all(left.outer, right.outer):
        return None
    return identity_recipe(left.outer), identity_recipe(right.outer)


# --- legality ---------------------------------------------------------------------------------------------------------


Moved = tuple[Vector, tuple[Dim, ...], int]
"""(vector, extents, number of outer axes) of one access."""


def moved(nest: Nest, access: Access, recipe: Recipe) -> Moved:
    """The access's vector, the nest's extents and its number of outer axes after `recipe`."""
    offset, coefficients = nest.table[access.index]
    return (offset, recipe.vector(coefficients)), recipe.extents(nest.extents), len(recipe.outer)


def same_point(writer: Moved, reader: Moved) -> bool:
    """Whether every element that the reader touches at an outer point is one that, if the writer stores it at all, it
    stores at the same outer point."""
    (offset_w, w), extents_w, outer = writer
    (offset_r, r), extents_r, _ = reader
    if outer == 0:
        return True
    if not same_all(w[:outer], r[:outer]):
        return False
    if any(is_zero(c) and not (type(e) is int and e == 1) for c, e in zip(w[:outer], extents_w)):
        return False
    if same(offset_w, offset_r) and w[outer:] == r[outer:] and same_all(extents_w[outer:], extents_r[outer:]):
        return True
    if window((writer, reader)) is not None:
        return True
    levels = coalesced(strides_of(writer[0], extents_w, outer))
    terms = strides_of(reader[0], extents_r, outer)
    return place_in_block(levels, terms, offset_r - offset_w) is not None


def span(access: Moved) -> tuple[Dim, Dim]:
    """The lowest and highest element that an outer point (the first one) touches."""
    (offset, coefficients), extents, outer = access
    low = high = offset
    for c, e in zip(coefficients[outer:], extents[outer:]):
        if estimate(c) < 0:
            low = low + c * (e - 1)
        else:
            high = high + c * (e - 1)
    return low, high


def window(accesses: Sequence[Moved]) -> tuple[Dim, Dim] | None:
    """The elements between which all accesses of the first outer point lie, if no other outer point comes near them;
    else None.

    That holds where all step alike from one outer point to the next, and by more than the window is wide.
    """
    (_, first), extents, outer = accesses[0]
    if any(not same_all(first[:outer], vector[1][:outer]) for vector, _, _ in accesses):
        return None
    levels = strides_of((0, first[:outer]), extents[:outer], 0)
    if len(levels) < outer or any(estimate(stride) < 0 for stride, _, _ in levels):
        return None
    spans = [span(access) for access in accesses]
    low, high = spans[0]
    for other_low, other_high in spans[1:]:
        low = low if _at_most(low, other_low) else other_low
        high = high if _at_most(other_high, high) else other_high
    if not all(_at_most(low, item_low) and _at_most(item_high, high) for item_low, item_high in spans):
        return None
    width = high - low + 1
    for stride, extent, _ in levels:
        if not _at_most(width, stride):
            return None
        width = stride * extent
    return low, high


def _at_most(a: Dim, b: Dim) -> bool:
    return a <= b if type(a) is int and type(b) is int else known_le(a, b) is True


def _apart(left: Moved, right: Moved) -> bool:
    """Whether two stores never meet: at one outer point they lie apart, and no other outer point comes near."""
    if left[2] > 0 and window((left, right)) is None:
        return False
    (low_l, high_l), (low_r, high_r) = span(left), span(right)
    return _at_most(high_l + 1, low_r) or _at_most(high_r + 1, low_l)


def links_hold(links: Sequence[Link], recipe_left: Recipe, recipe_right: Recipe) -> bool:
    """Whether each dependency between the groups stays within one outer point, and two writers of one buffer write
    different parts of it. Accumulating stores and places known only at run time never pass."""
    for link in links:
        if not link.dependency:
            continue
        (nest_l, access_l), (nest_r, access_r) = link.left, link.right
        if not (access_l.affine and access_r.affine):
            return False
        if access_l.mode != "write" or access_r.mode != "write":
            return False
        left, right = moved(nest_l, access_l, recipe_left), moved(nest_r, access_r, recipe_right)
        if access_l.store and access_r.store:
            if not _apart(left, right):
                return False
        elif not (same_point(left, right) if access_l.store else same_point(right, left)):
            return False
    return True
