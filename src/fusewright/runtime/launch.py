"""Loads a call plan: resolves its names to addresses and operators, and makes the native object.

Takes a `CallPlan` and the addresses of its kernels by key, or its machine code; gives a `fusewright._native.Plan`,
callable with the graph's inputs.
Always holds: a C function that this PyTorch does not export is an error here, at load time, never at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fusewright import _native
from fusewright.base.records import dataclass
from fusewright.codegen.call_plan_types import (
    ARGUMENT_KINDS,
    INTEGER_KINDS,
    OUTPUT_KINDS,
    SLOT_KINDS,
    STEP_KINDS,
    CallPlan,
    CCall,
    Gather,
    Guarded,
    KernelCall,
    KernelGroup,
    LaunchCall,
    OutputSpec,
    PythonCall,
    SlotSpec,
    SlotStep,
    StepSpec,
    kernel_calls,
)
from fusewright.codegen.kernel_code import symbol_of
from fusewright.runtime import torch_c
from fusewright.runtime.machine_code import load_code


class LoadError(RuntimeError):
    """A call plan names a kernel, function, dtype or device that this process does not have."""


def is_available(symbol: str) -> bool:
    """Whether PyTorch exports the C function `symbol`."""
    return torch_c.address(symbol) is not None


ARENA_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """A kernel that is loaded on a GPU: its handle, threads of a program, and dynamic shared memory in bytes."""

    handle: int
    threads: int
    shared: int


def device_key(key: str, device: int) -> str:
    """Under which name `load` finds the function of a kernel on a GPU."""
    return f"{key}@{device}"


Addresses = Mapping[str, "int | DeviceFunction"]
NOTHING: Addresses = {}

Labels = Callable[[], Mapping[str, str]]
"""The user's lines by the names of kernels and library calls; asked for once, when a profiler first sees the plan."""


def load(
    plan: CallPlan,
    addresses: Addresses,
    *,
    owner: object = None,
    arena_limit: int = ARENA_LIMIT,
    labels: Labels | None = None,
) -> Any:
    """The native plan. `addresses`: of each kernel's machine function, by `KernelCode.key` or by kernel name (of one on
    a GPU: its `DeviceFunction`, by `device_key`). `owner`: what keeps them valid; the plan holds it. `arena_limit`: a
    call that needs more bytes of temporary memory frees them when it ends; less is kept
    for the next call and shared by all plans. Raises LoadError."""
    names = tuple(name for step in plan.steps for name in _names(step))
    return _native.Plan(
        name=plan.name,
        inputs=plan.inputs,
        values=plan.values,
        symbols=plan.symbols,
        instructions=plan.instructions,
        slots=tuple(map(_slot, plan.slots)),
        steps=tuple(native for step in plan.steps for native in _steps(step, addresses)),
        outputs=tuple(map(_output, plan.outputs)),
        arena=plan.arena,
        constants=plan.constants,
        single=plan.single,
        arena_limit=arena_limit,
        owner=owner,
        labels=partial(_step_labels, names, labels),
    )


def _names(step: StepSpec) -> list[tuple[tuple[str, str], ...]]:
    """(name, origin) of what each native step of `step` computes."""
    if isinstance(step, Guarded):
        return [(), *(name for inner in step.steps for name in _names(inner))]
    if isinstance(step, KernelGroup):
        return [tuple((call.name, call.name) for call in step.calls)]
    if isinstance(step, (KernelCall, LaunchCall)):
        return [((step.name, step.name),)]
    return [((step.name, step.origin or step.name),)] if isinstance(step, (CCall, PythonCall)) else [()]


def _step_labels(names: tuple[tuple[tuple[str, str], ...], ...], labels: Labels | None) -> tuple[str, ...]:
    """What a profile calls each native step: nothing for one that keeps house."""
    lines = {} if labels is None else labels()

    def text(name: str, origin: str) -> str:
        return f"{name} [{lines[origin]}]" if lines.get(origin) else name

    return tuple(" + ".join(text(*one) for one in step) for step in names)


def load_with_code(
    plan: CallPlan,
    code: bytes,
    *,
    more: Addresses = NOTHING,
    arena_limit: int = ARENA_LIMIT,
    labels: Labels | None = None,
) -> Any:
    """The native plan over the object file of its CPU kernels, which it keeps in memory. `more`: addresses of others.
    Raises LoadError or ValueError."""
    keys = {call.key for call in kernel_calls(plan)}
    loaded = load_code(code, map(symbol_of, keys))
    addresses = {**more, **{key: loaded.addresses[symbol_of(key)] for key in keys}}
    return load(plan, addresses, owner=loaded.owner, arena_limit=arena_limit, labels=labels)


def _dtype_code(dtype: torch.dtype) -> int:
    # A dtype that PyTorch's C interface does not name can travel through operators, but is never allocated or checked
    # by a plan.
    return torch_c.DTYPE_CODES.get(dtype, -1)


def _slot(slot: SlotSpec) -> tuple[int, ...]:
    device = torch_c.DEVICE_CODES.get(slot.device)
    code = _dtype_code(slot.dtype)
    if device is None or (code < 0 and slot.kind not in ("input", "constant")):
        raise LoadError(f"{slot.name}: PyTorch's C interface has no {slot.dtype} on {slot.device}")
    return (
        SLOT_KINDS.index(slot.kind),
        int(slot.needs_pointer),
        slot.where,
        code,
        slot.dtype.itemsize,
        device,
        slot.device_index,
        slot.ndim,
        slot.sizes,
        slot.strides,
        slot.offset,
    )


def _kernel(step: KernelCall, addresses: Addresses) -> tuple[Any, ...]:
    address = addresses.get(step.key) or addresses.get(step.name)
    if not address:
        raise LoadError(f"kernel {step.name} ({step.key}) has no address")
    return (step.name, address, step.extent, step.grain, step.buffers, step.sizes)


def _group(step: KernelGroup, addresses: Addresses) -> tuple[Any, ...]:
    return tuple(_kernel(call, addresses) for call in step.calls)


def _launch(step: LaunchCall, addresses: Addresses) -> tuple[Any, ...]:
    function = addresses.get(device_key(step.key, step.device))
    if not isinstance(function, DeviceFunction):
        raise LoadError(f"kernel {step.name} ({step.key}) is not loaded on a GPU")
    written, by_value = tuple(map(int, step.written)), tuple(map(int, step.by_value))
    shape = (step.device, step.grid, function.threads, function.shared, int(step.scratch), int(step.waits))
    return (step.name, function.handle, *shape, step.buffers, by_value, written, step.sizes)


def _c_call(step: CCall, addresses: Addresses) -> tuple[Any, ...]:
    address = torch_c.address(step.symbol)
    if address is None:
        raise LoadError(f"this PyTorch does not export {step.symbol}")
    integers = tuple((INTEGER_KINDS.index(kind), payload) for kind, payload in step.integers)
    return (step.name, address, integers, step.doubles)


def _callable(target: Any) -> Any:
    """An operator's native entry (its Python wrapper adds 0.2 microseconds), or the callable itself."""
    return getattr(target, "_op", target) if isinstance(target, torch._ops.OpOverload) else target


def _python_call(step: PythonCall, addresses: Addresses) -> tuple[Any, ...]:
    program = tuple((ARGUMENT_KINDS.index(kind), operand) for kind, operand in step.program)
    return (step.name, _callable(step.target), step.constants, program, step.keywords or None, step.results)


def _slot_step(step: SlotStep, addresses: Addresses) -> tuple[Any, ...]:
    return (step.slot,)


def _gather(step: Gather, addresses: Addresses) -> tuple[Any, ...]:
    return (step.first, step.sources)


_STEPS: dict[type, tuple[str, Callable[[Any, Addresses], tuple[Any, ...]]]] = {
    KernelCall: ("kernel", _kernel),
    KernelGroup: ("group", _group),
    LaunchCall: ("launch", _launch),
    CCall: ("extern", _c_call),
    PythonCall: ("python", _python_call),
    Gather: ("gather", _gather),
}


def _step(step: StepSpec, addresses: Addresses) -> tuple[Any, ...]:
    if isinstance(step, SlotStep):
        return (STEP_KINDS.index(step.kind), *_slot_step(step, addresses))
    kind, convert = _STEPS[type(step)]
    return (STEP_KINDS.index(kind), *convert(step, addresses))


def _steps(step: StepSpec, addresses: Addresses) -> list[tuple[Any, ...]]:
    if not isinstance(step, Guarded):
        return [_step(step, addresses)]
    inside = [_step(inner, addresses) for inner in step.steps]
    return [(STEP_KINDS.index("skip"), step.value, len(inside)), *inside]


def _output(output: OutputSpec) -> tuple[Any, ...]:
    dtype = -1 if output.dtype is None else _dtype_code(output.dtype)
    slot = max(output.slot, 0)
    return (
        OUTPUT_KINDS.index(output.kind),
        slot,
        output.ndim,
        output.sizes,
        output.strides,
        output.offset,
        dtype,
        output.value,
    )
