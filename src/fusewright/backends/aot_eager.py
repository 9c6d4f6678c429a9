"""Backend `aot_eager`: records ATen operators, runs the graph passes, then runs the result with PyTorch's own
operators.

Tests the recorder and the passes apart from loops and code generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile, by_operators
from fusewright.backends.repeat import repeatable
from fusewright.graph import passes


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = passes.run(to_compile.graph)  # inputs are written to at its end only
    if to_compile.backward is None:
        return repeatable(by_operators(to_compile, graph), graph)
    to_compile = to_compile.without_examples()
    return repeatable(compile_joint(graph, to_compile, lambda half, _: by_operators(to_compile, half)), graph)


BACKEND = Backend("aot_eager", "aten", _compile, follows_autograd=False, trains=True)
