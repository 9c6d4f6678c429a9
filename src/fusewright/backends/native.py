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

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.llvm import CompiledModule, compile_kernels
from fusewright.events import KernelMade, StageDone
from fusewright.graph import passes
from fusewright.graph.printer import print_graph
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
from fusewright.loops.printer import print_program
from fusewright.runtime import launch
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import Plan
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


def _announce_kernels(to_compile: GraphToCompile, module: CompiledModule) -> None:
    for code in module.codes.values():
        to_compile.notify(KernelMade(to_compile.function, code.name, code.locations, code.origins, functools.partial(str, code.source)))


def compile_graph(to_compile: GraphToCompile) -> Callable[..., Any]:
    """A callable over the graph's flat inputs that gives the tuple of its outputs, with the backward attached for a joint graph."""
    stages = _Stages(to_compile)
    limit = to_compile.settings["stop_after_rewrites"]
    graph: torch.fx.Graph = stages.run(
        "passes", "aot_graphs", print_graph, passes.run, to_compile.graph, stop_after=None if limit < 0 else limit
    )
    if to_compile.backward is None:
        if to_compile.settings["layout"]:
            graph = stages.run("layout", "aot_graphs", print_graph, passes.choose_layouts, graph)
        return _compile_half(to_compile, stages, graph, to_compile.function)
    return compile_joint(
        graph, to_compile, lambda half, direction: _compile_half(to_compile, stages, half, f"{to_compile.function} {direction}")
    )


def _compile_half(to_compile: GraphToCompile, stages: _Stages, graph: torch.fx.Graph, name: str) -> Callable[..., Any]:
    """The native plan of a functional graph."""
    program: LoopProgram = stages.run("loops", "loops", print_program, lower, graph, to_compile.constants)
    options = ScheduleOptions(fusion=to_compile.settings["fusion"])
    plan: Plan = stages.run("schedule", "schedule", plan_text, schedule, program, options)
    module: CompiledModule = stages.run("kernels", "", lambda made: made.ir, compile_kernels, list(plan.kernels.values()))
    call_plan: CallPlan = stages.run(
        "call_plan", "output_code", describe, build_call_plan, plan, module.codes, name=name, available=launch.is_available
    )
    addresses = {code.key: module.addresses[code.symbol] for code in module.codes.values()}
    native_plan = stages.run("load", "", repr, launch.load, call_plan, addresses)
    _announce_kernels(to_compile, module)
    return native_plan


BACKEND = Backend("native", "aten", compile_graph, follows_autograd=False, trains=True)
