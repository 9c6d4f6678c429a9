"""Block sizes and warps of a kernel, from a cost model of bytes in flight, registers and occupancy. Nothing is
measured.

Takes a normalised kernel (`Shape`) and a `Processor`; gives a `Tile`. Always holds: blocks are powers of two; a
persistent tile holds a whole row.

Three kinds. "flat": pointwise work, the outer axes as one; or all but one, of which each thread computes several
points. "square": pointwise work whose accesses are contiguous along different axes, in tiles of both. "rows": outer
points times the inner axes; persistent when a row fits registers, else walked in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.codegen.analysis import Access, Shape, StageView, reductions_of, scans_of, values_of, walk
from fusewright.codegen.device_kernel import Processor, Unsupported
from fusewright.codegen.triton import online
from fusewright.loops.ir import Apply, Axis, Load
from fusewright.sizes import expressions as sizes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim

PERSISTENT = 32 * 1024  # elements of a row that are held in registers at most
PERSISTENT_COLUMNS = 1024  # rows of a persistent tile whose neighbouring elements lie along the outer axes
# elements of a step down a block of columns (four times as many down LONG_COLUMNS: 95% of a copy instead of 50%)
COLUMN_STEP = 2048
LONG_COLUMNS = 2048
NEAR = 4 << 20
"""Bytes that are likely still in the cache from the kernel before: there, more blocks of fewer columns cost no memory
traffic."""
LONG = 16 * 1024
SCAN = 8 * 1024
MOST_APART = 3
"""Loads of points that are no neighbours in memory, from which a thread computes one point only (on an H100: averages
of windows of 3x3 in 0.037 ms, in 0.047 with four points and in 0.069 with eight)."""
SCATTERED = 4096
"""Points of a block that loads several elements at places which it reads: those are then more often in the cache of the
multiprocessor (`grid_sample` at random places on an H100: 0.042 ms, 0.084 in blocks of 512). Eight points a thread have
more of such loads on their way (bilinear resampling of float32 on an H200: 57 us, 74 with four)."""
FEW_COLUMNS = 512
"""Rows of columns that are so few that all their blocks run at once: then a step is as long as down LONG_COLUMNS (sums
over batch, height and width of 32x256x56x56 halves on an H100: 0.038 ms instead of 0.050)."""
RESIDENT_WARPS = 32
"""Warps a multiprocessor below which blocks of columns have twice as many: too few loads are on their way (maxima of
the columns of 16384x2048 bfloat16 on an H100: 33 us instead of 42)."""
SHARED_BYTES = 2
"""The widest elements of which points share a thread: bilinear resampling of bfloat16 takes 0.055 instead of 0.066 ms
on an H100, of float32, whose loads take longer than that work, 0.072 instead of 0.065."""
LONGEST_STEP = 1024
"""Elements of a step where blocks were refused."""
MUCH_WORK = 12
"""Operations that compute places, from which on points with the same places share a thread."""
MOST_POINTS = 32 * 1024
"""Points of a block of up to eight warps that is worth a try."""


@dataclass(frozen=True, slots=True)
class Tile:
    """x, y, r: block sizes. x_axes, y_axes: outer axes along each, outermost first (of a flat tile the points along y
    are a thread's). persistent: a row is one block."""

    kind: str
    x: int
    r: int
    warps: int
    x_axes: tuple[Axis, ...]
    y: int = 1
    y_axes: tuple[Axis, ...] = ()
    persistent: bool = False

    @property
    def sizes(self) -> str:
        """Block sizes and warps, which tell a tile from its neighbours."""
        return f"x {self.x}, y {self.y}, r {self.r}, {self.warps} warps"

    @property
    def text(self) -> str:
        return f"{self.kind}, {self.warps} warps{', a row is one block' if self.persistent else ''}"


def points(axes: Iterable[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= max(estimate(axis.extent), 1)
    return total


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def unit_axis(access: Access, axes: Iterable[Axis]) -> Axis | None:
    """The axis along which the access walks neighbouring elements."""
    return next(
        (axis for axis in axes if sizes.coefficient(access.index, axis.symbol) == 1 and estimate(axis.extent) > 1), None
    )


def _width(shape: Shape) -> int:
    """Bytes of the narrowest element that most traffic has."""
    widths = [dtype.itemsize for dtype in shape.kernel.dtypes]
    return min(widths, default=4)


def _heavy(view: StageView) -> int:
    return sum(1 for expr in walk(values_of(view.stage)) if isinstance(expr, Apply))


def choose(shape: Shape, processor: Processor) -> Tile:
    if all(not view.axes for view in shape.views):
        return _pointwise(shape, processor)
    return _rows(shape, processor)


# --- pointwise --------------------------------------------------------------------------------------------------------


def _pointwise(shape: Shape, processor: Processor) -> Tile:
    crossing = _crossing_axes(shape)
    if crossing is not None:
        across, along = crossing
        rest = tuple(axis for axis in shape.outer if axis is not along and axis is not across)
        side = 64 if _width(shape) <= 2 else 32
        x = min(power_of_two(estimate(along.extent)), side)
        y = min(power_of_two(points((*rest, across))), max(side, 1024 // x))
        return Tile("square", x, 1, _clamp(x * y // 512, 1, 8), (along,), y, (*rest, across))
    gathers = [access for view in shape.views for access in view.accesses if access.bound and not access.store]
    sharing = _sharing(shape, gathers)
    if sharing is not None:
        axis, y = sharing
        rest = tuple(other for other in shape.outer if other is not axis)
        each, warps = 8 // y or 1, 4
        while warps > 1 and points(shape.outer) // (32 * each * warps * y) < 2 * processor.units:
            warps //= 2
        x = min(32 * each * warps, power_of_two(points(rest)))
        return Tile("flat", x, 1, _clamp(x // (32 * each), 1, warps), rest, y, (axis,))
    total = points(shape.outer)
    each = 8 if _width(shape) <= 2 else 4
    if sum(map(_heavy, shape.views)) > 150:
        each = 4
    held, warps = (8 if len(gathers) >= 2 else 4), 4
    block = 128 * each
    if _loads_apart(shape) >= MOST_APART:
        block, held, warps = 256, 1, 8
    elif len(gathers) >= 2 and _read_places(gathers):
        block, warps = SCATTERED, 16
    while block > 128 and total // block < 2 * processor.units:
        block //= 2
    block = min(block, power_of_two(total))
    return Tile("flat", block, 1, _clamp(block // (32 * held), 1, warps), _in_memory_order(shape))


def _read_places(gathers: Iterable[Access]) -> bool:
    """Whether a place is computed from what is in memory."""
    return any(isinstance(one, Load) for one in walk([value for access in gathers for _, value in access.bound]))


def _loads_apart(shape: Shape) -> int:
    """The number of loads whose neighbouring points are not neighbours in memory: a thread that computes several
    points makes as many requests for each."""
    if not shape.outer:
        return 0
    along = shape.outer[-1].symbol
    found = [access for view in shape.views for access in view.accesses if not access.store and not access.bound]
    return sum(sizes.coefficient(access.index, along) not in (0, 1) for access in found)


def _sharing(shape: Shape, gathers: Sequence[Access]) -> tuple[Axis, int] | None:
    """The longest axis along which the places of loads are the same (the channels of an image that is resampled), where
    they are much work; and the points along it for which a thread computes them once."""
    if len(shape.views) != 1 or _width(shape) > SHARED_BYTES:
        return None
    (view,) = shape.views
    places = [value for access in gathers for _, value in access.bound]
    if _read_places(gathers) or sum(isinstance(one, Apply) for one in walk(places)) < MUCH_WORK:
        return None
    used = frozenset[object]().union(*(view.facts(value).deps for value in places))
    stored = {unit_axis(access, shape.outer) for access in view.accesses if access.store}
    for axis in sorted(shape.outer, key=lambda axis: -estimate(axis.extent)):
        if axis.symbol not in used and axis not in stored and isinstance(axis.extent, int):
            count = next((count for count in (8, 4, 3, 2, 5, 7) if axis.extent % count == 0), 1)
            if count > 1:
                return axis, count
    return None


def _in_memory_order(shape: Shape) -> tuple[Axis, ...]:
    """The outer axes as the access that walks most of them lies in memory. (A store at places that are read from an
    index does not say.)"""

    def walked(access: Access) -> tuple[int, bool]:
        return points(a for a in shape.outer if sizes.coefficient(access.index, a.symbol) != 0), access.store

    known = [access for view in shape.views for access in view.accesses if not access.bound]
    main = max(known, key=walked, default=None)
    if main is None or not any(access.bound and access.store for view in shape.views for access in view.accesses):
        return tuple(shape.outer)
    strides: dict[Axis, int] = {}
    for axis in shape.outer:
        stride = sizes.coefficient(main.index, axis.symbol)
        if stride is None:
            return tuple(shape.outer)
        strides[axis] = -abs(estimate(stride))
    return tuple(sorted(shape.outer, key=strides.__getitem__))


def _crossing_axes(shape: Shape) -> tuple[Axis, Axis] | None:
    """(the axis along which some large access is contiguous, the axis of the stores), where they differ."""
    accesses = [access for view in shape.views for access in view.accesses if not access.bound]
    stores = [axis for access in accesses if access.store and (axis := unit_axis(access, shape.outer)) is not None]
    if not stores:
        return None
    along = max(stores, key=stores.count)
    if estimate(along.extent) < 16:
        return None
    total = points(shape.outer)
    for access in accesses:
        axis = unit_axis(access, shape.outer)
        if axis is None or axis is along or _run(access, axis, [one for one in shape.outer if one is not along]) < 16:
            continue
        walked = points(a for a in shape.outer if sizes.coefficient(access.index, a.symbol) != 0)
        if walked * 4 > total and sizes.coefficient(access.index, along.symbol) != 0:
            return axis, along
    return None


def _run(access: Access, unit: Axis, axes: Sequence[Axis]) -> int:
    """Neighbouring elements that the access walks along `unit` and the axes outside of it, one after the other."""
    run = estimate(unit.extent)
    for axis in reversed(axes[: axes.index(unit)]):
        if sizes.coefficient(access.index, axis.symbol) != run:
            break
        run *= estimate(axis.extent)
    return run


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(shape: Shape, processor: Processor) -> Tile:
    outer = points(shape.outer)
    lengths = {_length(view) for view in shape.views if view.axes}
    longest = max(estimate(length) for length in lengths)
    static = all(isinstance(length, int) for length in lengths)
    columns = _along_outer(shape)
    scans = any(scans_of(view.stage) for view in shape.views)
    limit = SCAN if scans else PERSISTENT
    if columns:
        return _columns(shape, processor, outer, longest, static)
    if static and longest <= limit and _worth_holding(shape, longest):
        return _persistent(shape, processor, outer, longest)
    pairs = online.pairs_of(shape) if longest > online.STEP else ()
    if pairs:
        step = online.STEP // power_of_two(max(len(pair.reductions) for pair in pairs))
        return Tile("rows", 1, step, online.STEP // (32 * online.ELEMENTS_A_THREAD), tuple(shape.outer))
    step = _clamp(power_of_two(longest), 16, 1024 if scans else 4096)
    x = 1
    while x * step < 512 and x < 64 and outer // (2 * x) >= processor.units:
        x *= 2
    return Tile("rows", x, step, _clamp(x * step // 256, 1, 16), tuple(shape.outer))


def _length(view: StageView) -> Dim:
    total: Dim = 1
    for axis in view.axes:
        total = total * axis.extent
    return total


def _worth_holding(shape: Shape, longest: int) -> bool:
    """Several stages over one row share what they load; a single one may as well walk a long row. A very long row
    leaves room for one block a multiprocessor, which then waits for memory: where nothing of its length is stored, it
    is quicker read again from the cache."""
    if longest > LONG and not shape.kernel.scratch and not any(_stores_rows(view) for view in shape.views):
        return False
    return (
        longest <= 2048
        or sum(1 for view in shape.views if view.axes) > 1
        or any(scans_of(view.stage) for view in shape.views)
    )


def _stores_rows(view: StageView) -> bool:
    return bool(view.axes) and any(access.store for access in view.accesses)


def _persistent(shape: Shape, processor: Processor, outer: int, longest: int) -> Tile:
    row = power_of_two(longest)
    x = 1
    while x * row < 1024 and x < 128 and outer // (2 * x) >= 2 * processor.units:
        x *= 2
    tensors = len(shape.kernel.buffers)
    # Elements a thread holds of every live value. Half as many warps at twice the elements wait less for each other (a
    # layer norm of rows of 8192: 94% of a copy's bandwidth instead of 88%), as long as the registers last.
    each = 8 if tensors > 8 else 32 if x * row >= 8 * 1024 and tensors <= 6 else 16
    warps = _clamp(power_of_two(x * row // (32 * each)), 1, 16)
    if row >= 16 * 1024:
        warps = 32 if row > 16 * 1024 or tensors > 6 else 16
    return Tile("rows", x, row, warps, tuple(shape.outer), persistent=True)


def _along_outer(shape: Shape) -> bool:
    """Whether the neighbouring elements of the largest reduced accesses lie along the outer axes."""
    inner = outer = 0
    for view in shape.views:
        if not (reductions_of(view.stage) or scans_of(view.stage)):
            continue
        for access in view.accesses:
            walked = points(a for a in (*shape.outer, *view.axes) if sizes.coefficient(access.index, a.symbol) != 0)
            if unit_axis(access, view.axes) is not None:
                inner += walked
            elif unit_axis(access, shape.outer) is not None:
                outer += walked
    return outer > inner


def _columns(shape: Shape, processor: Processor, outer: int, longest: int, static: bool) -> Tile:
    width = _width(shape)
    x = min(power_of_two(outer), 128 // max(width, 2))
    stages = sum(1 for view in shape.views if view.axes and 2 * estimate(_length(view)) > longest)
    near = outer * longest * width <= NEAR
    held = 2 * PERSISTENT_COLUMNS if near else PERSISTENT_COLUMNS if stages > 1 else 64
    needs_row = bool(shape.kernel.scratch)
    if static and (longest <= held or (needs_row and longest <= PERSISTENT)):
        row = power_of_two(longest)
        while x > 8 and (x * row > 16 * 1024 or outer // x < processor.units):
            x //= 2
        if x * row <= PERSISTENT:
            return Tile("rows", x, row, _clamp(x * row // 512, 1, 16), tuple(shape.outer), persistent=True)
    x = min(power_of_two(outer), 128 // max(width, 2))
    while x > (8 if near else 16) and outer // x < processor.units and (longest < 256 or near):
        x //= 2
    is_long = longest >= LONG_COLUMNS or (longest >= FEW_COLUMNS and outer // x < 2 * processor.units)
    step = _clamp(min(power_of_two(longest), COLUMN_STEP * (4 if is_long else 1) // x), 1, 128)
    warps = _clamp(x * step // 512, 1, 8)
    if warps < 8 and x * step >= 512 * warps and outer // x * warps < RESIDENT_WARPS * processor.units:
        warps *= 2
    return Tile("rows", x, step, warps, tuple(shape.outer))


# --- neighbours -------------------------------------------------------------------------------------------------------


def neighbours(shape: Shape, tile: Tile) -> list[Tile]:
    """Tiles like the model's choice with one size halved or doubled, and those with half or twice the warps."""
    found: dict[Tile, None] = {}
    longest = power_of_two(points(tile.x_axes))
    for x, y, r, warps in (
        (1, 1, 1, 2), (1, 1, 1, 0.5), (2, 1, 1, 1), (0.5, 1, 1, 1), (2, 1, 1, 2), (0.5, 1, 1, 0.5), (1, 2, 1, 1),
        (1, 0.5, 1, 1),
        (1, 1, 2, 1), (1, 1, 0.5, 1), (1, 1, 2, 2),
    ):  # fmt: skip
        changed = replace(tile, x=int(tile.x * x), y=int(tile.y * y), r=int(tile.r * r), warps=int(tile.warps * warps))
        if (tile.kind != "square" and y != 1) or ((tile.kind != "rows" or tile.persistent) and r != 1):
            continue
        if (
            not 1 <= changed.warps <= 32
            or not 1 <= changed.x <= max(longest, tile.x)
            or changed.y < 1
            or changed.r < 16 <= tile.r
        ):
            continue
        if changed.x * changed.y * changed.r <= MOST_POINTS * max(1, changed.warps // 8) and changed != tile:
            found[changed] = None
    return list(found)


def smaller(tile: Tile) -> list[Tile]:
    """What is tried, in this order, where a kernel's compiler refuses its blocks: a quarter of the points, and then a
    sixteenth; a row that is one block is walked in steps in the end."""
    found, last = [], tile
    for _ in range(2):
        for _ in range(2):
            if last.x > 1 and (last.x >= last.y or last.kind == "flat"):
                last = replace(last, x=last.x // 2)
            elif last.y > 1 and last.kind == "square":
                last = replace(last, y=last.y // 2)
            elif last.kind == "rows" and last.r > 16:
                last = replace(last, r=min(last.r // 2, LONGEST_STEP), persistent=False)
        block = last.x * last.r * (last.y if last.kind == "square" else 1)
        found.append(replace(last, warps=_clamp(block // 128, 1, tile.warps)))
    return [one for one in dict.fromkeys(found) if one != tile]


def check_store(mode: str, dtype: torch.dtype) -> None:
    """Raises Unsupported where the GPU has no atomic operation for an accumulation into memory of that dtype."""
    sums = (torch.float32, torch.float64, torch.float16, torch.bfloat16) if mode == "add" else ()
    if mode != "write" and dtype not in (torch.int32, torch.int64, *sums):
        raise Unsupported(f"an atomic {mode} of {dtype}")
