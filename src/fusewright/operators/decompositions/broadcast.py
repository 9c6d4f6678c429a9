"""torch.broadcast_tensors over symbolic sizes: a tensor that has the common shape is given back as the same object.

Takes the call's arguments; gives the recorded results. PyTorch's Python version for symbolic sizes makes a view of each
tensor. Always holds: what this file does not know, arguments that are wrong included, runs natively.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.sizes.interfaces import Recorder


def broadcast_tensors(
    recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The results of `torch.broadcast_tensors(*args)`, or None."""
    given = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if recorder.level != "aten" or not recorder.symbolic or not all(isinstance(t, torch.Tensor) for t in given):
        return None
    made = call(torch.broadcast_tensors, args, kwargs)
    return type(made)(own if own.shape == one.shape else one for own, one in zip(given, made, strict=True))
