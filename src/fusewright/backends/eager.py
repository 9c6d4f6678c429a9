"""Backend `eager`: runs the captured torch-level graph with PyTorch's own operators. Tests capture alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.backends.repeat import repeatable


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    return repeatable(to_compile.module().forward, to_compile.graph, torch_level=True)


BACKEND = Backend("eager", "torch", _compile)
