"""Backend `aot_eager`: records ATen operators, runs the graph passes, then runs the result with PyTorch's own operators.

Tests the recorder and the passes apart from loops and code generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.graph import passes


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    to_compile.graph = passes.run(to_compile.graph)
    return to_compile.module().forward


BACKEND = Backend("aot_eager", "aten", _compile, differentiable=False)
