"""Figures of a call plan: bytes and time of each step, memory while it runs.

Takes a loaded plan and its description; gives plain numbers. Always holds: a plan is timed on zeros of its own inputs'
sizes, never on the user's tensors, and not at all where sizes are symbolic, tensors lie on a GPU, or they would take
more than ZEROS_LIMIT bytes.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from fusewright.base.errors import RuntimeFallback
from fusewright.base.records import dataclass, field
from fusewright.codegen.call_plan_types import (
    CallPlan,
    CCall,
    KernelCall,
    KernelGroup,
    LaunchCall,
    PythonCall,
    SlotSpec,
    SlotStep,
    slots_of,
)

ZEROS_LIMIT = 1 << 30
RUNS = 5


@dataclass(slots=True)
class Step:
    """A kernel or a library operator of a plan, in its order. moved: bytes that it reads and writes, if each tensor is
    touched once; memory: bytes that the call holds while it runs. None: not known."""

    name: str
    is_kernel: bool
    moved: int | None
    memory: int | None
    seconds: float | None = None


@dataclass(slots=True)
class PlanFigures:
    """One plan: its steps, and the peak of the memory that it allocates."""

    name: str
    steps: list[Step] = field(default_factory=list)

    @property
    def peak(self) -> int | None:
        known = [step.memory for step in self.steps if step.memory is not None]
        return max(known, default=0) if len(known) == len(self.steps) else None


def figures(plan: CallPlan, loaded: Any) -> PlanFigures:
    """The figures of a plan. `loaded`: its native object."""
    made = PlanFigures(plan.name)
    symbolic = bool(plan.symbols)
    held = 0 if symbolic else plan.values[plan.arena]
    owned: dict[int, int] = {}
    for step in plan.steps:
        if isinstance(step, SlotStep):
            if step.kind == "allocate":
                owned[step.slot] = _bytes(plan, plan.slots[step.slot])
            elif step.kind == "release":
                owned.pop(step.slot, None)
            continue
        if not isinstance(step, (KernelCall, KernelGroup, LaunchCall, CCall, PythonCall)):
            continue
        slots = set(slots_of(step))
        owned |= {slot: _bytes(plan, plan.slots[slot]) for slot in slots if plan.slots[slot].kind == "returned"}
        moved, memory = sum(_bytes(plan, plan.slots[slot]) for slot in slots), held + sum(owned.values())
        for name, is_kernel in _names(step):
            own = moved if not isinstance(step, KernelGroup) else None
            made.steps.append(Step(name, is_kernel, None if symbolic else own, None if symbolic else memory))
    for measured, found in zip(made.steps, _seconds(plan, loaded, made.steps)):
        measured.seconds = found
    return made


def _names(step: Any) -> list[tuple[str, bool]]:
    if isinstance(step, KernelGroup):
        return [(call.name, True) for call in step.calls]
    return [(step.name, isinstance(step, (KernelCall, LaunchCall)))]


def _bytes(plan: CallPlan, slot: SlotSpec) -> int:
    return math.prod(plan.values[slot.sizes : slot.sizes + slot.ndim]) * slot.dtype.itemsize


def _seconds(plan: CallPlan, loaded: Any, steps: list[Step]) -> list[float]:
    """The median of a few runs for each step, on zeros; nothing where it cannot be measured."""
    prepared = tuple(
        getattr(loaded, "values", None) or ()
    )  # weights in a layout of the library's, which zeros have not
    given = len(plan.inputs) - len(prepared)
    by_place = {slot.where: slot for slot in plan.slots if slot.kind == "input" and slot.where < given}
    total = sum(_bytes(plan, slot) for slot in by_place.values())
    if plan.symbols or "i" in plan.inputs or total > ZEROS_LIMIT or any(slot.device != "cpu" for slot in plan.slots):
        return []
    native = getattr(loaded, "plan", loaded)
    if not hasattr(native, "timed") or (native is not loaded and not prepared) or any(map(_is_users, plan.steps)):
        return []
    none = torch.empty(0, device="cpu")
    inputs = [_zeros(plan, by_place[place]) if place in by_place else none for place in range(given)]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            runs = [[each / 1e9 for _, each in native.timed(*inputs, *prepared)[1]] for _ in range(RUNS + 1)]
    except RuntimeFallback:  # a check of values that zeros do not pass
        return []
    if any(len(run) != len(steps) for run in runs):
        return []
    return [statistics.median(times) for times in zip(*runs[1:])]


def _is_users(step: Any) -> bool:
    """Whether a step runs an operator of the user's, with effects that nobody knows."""
    return isinstance(step, PythonCall) and getattr(step.target, "namespace", "") not in ("aten", "prims", "mkldnn")


def _zeros(plan: CallPlan, slot: SlotSpec) -> torch.Tensor:
    sizes = plan.values[slot.sizes : slot.sizes + slot.ndim]
    strides = plan.values[slot.strides : slot.strides + slot.ndim]
    return torch.empty_strided(sizes, strides, dtype=slot.dtype, device="cpu").zero_()
