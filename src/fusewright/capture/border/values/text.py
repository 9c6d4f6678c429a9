"""Text that shows tensors: an f-string's result whose characters nobody may look at while the graph is recorded.

Takes the pieces of a formatted string; gives a `TensorText`, which is carried about, dropped (the message of a check
that holds), or made outside, after the graph. Always holds: whatever would look at the characters is the graph break
"print-tensor", at that place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fusewright.base.signals import GraphBreak


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise GraphBreak("print-tensor", "a tensor turned into text")


class TensorText:
    """pieces: strings, and (tensor, function that makes its text, further arguments, the tensor's version)."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: tuple[Any, ...]) -> None:
        self.pieces = pieces

    __str__ = __repr__ = __format__ = __eq__ = __ne__ = __hash__ = __bool__ = __len__ = __iter__ = __contains__ = (
        __getitem__
    ) = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __reduce_ex__ = (
        _refuse  # type: ignore[assignment]
    )


def text_of(tensor: torch.Tensor, make: Callable[..., str], *arguments: str) -> TensorText:
    """`make(tensor, *arguments)`, to be computed after the graph. An inference tensor breaks the graph: its writes are
    not counted."""
    if tensor.is_inference():
        _refuse()
    return TensorText(((tensor, make, arguments, tensor._version),))


def joined(parts: list[Any]) -> Any:
    """`"".join(parts)`, where some parts may be such text."""
    if not any(type(part) is TensorText for part in parts):
        return "".join(parts)
    return TensorText(
        tuple(piece for part in parts for piece in (part.pieces if type(part) is TensorText else (part,)))
    )


def refuse_if_shown(values: Any, said: str = "", depth: int = 0) -> None:
    """The graph break of native code that was given such text and complained: `said` names what an iterator gave it."""
    if TensorText.__name__ in said:
        _refuse()
    for value in values:
        if type(value) is TensorText:
            _refuse()
        if depth < 3 and type(value) in (list, tuple):
            refuse_if_shown(value, depth=depth + 1)
