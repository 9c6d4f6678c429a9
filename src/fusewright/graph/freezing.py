"""What a compiled graph computes from parameters beforehand, as data.

A `Prepacking` is a list of operator calls on some of the graph's inputs; `run` performs it. It is small and rarely
run, so it is interpreted. Some values are made for one size and serve any (a matrix packed for a number of rows): they
are prepared for the sizes that usually come, which the graph is told too. Always holds: no gradients, no autocast, and
none of the caller's dispatch modes take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusewright.base.records import dataclass
from fusewright.sizes.expressions import from_tuples
from fusewright.sizes.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Ref:
    """The value number `index`: first the inputs, then the steps' results."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number made of the usual sizes, as `sizes.to_tuples` gives it."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Step:
    """target(*args, **kwargs). Without a target: args[0], or item args[1] of it."""

    target: OpOverload | None
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Prepacking:
    """inputs: positions, among the graph's inputs, of the parameters. results: the prepared values; types: of each.
    usual: (position, among the graph's inputs, of a size; the name that `Size` has for its usual value)."""

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    results: tuple[Ref, ...]
    types: tuple[TensorType, ...]
    usual: tuple[tuple[int, str], ...] = ()

    @property
    def added(self) -> int:
        """How many inputs the graph has behind the caller's: the usual sizes, then the prepared values."""
        return len(self.usual) + len(self.results)

    def run(self, parameters: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
        """The prepared values. `sizes`: the usual ones. Raises ValueError when one is not of its type, and whatever an
        operator raises."""
        numbers = {name: size for (_, name), size in zip(self.usual, sizes, strict=True)}
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch._C.DisableTorchFunction(),
        ):
            values: list[Any] = [parameter.detach() for parameter in parameters]
            for step, unread in zip(self.steps, self._last_read()):
                args = _resolve(step.args, values, numbers)
                if step.target is None:
                    values.append(args[0][args[1]] if len(args) == 2 else args[0])
                else:
                    values.append(
                        step.target(*args, **{name: _resolve(value, values, numbers) for name, value in step.kwargs})
                    )
                for index in unread:
                    values[index] = None  # its memory serves the next steps
        results = tuple(values[ref.index] for ref in self.results)
        for value, type_ in zip(results, self.types, strict=True):
            opaque = value.layout is not torch.strided  # the library's own layout, whose size is its own matter
            if value.dtype != type_.dtype or not (
                opaque or (tuple(value.shape) == type_.shape and _has_strides(value, type_))
            ):
                raise ValueError(f"a prepared value is {value.dtype}{tuple(value.shape)}, not {type_}")
        return results

    def _last_read(self) -> list[list[int]]:
        """For each step, the values that are read by it for the last time and are no results."""
        kept = {ref.index for ref in self.results}
        unread: list[list[int]] = []
        for step in reversed(self.steps):
            read = {index for index in _indices((step.args, *(value for _, value in step.kwargs))) if index not in kept}
            kept |= read
            unread.append(sorted(read))
        return unread[::-1]


def _indices(argument: Any) -> Iterator[int]:
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _indices(item)


def _has_strides(value: torch.Tensor, type_: TensorType) -> bool:
    return value.numel() == 0 or all(
        size == 1 or a == b for size, a, b in zip(value.shape, value.stride(), type_.stride)
    )


def _resolve(argument: Any, values: list[Any], numbers: Mapping[str, int]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, Size):
        return from_tuples(argument.tree, numbers)
    return [_resolve(item, values, numbers) for item in argument] if isinstance(argument, tuple) else argument
