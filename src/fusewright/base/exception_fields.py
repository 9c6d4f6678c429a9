"""The fields that every exception has, read and written as CPython itself does: its class, which may have a
`__getattribute__` or a `__setattr__` of the program's, is not asked.

Takes an exception, and what a field is to hold; gives what it holds.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

_FIELDS: Any = vars(BaseException)

args_of: Callable[[BaseException], tuple[Any, ...]] = _FIELDS["args"].__get__
cause_of: Callable[[BaseException], BaseException | None] = _FIELDS["__cause__"].__get__
context_of: Callable[[BaseException], BaseException | None] = _FIELDS["__context__"].__get__
traceback_of: Callable[[BaseException], types.TracebackType | None] = _FIELDS["__traceback__"].__get__
suppresses_context: Callable[[BaseException], bool] = _FIELDS["__suppress_context__"].__get__

set_args: Callable[[BaseException, tuple[Any, ...]], None] = _FIELDS["args"].__set__
set_cause: Callable[[BaseException, BaseException | None], None] = _FIELDS["__cause__"].__set__
set_context: Callable[[BaseException, BaseException | None], None] = _FIELDS["__context__"].__set__
set_traceback: Callable[[BaseException, types.TracebackType | None], None] = _FIELDS["__traceback__"].__set__
set_suppresses_context: Callable[[BaseException, bool], None] = _FIELDS["__suppress_context__"].__set__

with_traceback: Callable[[BaseException, types.TracebackType | None], BaseException] = _FIELDS["with_traceback"]


def context_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, its context, the context of that, and so on. A program may close the chain to a ring: each
    exception comes once."""
    passed: set[int] = set()
    while error is not None and id(error) not in passed:
        passed.add(id(error))
        following = context_of(error)  # read first: the caller may cut the chain here
        yield error
        error = following


def has_no_dict(error: BaseException) -> bool:
    """Whether nothing has asked for the exception's instance dictionary yet: that makes one, and copies tell."""
    return len(BaseException.__reduce__(error)) == 2
