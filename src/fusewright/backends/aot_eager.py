"""Backend `aot_eager`: records ATen operators, runs the graph passes, then runs the result with PyTorch's own
operators.

Tests the recorder and the passes apart from loops and code generation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile, below_autograd
from fusewright.backends.repeat import repeatable
from fusewright.base.pytorch import methods, torch
from fusewright.graph import passes
from fusewright.graph.grad_mode import run_with_grad_mode


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = passes.run(to_compile.graph)  # inputs are written to at its end only
    if to_compile.backward is None:
        return repeatable(_run(to_compile, graph, "forward"), graph)
    return repeatable(compile_joint(graph, to_compile, functools.partial(_run, to_compile.without_examples())), graph)


def _copy(counted: int, written: torch.Tensor, value: torch.Tensor) -> None:
    """A write that the tensor's version counts as so many."""
    methods.copy_(written.data, value)
    torch.autograd.graph.increment_version([written] * counted)


def _run(to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    run_with_grad_mode(graph)
    for node in graph.nodes:
        if node.meta.get("counted", 1) != 1:
            node.target = functools.partial(_copy, node.meta["counted"])
    return below_autograd(to_compile.module(graph).forward)


BACKEND = Backend("aot_eager", "aten", _compile, follows_autograd=False, trains=True)
