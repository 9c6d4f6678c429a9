"""Backend `eager`: runs the captured torch-level graph with PyTorch's own operators. Tests capture alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.backends.repeat import drawn_by_checked, repeatable, writes


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = to_compile.graph
    return repeatable(to_compile.module().forward, writes(graph), drawn_by_checked(graph))


BACKEND = Backend("eager", "torch", _compile)
