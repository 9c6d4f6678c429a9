"""Values that nobody may look at while the graph is recorded: texts that show tensors, and what is carried along.

Takes the pieces of a formatted string; gives a `TensorText`, which is carried about, dropped (the message of a check
that holds), or made outside, after the graph. Always holds: whatever would look at its characters is the graph break
"print-tensor", at that place; what would look at a `Carried` is refused likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fusewright.base.signals import GraphBreak, Retry


class Unread:
    """Stands for a value that nobody may look at while the graph is recorded: whatever would do so is refused."""

    __slots__ = ()

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError

    __str__ = __repr__ = __format__ = __eq__ = __ne__ = __hash__ = __bool__ = __len__ = __iter__ = __contains__ = (
        __getitem__
    ) = lambda self, *args: self.refuse()
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __reduce_ex__ = (
        __mod__
    ) = __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = __pow__ = (
        __rpow__
    ) = __or__ = __ror__ = __and__ = __rand__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = (
        __int__
    ) = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = __bytes__ = __fspath__ = (
        lambda self, *args: self.refuse()  # type: ignore[assignment]
    )


class TensorText(Unread):
    """pieces: strings, and (tensor, function that makes its text, further arguments, the tensor's version)."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: tuple[Any, ...]) -> None:
        self.pieces = pieces

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise GraphBreak("print-tensor", "a tensor turned into text")


class Carried(Unread):
    """Stands for an immutable value from outside that is handed on. changes: other ones have been there at other calls,
    so that what looks at it breaks the graph; else it makes the next attempt take the value itself. copied: what makes
    a copy, and the value that it is one of."""

    __slots__ = ("changes", "copied", "kind")

    def __init__(self, kind: type, changes: bool, copied: tuple[Callable[[Any], Any], Carried] | None = None) -> None:
        self.kind = kind
        self.changes = changes
        self.copied = copied

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        if not self.changes:
            raise Retry(carries=False)
        raise GraphBreak("opaque-object", f"a {self.kind.__qualname__} that changes from call to call is looked at")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


def text_of(tensor: torch.Tensor, make: Callable[..., str], *arguments: str) -> TensorText:
    """`make(tensor, *arguments)`, to be computed after the graph. An inference tensor breaks the graph: its writes are
    not counted."""
    if tensor.is_inference():
        TensorText(()).refuse()
    return TensorText(((tensor, make, arguments, tensor._version),))


def joined(parts: list[Any]) -> Any:
    """`"".join(parts)`, where some parts may be such text."""
    if not any(type(part) is TensorText for part in parts):
        return "".join(parts)
    return TensorText(
        tuple(piece for part in parts for piece in (part.pieces if type(part) is TensorText else (part,)))
    )


def refuse_if_shown(values: Any, said: str = "", depth: int = 0) -> None:
    """The refusal of native code that was given such a value and complained: `said` names what an iterator gave it."""
    if TensorText.__name__ in said or Carried.__name__ in said:
        TensorText(()).refuse()
    for value in values:
        if issubclass(type(value), Unread):
            value.refuse()
        if depth < 3 and type(value) in (list, tuple):
            refuse_if_shown(value, depth=depth + 1)
