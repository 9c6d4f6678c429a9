"""Programs that nest more deeply than Python's stack is: compiled, or run eagerly with a word of the recursion limit, and never an
internal error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Captured, InternalError, Skipped

DEPTH = 1100


class Link:
    following: Any = None


def nested(wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(DEPTH):
        value = wrap(value)
    return value


def linked(value: Any) -> Any:
    link = Link()
    link.following = value
    return link


def first(x: torch.Tensor, value: Any) -> torch.Tensor:
    return x + len(value)


def all_the_way(x: torch.Tensor, value: Any) -> torch.Tensor:
    while type(value) in (list, tuple):
        value = value[0]
    return x + value


def along(x: torch.Tensor, link: Any) -> torch.Tensor:
    while type(link) is Link:
        x, link = x + 1, link.following
    return x


def added(x: torch.Tensor, value: Any) -> torch.Tensor:
    value.append(x)
    return x + 1


def made(x: torch.Tensor, value: Any) -> Any:
    for _ in range(DEPTH):
        value = [value]
    return x + 1


@pytest.mark.parametrize("function, make", [
    (first, lambda: nested(lambda value: [value])), (first, lambda: nested(lambda value: (value,))),
    (first, lambda: nested(lambda value: {"a": value})), (all_the_way, lambda: nested(lambda value: [value])),
    (along, lambda: nested(linked)), (added, lambda: nested(lambda value: [value])), (made, lambda: 1),
])  # fmt: skip
def test_no_internal_error(function: Any, make: Any) -> None:
    heard: list[Any] = []
    x = torch.ones(2)
    with STREAM.listening(heard.append):
        assert torch.equal(fusewright.compile(function)(x, make()), function(x, make()))
    assert not [event for event in heard if isinstance(event, InternalError)]
    skipped = [event.report.code for event in heard if isinstance(event, Skipped)]
    assert skipped == ["recursion"] or any(isinstance(event, Captured) for event in heard)
