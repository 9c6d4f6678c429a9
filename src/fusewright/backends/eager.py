"""Backend `eager`: runs the captured torch-level graph with PyTorch's own operators. Tests capture alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.base.errors import RuntimeFallback
from fusewright.graph.collectives import is_collective


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    return repeatable(to_compile.module().forward, to_compile.graph, any(map(_writes, to_compile.graph.nodes)))


def repeatable(run: Callable[..., Any], graph: torch.fx.Graph, writes: bool = False) -> Callable[..., Any]:
    """`run` of a graph, whose failure means that the call is repeated eagerly: the user's program decides what becomes
    of the error, and gets its own traceback and side effects. Inputs that the graph has written to by then (`writes`:
    it may) get their old content back. Not so with collectives: other processes take part in them once."""
    if any(map(is_collective, graph.nodes)):
        return run

    def attempt(*inputs: Any) -> Any:
        kept = (
            [(value, _version(value), value.detach().clone()) for value in inputs if isinstance(value, torch.Tensor)]
            if writes
            else ()
        )
        try:
            return run(*inputs)
        except Exception as error:
            if _stops_a_checkpoint(error):
                raise
            with torch.no_grad():
                for value, version, content in kept:
                    if _version(value) != version or (version < 0 and torch.is_inference_mode_enabled()):
                        value.copy_(content)
            raise RuntimeFallback(f"{type(error).__name__}: {error}") from error

    return attempt


def _stops_a_checkpoint(error: Exception) -> bool:
    """Whether a checkpoint around the call has all that it wanted to compute again: PyTorch ends the forward with an
    exception then."""
    module = sys.modules.get("torch.utils.checkpoint")
    return module is not None and isinstance(error, module._StopRecomputationError)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # inference tensors do not count


def _writes(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (
        name in ("setitem", "__setitem__") or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    )
    return node.op.startswith("call_") and (
        in_place or "out" in node.kwargs or node.kwargs.get("inplace") is True or name in _STATISTICS
    )


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
)
_IN_PLACE = frozenset(f"i{name}" for name in _OPERATORS)
_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # they write to running means when training


BACKEND = Backend("eager", "torch", _compile)
