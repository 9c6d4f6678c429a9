"""Block sizes of product kernels: which are worth a try for a shape.

Takes the extents of a product and a `Processor`; gives `ProductTile`s and numbers of slices, the likeliest first.
Always holds: blocks are powers of two of at least 16, and what a program keeps in shared memory fits. Nothing is
measured here: select/autotune.py does.
"""

from __future__ import annotations

import torch

from fusewright.base.records import dataclass, replace
from fusewright.base.thresholds import SKINNY
from fusewright.codegen.device_kernel import Processor

MOST_SHARED = 220 * 1024
"""Bytes of shared memory for operands in flight: a Hopper multiprocessor has 227 KiB for a program."""
LEAST_COLUMNS = 16
"""Of a program's block."""
MOST_SLICES = 16
PER_OPERATION = {torch.float32: 16}
"""Multiply-additions of a multiprocessor's tensor cores in the time of one other operation (on an H200): of float32 as
TF32, and of halves (the default, 32)."""
OPERATIONS_PER_BYTE = 4
"""Of all multiprocessors without their tensor cores, in the time of a byte of memory."""
MOST_RECOMPUTED = 2.0
"""Computing an operand again for each block may take this many times as long as what is saved by not storing it: other
warps hide some."""


@dataclass(frozen=True, slots=True)
class Computing:
    """What a product does for its computed operands. left, right: operations for an element; bytes_left, bytes_right:
    read for an element; saved: bytes of the operands that are not stored."""

    left: int = 0
    right: int = 0
    bytes_left: int = 0
    bytes_right: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class ProductTile:
    """x, y: columns and rows of a program's block; k: inner elements of a step; stages: steps in flight; group: blocks
    of rows whose programs follow each other. programs: where it is not 0, so many programs (at most) go through all
    blocks one after the other, and the copy engine brings the operands, as blocks of tensors that it knows."""

    x: int
    y: int
    k: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 0

    kind = "product"
    persistent = False

    @property
    def text(self) -> str:
        bulk = f", {self.programs} programs" if self.programs else ""
        return f"{self.y}x{self.x}x{self.k}, {self.warps} warps, {self.stages} stages{bulk}"


def smaller(tile: ProductTile) -> list[ProductTile]:
    """What is tried, in this order, where a kernel's compiler refuses its blocks: fewer steps in flight, and then
    smaller blocks of them."""
    fewer = replace(tile, stages=1)
    halved = replace(fewer, y=max(tile.y // 2, 16), k=max(tile.k // 2, 16))
    return [one for one in dict.fromkeys((fewer, halved)) if one != tile]


_WIDE = (
    # y, x, k, warps, stages, share of the peak that a large product reaches (on an H200; for the order of trials only)
    (128, 256, 64, 8, 3, 1.0),
    (128, 128, 64, 4, 3, 0.98),
    (256, 128, 64, 8, 3, 0.92),
    (128, 128, 64, 8, 4, 0.9),
    (64, 128, 64, 4, 4, 0.75),
    (128, 64, 64, 4, 4, 0.72),
    (128, 128, 32, 4, 4, 0.7),
    (64, 64, 64, 4, 4, 0.55),
    (64, 32, 128, 4, 4, 0.35),
    (32, 64, 128, 4, 4, 0.35),
)
_BULK = (
    (128, 256, 64, 8, 3, 1.05),
    (128, 256, 64, 8, 4, 1.06),
    (256, 128, 64, 8, 4, 1.02),
    (128, 128, 64, 4, 3, 1.0),
    (128, 128, 64, 8, 5, 0.97),
)
_FULL = (
    (64, 64, 16, 4, 3, 0.9),
    (128, 64, 16, 8, 3, 1.0),
    (64, 128, 16, 8, 3, 0.9),
    (32, 64, 32, 4, 3, 0.6),
    (32, 32, 32, 4, 3, 0.5),
)
_NARROW = (
    (64, 128, 4, 4),
    (32, 128, 4, 5),
    (64, 256, 4, 3),
    (128, 64, 4, 4),
    (32, 256, 4, 4),
    (128, 128, 4, 3),
    (16, 256, 2, 5),
)


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _blocks(n: int, block: int) -> int:
    return -(-n // block)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What decides which tiles are worth a try. extents: batch, rows, columns, inner; full: float32 as such, not as
    TF32; block_of: what blocks of the inner dimension must divide (channels of a convolution); sliceable: the inner
    dimension may be cut (split-K); bulk: the copy engine can bring the operands; computing: what the kernel computes
    for each block of its operands, every time that a block of the result needs it; rights: right operands whose
    products are summed at the same points."""

    extents: tuple[int, int, int, int]
    dtype: torch.dtype
    full: bool
    block_of: int = 0
    sliceable: bool = True
    bulk: bool = False
    computing: Computing | None = None
    rights: int = 1


def product_tiles(shape: ProductShape, processor: Processor, most: int) -> list[tuple[ProductTile, int]]:
    """(tile, number of slices), at most `most`, the likely ones first."""
    batch, rows, columns, inner = shape.extents
    dtype, full, block_of, sliceable = shape.dtype, shape.full, shape.block_of, shape.sliceable
    width = dtype.itemsize
    work = shape.computing or Computing(bytes_left=width, bytes_right=width * shape.rights)
    found: dict[tuple[ProductTile, int], float] = {}
    per_operation = 1 if dtype is torch.float32 and full else PER_OPERATION.get(dtype, 32)

    def again(tile: ProductTile) -> float:
        """Multiply-additions in whose time a step of one inner element computes operands."""
        return per_operation * (work.left * tile.y + work.right * tile.x)

    def is_too_much(tile: ProductTile) -> bool:
        across, down = _blocks(columns, tile.x), _blocks(rows, tile.y)
        repeated = work.left * rows * (across - 1) + work.right * columns * (down - 1)
        return batch * repeated * inner > MOST_RECOMPUTED * work.saved * OPERATIONS_PER_BYTE

    def offer(tile: ProductTile, slices: int, cost: float) -> None:
        shared = tile.stages * tile.k * (tile.y * work.bytes_left + tile.x * work.bytes_right)
        shared += tile.k * width * ((tile.y if work.left else 0) + (tile.x if work.right else 0))
        if (
            is_too_much(tile)
            or shared > MOST_SHARED
            or (block_of and block_of % tile.k)
            or tile.k > max(power_of_two(inner), 16)
        ):
            return
        found.setdefault((tile, slices), cost)

    if rows <= SKINNY:
        y = max(power_of_two(rows), 16)
        for x, k, warps, stages in _NARROW:
            if x > max(power_of_two(columns), 16):
                continue
            k = k * 2 // width
            programs = batch * _blocks(columns, x)
            for slices in _slice_counts(batch, inner, k) if sliceable else (1,):
                # Bytes are the same for all: what differs is how many programs ask for them, and what slices cost
                # afterwards.
                if 3 * programs * slices < processor.units and x > LEAST_COLUMNS and columns > x:
                    continue  # so few programs cannot read what is there as fast as it comes
                waves = programs * slices / (2 * processor.units)
                idle = _blocks(programs * slices, processor.units) * processor.units / (programs * slices)
                offer(ProductTile(x, y, k, warps, stages, 1), slices, idle + max(0.0, 1 - waves) + 0.05 * slices)
    else:
        table = _FULL if dtype is torch.float32 and full else _WIDE
        for y, x, k, warps, stages, share in table:
            if y > 2 * power_of_two(rows) or x > 2 * power_of_two(columns):
                continue
            k = k if table is _FULL else k * 2 // width
            programs = batch * _blocks(rows, y) * _blocks(columns, x)
            for slices in _slice_counts(batch, inner, k) if sliceable else (1,):
                if slices > 1 and programs * slices > 2 * processor.units:
                    break
                resident = 2 if x * y <= 128 * 128 else 1
                waves = _blocks(programs * slices, processor.units * resident)
                tile = ProductTile(x, y, k, warps, stages)
                cost = waves * resident * (x * y / share + again(tile)) * (inner / slices)
                offer(tile, slices, cost * (1 + 0.05 * (slices > 1)))
        for y, x, k, warps, stages, share in _BULK if shape.bulk else ():
            blocks = _blocks(rows, y) * _blocks(columns, x)
            if y <= rows and x <= columns and blocks > 1:
                shared = stages * k * (x + y) * width
                resident = processor.units * (2 if shared <= MOST_SHARED // 2 and warps == 4 else 1)
                cost = _blocks(blocks, resident) * (resident // processor.units) * x * y * inner / share
                offer(ProductTile(x, y, k, warps, stages, programs=min(blocks, resident)), 1, cost)
    return sorted(found, key=lambda item: found[item])[:most]


def _slice_counts(batch: int, inner: int, k: int) -> list[int]:
    counts = [1]
    while (
        batch == 1 and counts[-1] < MOST_SLICES and inner % (2 * counts[-1]) == 0 and inner // (2 * counts[-1]) >= 2 * k
    ):
        counts.append(2 * counts[-1])
    return counts
