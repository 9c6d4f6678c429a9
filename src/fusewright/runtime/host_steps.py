"""The steps of a call plan that work in the CPU's memory, apart from those on a GPU: a recording holds the latter only.

Takes a `CallPlan`; gives two, which together do what it does. Always holds: every step is in one of the two, in its
order; both take all inputs, and both give all results, with None for those of the other; no memory is used by both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusewright.base.records import replace
from fusewright.codegen.call_plan_types import CallPlan, OutputSpec, SlotSpec, touched_by


def apart(plan: CallPlan, on_host: Callable[[SlotSpec], bool]) -> tuple[CallPlan, CallPlan] | None:
    """(the plan of the steps on the host, the plan of the others); None where no memory is on the host, or a step
    touches both kinds."""
    sides = [None if slot.is_nobodys else on_host(slot) for slot in plan.slots]
    found = [{sides[slot] for slot in touched} - {None} for touched in touched_by(plan.steps)]
    if plan.single or True not in sides or any(len(one) > 1 for one in found):
        return None
    return _half(plan, sides, found, True), _half(plan, sides, found, False)


def _half(plan: CallPlan, sides: Sequence[bool | None], found: Sequence[set[bool | None]], side: bool) -> CallPlan:
    """What is on one side. A step that touches nothing is no step of the host's."""
    others = {number for number, own in enumerate(sides) if own is (not side)}
    hidden = {slot.where for number, slot in enumerate(plan.slots) if number in others and slot.kind == "input"}
    return replace(
        plan,
        inputs="".join("x" if position in hidden else kind for position, kind in enumerate(plan.inputs)),
        slots=tuple(slot.without_owner() if number in others else slot for number, slot in enumerate(plan.slots)),
        steps=tuple(step for step, one in zip(plan.steps, found, strict=True) if (True in one) is side),
        outputs=tuple(OutputSpec("value") if output.slot in others else output for output in plan.outputs),
    )


def together(results: tuple[Any, ...], host: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """The results of both."""
    if host is None:
        return results
    return tuple(own if other is None else other for own, other in zip(results, host, strict=True))
