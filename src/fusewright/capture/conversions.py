"""What reaches a compiled graph as another thing than it is: Python floats as 0-dimensional float64 tensors, NumPy
arrays and tensors of subclasses as plain ones, tensors that wrap others as their parts.

Takes the sources of a graph's inputs and the compiled callable; gives the sources that guards read, and a callable that
converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusewright._native import isinstance
from fusewright.base.pytorch import torch, with_history_as
from fusewright.capture.border.values.nested import outside_values
from fusewright.capture.guards.sources import (
    ArrayTensor,
    GeneratorState,
    JaggedValues,
    NumberTensor,
    PlainTensor,
    Source,
    WrappedPart,
)
from fusewright.record.apart import Apart, Form

Converted = tuple[int, Source]


def plain_sources(inputs: Sequence[Source]) -> tuple[tuple[Source, ...], tuple[Converted, ...]]:
    """Where each input is read, and the positions of those that are converted."""
    positions = tuple((position, source) for position, source in enumerate(inputs) if isinstance(source, _CONVERTED))
    return tuple(source.base if isinstance(source, _CONVERTED) else source for source in inputs), positions


_CONVERTED = (NumberTensor, ArrayTensor, GeneratorState, PlainTensor, WrappedPart, JaggedValues)


def converting(compiled: Callable[..., Any], converted: tuple[Converted, ...]) -> Callable[..., Any]:
    """`compiled` over inputs of which some are not yet what the graph takes."""
    positions = tuple(position for position, source in converted if type(source) is not WrappedPart)
    jagged = frozenset(position for position, source in converted if type(source) is JaggedValues)
    wrapped: dict[Any, list[tuple[int, int]]] = {}
    for position, source in converted:
        if isinstance(source, WrappedPart):
            wrapped.setdefault(source.form, []).append((position, source.index))
    if wrapped:
        compiled = _takes_wrapped(compiled, wrapped)
    if not positions:
        return compiled
    cpu, float64, tensor = torch.device("cpu"), torch.float64, torch.tensor
    array, from_numpy, generator = np.ndarray, torch.from_numpy, torch.Generator
    plain = torch.Tensor

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for position in positions:
            value = given[position]
            if position in jagged:
                given[position] = outside_values(value)
            elif isinstance(value, plain):
                given[position] = with_history_as(value, plain)  # gradients may be turned on inside
            elif type(value) is array:
                given[position] = from_numpy(value)
            elif type(value) is generator:
                given[position] = value.get_state()
            else:
                given[position] = tensor(value, dtype=float64, device=cpu)
        return compiled(*given)

    return run


def _takes_wrapped(compiled: Callable[..., Any], wrapped: dict[Form, list[tuple[int, int]]]) -> Callable[..., Any]:
    """`compiled` over inputs where a tensor that wraps others stands in the place of each of its parts."""
    groups = tuple((form, tuple(places)) for form, places in wrapped.items())

    def run(*inputs: Any) -> Any:
        given = list(inputs)
        for form, places in groups:
            with torch.enable_grad():  # the frame may have begun without gradients, and turned them on
                parts: Any = Apart.apply(form, True, given[places[0][0]])
            for position, index in places:
                given[position] = parts[index]
        return compiled(*given)

    return run


def under_inference_mode(compiled: Callable[..., Any], enabled: bool) -> Callable[..., Any]:
    """`compiled`, to run under inference mode or without it, as the captured frame does by itself."""
    mode = torch._C._InferenceMode
    inside = compiled if enabled else torch.no_grad()(compiled)  # whoever leaves the mode turns gradients on

    def run(*inputs: Any) -> Any:
        with mode(enabled):
            return inside(*inputs)

    return run
