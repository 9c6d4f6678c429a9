"""Python floats as inputs of a compiled graph: they reach it as 0-dimensional float64 tensors.

Takes the sources of a graph's inputs and the compiled callable; gives the sources that guards read, and a callable that
converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusewright.capture.guards.sources import ArrayTensor, NumberTensor, Source


def plain_sources(inputs: Sequence[Source]) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Where each input is read, and the positions of those that are floats or NumPy arrays."""
    positions = tuple(
        position for position, source in enumerate(inputs) if isinstance(source, (NumberTensor, ArrayTensor))
    )
    return tuple(
        source.base if isinstance(source, (NumberTensor, ArrayTensor)) else source for source in inputs
    ), positions


def takes_numbers(compiled: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """`compiled` over inputs of which those at `positions` are Python floats or NumPy arrays."""
    cpu, float64, tensor = torch.device("cpu"), torch.float64, torch.tensor
    array, from_numpy = np.ndarray, torch.from_numpy

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for position in positions:
            value = given[position]
            given[position] = from_numpy(value) if type(value) is array else tensor(value, dtype=float64, device=cpu)
        return compiled(*given)

    return run


def under_inference_mode(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, to run under inference mode, which the captured frame enters by itself."""
    mode = torch._C._InferenceMode

    def run(*inputs: Any) -> Any:
        with mode(True):
            return compiled(*inputs)

    return run
