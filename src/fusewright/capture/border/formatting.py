"""Text made of values at the border: formatted strings, `str`, `repr` and `ascii`.

Takes real values; gives the text that eager would, or a text that waits for a tensor's numbers. Always holds: an
outside object or a tensor never reaches native code that would print it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import PLAIN, for_native, text_ready
from fusewright.capture.border.protocols import answered
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.symbolic import concrete_inside
from fusewright.capture.border.values.text import text_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


_CONVERSIONS: dict[int, str] = {
    0: "format",
    -1: "format",
    1: "str",
    2: "repr",
    3: "ascii",
    ord("s"): "str",
    ord("r"): "repr",
    ord("a"): "ascii",
}


def format_value(world: World, value: Any, conversion: int, spec: str) -> Any:
    """One replacement field of a formatted string."""
    value = concrete_inside(for_native(world, value))  # the text shows the number, so a guard fixes it
    how = _CONVERSIONS[conversion]
    if isinstance(value, torch.Tensor) and not (spec and (how != "format" or value.dim())):
        return text_of(value, format, spec) if how == "format" else text_of(value, _CONVERTERS[how])
    if how == "format":
        method = classes.python_method(world, type(value), "__format__") if type(value) not in PLAIN else None
        if method is not None:
            return answered(
                world, value, "__format__", lambda echo: format(echo, spec), world.tracer.call(method, (value, spec))
            )
        if not spec:
            return to_text(world, value, "str")
        return native(format, text_ready(world, value), spec)
    return native(format, to_text(world, value, how), spec)


def to_text(world: World, value: Any, how: str) -> Any:
    """`str`, `repr` or `ascii` of a value; special methods written in Python are interpreted."""
    value = concrete_inside(for_native(world, value))
    if isinstance(value, torch.Tensor):
        return text_of(value, _CONVERTERS[how])
    if how == "str":
        method = classes.python_method(world, type(value), "__str__")
        if method is None and classes.lookup(type(value), "__str__") is object.__str__:
            return to_text(world, value, "repr")
        if method is not None:
            return answered(world, value, "__str__", str, world.tracer.call(method, (value,)))
    else:
        method = classes.python_method(world, type(value), "__repr__")
        if method is not None:
            text = answered(world, value, "__repr__", repr, world.tracer.call(method, (value,)))
            return (
                native(str.encode, text, "ascii", "backslashreplace").decode()
                if how == "ascii" and not text.isascii()
                else text
            )
    ready = text_ready(world, value)
    return native(_CONVERTERS[how], ready)


_CONVERTERS: dict[str, Any] = {"str": str, "repr": repr, "ascii": ascii}
