"""Methods of texts that format: `str.format`, `str.format_map` and `%`.

Takes the method, the text and its arguments; gives what the method gives. Always holds: values that format themselves
do so through the border.
"""

from __future__ import annotations

import _string  # type: ignore[import-not-found]
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fusewright.capture.border.native import native
from fusewright.capture.border.native_ready import PLAIN, text_ready
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.text import joined
from fusewright.capture.call.support import receiver_and_rest

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _format_text(tracer: Tracer, fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    world = tracer.world
    if any(_formats_itself(world, value) for value in (*args, *kwargs.values())):
        # complaints about the template itself
        native(owner.format, *(_Anything() for _ in args), **dict.fromkeys(kwargs, _Anything()))
        return joined(_fields(world, owner, args, kwargs, itertools.count()))
    ready = tuple(text_ready(world, value) for value in args)
    return native(
        fn,
        *receiver_and_rest(fn, owner, ready),
        **{name: text_ready(world, value) for name, value in kwargs.items()},
    )


class _Anything:
    """Has every attribute and every element, and no text."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""

    __str__ = __repr__ = lambda self: ""


def _formats_itself(world: Any, value: Any) -> bool:
    names = ("__format__", "__str__", "__repr__") if type(value) not in PLAIN else ()
    return any(classes.python_method(world, type(value), name) is not None for name in names)


def _fields(world: Any, template: str, args: Args, kwargs: Kwargs, numbers: Iterator[int]) -> list[Any]:
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


ROWS: dict[str, Callable[[Any, Any, Any, Args, Kwargs], Any]] = {
    "format": _format_text,
    "format_map": lambda tracer, fn, owner, args, kwargs: native(
        fn, *receiver_and_rest(fn, owner, (text_ready(tracer.world, args[0]),))
    ),
    "__mod__": lambda tracer, fn, owner, args, kwargs: tracer.world.binary("%", owner, args[0]),
}
