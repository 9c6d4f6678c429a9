"""Backend `native`: a graph comes from the disk cache, or goes through the stages; its native call plan is loaded
either way.

Always holds: the stages (passes, loops, schedule, code generation) are imported when something must be compiled, not
before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright import _native
from fusewright.backends import graph_cache
from fusewright.backends.parts import has_data_sizes, in_parts
from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.backends.repeat import draws_once, repeatable
from fusewright.base.errors import CannotFunctionalise, warn_once
from fusewright.base.events import Hint, KernelMade
from fusewright.base.signals import GraphBreak
from fusewright.codegen.device_kernel import DeviceKernel, Unsupported
from fusewright.graph.freezing import Prepacking
from fusewright.runtime.artifact import CompiledGraph
from fusewright.runtime.parameters import with_prepacking


def compile_graph(to_compile: GraphToCompile) -> Callable[..., Any]:
    """A callable over the graph's flat inputs that gives the tuple of its outputs, with the backward attached for a
    joint graph."""
    with torch._C.DisableTorchFunction():  # the program's modes (a default device) are none of the compiler's
        return _compile(to_compile)


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    if to_compile.settings["triton.cudagraphs"]:
        _say_if_useless(to_compile)
    if to_compile.settings["bucket"]:
        to_compile = _stages().with_buckets(to_compile)
    if to_compile.backward is not None:
        stages = _stages()
        joint = importlib.import_module("fusewright.backends.joint")  # lazy, as the stages are
        split = importlib.import_module("fusewright.autograd.partition").split
        partition = functools.partial(split, budget=to_compile.settings["activation_memory_budget"])
        compile_half = functools.partial(_compile_half, to_compile.without_examples())
        graph = stages.optimise(to_compile, to_compile.graph)
        record = functools.partial(graph_cache.training_graphs, to_compile.without_examples())
        return joint.compile_joint(graph, to_compile, compile_half, partition, record)
    if to_compile.settings["pack_weights"]:
        _mark_parameters(to_compile)
    if has_data_sizes(to_compile.graph):
        return _compile_in_parts(to_compile)
    lookup = graph_cache.find(to_compile, to_compile.graph)
    plan = lookup.plan
    if plan is None:
        stages = _stages()
        with lookup:
            graph, prepacking = stages.split_parameters(to_compile, stages.optimise(to_compile, to_compile.graph))
            plan = _generate(to_compile, lookup, graph, to_compile.function, prepacking)
    return draws_once(plan, to_compile.graph)


def _say_if_useless(to_compile: GraphToCompile) -> None:
    """CUDA graphs were asked for: says so, once, where there is no GPU to record."""
    devices = {item.device.type for item in to_compile.example_inputs if isinstance(item, torch.Tensor)}
    if devices == {"cpu"}:
        text = 'on a CPU "triton.cudagraphs" (as in mode="reduce-overhead") does nothing'
        to_compile.notify(Hint(to_compile.function, text))
        warn_once(text)


def as_data(to_compile: GraphToCompile) -> tuple[CompiledGraph, tuple[DeviceKernel, ...]]:
    """The compiled graph as data, for a package, and its kernels on GPUs: made anew, and not loaded. Raises Unsupported
    for a graph that has no plan of kernels and operators, and CannotFunctionalise for one that has no pure form."""
    if has_data_sizes(to_compile.graph):
        raise Unsupported("sizes that depend on data")
    if to_compile.settings["pack_weights"]:
        _mark_parameters(to_compile)
    stages = _stages()
    graph, prepacking = stages.split_parameters(to_compile, stages.optimise(to_compile, to_compile.graph))
    made = stages.generate(graph, to_compile, to_compile.function, loads=False)
    device_kernels = tuple(code for code in made.kernels if isinstance(code, DeviceKernel))
    return CompiledGraph(made.plan, made.code, (), (), prepacking), device_kernels


def _compile_in_parts(to_compile: GraphToCompile) -> Callable[..., Any]:
    """A graph with sizes that depend on data."""
    stages = _stages()
    try:
        graph, prepacking = stages.split_parameters(to_compile, stages.optimise(to_compile, to_compile.graph))
    except GraphBreak as question:  # a pass asks something of a size that nobody knows yet
        raise CannotFunctionalise(question.detail) from None
    compiled = in_parts(graph, to_compile.constants, functools.partial(_compile_half, to_compile.without_examples()))
    return compiled if prepacking is None else with_prepacking(compiled, prepacking, len(to_compile.example_inputs))


def _mark_parameters(to_compile: GraphToCompile) -> None:
    """Marks the inputs that seldom change and whose changes are noticed: parameters in the memory of a CPU that count
    their versions."""
    placeholders = [node for node in to_compile.graph.nodes if node.op == "placeholder"]
    for position in to_compile.parameters:
        real = to_compile.example_inputs[position]
        if type(real) in (torch.Tensor, torch.nn.Parameter) and real.device.type == "cpu" and not real.is_inference():
            placeholders[position].meta["stable"] = True


def _stages() -> Any:
    return importlib.import_module("fusewright.backends.pipeline")  # lazy: see above


def _compile_half(to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    """The native plan of one half of a joint graph: the "forward" or the "backward"."""
    name = f"{to_compile.function} {direction}"
    if direction != "forward":
        graph = _stages().optimise(to_compile, graph, _stages().BACKWARD_STAGES)
    seeds: tuple[Any, ...] = ()
    recorded = to_compile.settings["triton.cudagraphs"] and to_compile.settings["triton.cudagraphs_training"]
    if direction == "forward" and to_compile.backward is not None and recorded:
        graph, seeds = _stages().seeds_outside(graph, graph_cache.RECORDED)
    lookup = graph_cache.find(to_compile, graph, name)
    plan = lookup.plan
    if plan is None:
        with lookup:
            plan = _generate(to_compile, lookup, graph, name, half=direction.split()[0])
    if seeds:
        return graph_cache.with_draws(plan, tuple(seed.draw for seed in seeds))
    # what waits to be recorded is no plan yet: its forward's caller sees to that (autograd.halves.Call)
    return draws_once(plan, graph) if direction == "forward" and isinstance(plan, _native.Plan) else plan


def _generate(
    to_compile: GraphToCompile,
    lookup: graph_cache.Lookup,
    graph: torch.fx.Graph,
    name: str,
    prepacking: Prepacking | None = None,
    half: str = "",
) -> Callable[..., Any]:
    """The native plan of a functional graph, compiled and stored under the key of `lookup`. `half`: see
    native_stages.generate."""
    try:
        made = _stages().generate(graph, to_compile, name, half)
    except Unsupported as reason:
        to_compile.notify(
            Hint(to_compile.function, f"the graph runs operator by operator: no kernel can be generated for {reason}")
        )
        by_operators = repeatable(to_compile.module(graph).forward, graph)
        return (
            by_operators
            if prepacking is None
            else with_prepacking(by_operators, prepacking, len(to_compile.example_inputs))
        )
    compiled = CompiledGraph(made.plan, made.code, (), (), prepacking, made.autotuned or ())
    loaded = graph_cache.load_plan(to_compile, compiled, name, functools.partial(graph_cache.made_labels, made))
    for kernel in made.kernels:
        to_compile.notify(
            KernelMade(
                to_compile.function,
                kernel.name,
                kernel.locations,
                kernel.origins,
                functools.partial(str, kernel.source),
            )
        )
    if made.autotuned is not None and not graph_cache.short_of_kernels(made.plan):
        graph_cache.save(to_compile, lookup, compiled, made)
    return loaded


BACKEND = Backend(
    "native",
    "aten",
    compile_graph,
    follows_autograd=False,
    trains=True,
    own_random=True,
    takes_options=True,
    takes_mode=True,
)
