"""Runs generated kernels on CPU tensors under Triton's interpreter: what the native call plan does on a GPU."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusewright.codegen.triton import DeviceKernel, Processor, generate
from fusewright.runtime import cuda_code
from fusewright.schedule.plan import Plan, RunKernel
from fusewright.sizes.expressions import Expr, evaluate
from tests.loops import reference as loops

TINY = Processor(arch=90, units=2)
"""Few multiprocessors, so that small test programs still get blocks of several rows."""


def function_of(code: DeviceKernel) -> Any:
    name = f"<{code.symbol}>"
    linecache.cache[name] = (len(code.text), None, code.text.splitlines(True), name)
    scope: dict[str, Any] = {}
    exec(compile(code.text, name, "exec"), scope)
    return scope[code.symbol]


def mend_interpreter() -> None:
    """NumPy makes no Python number of an array of one element any more, which the interpreter counts on where a loop starts at a program's
    number, or at what is computed of it: gives the first as an array without dimensions, and takes the other's element."""
    import numpy
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    patch = getattr(interpreter._patch_lang_tensor, "__wrapped__", interpreter._patch_lang_tensor)

    @functools.wraps(patch)
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    InterpreterBuilder.create_get_program_id = lambda self, axis: TensorHandle(
        numpy.asarray(self.grid_idx[axis], numpy.int32), tl.int32
    )
    # the larger and the smaller number: NaN loses, as on a GPU
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    # what a comparison gives is a truth value also where it is spread over a block
    InterpreterBuilder.binary_op = lambda self, a, b, op: TensorHandle(
        output := op(a.data, b.data), tl.int1 if output.dtype == bool else a.dtype.scalar
    )
    # it has no constants of bfloat16, and no unsigned integer of ones
    InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(
        torch.tensor([value], dtype=torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16), tl.bfloat16
    )
    InterpreterBuilder.get_all_ones_value = lambda self, kind: TensorHandle(
        ~numpy.zeros(1, interpreter._get_np_dtype(kind)), kind.scalar
    )


def run_code(code: DeviceKernel, tensors: Mapping[str, torch.Tensor], sizes: Mapping[Expr, int] | None = None) -> None:
    sizes = sizes or {}
    grid = evaluate(code.grid, sizes)
    if grid <= 0:
        return
    arguments: list[Any] = [
        tensors[name].item() if k in code.scalars else tensors[name] for k, name in enumerate(code.buffers)
    ]
    arguments += [torch.full((evaluate(spill.elements, sizes),), 113, dtype=spill.dtype) for spill in code.spills]
    arguments += [evaluate(symbol, sizes) for symbol in code.sizes]
    mend_interpreter()
    function_of(code)[(grid,)](*arguments)


def run_plan(
    plan: Plan, inputs: Sequence[Any], processor: Processor = TINY, tiles: Mapping[str, Any] | None = None
) -> list[Any]:
    """What the plan returns with its kernels interpreted (externs by the reference interpreter). tiles: chosen blocks, by kernel."""
    codes = generate(list(plan.kernels.values()), plan.buffers, processor, tiles or {})
    memory = loops.prepare(plan, inputs)
    for name, place in plan.placements.items():
        dtype = plan.buffers[name].dtype
        del place
        memory.buffers[name] = torch.full(
            (memory.size(plan.buffers[name].span()) * dtype.itemsize,), 0xA5, dtype=torch.uint8
        ).view(dtype)
    for step in plan.steps:
        if isinstance(step, RunKernel):
            for read, written in plan.kernels[step.kernel].inplace:
                memory.buffers[written] = memory.buffers[read].view(plan.buffers[written].dtype)
            run_code(codes[step.kernel], memory.buffers, memory.sizes)
        else:
            loops.run_extern(memory, step.extern)
    return [
        r.clone() if isinstance(r, torch.Tensor) and not any(r is i for i in inputs) else r
        for r in loops.collect(plan, memory, inputs)
    ]


def refused(compiler: cuda_code.Compiler, codes: Iterable[DeviceKernel], folder: Path) -> list[str]:
    """What Triton says of each kernel that it cannot compile for an H200."""
    paths, found = [], []
    for number, code in enumerate(codes):
        paths.append(str(folder / str(number)))
        compiler.ask({
            "text": code.text, "symbol": code.symbol, "signature": code.signature, "aligned": code.aligned, "warps": code.warps,
            "stages": code.stages, "checks": code.checks, "scratch": code.scratch, "arch": 90, "ptx": False, "path": paths[-1],
        })  # fmt: skip
    for path in paths:
        try:
            compiler.wait(path)
        except cuda_code.CompileError as error:
            found.append(str(error))
    return found
