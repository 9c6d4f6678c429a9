"""What the native backend does differently on a GPU: schedule options, and kernels in Triton.

Takes a program or a plan; gives options and kernels. Always holds: a plan's kernels on CPU memory and those on GPU
memory are told apart by the buffers that they write.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.codegen.analysis import analyse
from fusewright.codegen.call_plan_types import CallPlan, LaunchCall
from fusewright.codegen.device_kernel import Processor, WithoutCode
from fusewright.codegen.triton import DeviceKernel, Unsupported, generate
from fusewright.codegen.triton.attention import tile_of
from fusewright.codegen.triton.capabilities import Refusals
from fusewright.codegen.triton.gemm_tiles import ProductTile, smaller as smaller_product
from fusewright.codegen.triton.module import NO_TILES, Tiles
from fusewright.codegen.triton.tiles import PERSISTENT_COLUMNS, Tile, choose, smaller
from fusewright.loops.ir import Buffer, Expression, Extern, LoopProgram, Operation
from fusewright.loops.lower.registry import Refuses
from fusewright.runtime import cuda_code
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.narrow import store_narrow
from fusewright.schedule.plan import UNBOUNDED, Kernel, Plan, Reduce, RunExtern
from fusewright.schedule.unroll import Repeat
from fusewright.select import chained_products, fused_attention
from fusewright.select.autotune import Tuned, tune
from fusewright.select.candidates import Budget, Records
from fusewright.select.measure import GpuAutotuner, machine_text
from fusewright.sizes import expressions as sizes

__all__ = [
    "Unsupported",
    "autotune",
    "compile_kernels",
    "load",
    "may_autotune",
    "refuses",
    "schedule_options",
    "scheduled",
    "split",
    "texts",
    "warm_up",
]


WHOLE_ROW, WHOLE_COLUMN = 131072, 256
"""GPU time, us, as one kernel and as five: on an H200 the softmax of 128 rows of 8192 takes 4.0 and 8.7; on an H100 of
16 rows of 32000 6.4 and 8.7, of 256 such rows 26 and 61, of 64 rows of 131072 56 and 64, but of 8 rows of 131072 37 and
11. Layer norm of 256 rows of 4096 and its gradients take 12.2 as three kernels, 21.3 as seven (H200). A launch costs
the processor 2 to 5 us more."""
OWN_BYTES = 8 << 20
"""Larger temporaries are allocations of their own, given back after their last reader; the rest are one allocation a
call."""


def warm_up(inputs: Iterable[object]) -> None:
    """Lets the compiler process start while the graph is still being worked on."""
    if any(isinstance(item, torch.Tensor) and item.device.type == "cuda" for item in inputs):
        cuda_code.warm_up()


def refuses(tell: Callable[[str], None], left: Collection[str] = ()) -> Refuses:
    """Whether there is no code for one of these in a GPU's kernel; it tells each reason once. left: names of nodes that
    kernels shall not compute."""
    refusals, told = Refusals(), set[str]()

    def ask(device: torch.device, made: Iterable[Expression | Operation], node: str) -> bool:
        if node in left:
            return True
        reason = refusals.of(made) if device.type == "cuda" else ""
        if reason and reason not in told:
            told.add(reason)
            tell(reason)
        return bool(reason)

    return ask


def schedule_options(options: ScheduleOptions, program: LoopProgram) -> ScheduleOptions:
    """Fusion bounds, reduction splits and the arena's bound for the program's GPU, if it has one."""
    device = next((buffer.device for buffer in program.buffers.values() if buffer.device.type == "cuda"), None)
    if device is None:
        return options
    units = cuda_code.processor(device.index or 0).units
    return replace(
        options, min_parallel=4 * units, whole_row=WHOLE_ROW, whole_column=WHOLE_COLUMN, lanes=64,
        held_rows=PERSISTENT_COLUMNS, chunks=8 * units, smallest_chunk=512, gathered_chunk=128,
        scratch_bytes=128 * 1024, own_bytes=OWN_BYTES,
    )  # fmt: skip


def scheduled(program: LoopProgram, options: ScheduleOptions, repeat: Repeat | None = None) -> Plan:
    """The program's plan. Reductions of few rows are cut into chunks, or their stages run one after the other on more
    points, which keeps a softmax from becoming part of attention: rows stay whole where attention takes all of them,
    and keeps the GPU busy."""
    program = store_narrow(program, lambda buffer: buffer.device.type == "cuda")
    cut = schedule(program, options, repeat)
    if repeat is not None or len(_batches(cut)) < 2 or not _batches(with_fused_attention(cut)):
        return cut
    whole = schedule(program, replace(options, smallest_chunk=UNBOUNDED, gathered_chunk=0, min_parallel=1))
    taken = with_fused_attention(whole)
    for kernel in taken.kernels.values():
        points = sizes.product(axis.extent for axis in kernel.outer[:2])
        softmax = kernel.product is not None and kernel.product.softmax is not None
        if softmax and not (isinstance(points, int) and points >= options.min_parallel // 8):
            return cut
        if not softmax and any(isinstance(one, Reduce) for stage in kernel.stages for one in stage.statements):
            return cut
    return whole if len(_batches(taken)) < len(_batches(whole)) else cut


def _batches(plan: Plan) -> list[Extern]:
    """The plan's batched products."""
    externs = [step.extern for step in plan.steps if isinstance(step, RunExtern)]
    return [extern for extern in externs if extern.target is torch.ops.aten.bmm.default]


def split(plan: Plan) -> tuple[list[Kernel], list[Kernel]]:
    """(kernels on CPU memory, kernels on GPU memory). Raises Unsupported for a device that is neither."""
    on_cpu: list[Kernel] = []
    on_gpu: list[Kernel] = []
    for kernel in plan.kernels.values():
        device = home(kernel, plan.buffers)
        if device.type not in ("cpu", "cuda"):
            raise Unsupported(f"a kernel on {device}")
        if device.type == "cpu" and any(plan.buffers[name].device != device for name in kernel.buffers):
            raise Unsupported("a kernel on the CPU that reads a GPU's memory")
        (on_cpu if device.type == "cpu" else on_gpu).append(kernel)
    return on_cpu, on_gpu


def home(kernel: Kernel, buffers: Mapping[str, Buffer]) -> torch.device:
    """The device that a kernel runs on."""
    return next(buffers[name].device for name in kernel.buffers if name in kernel.written)


def compile_kernels(kernels: list[Kernel], plan: Plan, tiles: Tiles = NO_TILES) -> dict[str, DeviceKernel]:
    """Generates the kernels, by name, and has them compiled in the background. tiles: block sizes that tuning chose.
    Raises Unsupported."""
    if cuda_code.triton_version() is None:
        raise Unsupported("a GPU without Triton (pip install triton)")
    if cuda_code.is_broken():
        raise Unsupported("a GPU: Triton's process has ended twice without an answer")
    groups: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(home(kernel, plan.buffers).index or 0, []).append(kernel)
    made: dict[str, DeviceKernel] = {}
    for index, group in groups.items():
        codes = _accepted(group, plan.buffers, index, tiles)
        cuda_code.request(codes.values(), cuda_code.processor(index).arch)
        made.update(codes)
    return made


def _accepted(
    kernels: list[Kernel], buffers: Mapping[str, Buffer], index: int, tiles: Tiles
) -> dict[str, DeviceKernel]:
    """The kernels with blocks that no compiler is known to refuse. Raises Unsupported, of which WithoutCode says that
    no such blocks are left."""
    processor, tiles = cuda_code.target(index), dict(tiles)
    untried: dict[str, Iterator[Tile | ProductTile]] = {}
    while True:
        codes = generate(kernels, buffers, processor, tiles)
        refused = {name: why for name, code in codes.items() if (why := cuda_code.refusal(code.key, index))}
        if not refused:
            return codes
        without = {}
        for kernel in kernels:
            if kernel.name in refused:
                others = untried.setdefault(kernel.name, _other_tiles(kernel, buffers, processor, tiles))
                tile = next(others, None)
                if tile is None:
                    without[kernel.name] = refused[kernel.name]
                else:
                    tiles[kernel.name] = tile
        if without:
            raise WithoutCode(without)


def _other_tiles(
    kernel: Kernel, buffers: Mapping[str, Buffer], processor: Processor, tiles: Tiles
) -> Iterator[Tile | ProductTile]:
    """What is worth a try after the kernel's own blocks (those in `tiles`, or the rules')."""
    tile = tiles.get(kernel.name)
    found: list[Tile | ProductTile] = []
    if kernel.product is None:
        first = choose(analyse(kernel), processor)
        found += [first] * (tile not in (None, first))
        found += smaller(first)
    else:
        own = tile_of(kernel) if tile is None else tile
        found += smaller_product(own) if isinstance(own, ProductTile) else []
    for one in found:
        with contextlib.suppress(Unsupported):
            generate([kernel], buffers, processor, {kernel.name: one})
            yield one


def load(codes: Mapping[str, DeviceKernel], plan: CallPlan, tell: Callable[[int, int], None]) -> None:
    """Waits for the machine code of the plan's kernels, and loads it. `tell`: see cuda_code.load. Raises WithoutCode
    for kernels that were refused, by name: `compile_kernels` makes others of them, or has none."""
    try:
        cuda_code.load({(step.key, step.device) for step in plan.steps if isinstance(step, LaunchCall)}, tell)
    except cuda_code.CompileError as error:
        raise WithoutCode(
            {name: error.refused[code.key] for name, code in codes.items() if code.key in error.refused}
        ) from error


def with_fused_attention(plan: Plan) -> Plan:
    """The plan with each attention on a GPU as one kernel, and with products of what other products gave as one kernel
    each, where there is code for it."""

    def has_code(kernel: Kernel, buffers: Mapping[str, Buffer]) -> bool:
        device = home(kernel, buffers)
        if device.type != "cuda" or cuda_code.triton_version() is None:
            return False
        try:
            _accepted([kernel], buffers, device.index or 0, NO_TILES)
        except Unsupported:
            return False
        return True

    return chained_products.fused(fused_attention.fused(plan, has_code), has_code)


def autotune(plan: Plan, seconds: float, records: Records | None) -> Tuned:
    """The plan with what is quickest on each of its GPUs, by measuring for at most so many seconds."""
    tuned = Tuned(plan, {}, (), 0)
    ends = time.perf_counter() + seconds
    for device in sorted({buffer.device for buffer in plan.buffers.values() if buffer.device.type == "cuda"}, key=str):
        index = device.index or 0
        processor = cuda_code.target(index)
        tuner = GpuAutotuner(tuned.plan, device, processor, machine_text(index))
        more = tune(tuned.plan, processor, device, Budget(tuner, records, ends))
        tuned = Tuned(more.plan, tuned.tiles | more.tiles, tuned.answers + more.answers, tuned.unasked + more.unasked)
    return tuned


def may_autotune() -> bool:
    """Whether something can be measured now: not while the caller records a CUDA graph."""
    return not torch.cuda.is_current_stream_capturing()


def texts(codes: dict[str, DeviceKernel]) -> str:
    """The distinct kernels, one after the other."""
    return "\n".join(dict.fromkeys(code.text for code in codes.values()))
