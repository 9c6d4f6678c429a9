"""Backend `native`: ATen graph → passes → loops → schedule → LLVM kernels and a native call plan.

The order of the stages is written here and nowhere else. Each stage is timed and announced on the event stream with its printed result
(the text is built only when somebody reads it).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.fx

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.llvm import CompiledModule, compile_kernels
from fusewright.events import KernelMade, StageDone
from fusewright.graph import passes
from fusewright.graph.printer import print_graph
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
program_text = str  # TODO
from fusewright.runtime import launch
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import Plan, RunExtern
from fusewright.schedule.printer import plan_text

Result = TypeVar("Result")


class _Stages:
    """Runs stages in order, timing and announcing each."""

    def __init__(self, to_compile: GraphToCompile) -> None:
        self.to_compile = to_compile

    def run(
        self, stage: str, artifact: str, text: Callable[[Result], str], work: Callable[..., Result], /, *args: Any, **kwargs: Any
    ) -> Result:
        started = time.perf_counter()
        result = work(*args, **kwargs)
        seconds = time.perf_counter() - started
        self.to_compile.notify(StageDone(self.to_compile.function, stage, functools.partial(text, result), seconds, artifact))
        return result


def _announce_kernels(to_compile: GraphToCompile, module: CompiledModule, plan: Plan) -> None:
    for code in module.codes.values():
        to_compile.notify(KernelMade(to_compile.function, code.name, code.locations, code.origins, functools.partial(str, code.source)))
    to_compile.counts["kernels"] = len(module.codes)
    to_compile.counts["externs"] = sum(isinstance(step, RunExtern) for step in plan.steps)


def compile_graph(to_compile: GraphToCompile) -> Callable[..., Any]:
    """The native plan of an ATen graph: a callable over its flat inputs that gives the tuple of its outputs."""
    options = to_compile.settings
    stages = _Stages(to_compile)
    limit = options["stop_after_rewrites"]
    graph: torch.fx.Graph = stages.run(
        "passes", "aot_graphs", print_graph, passes.run, to_compile.graph, stop_after=None if limit < 0 else limit
    )
    program: LoopProgram = stages.run("loops", "loops", program_text, lower, graph, to_compile.constants)
    plan: Plan = stages.run("schedule", "schedule", plan_text, schedule, program, ScheduleOptions(fusion=options["fusion"]))
    module: CompiledModule = stages.run("kernels", "", lambda made: made.ir, compile_kernels, list(plan.kernels.values()))
    call_plan: CallPlan = stages.run(
        "call_plan",
        "output_code",
        describe,
        build_call_plan,
        plan,
        module.codes,
        name=to_compile.function,
        available=launch.is_available,
    )
    addresses = {code.key: module.addresses[code.symbol] for code in module.codes.values()}
    native_plan = stages.run(
        "load", "", repr, launch.load, call_plan, addresses, arena_limit=options["arena_limit_mib"] << 20
    )
    _announce_kernels(to_compile, module, plan)
    return native_plan


BACKEND = Backend("native", "aten", compile_graph, differentiable=False)
