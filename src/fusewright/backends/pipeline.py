"""The stages of backend `native`: functional ATen graph → loops → schedule → LLVM kernels and a call plan.

The order of the stages is written here and nowhere else. Each stage is timed and announced on the event stream with its printed result
(the text is built only when somebody reads it). Imported only when something must be compiled: a warm start does without.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.fx

from fusewright.backends import graph_cache
from fusewright.backends.registry import GraphToCompile
from fusewright.base.events import Hint, Raced, StageDone
from fusewright.base.options import environment
from fusewright.base.records import replace
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.llvm import CompiledModule, compile_kernels
from fusewright.graph import passes
from fusewright.graph import repeated_layers as bodies
from fusewright.graph.builder import env_of
from fusewright.graph.freezing import Preparation
from fusewright.graph.grad_mode import run_with_grad_mode
from fusewright.graph.passes.library.linear_paths import Linear, no_rows
from fusewright.graph.printer import print_graph
from fusewright.graph.seeds import seeds_outside
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
from fusewright.loops.printer import print_program
from fusewright.runtime import launch
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import Kernel, Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.unroll import Irregular, Repeat
from fusewright.select import generated_gemm as own_products
from fusewright.select.linear import Chooser

if TYPE_CHECKING:
    from fusewright.codegen.triton.module import Tiles

__all__ = [
    "choose_layouts", "choose_operators", "clean", "finish_backward", "generate", "pack_parameters", "seeds_outside", "with_buckets",
]  # fmt: skip

Result = TypeVar("Result")

Races = tuple[tuple[str, str, tuple[tuple[str, float], ...], str], ...]

TRAINING_OWN_BYTES = 512 * 1024
"""An arena would lie beside all gradients when the last of them is made. Inference keeps one: memory that stays has no page faults."""


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


def clean(to_compile: GraphToCompile) -> torch.fx.Graph:
    """The captured graph after the passes: functional, without dead or repeated work."""
    if any(isinstance(item, torch.Tensor) and item.device.type == "cuda" for item in to_compile.example_inputs):
        _gpu().warm_up(to_compile.example_inputs)
    limit = to_compile.settings["stop_after_rewrites"]
    stop_after = None if limit < 0 else limit
    return run_stage(to_compile, "passes", "aot_graphs", print_graph, passes.run, to_compile.graph, stop_after=stop_after)


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
    graph = run_stage(to_compile, "buckets", "aot_graphs", print_graph, size_buckets.with_buckets, to_compile, clean(to_compile))
    return replace(to_compile, graph=graph)


def choose_layouts(to_compile: GraphToCompile, graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with its convolution chains in channels-last format, and products padded, as the options say; attention of few tokens
    as loops; and products of halves in float32 on a processor without instructions for them."""
    if to_compile.settings["shape_padding"] and passes.may_pad(graph):
        graph = run_stage(to_compile, "padding", "aot_graphs", print_graph, passes.choose_sizes, graph)
    if to_compile.backward is None and passes.may_write_out(graph):
        graph = run_stage(to_compile, "attention", "aot_graphs", print_graph, passes.choose_attention, graph)
    if passes.may_widen(graph):
        inference = to_compile.backward is None
        takes_own = chooser(to_compile).takes_own if inference and to_compile.settings["fusion"] else _nothing
        halves = passes.Halves(to_compile.settings["pack_weights"] and inference, takes_own)
        graph = run_stage(to_compile, "precision", "aot_graphs", print_graph, passes.choose_precision, graph, halves)
    if not to_compile.settings["layout"]:
        return graph
    return run_stage(to_compile, "layout", "aot_graphs", print_graph, passes.choose_layouts, graph)


def choose_operators(to_compile: GraphToCompile, graph: torch.fx.Graph) -> torch.fx.Graph:
    """The joint graph with the library's operators that its parts are quickest by."""
    quick = chooser(to_compile).has_quick_onednn
    return run_stage(to_compile, "operators", "aot_graphs", print_graph, passes.choose_operators, graph, quick)


def finish_backward(to_compile: GraphToCompile, graph: torch.fx.Graph) -> torch.fx.Graph:
    """The backward half (or a part of it) as it is lowered."""
    return run_stage(to_compile, "backward operators", "aot_graphs", print_graph, passes.finish_backward, graph)


def pack_parameters(to_compile: GraphToCompile, graph: torch.fx.Graph) -> tuple[torch.fx.Graph, Preparation | None]:
    """The graph with packed weights, and what is computed from parameters beforehand; both unchanged when the option says no."""
    if not to_compile.settings["pack_weights"]:
        return graph, None
    choose = chooser(to_compile)
    few = choose.few_rows if to_compile.settings["fusion"] else no_rows
    further = choose, few, choose.has_quick_onednn
    return run_stage(to_compile, "parameters", "aot_graphs", lambda made: print_graph(made[0]), passes.pack_parameters, graph, *further)


def _nothing(linear: Linear) -> bool:
    return False


def chooser(to_compile: GraphToCompile) -> Chooser:
    """What chooses between the library's ways and kernels of ours, as the options say."""
    settings = to_compile.settings
    store = settings["disk_cache"] and environment("FUSEWRIGHT_CACHE")
    if not settings["max_autotune"]:
        return Chooser(store)
    return Chooser(store, settings["autotune_seconds"], settings["autotune_seconds"], races=True)


def generate(
    graph: torch.fx.Graph, to_compile: GraphToCompile, name: str, half: Literal["", "forward", "backward"] = ""
) -> tuple[CallPlan, bytes, tuple[KernelCode | DeviceKernel, ...], Races | None]:
    """The call plan of a functional graph, the object file of its CPU kernels, all kernels, and what was measured (see CompiledGraph; None
    where more should have been: a later compile shall go on). Kernels for a GPU are compiled in the background; loading the plan waits for
    them. `half`: of a joint graph. Raises Unsupported for a graph that has none."""
    run = functools.partial(run_stage, to_compile)
    run_with_grad_mode(graph)
    own_bytes = TRAINING_OWN_BYTES if half else None
    env = env_of(graph)
    options = ScheduleOptions(fusion=to_compile.settings["fusion"], own_bytes=own_bytes, examples={} if env is None else env.examples)
    gpu: Any = None
    plan = None if half else _of_bodies(to_compile, graph, options)
    if plan is None:
        program: LoopProgram = run("loops", "loops", print_program, lower, graph, to_compile.constants)
        gpu = None if _is_on_cpu(program) else _gpu()
        if gpu is not None:
            options = gpu.schedule_options(options, program)
        plan = run("schedule", "schedule", plan_text, schedule, program, options)
    if gpu is None and not half and to_compile.settings["fusion"]:
        choose = chooser(to_compile)
        takes = choose.takes_own, choose.few_rows
        plan = run("products", "schedule", plan_text, own_products.with_own_products, plan, own_bytes, *takes, options.examples)
        plan = run("attention", "schedule", plan_text, own_products.with_own_attention, plan, own_bytes)
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
    """The plan of a graph with bodies that repeat, from the loops of a few of them; None where there are none, or they differ after all."""
    kinds = (node.meta["type"] for node in graph.find_nodes(op="placeholder"))
    found = bodies.find(graph) if all(getattr(kind, "device", _CPU).type == "cpu" for kind in kinds) else None
    if found is None:
        return None
    run, short = functools.partial(run_stage, to_compile), bodies.shortened(graph, found)
    program: LoopProgram = run("loops", "loops", print_program, lower, short.graph, to_compile.constants)
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
    """The plan with what was found to be quickest on its GPUs, block sizes of its kernels, and what was measured (see `generate`)."""
    gpu = _gpu()
    if not gpu.may_autotune():
        to_compile.notify(Hint(to_compile.function, "max_autotune measures nothing while a CUDA graph is recorded"))
        return plan, {}, None
    settings = to_compile.settings
    records = graph_cache.store() if settings["disk_cache"] and environment("FUSEWRIGHT_CACHE") else None
    started = time.perf_counter()
    tuned = gpu.autotune(plan, own_bytes, settings["autotune_seconds"], records)
    seconds = time.perf_counter() - started
    to_compile.notify(StageDone(to_compile.function, "autotuning", lambda: tuned.text, seconds, "autotuning"))
    for answer in tuned.answers:
        to_compile.notify(Raced(to_compile.function, answer.question, answer.winner, dict(answer.times), dict(answer.refused), answer.text))
    if tuned.unasked:
        spent = f"autotune_seconds={settings['autotune_seconds']:g} were over before {tuned.unasked} products or kernels were measured"
        to_compile.notify(Hint(to_compile.function, f"{spent}: they run as in default mode"))
    races = tuple((answer.question, answer.winner, tuple(answer.times.items()), answer.text) for answer in tuned.answers)
    return tuned.plan, tuned.tiles, None if tuned.unasked else races
