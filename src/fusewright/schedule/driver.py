"""The stages of scheduling in their order.

Takes a `LoopProgram` and options; gives a `Plan` (`schedule`), and the plan with memory (`with_memory`). Always holds:
the program is not changed; between the two, other kernels may take the place of steps (`select`).
"""

from __future__ import annotations

from fusewright.base.records import replace
from fusewright.loops.ir import LoopProgram
from fusewright.schedule.build import build_kernel
from fusewright.schedule.dependencies import Dependencies, analyse, used_buffers
from fusewright.schedule.fuse import Group, fuse
from fusewright.schedule.horizontal_fusion import fuse_horizontally
from fusewright.schedule.in_place import write_in_place
from fusewright.schedule.memory import plan_memory
from fusewright.schedule.names import kernel_name
from fusewright.schedule.options import ScheduleOptions
from fusewright.schedule.order import order_groups
from fusewright.schedule.plan import Kernel, Plan, RunExtern, RunKernel, Step
from fusewright.schedule.split import split_reductions
from fusewright.schedule.unroll import Repeat, Steps, unroll

DEFAULTS = ScheduleOptions()


def schedule(program: LoopProgram, options: ScheduleOptions = DEFAULTS, repeat: Repeat | None = None) -> Plan:
    """Fuses the program's operations into kernels and orders them. The plan's temporaries have no place yet: see
    `with_memory`. With `repeat` the plan has so many bodies more than the program; raises Irregular where that cannot
    be told from those that it has."""
    if options.fusion:
        program = split_reductions(write_in_place(program), options)
    dependencies = analyse(program)
    groups = order_groups(fuse(dependencies, program.buffers, options), dependencies, program.buffers)
    kernels: dict[str, Kernel] = {}
    steps: list[Step] = []
    for group in groups:
        if group.extern is not None:
            steps.append(RunExtern(group.extern))
            continue
        internal = _internal_buffers(group, dependencies)
        name = kernel_name((nest.operation.name for nest in group.nests), len(kernels))
        kernels[name] = build_kernel(group, name, internal, program.buffers, program.size_symbols.keys(), options)
        steps.append(RunKernel(name))
    if options.fusion:
        steps = fuse_horizontally(steps, kernels, program.buffers, dependencies.shared, options)
    buffers, outputs = program.buffers, program.outputs
    if repeat is not None:
        whole = unroll(Steps(steps, kernels, buffers, outputs), program.makers, repeat)
        steps, kernels, buffers, outputs = whole.steps, whole.kernels, whole.buffers, whole.outputs
    used = used_buffers(program.inputs, outputs, kernels, steps)
    return Plan(
        kernels=kernels,
        buffers={name: buffer for name, buffer in buffers.items() if name in used},
        steps=tuple(steps),
        inputs=program.inputs,
        outputs=outputs,
        constants=program.constants,
        size_symbols=program.size_symbols,
    )


def _internal_buffers(group: Group, dependencies: Dependencies) -> frozenset[str]:
    """Buffers that only this group writes and reads."""
    inside = set(group.positions)
    return frozenset(
        name
        for name in group.written
        if name not in dependencies.kept
        and inside.issuperset(dependencies.writers[name])
        and inside.issuperset(dependencies.readers.get(name, ()))
    )


def with_memory(plan: Plan, own_bytes: int | None) -> Plan:
    """The plan with its temporaries placed: in one arena, or from `own_bytes` on in memory of their own. Done once,
    when the plan's steps are settled."""
    memory = plan_memory(plan.steps, plan.kernels, plan.buffers, plan.outputs, own_bytes)
    return replace(
        plan,
        kernels={name: replace(kernel, inplace=memory.inplace.get(name, ())) for name, kernel in plan.kernels.items()},
        placements=memory.placements,
        arena_size=memory.arena_size,
        last_use=memory.last_use,
        takes_over=memory.takes_over,
    )
