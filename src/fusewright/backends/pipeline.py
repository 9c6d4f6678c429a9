"""The stages of backend `native`: functional ATen graph → loops → schedule → LLVM kernels and a call plan.

The order of the stages is written here and nowhere else. Each stage is timed and announced on the event stream with its
printed result (the text is built only when somebody reads it). Imported only when something must be compiled: a warm
start does without.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
import torch.fx

from fusewright.backends.registry import GraphToCompile
from fusewright.base.events import Hint, PassDone, Raced, StageDone
from fusewright.base.options import environment
from fusewright.base.records import replace
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.llvm import CompiledModule, compile_kernels
from fusewright.graph import passes, repeated_layers as bodies
from fusewright.graph.builder import env_of
from fusewright.graph.freezing import Preparation
from fusewright.graph.grad_mode import run_with_grad_mode
from fusewright.graph.printer import print_graph
from fusewright.graph.seeds import seeds_outside
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
from fusewright.loops.printer import print_program
from fusewright.runtime import host, launch
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import Kernel, Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.unroll import Irregular, Repeat
from fusewright.select import generated_gemm
from fusewright.select.linear import Chooser

if TYPE_CHECKING:
    from fusewright.codegen.triton.module import Tiles

__all__ = [
    "BACKWARD_STAGES",
    "GRAPH_STAGES",
    "generate",
    "optimise",
    "seeds_outside",
    "split_parameters",
    "with_buckets",
]

Result = TypeVar("Result")

Races = tuple[tuple[str, str, tuple[tuple[str, float], ...], str], ...]

TRAINING_OWN_BYTES = 512 * 1024
"""An arena would lie beside all gradients when the last of them is made. Inference keeps one: memory that stays has no
page faults."""


def run_stage(
    to_compile: GraphToCompile,
    stage: str,
    artifact: str,
    text: Callable[[Result], str],
    work: Callable[..., Result],
    /,
    *args: Any,
    **kwargs: Any,
) -> Result:
    """work(*args, **kwargs), timed and announced as `stage`."""
    started = time.perf_counter()
    result = work(*args, **kwargs)
    seconds = time.perf_counter() - started
    to_compile.notify(StageDone(to_compile.function, stage, functools.partial(text, result), seconds, artifact))
    return result


def _gpu() -> Any:
    return importlib.import_module("fusewright.backends.gpu")  # lazy: brings Triton's generator and the tuner


class GraphStage(NamedTuple):
    """One stage over the graph: its name on the event stream, its passes, and on which graphs it runs."""

    name: str
    passes: list[tuple[passes.Pass, str]]
    condition: Callable[[GraphToCompile, torch.fx.Graph], bool]


def _always(to_compile: GraphToCompile, graph: torch.fx.Graph) -> bool:
    return True


def _trains(to_compile: GraphToCompile, graph: torch.fx.Graph) -> bool:
    return to_compile.backward is not None


CLEAN = GraphStage("passes", passes.PIPELINE, _always)
GRAPH_STAGES: list[GraphStage] = [
    CLEAN,
    GraphStage("padding", passes.PADDING, lambda t, graph: t.settings["shape_padding"] and passes.may_pad(graph)),
    GraphStage("attention", passes.ATTENTION, lambda t, graph: t.backward is None and passes.may_write_out(graph)),
    GraphStage("precision", passes.PRECISION, lambda t, graph: passes.may_widen(graph)),
    GraphStage("layout", passes.LAYOUT, lambda t, graph: t.settings["layout"]),
    GraphStage("operators", passes.LIBRARY, _trains),
    GraphStage("packing", passes.PACKING, lambda t, graph: t.backward is None and t.settings["pack_weights"]),
]
"""What is done to a captured graph before it is lowered (a joint graph: before it is cut), in this order."""
BACKWARD_STAGES: list[GraphStage] = [GraphStage("backward operators", passes.BACKWARD, _always)]
"""What is done to a backward half, or a part of it."""


def optimise(
    to_compile: GraphToCompile, graph: torch.fx.Graph, stages: list[GraphStage] | None = None
) -> torch.fx.Graph:
    """The graph after the stages whose conditions hold (GRAPH_STAGES)."""
    if any(isinstance(item, torch.Tensor) and item.device.type == "cuda" for item in to_compile.example_inputs):
        _gpu().warm_up(to_compile.example_inputs)
    context = pass_context(to_compile)
    for stage in GRAPH_STAGES if stages is None else stages:
        if stage.condition(to_compile, graph):
            graph = run_stage(
                to_compile, stage.name, "aot_graphs", print_graph, passes.run_passes, graph, stage.passes, context
            )
    return graph


def split_parameters(to_compile: GraphToCompile, graph: torch.fx.Graph) -> tuple[torch.fx.Graph, Preparation | None]:
    """The graph, and what is computed from parameters beforehand."""
    if not to_compile.settings["pack_weights"]:
        return graph, None
    preparation = run_stage(
        to_compile, "parameters", "aot_graphs", lambda made: print_graph(graph), passes.split_preparation, graph
    )
    return graph, preparation


def pass_context(to_compile: GraphToCompile) -> passes.PassContext:
    """What the passes over this graph share, as the options say."""
    settings, choose = to_compile.settings, chooser(to_compile)
    inference = to_compile.backward is None
    context = passes.PassContext(to_compile.rewrites, keeps_parameters=settings["pack_weights"] and inference)
    context.choose, context.has_quick_onednn = choose, choose.has_quick_onednn
    if settings["fusion"]:
        context.few_rows = choose.few_rows
        if inference:
            context.takes_generated = choose.takes_own
    if settings["trace.enabled"] or environment("FUSEWRIGHT_DEBUG"):

        def tell(report: passes.PassReport) -> None:
            if report.before != report.after:
                to_compile.notify(PassDone(to_compile.function, report.name, report.rewrites, report.after))

        context.observer = tell
    return context


def chooser(to_compile: GraphToCompile) -> Chooser:
    """What chooses between the library's ways and kernels of ours, as the options say."""
    settings = to_compile.settings
    store = settings["disk_cache"] and environment("FUSEWRIGHT_CACHE")
    if not settings["max_autotune"]:
        return Chooser(store)
    return Chooser(store, settings["autotune_seconds"], settings["autotune_seconds"], races=True)


def with_buckets(to_compile: GraphToCompile) -> GraphToCompile:
    """The graph with the sizes that the option `bucket` names padded, where that is exact."""
    env = env_of(to_compile.graph)
    if env is None or not env.buckets:
        return to_compile
    if to_compile.backward is not None or env.unbacked:
        why = "gradients are wanted" if to_compile.backward is not None else "sizes depend on data"
        to_compile.notify(Hint(to_compile.function, f"no size is put into buckets: {why}"))
        return to_compile
    size_buckets = importlib.import_module("fusewright.backends.size_buckets")  # lazy: behind an option
    cleaned = optimise(to_compile, to_compile.graph, [CLEAN])
    graph = run_stage(to_compile, "buckets", "aot_graphs", print_graph, size_buckets.with_buckets, to_compile, cleaned)
    return replace(to_compile, graph=graph)


def generate(
    graph: torch.fx.Graph, to_compile: GraphToCompile, name: str, half: Literal["", "forward", "backward"] = ""
) -> tuple[CallPlan, bytes, tuple[KernelCode | DeviceKernel, ...], Races | None]:
    """The call plan of a functional graph, the object file of its CPU kernels, all kernels, and what was measured (see
    CompiledGraph; None where more should have been: a later compile shall go on). Kernels for a GPU are compiled in the
    background; loading the plan waits for them. `half`: of a joint graph. Raises Unsupported for a graph that has
    none."""
    run = functools.partial(run_stage, to_compile)
    run_with_grad_mode(graph)
    own_bytes = TRAINING_OWN_BYTES if half else None
    env = env_of(graph)
    options = ScheduleOptions(
        fusion=to_compile.settings["fusion"], own_bytes=own_bytes, examples={} if env is None else env.examples
    )
    gpu: Any = None
    plan = None if half else _of_bodies(to_compile, graph, options)
    if plan is None:
        program: LoopProgram = run("loops", "loops", print_program, lower, graph, to_compile.constants, options.fusion)
        gpu = None if _is_on_cpu(program) else _gpu()
        if gpu is not None:
            options = gpu.schedule_options(options, program)
        plan = run("schedule", "schedule", plan_text, schedule, program, options)
    if gpu is None and not half and to_compile.settings["fusion"]:
        choose = chooser(to_compile)
        takes = choose.takes_own, choose.few_rows
        plan = run(
            "products",
            "schedule",
            plan_text,
            generated_gemm.with_generated_gemm,
            plan,
            own_bytes,
            *takes,
            options.examples,
        )
        plan = run("attention", "schedule", plan_text, generated_gemm.with_generated_attention, plan, own_bytes)
    on_cpu: list[Kernel] = list(plan.kernels.values())
    on_gpu: list[Kernel] = []
    device_codes: dict[str, DeviceKernel] = {}
    races: Races | None = ()
    if gpu is not None:
        on_cpu, on_gpu = gpu.split(plan)
    if on_gpu:
        device_codes = run("gpu_kernels", "", gpu.texts, gpu.compile_kernels, on_gpu, plan)
    if to_compile.settings["max_autotune"] and on_gpu:
        plan, tiles, races = _tuned(to_compile, plan, options.own_bytes)
        on_cpu, on_gpu = gpu.split(plan)
        device_codes = run("gpu_kernels", "", gpu.texts, gpu.compile_kernels, on_gpu, plan, tiles)
    module = CompiledModule({}, b"", "")
    if on_cpu or not on_gpu:
        module = run("kernels", "", lambda made: made.ir, compile_kernels, on_cpu)
    codes: dict[str, KernelCode | DeviceKernel] = {**module.codes, **device_codes}
    build = functools.partial(build_call_plan, available=launch.is_available, consumes=half == "backward")
    call_plan: CallPlan = run("call_plan", "output_code", describe, build, plan, codes, name=name)
    return call_plan, module.object, tuple(codes.values()), races


_CPU = torch.device("cpu")


def _of_bodies(to_compile: GraphToCompile, graph: torch.fx.Graph, options: ScheduleOptions) -> Plan | None:
    """The plan of a graph with bodies that repeat, from the loops of a few of them; None where there are none, or they
    differ after all."""
    kinds = (node.meta["type"] for node in graph.find_nodes(op="placeholder"))
    found = bodies.find(graph) if all(getattr(kind, "device", _CPU).type == "cpu" for kind in kinds) else None
    if found is None:
        return None
    run, short = functools.partial(run_stage, to_compile), bodies.shortened(graph, found)
    program: LoopProgram = run(
        "loops", "loops", print_program, lower, short.graph, to_compile.constants, options.fusion
    )
    if not _is_on_cpu(program):
        return None
    own = {program.inputs[before]: program.inputs[after] for before, after in short.own.items()}
    repeat = Repeat(short.body, short.following, own, short.left_out)
    try:
        return run("schedule", "schedule", plan_text, schedule, program, options, repeat)
    except Irregular:
        return None


def _is_on_cpu(program: LoopProgram) -> bool:
    return all(buffer.device.type == "cpu" for buffer in program.buffers.values())


def _tuned(to_compile: GraphToCompile, plan: Plan, own_bytes: int | None) -> tuple[Plan, Tiles, Races | None]:
    """The plan with what was found to be quickest on its GPUs, block sizes of its kernels, and what was measured (see
    `generate`)."""
    gpu = _gpu()
    if not gpu.may_autotune():
        to_compile.notify(Hint(to_compile.function, "max_autotune measures nothing while a CUDA graph is recorded"))
        return plan, {}, None
    settings = to_compile.settings
    records = host.store() if settings["disk_cache"] and environment("FUSEWRIGHT_CACHE") else None
    started = time.perf_counter()
    tuned = gpu.autotune(plan, own_bytes, settings["autotune_seconds"], records)
    seconds = time.perf_counter() - started
    to_compile.notify(StageDone(to_compile.function, "autotuning", lambda: tuned.text, seconds, "autotuning"))
    for answer in tuned.answers:
        to_compile.notify(
            Raced(
                to_compile.function,
                answer.question,
                answer.winner,
                dict(answer.times),
                dict(answer.refused),
                answer.text,
            )
        )
    if tuned.unasked:
        limit = f"autotune_seconds={settings['autotune_seconds']:g}"
        spent = f"{limit} were over before {tuned.unasked} products or kernels were measured"
        to_compile.notify(Hint(to_compile.function, f"{spent}: they run as in default mode"))
    races = tuple(
        (answer.question, answer.winner, tuple(answer.times.items()), answer.text) for answer in tuned.answers
    )
    return tuned.plan, tuned.tiles, None if tuned.unasked else races
