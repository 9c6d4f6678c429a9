"""The stages of backend `native`: functional ATen graph → loops → schedule → LLVM kernels and a call plan.

The order of the stages is written here and nowhere else. Each stage is timed and announced on the event stream with its
printed result (the text is built only when somebody reads it). Imported only when something must be compiled: a warm
start does without.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
import torch.fx

from fusewright.backends import kernel_nodes, stage_texts
from fusewright.backends.registry import GraphToCompile
from fusewright.base.errors import InternalErrorWarning, warn
from fusewright.base.events import Autotuned, Hint, PassDone, StageDone, Stopped
from fusewright.base.location import Location
from fusewright.base.options import environment
from fusewright.base.records import dataclass, field, replace
from fusewright.codegen.call_plan import build_call_plan, describe
from fusewright.codegen.call_plan_types import CallPlan
from fusewright.codegen.device_kernel import DeviceKernel, WithoutCode
from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.llvm import CompiledModule, compile_kernels, target_of
from fusewright.codegen.llvm.checked import Checks
from fusewright.codegen.llvm.emit.target import Target
from fusewright.graph import passes, repeated_layers as bodies
from fusewright.graph.builder import env_of
from fusewright.graph.collectives import is_collective
from fusewright.graph.freezing import Prepacking
from fusewright.graph.grad_mode import run_with_grad_mode
from fusewright.graph.printer import print_graph
from fusewright.graph.seeds import seeds_outside
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
from fusewright.loops.lower.questions import types_in
from fusewright.loops.lower.registry import Refuses
from fusewright.loops.printer import print_program
from fusewright.runtime import host, launch
from fusewright.schedule import ScheduleOptions, bounds, schedule, with_memory
from fusewright.schedule.plan import Kernel, Plan, RunExtern
from fusewright.schedule.printer import plan_text
from fusewright.schedule.unroll import Irregular, Repeat
from fusewright.select import generated_gemm
from fusewright.select.linear import Chooser
from fusewright.sizes.expressions import Relation, free_symbols

if TYPE_CHECKING:
    from fusewright.codegen.triton.module import Tiles

__all__ = [
    "BACKWARD_STAGES",
    "GRAPH_STAGES",
    "generate",
    "generate_from",
    "optimise",
    "seeds_outside",
    "split_parameters",
    "with_buckets",
]

Result = TypeVar("Result")

Measured = tuple[tuple[str, str, tuple[tuple[str, float], ...], str], ...]

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
    complete = functools.partial(stage_texts.complete_text, result) if type(result) in stage_texts.RECORDS else None
    told = StageDone(to_compile.function, stage, functools.partial(text, result), seconds, artifact, complete)
    to_compile.notify(told)
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
LAST_STAGES: list[GraphStage] = [
    GraphStage("cutting", passes.CUTTING, lambda t, graph: t.settings["cut_collectives"] > 1),
    GraphStage("joining", passes.JOINING, lambda t, graph: t.settings["join_collectives"]),
    GraphStage("overlap", passes.OVERLAP, lambda t, graph: any(map(is_collective, graph.nodes))),
]
"""What is done to each graph just before it is lowered."""


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
    if to_compile.rewrites.stopped_in:
        to_compile.notify(Stopped(to_compile.function, to_compile.rewrites.stopped_in, to_compile.rewrites.last))
    return graph


def split_parameters(to_compile: GraphToCompile, graph: torch.fx.Graph) -> tuple[torch.fx.Graph, Prepacking | None]:
    """The graph, and what is computed from parameters beforehand."""
    if not to_compile.settings["pack_weights"]:
        return graph, None
    prepacking = run_stage(
        to_compile, "parameters", "aot_graphs", lambda made: print_graph(graph), passes.split_prepacking, graph
    )
    return graph, prepacking


def pass_context(to_compile: GraphToCompile) -> passes.PassContext:
    """What the passes over this graph share, as the options say."""
    settings, choose = to_compile.settings, chooser(to_compile)
    inference = to_compile.backward is None
    context = passes.PassContext(to_compile.rewrites, keeps_parameters=settings["pack_weights"] and inference)
    context.pieces = settings["cut_collectives"]
    context.choose, context.has_quick_onednn = choose, choose.has_quick_onednn
    if settings["fusion"]:
        context.skinny_rows = choose.skinny_rows
        if inference:
            context.takes_generated = choose.takes_generated
    if settings["trace.enabled"] or environment("FUSEWRIGHT_DEBUG"):

        def tell(report: passes.PassReport) -> None:
            if report.before != report.after:
                to_compile.notify(PassDone(to_compile.function, report.name, report.rewrites, report.after))

        context.observer = tell
    return context


def chooser(to_compile: GraphToCompile) -> Chooser:
    """What chooses between the library's candidates and kernels of ours, as the options say."""
    settings = to_compile.settings
    store = settings["disk_cache"] and environment("FUSEWRIGHT_CACHE")
    target = _other_target(to_compile)
    if not settings["library_products"]:
        return Chooser(store, target=target, library=False)
    if not settings["max_autotune"]:
        return Chooser(store, target=target)
    return Chooser(store, settings["autotune_seconds"], settings["autotune_seconds"], autotunes=True, target=target)


def _other_target(to_compile: GraphToCompile) -> Target | None:
    """The processor to compile for; None where it is this one, which is asked only when something depends on it."""
    name = to_compile.settings["target"]
    return None if name == "native" else target_of(name)


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


@dataclass(slots=True)
class Selection:
    """What is chosen between fusion and memory: the plan, block sizes of its kernels on a GPU, and what was measured
    (see CompiledGraph; None where more should have been: a later compile shall go on). makers: see LoopProgram."""

    plan: Plan
    options: ScheduleOptions
    gpu: Any
    half: Literal["", "forward", "backward"]
    tiles: Tiles = field(default_factory=dict)
    autotuned: Measured | None = ()
    makers: Mapping[str, str] = field(default_factory=dict)

    def refused(self, error: WithoutCode) -> list[Kernel]:
        """The kernels of the plan that have no code."""
        return [kernel for name, kernel in self.plan.kernels.items() if name in error.kernels]

    @property
    def is_for_rules(self) -> bool:
        """Whether rules choose between the library and generated kernels: for inference on a CPU."""
        return self.gpu is None and not self.half and self.options.fusion


class PlanStage(NamedTuple):
    """One stage between fusion and the kernels' code: its name on the event stream, what its result is logged as, what
    it does to `Selection.plan`, and for which plans it runs."""

    name: str
    artifact: str
    work: Callable[[GraphToCompile, Selection], Plan]
    condition: Callable[[GraphToCompile, Selection], bool]


def _gemm(to_compile: GraphToCompile, selection: Selection) -> Plan:
    choose = chooser(to_compile)
    plan, examples = selection.plan, selection.options.examples
    return generated_gemm.with_generated_gemm(plan, choose.takes_generated, choose.skinny_rows, examples, choose.target)


def _attention(to_compile: GraphToCompile, selection: Selection) -> Plan:
    library = to_compile.settings["library_products"]
    return generated_gemm.with_generated_attention(selection.plan, _other_target(to_compile), library)


def _memory(to_compile: GraphToCompile, selection: Selection) -> Plan:
    skipped = to_compile.settings["skip_stage"] == "memory"
    return with_memory(selection.plan, 0 if skipped else selection.options.own_bytes)


def _autotune(to_compile: GraphToCompile, selection: Selection) -> Plan:
    """The plan with what was found to be quickest on its GPUs."""
    gpu, plan = selection.gpu, selection.plan
    if not gpu.may_autotune():
        to_compile.notify(Hint(to_compile.function, "max_autotune measures nothing while a CUDA graph is recorded"))
        return plan
    gpu.compile_kernels(gpu.split(plan)[1], plan)  # in the background, while products are measured
    settings = to_compile.settings
    records = host.store() if settings["disk_cache"] and environment("FUSEWRIGHT_CACHE") else None
    started = time.perf_counter()
    tuned = gpu.autotune(plan, settings["autotune_seconds"], records)
    seconds = time.perf_counter() - started
    function = to_compile.function
    to_compile.notify(StageDone(function, "autotuning", lambda: tuned.text, seconds, "autotuning"))
    for answer in tuned.answers:
        times, refused = dict(answer.times), dict(answer.refused)
        to_compile.notify(Autotuned(function, answer.question, answer.winner, times, refused, answer.text))
    if tuned.unasked:
        limit = f"autotune_seconds={settings['autotune_seconds']:g}"
        spent = f"{limit} were over before {tuned.unasked} products or kernels were measured"
        to_compile.notify(Hint(function, f"{spent}: they run as in default mode"))
    if any(answer.short for answer in tuned.answers):
        to_compile.notify(Hint(function, "memory was short while candidates were measured: a later compile asks again"))
    asked = ((answer.question, answer.winner, tuple(answer.times.items()), answer.text) for answer in tuned.answers)
    selection.tiles, selection.autotuned = tuned.tiles, tuple(asked) if tuned.complete else None
    return tuned.plan


PLAN_STAGES = [
    PlanStage("generated_gemm", "", _gemm, lambda to_compile, selection: selection.is_for_rules),
    PlanStage("generated_attention", "", _attention, lambda to_compile, selection: selection.is_for_rules),
    PlanStage(
        "fused_attention",
        "",
        lambda to_compile, selection: selection.gpu.with_fused_attention(selection.plan),
        lambda to_compile, selection: selection.gpu is not None and selection.options.fusion,
    ),
    PlanStage(
        "gpu_candidates",
        "",
        _autotune,
        lambda t, s: t.settings["max_autotune"] and bool(s.gpu and s.gpu.split(s.plan)[1]),
    ),
    PlanStage("memory", "schedule", _memory, lambda to_compile, selection: True),
]
"""What is done to a plan before its kernels are generated, in this order: generated kernels take the place of library
calls, then memory is placed, once."""


LIBRARY_STAGES = [stage for stage in PLAN_STAGES if stage.name == "memory"]
"""The same, where a kernel that was chosen in place of a library call has no code."""


class Generated(NamedTuple):
    """plan: the call plan; code: the object file of the CPU kernels; kernels: all of them; calls: of each library call
    by name, the lines that it is put down to; autotuned: what was measured (see `Selection`)."""

    plan: CallPlan
    code: bytes
    kernels: tuple[KernelCode | DeviceKernel, ...]
    calls: dict[str, tuple[Location, ...]]
    autotuned: Measured | None


def generate(
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    name: str,
    half: Literal["", "forward", "backward"] = "",
    loads: bool = True,
) -> Generated:
    """The code of a functional graph. Kernels for a GPU are compiled in the background, and waited for in the end: what
    their compiler refuses has other blocks then, or its operators are left to PyTorch. `half`: of a joint graph; loads:
    for a GPU that is here. Raises Unsupported for a graph that has none."""
    run_with_grad_mode(graph)
    last, left, stages = optimise(to_compile, graph, LAST_STAGES), frozenset[str](), PLAN_STAGES
    told: set[str] = set()

    def tell(error: WithoutCode, what: str) -> None:
        hints = {f"kernel {name} was refused by its compiler, {what}: {why}" for name, why in error.kernels.items()}
        for hint in sorted(hints - told):
            to_compile.notify(Hint(to_compile.function, hint))
        told.update(hints)

    while True:
        selection = _scheduled(last, to_compile, half, left)
        try:
            made = generate_from(selection, graph, to_compile, name, stages)
        except WithoutCode as error:
            refused = selection.refused(error)
            if stages is PLAN_STAGES and any(kernel.product or kernel.attention for kernel in refused):
                stages = LIBRARY_STAGES
            else:
                more = kernel_nodes.computing(last, selection.makers, refused, left)
                if more <= left:
                    raise
                left |= more
            tell(error, "its operators are called as PyTorch has them")
            warn(f"{to_compile.function}: {error}; its operators are called as PyTorch has them", InternalErrorWarning)
            continue
        codes = {code.name: code for code in made.kernels if isinstance(code, DeviceKernel)}
        try:
            if codes and loads:
                selection.gpu.load(codes, made.plan, to_compile.tell_kernel)
        except WithoutCode as error:
            tell(error, "it is generated in another way")
        else:
            return made


def generate_from(
    selection: Selection,
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    name: str,
    stages: Sequence[PlanStage] = PLAN_STAGES,
) -> Generated:
    """As `generate`, from a plan of the graph on: what `stages` do to it (none: its memory is placed), and the rest."""
    run = functools.partial(run_stage, to_compile)
    for stage in stages:
        skipped = stage.name == to_compile.settings["skip_stage"] != "memory"
        if not skipped and stage.condition(to_compile, selection):
            selection.plan = run(stage.name, stage.artifact, plan_text, stage.work, to_compile, selection)
    plan, gpu = selection.plan, selection.gpu
    shown = run("bounds", "bounds", bounds.text, _in_bounds, to_compile, graph, plan)
    for access in shown.unproved:
        to_compile.notify(Hint(to_compile.function, f"not shown to lie inside its buffer: {access}"))
    checks = _checks(to_compile, plan, shown)
    on_cpu: list[Kernel] = list(plan.kernels.values())
    on_gpu: list[Kernel] = []
    device_codes: dict[str, DeviceKernel] = {}
    if gpu is not None:
        on_cpu, on_gpu = gpu.split(plan)
    if on_gpu:
        device_codes = run("gpu_kernels", "", gpu.texts, gpu.compile_kernels, on_gpu, plan, selection.tiles)
    module = CompiledModule({}, b"", "")
    if on_cpu or not on_gpu:
        target = to_compile.settings["target"]
        more = {"tell": to_compile.tell_kernel, "vector_functions": to_compile.settings["vector_functions"]}
        compiled = functools.partial(compile_kernels, target=target, checks=checks, **more)
        module = run("kernels", "", lambda made: made.ir, compiled, on_cpu)
    codes: dict[str, KernelCode | DeviceKernel] = {**module.codes, **device_codes}
    build = functools.partial(build_call_plan, available=launch.is_available, consumes=selection.half == "backward")
    call_plan: CallPlan = run("call_plan", "output_code", describe, build, plan, codes, name=name)
    calls = {step.extern.name: step.extern.locations for step in plan.steps if isinstance(step, RunExtern)}
    return Generated(call_plan, module.object, tuple(codes.values()), calls, selection.autotuned)


def _in_bounds(to_compile: GraphToCompile, graph: torch.fx.Graph, plan: Plan) -> bounds.Shown:
    """Shows that the plan touches only what lies inside its buffers. What depends on sizes alone, and holds in the
    example, becomes a guard; of a half of a joint graph, whose guards may be in use already, it stays open."""
    env = env_of(to_compile.graph)
    if env is None:
        return bounds.show(plan)
    known = bounds.Known(
        lambda d: env.known(Relation("<=", 0, d)) is True, env.not_negative(), env.simplify, env.as_multiples()
    )
    shown = bounds.show(plan, known)

    def guarded(access: bounds.Unproved) -> bool:
        wanted, symbols = Relation("<=", 0, access.missing), free_symbols(access.missing)
        of_sizes = env_of(graph) is env and bool(symbols) and symbols <= env.symbols.keys()
        return of_sizes and env.hint(access.missing) >= 0 and env.settle(wanted)

    return replace(shown, unproved=tuple(access for access in shown.unproved if not guarded(access)))


def _checks(to_compile: GraphToCompile, plan: Plan, shown: bounds.Shown) -> dict[str, Checks]:
    """The kernels whose accesses are checked as they run: all, if the user wants that; else those of which it could not
    be shown before."""
    every, unproved = to_compile.settings["checked"], {access.where for access in shown.unproved}
    return {
        name: Checks(tuple(plan.buffers[buffer].span() for buffer in kernel.buffers), told=every)
        for name, kernel in plan.kernels.items()
        if every or name in unproved
    }


def _scheduled(
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    half: Literal["", "forward", "backward"],
    left: frozenset[str],
) -> Selection:
    """The graph as fused kernels and library calls in order. left: names of nodes that no kernel computes."""
    env = env_of(graph)
    options = ScheduleOptions(
        fusion=to_compile.settings["fusion"],
        own_bytes=TRAINING_OWN_BYTES if half else None,
        examples={} if env is None else env.examples,
    )
    plan = None if half or left else _of_bodies(to_compile, graph, options)
    if plan is not None:
        return Selection(plan, options, None, half)
    run = functools.partial(run_stage, to_compile)
    refuses: Refuses | None = (lambda device, made, node: node in left) if left else None
    if _meets_gpu(graph):
        refuses = _gpu().refuses(functools.partial(_left_to_pytorch, to_compile), left)
    program: LoopProgram = run(
        "loops", "loops", print_program, lower, graph, to_compile.constants, options.fusion, refuses
    )
    gpu = None if _is_on_cpu(program) else _gpu()
    if gpu is not None:
        options = gpu.schedule_options(options, program)
    work = schedule if gpu is None else gpu.scheduled
    plan = run("schedule", "", plan_text, work, program, options)
    return Selection(plan, options, gpu, half, makers=program.makers)


def _left_to_pytorch(to_compile: GraphToCompile, reason: str) -> None:
    hint = f"an operator is called as PyTorch has it: no kernel can be generated for {reason}"
    to_compile.notify(Hint(to_compile.function, hint))


def _meets_gpu(graph: torch.fx.Graph) -> bool:
    return any(kind.device.type == "cuda" for node in graph.nodes for kind in types_in(node.meta.get("type")))


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
    repeat = Repeat(short.body, short.following, own, short.left_out, bodies.moved_lines(found))
    try:
        return run("schedule", "", plan_text, schedule, program, options, repeat)
    except Irregular:
        return None


def _is_on_cpu(program: LoopProgram) -> bool:
    return all(buffer.device.type == "cpu" for buffer in program.buffers.values())
