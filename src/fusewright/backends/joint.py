"""Compiling a joint graph: split it, compile both halves, join them in an autograd function.

Takes a functional joint graph and a compiler of one graph; gives the callable that the entry runs. Used by every backend that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from fusewright.autograd.function import Halves, differentiable
from fusewright.autograd.joint import JointGraph, forward_only
from fusewright.autograd.partition import split
from fusewright.backends.registry import GraphToCompile


def compile_joint(
    graph: torch.fx.Graph, to_compile: GraphToCompile, compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]]
) -> Callable[..., Any]:
    """`graph` is the functional form of `to_compile.graph`; `compile_half(graph, name)` compiles one half."""
    backward = to_compile.backward
    assert backward is not None
    joint = JointGraph(graph, backward.inputs, backward.outputs, backward.tangents, backward.gradients)
    halves = split(joint)
    replay = to_compile.module(forward_only(to_compile.graph, backward.inputs, backward.outputs))
    compiled = Halves(
        forward=compile_half(halves.forward, f"{to_compile.function} forward"),
        backward=compile_half(halves.backward, f"{to_compile.function} backward"),
        replay=replay.forward,
        outputs=backward.outputs,
        tangents=backward.tangents,
        gradients=backward.gradients,
        saved_inputs=halves.saved_inputs,
    )
    return differentiable(compiled)
