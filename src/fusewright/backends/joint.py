"""Compiling a joint graph: split it, compile both halves, join them in an autograd function.

Takes a functional joint graph and a compiler of one graph; gives the callable that the entry runs. Used by every backend that trains.
Always holds: the joint graph and its halves are announced (artifact "aot_graphs") before anything is made of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.fx

from fusewright.autograd.buckets import CompiledPart, bucket_bytes, buckets, parts_of
from fusewright.autograd.function import Graphs, Halves, differentiable
from fusewright.autograd.joint import JointGraph, Split, constant_gradients, tangents_of_gradients
from fusewright.autograd.partition import split
from fusewright.autograd.replay import replay
from fusewright.backends.registry import GraphToCompile
from fusewright.events import FellBack, StageDone
from fusewright.graph.generators import drawing_devices
from fusewright.graph.printer import print_graph
from fusewright.graph.sizes import Expr


def compile_joint(
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]],
    partition: Callable[[JointGraph], Split] = split,
    record: Callable[..., Graphs | None] = lambda *halves: None,
) -> Callable[..., Any]:
    """`graph` is the functional form of `to_compile.graph`; `compile_half(graph, direction)` compiles one half ("forward", "backward");
    `record(forward, backward, saved, outputs)` gives what replays the compiled halves, if anything does."""
    backward = to_compile.backward
    assert backward is not None
    joint = JointGraph(graph, backward.inputs, backward.outputs, backward.tangents, backward.gradients)
    started = time.perf_counter()
    halves = partition(joint)
    seconds = time.perf_counter() - started
    parts = (("joint graph", graph, 0.0), ("forward graph", halves.forward, seconds), ("backward graph", halves.backward, 0.0))
    for stage, part, spent in parts:
        to_compile.notify(StageDone(to_compile.function, stage, functools.partial(print_graph, part), spent, "aot_graphs"))
    function, notify = to_compile.function, to_compile.notify  # not `to_compile` itself, which holds the first call's inputs
    again = None
    if backward.user_code is not None:
        again = replay(to_compile.graph, backward.inputs, backward.outputs, to_compile.constants, backward.user_code)
    in_parts = _parts(halves.backward, compile_half)
    run_forward = compile_half(halves.forward, "forward")
    run_backward = compile_half(halves.backward, "backward") if backward.gradients and not in_parts else no_gradients
    compiled = Halves(
        forward=run_forward,
        backward=run_backward,
        parts=in_parts,
        graphs=record(run_forward, run_backward, halves.saved, backward.outputs),
        replay=again,
        random=drawing_devices(halves.forward),
        updates=bool(backward.updates),
        outputs=backward.outputs,
        tangents=backward.tangents,
        gradients=backward.gradients,
        saved=halves.saved,
        depends=tangents_of_gradients(joint),
        constant=constant_gradients(joint),
        fell_back=lambda reason: notify(FellBack(f"{function} backward", reason)),
    )
    kinds = [node.meta["type"] for node in to_compile.graph.nodes if node.op == "placeholder"][: backward.inputs]
    return differentiable(compiled, backward, tuple(kind if isinstance(kind, Expr) else None for kind in kinds))


def _parts(graph: torch.fx.Graph, compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]]) -> tuple[CompiledPart, ...]:
    """The backward cut at the borders of DistributedDataParallel's buckets, compiled; nothing outside of such a module."""
    capacities = bucket_bytes()
    if capacities is None:
        return ()
    groups = buckets(graph, *reversed(capacities))
    if len(groups) < 2:
        return ()
    parts = parts_of(graph, groups)
    return tuple(
        CompiledPart(compile_half(part.graph, f"backward part {index}"), part.reads, part.gradients) for index, part in enumerate(parts)
    )


def no_gradients(*values: Any) -> tuple[Any, ...]:
    """The backward of a graph whose inputs get none."""
    return ()
