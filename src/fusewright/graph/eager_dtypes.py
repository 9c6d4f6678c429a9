"""Whether eager has a kernel for these dtypes, and what it gives: meta kernels, and loops of ours, accept more than PyTorch's CPU kernels.

Takes a pointwise operator with its arguments and the result type that was inferred (a TensorType in each tensor's place); gives the reason
why eager would do something else, else "". Always holds: the answer comes from the operator itself, run once for each combination of
dtypes on tensors of one element.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch._ops import OpOverload

from fusewright.graph.schema import functional_form
from fusewright.graph.sizes import Expr
from fusewright.graph.types import TensorType

_answers: dict[tuple[object, ...], tuple[torch.dtype, ...] | str] = {}


def disagreement(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> str:
    """Why eager refuses the call, or that it gives another dtype; empty when it agrees, or when the operator is no pointwise one of the
    CPU's."""
    if not _is_pointwise(func):
        return ""
    key = (func, torch.get_default_dtype(), *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
    found = _answers.get(key)
    if found is None:
        found = _answers[key] = () if _elsewhere((args, tuple(kwargs.values()))) else _asked(func, args, kwargs)
    if isinstance(found, str):
        return found
    inferred = _dtypes(result)
    return f"eager gives {found}, its meta kernel {inferred}" if found and found != inferred else ""


@cache
def _is_pointwise(func: OpOverload) -> bool:
    """Without random numbers: asking must change nothing."""
    tags = (functional_form(func) or func).tags  # in-place forms are not all tagged
    return (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags) or func in _LOSSES


# Losses go over their operands as pointwise operators do, and then reduce.
_LOSSES = frozenset(
    getattr(torch.ops.aten, name).default
    for loss in ("huber_loss", "smooth_l1_loss", "mse_loss", "soft_margin_loss", "binary_cross_entropy")
    for name in (loss, f"{loss}_backward")
)


def _kind(value: object) -> object:
    """What of an argument may decide: the dtype and whether there are dimensions, the type of a number and its sign."""
    if isinstance(value, TensorType):
        return value.dtype, bool(value.shape), value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, (int, float)):
        return type(value), value < 0
    return value if isinstance(value, (torch.dtype, str)) else type(value)


def _elsewhere(value: object) -> bool:
    if isinstance(value, TensorType):
        return value.device.type != "cpu"
    return isinstance(value, (list, tuple)) and any(map(_elsewhere, value))


def _asked(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[torch.dtype, ...] | str:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _dtypes(func(*map(_small, args), **{name: _small(value) for name, value in kwargs.items()}))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _dtypes(result: object) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, (torch.Tensor, TensorType)))


def _small(value: object) -> object:
    if isinstance(value, TensorType):
        return torch.ones([1] if value.shape else [], dtype=value.dtype)
    if isinstance(value, Expr):
        return 1
    return [_small(item) for item in value] if isinstance(value, (list, tuple)) else value


__all__ = ["disagreement"]
