"""Recurrent layers over a symbolic length: one operator (operators/recurrent.py), since PyTorch's would fix the length and write out each step.

Takes the arguments of `torch.gru` and its kin; gives the recorded result, or None where they are recorded as they come: over lengths that
are numbers, of packed sequences, with dropout, autocast or gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright.operators.recurrent import RECURRENT
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.interpret.interpreter import Tracer

_ARGUMENTS = 9  # input, state, params, has_biases, num_layers, dropout, train, bidirectional, batch_first


def recurrent(tracer: Tracer, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `torch.<kind>(*args, **kwargs)`."""
    recorder = tracer.recorder
    if len(args) != _ARGUMENTS or kwargs or recorder.level != "aten" or not recorder.symbolic or not isinstance(args[2], list | tuple):
        return None
    x, state, params, biases, layers, dropout, train, bidirectional, batch_first = args
    tensors = (x, state, *params)
    if not all(type(tensor) is TracedTensor and tensor.device.type == "cpu" and tensor.dtype == x.dtype for tensor in tensors):
        return None
    if x.dim() != 3 or state.dim() != 3 or type(x.shape[1 if batch_first else 0]) is not torch.SymInt:
        return None
    if (train and dropout) or torch.is_autocast_enabled("cpu"):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    width = x.shape[2]
    if not isinstance(width, int) or params[0].shape[1] != width or state.shape[1] != x.shape[0 if batch_first else 1]:
        return None  # eager's error
    if state.shape[0] != layers * (2 if bidirectional else 1) or state.shape[2] != params[1].shape[1]:
        return None
    return tracer.world.torch_call(RECURRENT, (x, state, list(params), biases, layers, bidirectional, batch_first, kind), {})
