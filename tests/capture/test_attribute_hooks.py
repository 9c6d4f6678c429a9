"""A class's own `__getattribute__`, `__setattr__` and `__delattr__` are called where eager calls them, and nowhere else:
what a capture, a guard or the code behind a graph reads of an object, it reads past them.

Each program is run three times on an object of each class, eagerly and compiled; what it gives, what the object holds
then and which hooks were called, in their order, must be equal.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError

CALLED: list[tuple[str, str]] = []


def hooked(base: type) -> type:
    def getattribute(self: Any, name: str) -> Any:
        CALLED.append(("get", name))
        return super(kind, self).__getattribute__(name)  # type: ignore[misc]

    def setattribute(self: Any, name: str, value: object) -> None:
        CALLED.append(("set", name))
        super(kind, self).__setattr__(name, value)  # type: ignore[misc]

    def delattribute(self: Any, name: str) -> None:
        CALLED.append(("delete", name))
        super(kind, self).__delattr__(name)  # type: ignore[misc]

    cached = functools.cached_property(lambda self: self.w)
    cached.__set_name__(base, "cached")
    hooks = {"cached": cached, "__getattribute__": getattribute, "__setattr__": setattribute, "__delattr__": delattribute}
    kind = type(f"Hooked{base.__name__.title()}", (base,), hooks)
    return kind


class Slots:
    __slots__ = ("__dict__", "empty", "full")

    def __init__(self) -> None:
        self.full = 4


BASES: dict[type, tuple[Any, ...]] = {
    object: (), list: ([1],), collections.deque: ([1], 3), dict: ({"a": 1},), collections.OrderedDict: ({"a": 1},),
    collections.defaultdict: (int, {"a": 1}), set: ([1],), tuple: ([1],), int: (1,), float: (1.5,), str: ("a",),
    Exception: (1,), OSError: (1, "b"), AttributeError: (1,), torch.nn.Module: (), torch.nn.ReLU: (), Slots: (), threading.local: (),
    types.SimpleNamespace: (), functools.partial: (int,),
}  # fmt: skip


def deleted(x: torch.Tensor, one: Any) -> Any:
    one.v = x
    del one.v


def caught(x: torch.Tensor, one: Any) -> Any:
    try:
        raise type(one)(*one.args)
    except type(one) as error:
        return x + 1, error.args, [error]


def chained(x: torch.Tensor, one: Any) -> Any:
    try:
        try:
            raise KeyError(1)
        except KeyError as cause:
            raise type(one)(*one.args) from cause
    except type(one) as error:
        return error


def without_context(x: torch.Tensor, one: Any) -> Any:
    try:
        raise type(one)(*one.args) from None
    except type(one) as error:
        return error, error.__context__, error.__cause__, error.__suppress_context__


def behind_a_break(x: torch.Tensor, one: Any) -> Any:
    with contextlib.suppress(type(one)):
        x.sum().item()
        raise type(one)(*one.args)


def thrown(x: torch.Tensor, one: Any) -> Any:
    error = type(one)(*one.args)

    def generator() -> Iterator[Any]:
        try:
            yield 1
        except type(error) as caught:
            yield caught

    waiting = generator()
    next(waiting)
    return waiting.throw(error), x + 1


def made(x: torch.Tensor, one: Any) -> Any:
    other = type(one)()
    other.v = x + 1
    return other


def filled(x: torch.Tensor, one: Any) -> Any:
    if isinstance(one, list | collections.deque):
        one.append(x)
    elif isinstance(one, dict):
        one["b"] = x
    elif isinstance(one, set):
        one.add(3)
    return x + 1


PROGRAMS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "set": lambda x, one: setattr(one, "v", x + 1), "delete": deleted, "delete what is there": lambda x, one: delattr(one, "w"),
    "delete what is not": lambda x, one: delattr(one, "nothing"), "read": lambda x, one: one.w,
    "slot": lambda x, one: (one.full, setattr(one, "full", 5), one.full), "empty slot": lambda x, one: one.empty,
    "caught": caught, "chained": chained, "without context": without_context, "behind a break": behind_a_break,
    "thrown": thrown, "made": made, "filled": filled, "vars": lambda x, one: vars(one).update(q=1),
    "dictionary": lambda x, one: one.__dict__.setdefault("q", []).append(3), "kept": lambda x, one: [x, [one], {"a": one}],
    "after a break": lambda x, one: (x.sum().item(), setattr(one, "v", x), one.w), "has": lambda x, one: hasattr(one, "z"),
    "copy": lambda x, one: copy.copy(one), "deep copy": lambda x, one: copy.deepcopy(one),
    "limit": lambda x, one: one.maxlen, "arguments": lambda x, one: one.args, "class": lambda x, one: one.__class__,
    "get of object": lambda x, one: object.__getattribute__(one, "w"), "call": lambda x, one: one(x),
    "set of object": lambda x, one: object.__setattr__(one, "w", x), "size": lambda x, one: one + x.shape[0],
    "links": lambda x, one: (one.__cause__, one.__context__), "set arguments": lambda x, one: setattr(one, "args", (x,)),
    "length": lambda x, one: len(one), "truth": lambda x, one: not one, "list": lambda x, one: list(one),
    "write, then read": lambda x, one: (one.w, setattr(one, "w", 5), one.w, one.__dict__["w"]),
    "set, then an error": lambda x, one: (vars(one).setdefault("n", []).append(1), [][1]),
    "cached": lambda x, one: (one.cached, one.cached), "reduce": lambda x, one: len(one.__reduce__()),
}  # fmt: skip
CONTAINERS = (dict, list, tuple, set, collections.deque)


def shown(value: Any, depth: int = 0) -> Any:
    """What an object is and holds, without asking it."""
    kind = type(value)
    if depth > 4 or kind in (int, str, float, bool):
        return value if depth <= 4 else "..."
    if isinstance(value, torch.Tensor):
        return value.tolist()
    found = [kind.__name__]
    for base in (base for base in CONTAINERS if issubclass(kind, base)):
        found.append(shown(list(dict.items(value) if base is dict else base.__iter__(value)), depth + 1))
    if issubclass(kind, BaseException):
        fields = [vars(BaseException)[name].__get__(value) for name in ("args", "__context__", "__cause__")]
        found.append([[shown(part, depth + 1) for part in fields[0]], *(shown(part, depth + 1) for part in fields[1:])])
    if kind.__dictoffset__ and kind.__flags__ & (1 << 9) and not issubclass(kind, type | threading.local):
        found.append([(name, shown(held, depth + 1)) for name, held in object.__getattribute__(value, "__dict__").items()])
    return found if kind is not list else [shown(part, depth + 1) for part in list.__iter__(value)]


def outcome(function: Callable[..., Any], one: Any) -> Any:
    CALLED.clear()
    result: Any = None
    try:
        result = function(torch.ones(2), one)
    except Exception as error:
        result = error
    called = list(CALLED)
    return shown(result), shown(one), called


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
@pytest.mark.filterwarnings("ignore")
def test_are_called_where_eager_calls_them(base: type) -> None:
    heard: list[Any] = []
    kind = hooked(base)
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for name, program in PROGRAMS.items():
            compiled = fusewright.compile(types.FunctionType(program.__code__, globals()), backend="eager", dynamic=True)
            theirs, ours = kind(*BASES[base]), kind(*BASES[base])
            for one in (theirs, ours):
                one.w = 3
            for call in range(3):
                assert outcome(compiled, ours) == outcome(program, theirs), (name, call)
    assert not heard


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyError, hooked(Exception)])
def test_a_read_makes_no_dictionary(kind: type) -> None:
    def program(x: torch.Tensor, error: Any) -> Any:
        own = kind(1)
        seen = [getattr(one, name, None) for one in (error, own) for name in ("v", "args")]
        return x + 1, seen, len(error.__reduce__()), len(own.__reduce__()), copy.copy(error).args

    compiled = fusewright.compile(program)
    ours, theirs = kind(1), kind(1)
    for value in (None, None, 3, 4):
        if value is not None:
            ours.v = theirs.v = value
        assert str(compiled(torch.ones(1), ours)) == str(program(torch.ones(1), theirs))
        assert len(ours.__reduce__()) == len(theirs.__reduce__())


class Bare:
    __slots__ = ("slot",)
    __qualname__ = "Bare"
    plain = 3

    def __del__(self) -> None:
        pass


Pair = collections.namedtuple("Pair", "a b")
NAMES = (
    "slot", "plain", "later", "nothing", "__init__", "__slots__", "__del__", "__doc__", "__module__", "__hash__", "real",
)  # fmt: skip


@pytest.mark.parametrize("made", [Bare, lambda: Pair(1, 2), lambda: 3], ids=["slots", "tuple", "int"])
def test_what_an_object_without_a_dictionary_says(made: Callable[[], Any]) -> None:
    def program(x: torch.Tensor, given: Any, name: str, change: str) -> list[str]:
        one = made() if given is None else given
        said = []
        try:
            if change == "store":
                one.__class__.later = sorted
            if change == "delete":
                del one.__class__.later
        except TypeError as error:
            said.append(str(error))
        for tried in (lambda: delattr(one, name), lambda: setattr(one, name, 3), lambda: delattr(one, name)):
            try:
                tried()
            except (AttributeError, TypeError) as error:
                said.append(str(error))
        return said

    def run(function: Callable[..., Any], name: str, inside: bool) -> list[Any]:
        given = None if inside else made()
        return [function(torch.ones(2), given, name, change) for change in ("store", "", "delete", "")]

    for name in NAMES:
        for inside in (True, False):
            compiled = fusewright.compile(program, backend="eager")
            assert run(compiled, name, inside) == run(program, name, inside), (name, inside)
