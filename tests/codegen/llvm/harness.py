"""Runs compiled kernels on torch tensors: what the native call plan does, in ctypes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.llvm import CompiledModule, compile_kernels
from fusewright.loops.ir import Axis, Expression, Store, apply, load
from fusewright.runtime.machine_code import LoadedCode, load_code
from fusewright.schedule.plan import Kernel, Plan, RunKernel, Stage
from fusewright.sizes.expressions import Expr, evaluate, loop_symbol
from tests.loops import reference as loops
from tests.schedule.reference import take_over

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@functools.lru_cache(maxsize=256)
def loaded(data: bytes, symbol: str) -> LoadedCode:
    return load_code(data, [symbol])


def run_code(
    module: CompiledModule,
    code: KernelCode,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[Expr, int] | None = None,
    parts: int = 1,
) -> int:
    """Calls a kernel over its whole domain in `parts` ranges (in reverse order, so that a hidden dependence between ranges shows); the
    status.
    """
    sizes = sizes or {}
    entry = _ENTRY(loaded(module.object, code.symbol).addresses[code.symbol])
    pointers = (ctypes.c_void_p * max(len(code.buffers), 1))(*[tensors[name].data_ptr() for name in code.buffers])
    values = (ctypes.c_int64 * max(len(code.sizes), 1))(*[sizes[symbol] for symbol in code.sizes])
    status = ctypes.c_int64(0)
    extent = evaluate(code.extent, sizes)
    cuts = sorted({extent * k // parts for k in range(parts + 1)})
    for begin, end in reversed(list(itertools.pairwise(cuts))):
        entry(pointers, values, begin, end, ctypes.byref(status))
    return status.value


def run_kernel(
    kernel: Kernel, tensors: Mapping[str, torch.Tensor], sizes: Mapping[Expr, int] | None = None, parts: int = 2
) -> int:
    module = compile_kernels([kernel])
    return run_code(module, module.codes[kernel.name], tensors, sizes, parts)


def kernel_of(
    name: str,
    outer: Sequence[Axis],
    stages: Sequence[Stage],
    buffers: Mapping[str, torch.dtype],
    written: Sequence[str],
    **options: object,
) -> Kernel:
    return Kernel(
        name, tuple(outer), tuple(stages), tuple(buffers), tuple(buffers.values()), frozenset(written), **options
    )  # type: ignore[arg-type]


def elementwise(op: str, arguments: Sequence[torch.Tensor], result: torch.dtype, wrap: object = None) -> torch.Tensor:
    """`op` applied by a flat kernel to one-dimensional tensors."""
    count = arguments[0].numel()
    i = loop_symbol("o0", count)
    loads: list[Expression] = [load(f"a{k}", i, t.dtype) for k, t in enumerate(arguments)]
    value = apply(op, *loads, dtype=result)
    buffers = {f"a{k}": t.dtype for k, t in enumerate(arguments)} | {"out": result}
    kernel = kernel_of("elementwise", [Axis(i, count)], [Stage((), (Store("out", i, value),))], buffers, ["out"])
    out = torch.empty(count, dtype=result)
    tensors = {f"a{k}": t for k, t in enumerate(arguments)} | {"out": out}
    elementwise.status = run_kernel(kernel, tensors)  # type: ignore[attr-defined]
    return out


def run_plan(
    plan: Plan,
    inputs: Sequence[Any],
    parts: int = 3,
    without: frozenset[str] = frozenset(),
    target: str = "native",
    run: Callable[..., int] = run_code,
) -> tuple[list[Any], int]:
    """What the plan returns with its kernels compiled (externs by the reference interpreter), and the or of all statuses. `run` runs one
    kernel of code for `target`."""
    module = compile_kernels(list(plan.kernels.values()), without, target)
    memory = loops.prepare(plan, inputs)
    arena = torch.full((memory.size(plan.arena_size),), 0xA5, dtype=torch.uint8)
    for name, place in plan.placements.items():
        start, dtype = memory.size(place.offset), plan.buffers[name].dtype
        size = memory.size(plan.buffers[name].span()) * dtype.itemsize
        memory.buffers[name] = arena[start : start + size].view(dtype)
    status = 0
    for number, step in enumerate(plan.steps):
        if isinstance(step, RunKernel):
            take_over(plan, plan.kernels[step.kernel], memory)
            status |= run(module, module.codes[step.kernel], memory.buffers, memory.sizes, parts)
        else:
            loops.run_extern(memory, step.extern)
        for name, last in plan.last_use.items():
            if last == number:
                del memory.buffers[name]
    results = collect_outputs(plan, memory, inputs)
    return results, status


def collect_outputs(plan: Plan, memory: loops.Memory, inputs: Sequence[Any]) -> list[Any]:
    found = loops.collect(plan, memory, inputs)
    return [r.clone() if isinstance(r, torch.Tensor) and not any(r is i for i in inputs) else r for r in found]


class Guarded:
    """Tensors that end exactly where an unreadable page begins: touching one byte beyond them kills the process."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous()
        size = flat.numel() * flat.element_size()
        page = mmap.PAGESIZE
        room = -(-max(size, 1) // page) * page
        region = mmap.mmap(-1, room + page)
        self._regions.append(region)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        assert self._libc.mprotect(ctypes.c_void_p(start + room), page, 0) == 0
        bytes_ = torch.frombuffer(region, dtype=torch.uint8, count=room)
        made = bytes_[room - size : room].view(flat.dtype).view(flat.shape)
        return made.copy_(flat)
