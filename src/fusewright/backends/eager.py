"""Backend `eager`: runs the captured torch-level graph with PyTorch's own operators. Tests capture alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.backends.registry import Backend, GraphToCompile


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    return to_compile.module().forward


BACKEND = Backend("eager", "torch", _compile)
