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

from fusewright.autograd.function import Halves, differentiable
from fusewright.autograd.joint import JointGraph, Split, forward_only
from fusewright.autograd.partition import split
from fusewright.backends.registry import GraphToCompile
from fusewright.events import FellBack, StageDone
from fusewright.graph.printer import print_graph


def compile_joint(
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]],
    partition: Callable[[JointGraph], Split] = split,
) -> Callable[..., Any]:
    """`graph` is the functional form of `to_compile.graph`; `compile_half(graph, direction)` compiles one half ("forward", "backward")."""
    backward = to_compile.backward
    assert backward is not None
    joint = JointGraph(graph, backward.inputs, backward.outputs, backward.tangents, backward.gradients)
    started = time.perf_counter()
    halves = partition(joint)
    seconds = time.perf_counter() - started
    parts = (("joint graph", graph, 0.0), ("forward graph", halves.forward, seconds), ("backward graph", halves.backward, 0.0))
    for stage, part, spent in parts:
        to_compile.notify(StageDone(to_compile.function, stage, functools.partial(print_graph, part), spent, "aot_graphs"))
    replay = to_compile.module(forward_only(to_compile.graph, backward.inputs, backward.outputs))
    compiled = Halves(
        forward=compile_half(halves.forward, "forward"),
        backward=compile_half(halves.backward, "backward"),
        replay=replay.forward,
        outputs=backward.outputs,
        tangents=backward.tangents,
        gradients=backward.gradients,
        saved_inputs=halves.saved_inputs,
        fell_back=lambda reason: to_compile.notify(FellBack(f"{to_compile.function} backward", reason)),
    )
    return differentiable(compiled)
