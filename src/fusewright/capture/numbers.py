"""Python floats as inputs of a compiled graph: they reach it as 0-dimensional float64 tensors.

Takes the sources of a graph's inputs and the compiled callable; gives the sources that guards read, and a callable that
converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusewright.capture.guards.sources import ArrayTensor, NumberTensor, PlainTensor, Source


def plain_sources(inputs: Sequence[Source]) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Where each input is read, and the positions of those that are floats or NumPy arrays."""
    positions = tuple(position for position, source in enumerate(inputs) if isinstance(source, _CONVERTED))
    return tuple(source.base if isinstance(source, _CONVERTED) else source for source in inputs), positions


_CONVERTED = (NumberTensor, ArrayTensor, PlainTensor)


def takes_numbers(compiled: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """`compiled` over inputs of which those at `positions` are Python floats or NumPy arrays."""
    cpu, float64, tensor = torch.device("cpu"), torch.float64, torch.tensor
    array, from_numpy = np.ndarray, torch.from_numpy
    plain, as_subclass = torch.Tensor, torch.Tensor.as_subclass

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for position in positions:
            value = given[position]
            if isinstance(value, plain):
                given[position] = as_subclass(value, plain)
            elif type(value) is array:
                given[position] = from_numpy(value)
            else:
                given[position] = tensor(value, dtype=float64, device=cpu)
        return compiled(*given)

    return run


def under_inference_mode(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, to run under inference mode, which the captured frame enters by itself."""
    mode = torch._C._InferenceMode

    def run(*inputs: Any) -> Any:
        with mode(True):
            return compiled(*inputs)

    return run
