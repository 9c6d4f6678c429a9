"""Texts of what holds an object from outside: that object is another one at the next call, and its text another."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
import reprlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError


class Plain:
    pass


class Shown:
    number = 0

    def __repr__(self) -> str:
        return f"Shown {self.number}"


@dataclasses.dataclass
class Record:
    a: Any = None


def held_by(base: type, *args: Any, **named: Any) -> Any:
    return type("Sub", (base,), {})(*args, **named)


def ring(one: Any) -> list[Any]:
    made = [one]
    made.append(made)
    return made


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda o: slice(o, 1), "namespace": lambda o: types.SimpleNamespace(a=o), "repeat": itertools.repeat, "static": staticmethod,
    "class method": classmethod, "proxy": lambda o: types.MappingProxyType({1: o}), "values": lambda o: {1: o}.values(),
    "items": lambda o: {1: o}.items(), "ordered": lambda o: collections.OrderedDict(a=o), "deque": lambda o: collections.deque([o]),
    "chain map": lambda o: collections.ChainMap({"a": o}), "record": Record, "error": ValueError, "getter": operator.itemgetter,
    "caller": lambda o: operator.methodcaller("a", o), "partial": lambda o: functools.partial(print, o), "method": lambda o: types.MethodType(print, o),
    "alias": lambda o: list[o], "set": lambda o: {o}, "deep": lambda o: functools.reduce(lambda inner, _: [inner], range(12), o),
    "deep dict": lambda o: functools.reduce(lambda inner, _: {1: inner}, range(12), o), "ring": ring,
    **{f"sub {base.__name__}": lambda o, base=base: held_by(base, (o,)) for base in (list, tuple, set, ValueError)},
    "sub dict": lambda o: held_by(dict, a=o), "bound in C": lambda o: o.__eq__, "super": lambda o: super(type(o), o),
}  # fmt: skip
TEXTS: dict[str, Callable[[Any], str]] = {
    "repr": repr, "str": str, "%": lambda one: "%s %r" % (one, (one,)), "format": lambda one: f"{one!r:>4} {[one]}", "reprlib": reprlib.repr,  # noqa: UP031
}  # fmt: skip


@pytest.mark.parametrize("kind", [Plain, Shown])
@pytest.mark.parametrize("holder", HOLDERS)
def test_another_object_at_each_call(holder: str, kind: type) -> None:
    hold, heard = HOLDERS[holder], []
    objects = [kind() for _ in range(3)]
    for number, one in enumerate(objects):
        one.number = number  # type: ignore[attr-defined]
    for text in TEXTS.values():

        def program(x: torch.Tensor, one: Any, text: Any = text) -> Any:
            return x + 1, text(hold(one))

        fusewright.reset()
        compiled = fusewright.compile(program, backend="eager")
        with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
            for one in (*objects, objects[0]):
                assert compiled(torch.ones(1), one)[1] == program(torch.ones(1), one)[1]
    assert not heard


def test_the_text_of_a_weak_reference() -> None:
    compiled = fusewright.compile(lambda x, one: (x + 1, repr(weakref.ref(one))), backend="eager")
    for one in [Plain() for _ in range(3)]:
        assert hex(id(one)) in compiled(torch.ones(1), one)[1]
