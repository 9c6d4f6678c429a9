"""What the interpreter's own objects are to a program, and what stands for a traceback: interpreted frames have none.

Always holds: that is true and no None, knows the exception and the lines that its traceback had at that moment (so that
it can be made at run time), and whatever looks into it breaks the graph there: outside of it tracebacks are genuine. No
torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

from fusewright.base.signals import GraphBreak


class AbsentTraceback:
    """See the module's docstring; a program sees a `types.TracebackType`. `left` is as in `tracebacks.Raised`."""

    __slots__ = ("error", "left")

    def __init__(self, error: BaseException, left: tuple[Any, ...]) -> None:
        self.error = error
        self.left = left

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return types.TracebackType

    def __getattr__(self, name: str) -> NoReturn:
        raise GraphBreak("frame-access", f"{name} of a traceback: interpreted frames leave none")

    def __repr__(self) -> NoReturn:
        raise GraphBreak("frame-access", "the text of a traceback: interpreted frames leave none")


STAND_FOR: dict[type, type] = {AbsentTraceback: types.TracebackType}
"""The types of the interpreter's own objects that a program meets, with what they are to it."""

LOOK_LIKE: dict[type, Callable[[Any], Any]] = {}
"""For types of stand-ins: what gives one of CPython's objects that looks like this one, its methods too."""


def look_alike(value: Any) -> Any:
    """CPython's object that a stand-in, or a bound method of one, looks like; None for any other value."""
    example = LOOK_LIKE.get(type(value))
    if example is not None:
        return example(value)
    if type(value) is not types.MethodType:
        return None
    owner, name = value.__self__, value.__func__.__name__
    example = LOOK_LIKE.get(type(owner))
    if example is None or getattr(type(owner), name, None) is not value.__func__:
        return None
    return getattr(example(owner), name)
