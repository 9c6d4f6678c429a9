"""Steps of a plan in place of others.

Takes a `Plan` whose memory is not placed, and `Replacement`s; gives the plan with these in place. Always holds: the
given plan is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.base.records import dataclass, replace
from fusewright.loops.ir import Buffer
from fusewright.schedule.dependencies import extern_reads, used_buffers
from fusewright.schedule.plan import (
    Kernel,
    Plan,
    RunExtern,
    RunKernel,
    Step,
)


def touched(plan: Plan, number: int) -> tuple[set[str], set[str]]:
    """(buffers that a step reads, buffers that it writes)."""
    step = plan.steps[number]
    if isinstance(step, RunExtern):
        written = {name for name in (*step.extern.outputs, *step.extern.mutates) if name is not None}
        return set(extern_reads(step.extern)), written
    kernel = plan.kernels[step.kernel]
    return set(kernel.buffers), set(kernel.written)


def is_private(plan: Plan, name: str) -> bool:
    """Whether a buffer lives within a call and nobody gets it."""
    given = {output.buffer if output.ref is None else output.ref.buffer for output in plan.outputs}
    return plan.buffers[name].role == "temporary" and name not in given


@dataclass(frozen=True, slots=True)
class Span:
    """Steps that a kernel takes part in replacing, and where it stands. early: buffers that the steps read before step
    number `between`; what else the kernel reads was read from there on. written: by what goes, beside the kernel."""

    steps: frozenset[int]
    at: int
    between: int
    early: frozenset[str]
    written: frozenset[str] = frozenset()


def is_undisturbed(plan: Plan, kernel: Kernel, span: Span) -> bool:
    """Whether no other step before the kernel's place writes what it reads, since that was read, or touches what it
    writes; and whether all is on one device (a number may be in CPU memory)."""
    reads = set(kernel.buffers) - kernel.written
    for number in range(min(span.steps), span.at + 1):
        if number in span.steps:
            continue
        read, written = touched(plan, number)
        if written & (span.early if number < span.between else reads):
            return False
        if (read | written) & (kernel.written | span.written):
            return False
    known = [plan.buffers[name] for name in kernel.buffers if name in plan.buffers]
    return len({buffer.device for buffer in known if any(size != 1 for size in buffer.shape)}) == 1


@dataclass(frozen=True, slots=True)
class Replacement:
    """Kernels in place of steps, where step number `at` stood."""

    steps: tuple[int, ...]
    at: int
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()


def replaced(plan: Plan, chosen: Sequence[Replacement]) -> Plan:
    """The plan with these in place (no two take the same step away)."""
    kernels = dict(plan.kernels)
    buffers = dict(plan.buffers)
    put: dict[int, tuple[Kernel, ...]] = {}
    gone: set[int] = set()
    for one in chosen:
        assert gone.isdisjoint(one.steps), "two replacements of one step"
        gone.update(one.steps)
        put[one.at] = one.kernels
        buffers.update({buffer.name: buffer for buffer in one.buffers})
        for number in one.steps:
            step = plan.steps[number]
            if isinstance(step, RunKernel):
                del kernels[step.kernel]
        kernels.update({kernel.name: kernel for kernel in one.kernels})
    steps: list[Step] = []
    for number, step in enumerate(plan.steps):
        if number in put:
            steps.extend(RunKernel(kernel.name) for kernel in put[number])
        elif number not in gone:
            if number - 1 in gone and isinstance(step, RunKernel):  # what it ran together with has gone
                step = RunKernel(step.kernel)
            steps.append(step)
    return with_steps(plan, kernels, buffers, steps)


def with_steps(plan: Plan, kernels: dict[str, Kernel], buffers: dict[str, Buffer], steps: Sequence[Step]) -> Plan:
    """The plan with other steps, and those buffers that they use."""
    assert not plan.placements, "a plan's steps are settled before its memory"
    used = used_buffers(plan.inputs, plan.outputs, kernels, steps)
    buffers = {name: buffer for name, buffer in buffers.items() if name in used}
    return replace(plan, kernels=kernels, buffers=buffers, steps=tuple(steps))
