"""Copies that a program makes inside: what they ask of the objects, in which order, and which copies share memory."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import inspect
import operator
import pathlib
import re
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusewright


def both(function: Callable[..., Any], make: Callable[[], Any], calls: int = 3) -> None:
    compiled = fusewright.compile(function, backend="eager")
    for _ in range(calls):
        assert compiled(torch.ones(2), *make()) == function(torch.ones(2), *make())


class Asked:
    """Says what it is asked for."""

    log: list[Any] = []

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __getattribute__(self, name: str) -> Any:
        Asked.log.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("held", [{}, {"a": 1}, {"inner": {"b": 2}}, {"inner": [1]}], ids=str)
def test_what_is_asked_in_which_order(held: dict[str, Any]) -> None:
    def program(x: torch.Tensor, one: Any) -> Any:
        Asked.log.clear()
        made = copy.deepcopy({"k": one})["k"]
        return made is one, list(Asked.log), copy.copy(one) is one, list(Asked.log)

    both(program, lambda: (Asked(**held),))
    both(program, lambda: (Asked(inner=Asked(**held), last=Asked()),))


def test_an_object_that_holds_its_own_dictionary() -> None:
    class Plain:
        pass

    def program(x: torch.Tensor) -> Any:
        one: Any = Plain()
        one.a, one.me, one.names = [1], one, one.__dict__
        made = copy.deepcopy(one)
        return made.me is made, made.names is made.__dict__, made.names["me"] is made, made.a is made.names["a"], made.a is one.a

    both(program, tuple)


def program_of_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    first, second, third = copy.deepcopy([a, b, c])
    first.add_(5)
    return first, second, third, a.data_ptr() == b.data_ptr(), a.data_ptr() == c.data_ptr(), b.data_ptr() == c.data_ptr()


def test_copies_share_memory_as_the_tensors_do() -> None:
    compiled = fusewright.compile(program_of_three, backend="eager", recompile_limit=16)
    one, other, last = (torch.ones(2) for _ in range(3))
    cases = (one, other, last), (one, other, one.view(2)), (one, one.view(2), last), (one, other, other.view(2)), (one, one, last)
    for case in (*cases, *cases):
        assert str(compiled(*case)) == str(program_of_three(*case))


@pytest.mark.parametrize("second", [lambda t: t[0], lambda t: t.view(4), lambda t: t.detach(), lambda t: t + 0, lambda t: t])
def test_copies_of_views(second: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def program(x: torch.Tensor) -> Any:
        base = torch.ones(2, 2)
        first, copied = copy.deepcopy((base, second(base)))
        first.add_(x[0])
        return first.tolist(), copied.tolist()

    both(program, tuple)


def test_a_partial_is_not_given_a_dictionary() -> None:
    """A partial of a partial is one partial, unless the inner one has a dictionary."""

    def program(x: torch.Tensor, one: Any) -> Any:
        return one.args, one.func is max

    given = functools.partial(max, 1)
    fusewright.compile(program, backend="eager")(torch.ones(2), given)
    assert functools.partial(given, 2).func is max


def plain() -> None:
    pass


VALUES: dict[str, Callable[[], Any]] = {
    "date": lambda: datetime.date(2020, 1, 1), "timedelta": lambda: datetime.timedelta(1), "zone": lambda: datetime.UTC,
    "path": lambda: pathlib.Path("a"), "decimal": lambda: decimal.Decimal(1), "fraction": lambda: fractions.Fraction(1, 2),
    "pattern": lambda: re.compile("a"), "match": lambda: re.match("a", "a"), "struct": lambda: struct.Struct("i"),
    "signature": lambda: inspect.signature(plain), "getter": lambda: operator.itemgetter(1), "alias": lambda: list[int],
    "property": lambda: property(plain), "cached property": lambda: functools.cached_property(plain), "fields": lambda: dataclasses.fields(Held),
    "numpy dtype": lambda: np.dtype("f4"), "dtype": lambda: torch.float32, "size": lambda: torch.Size([1]), "device": lambda: torch.device("cpu"),
    "slice": lambda: slice(1, 2), "range": lambda: range(3), "module": lambda: re, "builtin": lambda: len, "class": lambda: int,
    "frozenset": lambda: frozenset({1}), "tuple": lambda: (1, (2, 3)), "proxy": lambda: types.MappingProxyType({}), "keys": lambda: {1: 2}.keys(),
    "generator": lambda: (one for one in (1, 2)), "iterator": lambda: iter([1]), "finfo": lambda: torch.finfo(torch.float32),
}  # fmt: skip


@dataclasses.dataclass
class Held:
    a: int = 1


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", VALUES)
def test_which_object_a_copy_is(name: str, copier: Callable[[Any], Any]) -> None:
    make, outside = VALUES[name], VALUES[name]()

    def program(x: torch.Tensor, given: Any, inside: bool) -> Any:
        one = make() if inside else outside if given is None else given
        try:
            made, held = copier(one), copier({"k": one})["k"]
        except TypeError as error:
            return str(error)
        return made is one, held is one, type(made)

    both(program, lambda: (None, False))
    both(program, lambda: (None, True))
    both(program, lambda: (make(), False))


class Listed(list[Any]):
    pass


class Dictionary(dict[Any, Any]):
    pass


HELD = (
    "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "items", "append", "keys",
)  # fmt: skip


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", HELD)
def test_what_an_object_holds_under_a_name_that_a_copy_asks_for(name: str, copier: Callable[[Any], Any]) -> None:
    def program(x: torch.Tensor, one: Any) -> Any:
        try:
            made = copier(one)
        except TypeError as error:
            return str(error)
        contents = list(made) if isinstance(made, (list, dict)) else ()
        return type(made), contents, vars(made) if hasattr(made, "__dict__") else made

    for value in (3, lambda *given: (Held, (2,))):
        for make in (lambda: Held(1), lambda: Listed([1]), lambda: Dictionary(a=1)):
            made = make()
            vars(made)[name] = value
            both(program, lambda: (made,))


class WithSlots:
    __slots__ = ("__mangled", "first")

    def __init__(self) -> None:
        self.first, self.__mangled = 2, 3

    def seen(self) -> Any:
        return self.first, self.__mangled, getattr(self, "__dict__", None)


class WithDict(WithSlots):
    second = 1


class Shadowing(WithSlots):
    __slots__ = ("__dict__",)
    first = 5  # type: ignore[assignment]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("hide", [None, 4])
@pytest.mark.parametrize("kind", [WithSlots, WithDict, Shadowing])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_slots_are_asked_for_by_name(copier: Callable[[Any], Any], kind: type, hide: int | None, inside: bool) -> None:
    """The class may give something else by that name."""

    def program(x: torch.Tensor, one: Any) -> Any:
        if inside and hide is not None:
            WithSlots.first = hide  # type: ignore[assignment]
        return copier(one)

    def run(function: Callable[..., Any]) -> Any:
        slot = WithSlots.__dict__["first"]
        object.__setattr__(one := kind.__new__(kind), "_WithSlots__mangled", 3)
        slot.__set__(one, 2)
        try:
            if hide is not None and not inside:
                WithSlots.first = hide  # type: ignore[assignment]
            made = function(torch.ones(2), one)
            return made.seen(), slot.__get__(made)
        except AttributeError as error:
            return str(error)
        finally:
            WithSlots.first = slot  # type: ignore[assignment]

    compiled = fusewright.compile(program, backend="eager")
    for _ in range(3):
        assert run(compiled) == run(program)


class Hooked(Exception):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def test_an_exception_that_was_looked_at_has_a_dictionary() -> None:
    def program(error: Exception) -> Any:
        return copy.deepcopy({"a": len, "z": error}), f"{True!r:^3}"

    given, other = Hooked(1), Hooked(1)
    assert fusewright.compile(program, backend="eager")(given)[0]["z"].args == program(other)[0]["z"].args == (1,)
    assert (given.__reduce__(), other.__reduce__()) == ((Hooked, (1,), {}), (Hooked, (1,)))
