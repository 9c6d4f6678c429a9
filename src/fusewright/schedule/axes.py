"""Iteration spaces as vectors: the canonical axes of an operation, and every index as offset + sum of coefficient *
axis.

Takes loop operations; gives `Nest`s. Always holds: a nest's axes are `outer` leading ones and the inner rest (reduced
or scanned axes of a reduction or a scan; for a pointwise operation none until fusion moves some inwards); `table` has a
vector for every index of the operation that is affine in its axes, and for every axis symbol of one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from fusewright.base.records import dataclass, field
from fusewright.loops.ir import Axis, Load, Pointwise, Reduction, Scan
from fusewright.schedule.dependencies import Touch
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import (
    Dim,
    Expr,
    FloorDiv,
    Mod,
    Symbol,
    coefficient,
    free_symbols,
    known_eq,
    known_le,
    loop_symbol,
    product,
    substitute,
)

Vector = tuple[Dim, tuple[Dim, ...]]
"""(offset, coefficients over the axes)."""


def same(a: Dim, b: Dim) -> bool:
    """Whether a == b for certain."""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or known_eq(a, b) is True


def same_all(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return a == b or (len(a) == len(b) and all(map(same, a, b)))


def is_zero(d: Dim) -> bool:
    return type(d) is int and d == 0


def divide(a: Dim, b: Dim) -> Dim | None:
    """a / b when b divides a for certain, else None."""
    if type(a) is int and type(b) is int:
        return a // b if b and a % b == 0 else None
    if type(b) is int and b == 0:
        return None
    rest = a % b
    return a // b if type(rest) is int and rest == 0 else None


@lru_cache(maxsize=1 << 14)
def decompose(index: Dim, symbols: tuple[Expr, ...]) -> Vector | None:
    """`index` as a vector over `symbols`, or None where it is not affine in them."""
    if isinstance(index, int):
        return index, (0,) * len(symbols)
    places = {sym: k for k, sym in enumerate(symbols)}
    coefficients: list[Dim] = [0] * len(symbols)
    offset: Dim = index.constant
    for monomial, count in index.terms:
        place = -1
        scale: Dim = count
        for atom in monomial:
            k = places.get(atom, -1)
            if k >= 0 and place >= 0:
                return None
            if k >= 0:
                place = k
            elif type(atom) is not Symbol and not free_symbols(atom).isdisjoint(places):
                return None
            else:
                scale = scale * atom
        if place < 0:
            offset = offset + scale
        else:
            coefficients[place] = coefficients[place] + scale
    return offset, tuple(coefficients)


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write. `affine`: its place is known exactly (no indirect index, no division)."""

    buffer: str
    index: Dim
    affine: bool
    store: bool
    mode: str = "write"
    inner: bool = True  # False for the store of a reduction: it happens once for each outer point


@dataclass(slots=True, eq=False)
class Nest:
    """One loop operation over canonical axes. `position` is its place in the program."""

    position: int
    operation: Pointwise | Reduction | Scan
    extents: tuple[Dim, ...]
    outer: int
    table: dict[Dim, Vector]
    accesses: tuple[Access, ...]
    nodes: int
    masks: int

    @property
    def reduces(self) -> bool:
        return not isinstance(self.operation, Pointwise)

    def points(self) -> int:
        """Estimated number of iterations."""
        return estimate(product(self.extents))

    def transform(self, recipe: Recipe) -> None:
        """Rewrites every vector by `recipe`."""
        if not recipe.identity:
            self.extents, self.outer = recipe.extents(self.extents), len(recipe.outer)
            self.table = {
                key: (offset, recipe.vector(coefficients)) for key, (offset, coefficients) in self.table.items()
            }


@dataclass(slots=True, eq=False)
class Recipe:
    """How a group's outer axes change. parts[k]: extents into which outer axis k is split (most significant first).
    outer: the new outer axes as (axis, part); inner: the parts that become inner axes, in front of the inner axes that
    are there already.

    Never changed once made; recipes are shared between groups of equal form, so each remembers what it made of a
    vector."""

    parts: tuple[tuple[Dim, ...], ...]
    outer: tuple[tuple[int, int], ...]
    inner: tuple[tuple[int, int], ...] = ()
    identity: bool = field(init=False)
    _vectors: dict[tuple[Dim, ...], tuple[Dim, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        unsplit = all(len(p) == 1 for p in self.parts)
        self.identity = not self.inner and unsplit and self.outer == tuple((k, 0) for k in range(len(self.parts)))

    def vector(self, coefficients: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if self.identity:
            return coefficients
        found = self._vectors.get(coefficients)
        if found is None:
            split = [_split_coefficient(c, parts) for c, parts in zip(coefficients, self.parts)]
            moved = [split[axis][part] for axis, part in (*self.outer, *self.inner)]
            found = self._vectors[coefficients] = (*moved, *coefficients[len(self.parts) :])
        return found

    def extents(self, old: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if self.identity:
            return old
        moved = [self.parts[axis][part] for axis, part in (*self.outer, *self.inner)]
        return (*moved, *old[len(self.parts) :])

    def outer_extents(self) -> tuple[Dim, ...]:
        return tuple(self.parts[axis][part] for axis, part in self.outer)


@lru_cache(maxsize=1 << 10)
def identity_recipe(extents: tuple[Dim, ...]) -> Recipe:
    return Recipe(tuple((e,) for e in extents), tuple((k, 0) for k in range(len(extents))))


def _split_coefficient(coefficient: Dim, parts: tuple[Dim, ...]) -> tuple[Dim, ...]:
    if len(parts) == 1:
        return (coefficient,)
    scaled: list[Dim] = [coefficient]
    for extent in reversed(parts[1:]):
        scaled.append(scaled[-1] * extent)
    return tuple(reversed(scaled))


# --- canonical form --------------------------------------------------------------------------------------------------


def make_nest(position: int, operation: Pointwise | Reduction | Scan, touch: Touch) -> Nest:
    """Drops axes of extent 1, orders axes by memory (outermost has the largest stride), merges neighbours that every
    index treats as one."""
    survey = touch.survey
    assert survey is not None
    if isinstance(operation, Pointwise):
        axes, ordering = operation.axes, "stores"
        leading: Dim = operation.stores[0].index
    elif isinstance(operation, Reduction):
        axes, ordering = (
            (*operation.axes, *operation.reduced),
            "positions" if operation.kind in ("argmax", "argmin") else "loads",
        )
        leading = operation.index
    else:
        axes, ordering = (*operation.axes, operation.scanned), "scan"
        leading = operation.index
    loaded = tuple(load.index for load in survey.loads if not load.bindings)
    extents, outer, table, opaque = _canonical(axes, len(operation.axes), tuple(survey.dims), leading, loaded, ordering)
    accesses = _accesses(operation, survey.loads, opaque)
    return Nest(position, operation, extents, outer, dict(table), accesses, survey.nodes, survey.masks)


@lru_cache(maxsize=1 << 12)
def _canonical(
    axes: tuple[Axis, ...], outer: int, dims: tuple[Dim, ...], stored: Dim, loaded: tuple[Dim, ...], ordering: str
) -> tuple[tuple[Dim, ...], int, dict[Dim, Vector], frozenset[Dim]]:
    """(extents, number of outer axes, vectors, indices that are not affine). It knows indices only, so equal layers
    share the work."""
    original = frozenset(axis.symbol for axis in axes)
    axes, outer, mapping = _split_divided(axes, outer, dims, len(axes) if ordering != "scan" else outer)
    symbols = tuple(axis.symbol for axis in axes)
    table: dict[Dim, Vector] = {}
    opaque: set[Dim] = set()
    for dim in dims:
        vector = decompose(substitute(dim, mapping), symbols)
        if vector is not None:
            table[dim] = vector
            continue
        opaque.add(dim)
        for sym in free_symbols(dim) & original:
            place = decompose(substitute(sym, mapping), symbols)
            assert place is not None, "an axis is a sum over its parts"
            table[sym] = place
    extents = tuple(axis.extent for axis in axes)
    pointwise = ordering == "stores"
    order = _axis_order(
        extents, outer, pointwise, _coefficients(table, stored), _main_load(table, loaded, extents), ordering
    )
    extents = tuple(extents[k] for k in order)
    outer = sum(k < outer for k in order)
    table = {dim: (offset, tuple(c[k] for k in order)) for dim, (offset, c) in table.items()}
    extents, table, outer = _merge_range(extents, table, outer, 0, outer)
    if ordering != "scan":
        extents, table, outer = _merge_range(extents, table, outer, outer, len(extents))
    return extents, outer, table, frozenset(opaque)


def _split_divided(
    axes: tuple[Axis, ...], outer: int, dims: Sequence[Dim], splittable: int
) -> tuple[tuple[Axis, ...], int, dict[Expr, Dim]]:
    """Splits axes so that indices such as i // 4 and i % 4 become affine: (axes, outer ones among them, old symbol ->
    new index).

    Group normalisation reads a group's statistics at channel // channels_per_group. Axes from `splittable` on stay
    whole.
    """
    mapping: dict[Expr, Dim] = {}
    if not any(type(atom) in (FloorDiv, Mod) for dim in dims for atom in _atoms(dim)):
        return axes, outer, mapping
    current = list(axes)
    for _ in range(8):
        found = _divided_axis(current[:splittable], [substitute(dim, mapping) for dim in dims])
        if found is None:
            break
        k, length = found
        symbol_, extent = current[k].symbol, current[k].extent
        high = Axis(loop_symbol(f"{symbol_}h", extent // length), extent // length)
        low = Axis(loop_symbol(f"{symbol_}l", length), length)
        current[k : k + 1] = [high, low]
        splittable += 1
        outer += k < outer
        step: dict[Expr, Dim] = {symbol_: high.symbol * length + low.symbol}
        mapping = {sym: substitute(index, step) for sym, index in mapping.items()}
        if any(axis.symbol is symbol_ for axis in axes):
            mapping.update(step)
    return tuple(current), outer, mapping


def _atoms(dim: Dim) -> Iterator[Expr]:
    """Every atom of an index, those inside atoms included."""
    if isinstance(dim, Expr):
        for monomial, _ in dim.terms:
            for atom in monomial:
                yield atom
                if type(atom) is not Symbol:
                    for child in atom._children():
                        yield from _atoms(child)


def _divided_axis(axes: Sequence[Axis], dims: Sequence[Dim]) -> tuple[int, int] | None:
    """(axis, length of its parts) for the first axis that some index divides evenly."""
    places = {axis.symbol: k for k, axis in enumerate(axes)}
    for dim in dims:
        for atom in _atoms(dim):
            if not isinstance(atom, (FloorDiv, Mod)) or not isinstance(atom.right, int):
                continue
            for sym in free_symbols(atom.left):
                k = places.get(sym, -1)
                stride = coefficient(atom.left, sym) if k >= 0 else None
                if not isinstance(stride, int) or stride <= 0 or atom.right % stride:
                    continue
                length = atom.right // stride
                parts = divide(axes[k].extent, length)
                if length > 1 and parts is not None and not (type(parts) is int and parts == 1):
                    return k, length
    return None


def _coefficients(table: dict[Dim, Vector], index: Dim) -> tuple[Dim, ...] | None:
    found = table.get(index)
    return None if found is None else found[1]


def _main_load(table: dict[Dim, Vector], loaded: Sequence[Dim], extents: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The coefficients of the load that reads most."""
    candidates = [table[index][1] for index in loaded if index in table]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return max(candidates, key=lambda c: sum(estimate(e) for k, e in zip(c, extents) if not is_zero(k)))


def _axis_order(
    extents: Sequence[Dim],
    outer: int,
    pointwise: bool,
    stored: tuple[Dim, ...] | None,
    read: tuple[Dim, ...] | None,
    ordering: str,
) -> list[int]:
    """The axes to keep (not those of extent 1, but at least one reduced or scanned one), largest stride first."""
    keep = [k for k, extent in enumerate(extents) if not (type(extent) is int and extent == 1)]
    if not pointwise and not any(k >= outer for k in keep):
        keep.append(len(extents) - 1)
    first = [k for k in keep if k < outer]
    second = [k for k in keep if k >= outer]
    reference = stored or read
    if reference is not None and len(first) > 1:
        first.sort(key=lambda k: -abs(estimate(reference[k])))
    if read is not None and len(second) > 1 and ordering == "loads":
        second.sort(key=lambda k: -abs(estimate(read[k])))
    return first + second


def _accesses(operation: Pointwise | Reduction | Scan, loads: list[Load], opaque: frozenset[Dim]) -> tuple[Access, ...]:
    found = [Access(load.buffer, load.index, not load.bindings and load.index not in opaque, False) for load in loads]
    if isinstance(operation, Pointwise):
        for store in operation.stores:
            affine = not store.bindings and store.index not in opaque
            found.append(Access(store.buffer, store.index, affine, True, store.mode))
    else:
        scan = isinstance(operation, Scan)
        found.append(Access(operation.buffer, operation.index, operation.index not in opaque, True, inner=scan))
        if isinstance(operation, Scan) and operation.position_buffer is not None:
            found.append(Access(operation.position_buffer, operation.index, operation.index not in opaque, True))
    return tuple(found)


def main_access(nest: Nest) -> Access | None:
    """The access whose memory order the loops should follow: a pointwise operation's first store, else the largest
    load."""
    affine = [access for access in nest.accesses if access.affine]
    if not nest.reduces:
        for access in affine:
            if access.store:
                return access
    loads = [access for access in affine if not access.store]
    if not loads:
        return affine[-1] if affine else None
    return max(
        loads,
        key=lambda access: sum(
            estimate(e) for c, e in zip(nest.table[access.index][1], nest.extents) if not is_zero(c)
        ),
    )


def merge_axes(nests: Sequence[Nest], first: int, last: int) -> None:
    """Merges neighbouring axes among first..last-1 wherever every vector of every nest steps through both as through
    one."""
    k = first
    while k + 1 < last:
        if all(_mergeable(nest.extents, nest.table, k) for nest in nests):
            for nest in nests:
                nest.extents, nest.table, nest.outer = _merged(nest.extents, nest.table, nest.outer, k)
            last -= 1
        else:
            k += 1


def _merge_range(
    extents: tuple[Dim, ...], table: dict[Dim, Vector], outer: int, first: int, last: int
) -> tuple[tuple[Dim, ...], dict[Dim, Vector], int]:
    k = first
    while k + 1 < last:
        if _mergeable(extents, table, k):
            extents, table, outer = _merged(extents, table, outer, k)
            last -= 1
        else:
            k += 1
    return extents, table, outer


def _merged(
    extents: tuple[Dim, ...], table: dict[Dim, Vector], outer: int, k: int
) -> tuple[tuple[Dim, ...], dict[Dim, Vector], int]:
    table = {dim: (offset, (*c[:k], *c[k + 1 :])) for dim, (offset, c) in table.items()}
    return (*extents[:k], extents[k] * extents[k + 1], *extents[k + 2 :]), table, outer - (k + 1 < outer)


def _mergeable(extents: tuple[Dim, ...], table: dict[Dim, Vector], k: int) -> bool:
    extent = extents[k + 1]
    for _, c in table.values():
        low = c[k + 1]
        if not (c[k] == low * extent if type(low) is int and type(extent) is int else same(c[k], low * extent)):
            return False
    return True


# --- levels: which element of a stored block an index means -----------------------------------------------------------


def strides_of(vector: Vector, extents: Sequence[Dim], first: int) -> list[tuple[Dim, Dim, int]]:
    """(stride, extent, axis) of the axes from `first` on that move the index, smallest stride first."""
    found = [(c, e, first + k) for k, (c, e) in enumerate(zip(vector[1][first:], extents[first:])) if not is_zero(c)]
    found.sort(key=lambda item: estimate(item[0]))
    return found


def coalesced(levels: list[tuple[Dim, Dim, int]]) -> list[tuple[Dim, Dim]]:
    """Levels with those joined that together step through a dense block; smallest stride first."""
    joined: list[tuple[Dim, Dim]] = []
    for stride, extent, _ in levels:
        if joined and same(stride, joined[-1][0] * joined[-1][1]):
            joined[-1] = (joined[-1][0], joined[-1][1] * extent)
        else:
            joined.append((stride, extent))
    return joined


def covers(vector: Vector, extents: Sequence[Dim], elements: Dim) -> bool:
    """Whether an index, as a vector over loops of these extents, is at each of 0 .. elements - 1 in turn."""
    offset, coefficients = vector
    still = any(is_zero(c) and not (type(e) is int and e == 1) for c, e in zip(coefficients, extents, strict=True))
    levels = coalesced(strides_of(vector, extents, 0))
    whole = (
        same(elements, 1) if not levels else len(levels) == 1 and same(levels[0][0], 1) and same(levels[0][1], elements)
    )
    return is_zero(offset) and not still and whole


def place_in_block(
    levels: Sequence[tuple[Dim, Dim]], terms: Sequence[tuple[Dim, Dim, int]], shift: Dim
) -> tuple[list[Dim], dict[int, tuple[int, Dim]]] | None:
    """Expresses shift + sum(c * axis) as digits over `levels` (stride, extent), if it certainly stays inside every
    level.

    Gives (constant digit of each level, axis -> (level, multiplier)); None when it cannot be proved.
    """
    digits: list[Dim] = [0] * len(levels)
    high: list[Dim] = [0] * len(levels)
    where: dict[int, tuple[int, Dim]] = {}
    if not levels:
        return (digits, where) if not terms and is_zero(shift) else None
    if not is_zero(shift):
        rest = shift
        for k in range(len(levels) - 1, -1, -1):
            digits[k] = rest // levels[k][0]
            rest = rest - digits[k] * levels[k][0]
        if not is_zero(rest):
            return None
    for step, extent, axis in terms:
        for k in range(len(levels) - 1, -1, -1):
            multiplier = divide(step, levels[k][0])
            if (
                multiplier is not None
                and estimate(multiplier) >= 1
                and estimate(multiplier * (extent - 1)) < estimate(levels[k][1])
            ):
                break
        else:
            return None
        where[axis] = (k, multiplier)
        high[k] = high[k] + multiplier * (extent - 1)
    for k, (_, extent) in enumerate(levels):
        room = extent - 1 - high[k] - digits[k]
        if not (_at_least_zero(digits[k]) and _at_least_zero(room)):
            return None
    return digits, where


def _at_least_zero(d: Dim) -> bool:
    if type(d) is int:
        return d >= 0
    return known_le(0, d) is True
