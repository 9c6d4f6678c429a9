"""Backend `aot_eager`: records ATen operators, runs the graph passes, then runs the result with PyTorch's own
operators.

Tests the recorder and the passes apart from loops and code generation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile, below_autograd, counting_as_eager, counts_of
from fusewright.backends.repeat import repeatable
from fusewright.base.pytorch import torch
from fusewright.graph import passes
from fusewright.graph.grad_mode import run_with_grad_mode


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = passes.run(to_compile.graph)  # inputs are written to at its end only
    if to_compile.backward is None:
        return repeatable(_run(to_compile, graph, "forward"), graph)
    return repeatable(compile_joint(graph, to_compile, functools.partial(_run, to_compile.without_examples())), graph)


def _run(to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    run_with_grad_mode(graph)
    return counting_as_eager(below_autograd(to_compile.module(graph).forward), counts_of(graph))


BACKEND = Backend("aot_eager", "aten", _compile, follows_autograd=False, trains=True)
