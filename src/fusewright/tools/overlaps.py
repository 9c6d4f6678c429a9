"""What a plan's collectives run beside: the steps between where each begins and where it is waited for.

Takes the description of a loaded plan; gives `Overlap`s in the order in which they begin. Always holds: this is the
order of the plan itself, whether it was compiled now or came from the disk cache.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from fusewright.base.records import dataclass
from fusewright.codegen.call_plan_types import (
    CallPlan,
    CCall,
    Guarded,
    KernelCall,
    KernelGroup,
    LaunchCall,
    PythonCall,
    StepSpec,
    slots_of,
)

_SPACES = ("_c10d_functional::", "fusewright_c10d::")
_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective of a plan. function: of the plan; operator: without its namespace; bytes: of the tensors that it is
    given, None where a size is symbolic; beside: the kernels and library calls that run until it is waited for;
    awaited: whether the plan waits for it."""

    function: str
    operator: str
    bytes: int | None
    beside: tuple[str, ...]
    awaited: bool

    def __str__(self) -> str:
        size = "" if self.bytes is None else f" of {self.bytes} bytes"
        counted = [name if number == 1 else f"{name} ({number} times)" for name, number in Counter(self.beside).items()]
        more = f" and {len(counted) - 6} more" if len(counted) > 6 else ""
        beside = ", ".join(counted[:6]) + more if counted else "nothing"
        end = "" if self.awaited else ", until it is waited for elsewhere"
        return f"{self.operator}{size} runs beside {beside}{end}"


def overlaps(plan: CallPlan) -> list[Overlap]:
    """The plan's collectives."""
    steps = list(_calls(plan.steps))
    found = []
    for position, step in enumerate(steps):
        if not isinstance(step, PythonCall) or not step.name.startswith(_SPACES) or step.name == _WAIT:
            continue
        results = set(step.results)
        end = next((k for k in range(position + 1, len(steps)) if _awaits(steps[k], results)), None)
        between = steps[position + 1 : end]
        beside = tuple(itertools.chain.from_iterable(map(_names, between)))
        given = [slot for slot in slots_of(step) if slot not in results]
        found.append(Overlap(plan.name, step.name.partition("::")[2], _bytes(plan, given), beside, end is not None))
    return found


def _calls(steps: tuple[StepSpec, ...]) -> Iterator[StepSpec]:
    for step in steps:
        if isinstance(step, Guarded):
            yield from _calls(step.steps)
        else:
            yield step


def _awaits(step: StepSpec, results: set[int]) -> bool:
    return isinstance(step, PythonCall) and step.name == _WAIT and not results.isdisjoint(slots_of(step))


def _names(step: StepSpec) -> list[str]:
    if isinstance(step, KernelGroup):
        return [call.name for call in step.calls]
    if isinstance(step, (KernelCall, LaunchCall, CCall)):
        return [step.name]
    return [step.name] if isinstance(step, PythonCall) and not step.name.startswith(_SPACES) else []


def _bytes(plan: CallPlan, slots: list[int]) -> int | None:
    if plan.symbols:
        return None
    total = 0
    for slot in (plan.slots[index] for index in slots):
        sizes = plan.values[slot.sizes : slot.sizes + slot.ndim]
        total += math.prod(sizes) * slot.dtype.itemsize
    return total
