"""Binding arguments to the locals of a frame, as CPython does.

Takes a function and a call's arguments; gives the values of its argument slots (positional, keyword-only, the `*args`
tuple, the `**kwargs` dict). Always holds: a call that does not fit raises the very TypeError that CPython would raise.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from fusewright._native import isinstance
from fusewright.base.signals import UserException
from fusewright.capture.bytecode.instructions import CO_VARARGS, CO_VARKEYWORDS, NULL, constant_body

_TAKES_KEYWORDS = TorchVersion(torch.__version__) >= "2.13"  # Function.apply

LoadDefault = Callable[[types.FunctionType, int | str | None], object]


def bind(
    function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], load_default: LoadDefault
) -> list[Any]:
    """The argument slots' values. `load_default(function, index or name)` reads a default through the border; None
    for which: there is none."""
    code = function.__code__
    count = code.co_argcount
    flags = code.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
    if not kwargs and not flags and len(args) == count and not code.co_kwonlyargcount:
        return list(args)
    values: list[Any] = [*args[:count], *[NULL] * (max(count - len(args), 0) + code.co_kwonlyargcount)]
    if len(args) > count and not flags & CO_VARARGS:
        raise _mismatch(function, args, kwargs, load_default)
    extra = _bind_keywords(function, args, kwargs, values, load_default) if kwargs else {}
    _bind_defaults(function, args, kwargs, values, load_default)
    if flags & CO_VARARGS:
        values.append(tuple(args[count:]))
    if flags & CO_VARKEYWORDS:
        values.append(extra)
    return values


def by_place(
    forward: Any, sets_up: bool, args: list[Any], kwargs: dict[str, Any], load_default: LoadDefault
) -> list[Any] | None:
    """What `torch.autograd.Function.apply` gives to autograd: arguments by place, with defaults where there is a
    `setup_context`. None where it refuses some, or binds them in a way that is not known."""
    if kwargs and not _TAKES_KEYWORDS:
        return None
    if sets_up:
        function = inspect.unwrap(forward)
        if not isinstance(function, types.FunctionType):
            return None
        code, values = function.__code__, bind(function, tuple(args), kwargs, load_default)
        if code.co_kwonlyargcount or code.co_flags & CO_VARKEYWORDS:
            return None
        return [*values[:-1], *values[-1]] if code.co_flags & CO_VARARGS else values
    if not kwargs:
        return args
    if not isinstance(forward, types.FunctionType):
        return None
    code = forward.__code__
    names = code.co_varnames[len(args) + 1 : code.co_argcount]  # the first one is the context
    given = list(itertools.takewhile(kwargs.__contains__, names))
    return [*args, *(kwargs[name] for name in given)] if len(given) == len(kwargs) else None


def _bind_keywords(
    function: types.FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: list[Any],
    load_default: LoadDefault,
) -> dict[str, Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    extra = {}
    for name, value in kwargs.items():
        slot = next((slot for slot in range(code.co_posonlyargcount, len(names)) if names[slot] == name), -1)
        if slot < 0:
            if not code.co_flags & CO_VARKEYWORDS:
                raise _mismatch(function, args, kwargs, load_default)
            extra[name] = value
        elif values[slot] is not NULL:
            raise _mismatch(function, args, kwargs, load_default)
        else:
            values[slot] = value
    return extra


def _bind_defaults(
    function: types.FunctionType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: list[Any],
    load_default: LoadDefault,
) -> None:
    code = function.__code__
    count = code.co_argcount
    first = count - len(function.__defaults__ or ())
    keyword_defaults = function.__kwdefaults__ or {}
    for slot in range(min(len(args), count), len(values)):
        if values[slot] is not NULL:
            continue
        if slot >= count:
            name = code.co_varnames[slot]
            if name not in keyword_defaults:
                raise _mismatch(function, args, kwargs, load_default)
            values[slot] = load_default(function, name)
        elif slot < first:
            raise _mismatch(function, args, kwargs, load_default)
        else:
            values[slot] = load_default(function, slot - first)


def _mismatch(
    function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any], load_default: LoadDefault
) -> UserException:
    """Lets CPython itself bind the arguments, to a function of the same signature that does nothing, for its
    message."""
    load_default(function, None)  # with other defaults the call may be right
    stand_in = types.FunctionType(
        constant_body(function.__code__), {}, function.__name__, function.__defaults__, function.__closure__
    )
    stand_in.__kwdefaults__ = function.__kwdefaults__
    stand_in.__qualname__ = function.__qualname__
    try:
        stand_in(*args, **kwargs)
    except TypeError as error:
        return UserException(error)
    raise AssertionError(f"CPython accepts the arguments of {function.__qualname__}")
