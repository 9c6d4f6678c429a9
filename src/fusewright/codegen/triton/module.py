"""All kernels of a graph as Triton text: equal ones once.

Takes the scheduled kernels of one GPU and the graph's buffers; gives a `DeviceKernel` each. Always holds: kernels with
one key have the same text, parameters and block sizes, so that they share machine code.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from fusewright.codegen.analysis import tree_size, values_of, walk
from fusewright.codegen.device_kernel import MOST_PARAMETERS, DeviceKernel, Processor, Unsupported
from fusewright.codegen.signature import signature
from fusewright.codegen.triton.attention import emit_attention, is_blockwise, tile_of
from fusewright.codegen.triton.gemm import emit_product
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.codegen.triton.kernel import LONGEST_INDEX, KernelText, emit_kernel
from fusewright.codegen.triton.operations import TYPES
from fusewright.codegen.triton.tiles import Tile
from fusewright.loops.ir import Buffer, IndexValue
from fusewright.schedule.plan import Kernel
from fusewright.schedule.printer import kernel_text, location_lines
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim

PRINTABLE_NODES = 400
STAGES = 3
"""Loads in flight of a loop."""
DEPENDENT_ARCH = 90
"""Compute capability from which a kernel can start before those ahead of it have ended, and wait for them itself."""
MOST_DEPENDENT = 64
"""Programs a multiprocessor of a kernel that starts before those ahead of it have ended. Each has to ask for that; a
few microseconds are to be gained, and 262,144 programs that store 134 MB take 84 us so, 57 to 74 otherwise (H200)."""
Tiles = Mapping[str, "Tile | ProductTile"]
NO_TILES: Tiles = {}
HEADER = """import triton
import triton.language as tl
from fusewright.codegen.triton import library as lib
"""


def generate(
    kernels: Sequence[Kernel], buffers: Mapping[str, Buffer], processor: Processor, tiles: Tiles = NO_TILES
) -> dict[str, DeviceKernel]:
    """By kernel name. tiles: of kernels whose blocks were chosen already (each that has a product, and others). Raises
    Unsupported."""
    made: dict[Hashable, DeviceKernel] = {}
    found: dict[str, DeviceKernel] = {}
    readers = Counter(name for kernel in kernels for name in kernel.buffers if name not in kernel.written)
    for kernel in kernels:
        scalars = _scalars(kernel, buffers)
        wide = _is_wide(kernel, buffers)
        aligned = tuple(_is_aligned(buffers[name]) for name in kernel.buffers)
        fetches = kernel.product is not None and processor.arch >= DEPENDENT_ARCH
        given = frozenset(
            name for name in (kernel.buffers if fetches else ())
            if name not in kernel.written and buffers[name].role in ("input", "constant")
        )  # fmt: skip
        tile = tiles.get(kernel.name)
        if tile is None and is_blockwise(kernel):
            tile = tile_of(kernel)
        places = frozenset(kernel.buffers.index(name) for name in given)
        again = frozenset(name for name in kernel.buffers if readers[name] > 1)
        rest = (places, frozenset(kernel.buffers.index(name) for name in again))
        structure = (signature(kernel), scalars, wide, aligned, tile, rest)
        first = made.get(structure)
        if first is None:
            first = made[structure] = _generate(kernel, processor, scalars, (wide, aligned, given, again), tile)
        found[kernel.name] = DeviceKernel(
            kernel.name, first.key, first.symbol, first.text, first.signature, first.aligned, kernel.buffers,
            first.scalars, first.spills,
            kernel.sizes, first.grid, first.warps, first.stages, first.checks, kernel.locations, kernel.origins,
            first.scratch, first.waits,
        )  # fmt: skip
    return found


def _scalars(kernel: Kernel, buffers: Mapping[str, Buffer]) -> frozenset[int]:
    """Parameters that are scalars in CPU memory, while the kernel runs on a GPU."""
    found = set()
    home = next(buffers[name].device for name in kernel.buffers if name in kernel.written)
    for position, name in enumerate(kernel.buffers):
        buffer = buffers[name]
        if buffer.device == home:
            continue
        if buffer.device.type != "cpu" or name in kernel.written or any(size != 1 for size in buffer.shape):
            raise Unsupported(f"a tensor on {buffer.device} read by a kernel on {home}")
        found.add(position)
    return frozenset(found)


def _span_limit(d: Dim | None) -> int | None:
    return d if isinstance(d, int | None) else sizes.bounds(d)[1]


def _is_wide(kernel: Kernel, buffers: Mapping[str, Buffer]) -> bool:
    """Whether some index may not fit 32 bits."""
    spans: Iterable[Dim | None] = [buffers[name].span() for name in kernel.buffers]
    points: Dim = sizes.product(axis.extent for axis in kernel.outer)
    for stage in kernel.stages:
        total = points * sizes.product(axis.extent for axis in stage.axes)
        values = [expr.index for expr in walk(values_of(stage)) if isinstance(expr, IndexValue)]
        spans = [
            *spans,
            total,
            *(bound if bound is None else abs(bound) for value in values for bound in sizes.bounds(value)),
        ]
    for operand in () if kernel.product is None else (kernel.product.left, kernel.product.right):
        if operand.value is not None:  # it may count the elements of what it stands for
            values = [
                operand.outer + operand.inner,
                *(expr.index for expr in walk([operand.value]) if isinstance(expr, IndexValue)),
            ]
            spans = [
                *spans,
                *(bound if bound is None else abs(bound) for value in values for bound in sizes.bounds(value)),
            ]
    for scratch in kernel.scratch:
        spans = [*spans, points * scratch.size]
    slack = 1 << 20  # a block may reach beyond the end before its mask cuts it off
    return any((limit := _span_limit(span)) is None or limit > LONGEST_INDEX - slack for span in spans)


def _is_aligned(buffer: Buffer) -> bool:
    """Whether memory starts at a multiple of 16 bytes: what PyTorch allocates does; the runtime sees to it for the
    caller's tensors."""
    return True


def _generate(
    kernel: Kernel,
    processor: Processor,
    scalars: frozenset[int],
    memory: tuple[bool, Sequence[bool], frozenset[str], frozenset[str]],
    tile: Tile | ProductTile | None,
) -> DeviceKernel:
    """memory: whether an index may not fit 32 bits, which parameters are aligned, buffers that are there before any
    kernel runs, buffers that other kernels read too."""
    wide, aligned, given, again = memory
    stages, numbers = STAGES, frozenset(kernel.buffers[k] for k in scalars)
    if isinstance(tile, ProductTile):
        stages = tile.stages
        if is_blockwise(kernel):
            made = emit_attention(kernel, numbers, wide, tile)
        elif scalars:
            raise Unsupported("a product with a number in CPU memory")
        else:
            made = emit_product(kernel, wide, tile, given)
    else:
        made = emit_kernel(kernel, processor, numbers, wide, tile, again)
    types = [("" if k in scalars else "*") + _type(dtype, k in scalars) for k, dtype in enumerate(kernel.dtypes)]
    types += ["*" + TYPES[spill.dtype] for spill in made.spills]
    pointers = tuple(k for k in range(len(types)) if k not in scalars and (k >= len(aligned) or aligned[k]))
    types += ["i64" if wide else "i32"] * len(kernel.sizes)
    if len(types) > MOST_PARAMETERS:
        raise Unsupported(f"a kernel of {len(types)} parameters")
    many = isinstance(made.grid, int) and made.grid > MOST_DEPENDENT * processor.units
    waits = processor.arch >= DEPENDENT_ARCH and not many
    lines = list(made.body)
    if waits:
        lines = ["lib.let_next_start()", *lines[: made.early], "lib.wait()", *lines[made.early :]]
    body = "\n".join(f"    {line}" for line in lines)
    facts = (
        body,
        made.parameters,
        tuple(types),
        pointers,
        made.tile.warps,
        stages,
        processor.arch,
        made.checks,
        made.scratch,
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    symbol = f"fw_{re.sub('[^0-9a-zA-Z_]', '_', kernel.name)[:60]}_{key[:8]}"
    comments = "\n".join(f"    # {line}" for line in _comments(kernel, made))
    text = f"{HEADER}\n\n@triton.jit\ndef {symbol}({', '.join(made.parameters)}):\n{comments}\n{body}\n"
    return DeviceKernel(
        kernel.name, key, symbol, text, tuple(types), pointers, kernel.buffers, scalars, made.spills, kernel.sizes,
        made.grid,
        made.tile.warps, stages, made.checks, kernel.locations, kernel.origins, made.scratch, waits,
    )  # fmt: skip


def _type(dtype: object, by_value: bool) -> str:
    found = TYPES.get(dtype)  # type: ignore[call-overload]
    if found is None:
        raise Unsupported(f"memory of {dtype}")
    return "u8" if by_value and found == "i1" else str(found)


def _comments(kernel: Kernel, made: KernelText) -> list[str]:
    """The user's lines and, of a kernel that is not long, its loops."""
    sizes_ = [tree_size(value) for stage in kernel.stages for value in values_of(stage)]
    tile = made.tile
    lines = [*location_lines(kernel.locations), tile.text]
    if sum(sizes_) <= PRINTABLE_NODES:
        lines += kernel_text(kernel, locations=False).splitlines()
    return lines
