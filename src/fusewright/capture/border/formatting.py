"""Text made of values at the border: formatted strings, `str.format`, `str`, `repr` and `ascii`.

Takes real values; gives the text that eager would, or a text that waits for a tensor's numbers. Always holds: an
outside object or a tensor never reaches native code that would print it.
"""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import itertools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import PLAIN, for_native, text_ready
from fusewright.capture.border.protocols import answered
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.symbolic import concrete_inside
from fusewright.capture.border.values.text import joined, text_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

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


def format_text(world: World, template: str, args: Args, kwargs: Kwargs) -> Any:
    """`template.format(*args, **kwargs)`; values that format themselves do so through the border."""
    if any(_formats_itself(world, value) for value in (*args, *kwargs.values())):
        # complaints about the template itself
        native(str.format, template, *(_Anything() for _ in args), **dict.fromkeys(kwargs, _Anything()))
        return joined(_fields(world, template, args, kwargs, itertools.count()))
    named = {name: text_ready(world, value) for name, value in kwargs.items()}
    return native(str.format, template, *(text_ready(world, value) for value in args), **named)


class _Anything:
    """Has every attribute and every element, and no text."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""

    __str__ = __repr__ = lambda self: ""


def _formats_itself(world: World, value: Any) -> bool:
    names = ("__format__", "__str__", "__repr__") if type(value) not in PLAIN else ()
    return any(classes.python_method(world, type(value), name) is not None for name in names)


def _fields(world: World, template: str, args: Args, kwargs: Kwargs, numbers: Iterator[int]) -> list[Any]:
    """The parts of a formatted string, each value formatted through the border. `numbers`: of the fields that name no
    argument."""
    parts: list[Any] = []
    for literal, field, spec, conversion in native(_string.formatter_parser, template):
        parts.append(literal)
        if field is not None:
            name, path = native(_string.formatter_field_name_split, field)
            name = next(numbers) if name == "" else name
            value = native(operator.getitem, args if type(name) is int else kwargs, name)
            for is_attribute, key in path:
                value = world.getattr(value, key) if is_attribute else world.getitem(value, key)
            inner = joined(_fields(world, spec, args, kwargs, numbers))
            parts.append(world.format(value, ord(conversion) if conversion else 0, inner))
    return parts
