"""Immutable values that come with a call and are another object each time (a date): what only hands them on serves all of them; what
looks at them gives eager's answer, and is compiled a few times at most."""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import fractions
import functools
import pathlib
import re
import typing
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Captured, InternalError

MAKERS: dict[str, Callable[[int], Any]] = {
    "datetime": lambda i: datetime.datetime(2020, 1, 1 + i),
    "date": lambda i: datetime.date(2020, 1, 1 + i),
    "time": lambda i: datetime.time(i),
    "timedelta": lambda i: datetime.timedelta(i),
    "Decimal": lambda i: decimal.Decimal(i) / 4,
    "Fraction": lambda i: fractions.Fraction(i, 7),
    "UUID": lambda i: uuid.UUID(int=i),
    "path": lambda i: pathlib.PurePosixPath(f"a{i}"),
    "match": lambda i: re.match("(.)", f"a{i}"),
    "TypeVar": lambda i: typing.TypeVar(f"T{i}"),  # type: ignore[misc]
}
ONE = datetime.datetime(2020, 1, 1)
HANDED_ON: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "returned": lambda x, v: (x + 1, v, [v]),
    "kept": lambda x, v: {"v": v, "t": (v, x * 2)},
    "none": lambda x, v: (x + 1 if v is None else x + 2, v),
    "type": lambda x, v: (x + 1, type(v), isinstance(v, object), v.__class__, callable(v)),
    "copied": lambda x, v: (x + 1, copy.copy([v]), copy.deepcopy([v]), copy.copy(v), copy.deepcopy({"k": [v, v]}), type(copy.copy(v))),
    "called": lambda x, v: (x + 1, (lambda u=v: u)(), functools.partial(print, v)),
    "default": lambda x, v: (x + 1, collections.defaultdict(lambda: v)[1], {}.get(2, v)),
    "raised": lambda x, v: (x + 1, ValueError(v).args, slice(v)),
}


def broken(x: torch.Tensor, value: Any) -> Any:
    y = x + 1
    fusewright.graph_break()
    return y, value


HANDED_ON["broken"] = broken
LOOKED_AT: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "equal": lambda x, v: (x + 1, v == ONE, v != ONE, v is ONE, ONE is v),
    "copies": lambda x, v: (x + 1, copy.copy(v) is v, copy.deepcopy([v])[0] is v, copy.copy(v) == v, f"{copy.deepcopy(v)}"),
    "text": lambda x, v: (x + 1, f"{v}", str(v), repr([v]), "%s" % v, "{} {}".format(v, 1)),  # noqa: UP031, UP032
    "key": lambda x, v: (x + 1, {v: 1}[v], v in {v}, v in [v], [v].index(v)),
    "in lists": lambda x, v: (x + 1, [v] == [ONE], (v,) == (ONE,), [ONE].count(v)),
    "attributes": lambda x, v: (x + 1, hasattr(v, "year"), getattr(v, "numerator", 3)),
    "truth": lambda x, v: (x + 1 if v else x - 1, bool(v), not v),
    "sum": lambda x, v: (x + 1, v + v),
    "with a tensor": lambda x, v: x + v,
    "called": lambda x, v: (x + 1, v(1)),
    "iterated": lambda x, v: (x + 1, list(v)),
    "set": lambda x, v: (x + 1, setattr(v, "other", 1)),
    "held": lambda x, v: (x + 1, list[v], property(v).fget),  # type: ignore[valid-type]
    "joined": lambda x, v: (x + 1, ", ".join([v])),
    "given": lambda x, v: (x + 1, datetime.datetime.combine(v, v)),
    "sorted": lambda x, v: (x + 1, sorted([v, v]), max(v, v)),
}


def told(function: Any, *args: Any) -> str:
    try:
        return re.sub("0x[0-9a-f]+", "", repr(function(*args)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:40]}"


def run(function: Any, make: Callable[[int], Any]) -> list[int]:
    """How many captures each of some calls took."""
    compiled = fusewright.compile(function, backend="eager")
    x, captures, again = torch.ones(2), [], make(2)
    for number in (1, 2, 3, 4, 2, 2, 5, 6):
        value = again if number == 2 else ONE if number == 6 else make(number)
        heard: list[Any] = []
        with STREAM.listening(heard.append):
            got = told(compiled, x, value)
        assert got == told(function, x, value)
        assert not [event for event in heard if isinstance(event, InternalError)]
        captures.append(sum(isinstance(event, Captured) for event in heard))
    return captures


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "TypeVar"])
@pytest.mark.parametrize("how", HANDED_ON)
def test_one_version_serves_all(how: str, kind: str) -> None:
    captures = run(HANDED_ON[how], MAKERS[kind])
    assert not any(captures[1:-1]), captures


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", LOOKED_AT)
def test_what_is_looked_at(how: str, kind: str) -> None:
    run(LOOKED_AT[how], MAKERS[kind])


def test_what_is_made_inside_each_time() -> None:
    """As what an eager part of the program gives."""

    def now() -> Any:
        return datetime.datetime.now()

    def program(x: torch.Tensor) -> Any:
        y = x + 1
        begun = now()
        return y * 2, begun

    compiled, x = fusewright.compile(program, backend="eager"), torch.ones(2)
    compiled(x)
    heard: list[Any] = []
    with STREAM.listening(heard.append):
        given = [compiled(x)[1] for _ in range(5)]
    assert len(set(given)) == 5 and not [event for event in heard if isinstance(event, Captured)]
