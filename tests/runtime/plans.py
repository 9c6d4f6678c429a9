"""Helpers of the runtime's tests: kernels written in Python behind C pointers, and schedules by hand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.codegen.call_plan import build_call_plan
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.kernel_code import KernelCode
from fusewright.loops.externs import placement
from fusewright.loops.ir import Buffer, BufferRef, Extern, Output
from fusewright.runtime import launch
from fusewright.schedule.plan import Kernel, Placement, Plan, RunExtern, RunKernel, Step
from fusewright.sizes.expressions import Dim, Expr
from fusewright.sizes.tensor_type import contiguous_strides

SIGNATURE = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
)
CPU = torch.device("cpu")


def elementwise(function: Callable[..., float]) -> Any:
    """A kernel over float32 buffers: the last one's element i is function(the others' elements i)."""

    def body(buffers: Any, sizes: Any, begin: int, end: int, status: Any) -> None:
        count = _arity(function)
        arrays = [ctypes.cast(buffers[k], ctypes.POINTER(ctypes.c_float)) for k in range(count + 1)]
        for i in range(begin, end):
            arrays[count][i] = function(*(array[i] for array in arrays[:count]))

    return SIGNATURE(body)


def _arity(function: Callable[..., float]) -> int:
    return function.__code__.co_argcount


def kernel(
    name: str,
    buffers: Sequence[str],
    extent: Dim,
    sizes: tuple[Expr, ...] = (),
    grain: int = 1 << 30,
    written: Sequence[str] = (),
) -> tuple[Kernel, KernelCode]:
    """A kernel of the given buffers that writes the last one (or `written`)."""
    targets = frozenset(written or buffers[-1:])
    dtypes = tuple(torch.float32 for _ in buffers)
    scheduled = Kernel(name, (), (), tuple(buffers), dtypes, targets, sizes)
    return scheduled, KernelCode(name, "key_" + name, name, "", tuple(buffers), sizes, extent, grain)


def buffer(
    name: str,
    shape: tuple[Dim, ...],
    role: Any,
    position: int = -1,
    dtype: torch.dtype = torch.float32,
    stride: tuple[Dim, ...] | None = None,
) -> Buffer:
    return Buffer(name, shape, contiguous_strides(shape) if stride is None else stride, dtype, CPU, role, position)


def whole(b: Buffer) -> BufferRef:
    return BufferRef(b.name, b.shape, b.stride, 0, b.dtype)


class Schedule:
    """A schedule's `Plan` in the making, and the machine functions of its kernels."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.codes: dict[str, KernelCode] = {}
        self.functions: dict[str, Any] = {}
        self.steps: list[Step] = []
        self._arena = 0

    def input(
        self, name: str, *shape: Dim, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None
    ) -> Buffer:
        made = buffer(name, shape, "input", len(self.plan.inputs), dtype, stride)
        self.plan.inputs += (name,)
        return self._add(made)

    def integer(self, symbol: Expr) -> None:
        self.plan.size_symbols[symbol] = (len(self.plan.inputs), -1)
        self.plan.inputs += ("",)

    def constant(self, name: str, tensor: torch.Tensor) -> Buffer:
        made = buffer(name, tuple(tensor.shape), "constant", len(self.plan.constants), tensor.dtype, tensor.stride())
        self.plan.constants += (tensor,)
        return self._add(made)

    def temporary(self, name: str, *shape: Dim, dtype: torch.dtype = torch.float32, placed: bool = True) -> Buffer:
        made = buffer(name, shape, "temporary", dtype=dtype)
        if placed:
            size: Dim = dtype.itemsize
            for extent in shape:
                size = size * extent
            size = (size + 63) // 64 * 64
            self.plan.placements[name] = Placement(self.plan.arena_size, size)
            self.plan.arena_size = self.plan.arena_size + size
        return self._add(made)

    def output(
        self, name: str, *shape: Dim, dtype: torch.dtype = torch.float32, stride: tuple[Dim, ...] | None = None
    ) -> Buffer:
        made = buffer(name, shape, "output", dtype=dtype, stride=stride)
        self.plan.outputs += (Output("buffer", name),)
        return self._add(made)

    def _add(self, made: Buffer) -> Buffer:
        self.plan.buffers[made.name] = made
        return made

    def run(
        self, name: str, function: Any, buffers: Sequence[Buffer], extent: Dim, grain: int = 1 << 30, **more: Any
    ) -> None:
        scheduled, code = kernel(name, [b.name for b in buffers], extent, grain=grain, **more)
        self.plan.kernels[name] = scheduled
        self.codes[name] = code
        self.functions[code.key] = function
        self.steps.append(RunKernel(name))

    def call(
        self, target: Any, *args: Any, out: Sequence[Buffer | None], mutates: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        names = tuple(None if b is None else b.name for b in out)
        arguments = tuple(whole(a) if isinstance(a, Buffer) else a for a in args)
        where = placement(target, (arguments, tuple(kwargs.values())))
        self.steps.append(RunExtern(Extern("call", target, arguments, tuple(kwargs.items()), names, where, mutates)))

    def build(self, **options: Any) -> CallPlan:
        self.plan.steps = tuple(self.steps)
        return build_call_plan(self.plan, self.codes, **options)

    def load(self, **options: Any) -> Any:
        return launch.load(self.build(**options), self.addresses())

    def addresses(self) -> Mapping[str, int]:
        return {key: ctypes.cast(function, ctypes.c_void_p).value or 0 for key, function in self.functions.items()}
