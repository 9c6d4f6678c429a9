"""Python floats as inputs of a compiled graph: they reach it as 0-dimensional float64 tensors.

Takes the sources of a graph's inputs and the compiled callable; gives the sources that guards read, and a callable that converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright.capture.sources import NumberTensor, Source


def plain_sources(inputs: Sequence[Source]) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Where each input is read, and the positions of those that are floats."""
    positions = tuple(position for position, source in enumerate(inputs) if isinstance(source, NumberTensor))
    return tuple(source.base if isinstance(source, NumberTensor) else source for source in inputs), positions


def takes_numbers(compiled: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """`compiled` over inputs of which those at `positions` are Python floats."""
    cpu, float64, tensor = torch.device("cpu"), torch.float64, torch.tensor

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for position in positions:
            given[position] = tensor(given[position], dtype=float64, device=cpu)
        return compiled(*given)

    return run
