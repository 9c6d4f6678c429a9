"""Attributes of what stands for a number, a text, an array, a storage, a generator or a tensor: read, set and deleted as in eager, and none of the
stand-in's own shows."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError


class Sub(torch.Tensor):
    """A tensor of the program's."""


VALUES: dict[str, Callable[[torch.Tensor, int, float], Any]] = {
    "int": lambda x, n, f: n,
    "float": lambda x, n, f: f,
    "size": lambda x, n, f: x.shape[0],
    "comparison": lambda x, n, f: x.shape[0] > 3,
    "product": lambda x, n, f: x.numel() * 1.5,
    "text": lambda x, n, f: f"{x}",
    "address": lambda x, n, f: x.data_ptr(),
    "storage": lambda x, n, f: x.untyped_storage(),
    "array": lambda x, n, f: x.numpy(),
    "generator": lambda x, n, f: (one for one in (1, 2)),
    "shape": lambda x, n, f: x.shape,
    "method": lambda x, n, f: {"a": n}.get,
    "tensor": lambda x, n, f: x + 1,
    "argument": lambda x, n, f: x,
    "leaf": lambda x, n, f: torch.ones(2, requires_grad=True),
    "parameter": lambda x, n, f: torch.nn.Parameter(torch.ones(2)),
    "subclass": lambda x, n, f: x.as_subclass(Sub),
}
NAMES = ("foo", "real", "tensor", "__class__")
OF_TENSORS = ("foo", "tensor", "__class__", "grad", "shape")  # eager crashes at `del tensor.real`
OWN = ("node", "pieces", "what", "refuse", "world", "__dict__")  # what stand-ins have
ASKS: dict[str, Callable[[Any, str], Any]] = {
    "get": getattr,
    "has": hasattr,
    "set": lambda value, name: setattr(value, name, int),
    "delete": delattr,
    "set by object": lambda value, name: object.__setattr__(value, name, int),
    "delete by object": object.__delattr__,
}


def program(x: torch.Tensor, n: int, f: float, make: Any, ask: Any, name: str) -> Any:
    y = x + 1
    try:
        given = ask(make(x, n, f), name)
    except Exception as error:
        return y, type(error), str(error)
    return y, type(given), given is True


@pytest.mark.parametrize("kind", VALUES)
def test_as_eager(kind: str) -> None:
    heard: list[Any] = []
    x = torch.arange(6.0).reshape(2, 3)
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for how, ask in ASKS.items():
            names = OF_TENSORS if kind in ("tensor", "argument", "leaf", "parameter", "subclass") else NAMES
            for name in (*names, *OWN) if how == "get" else names:
                compiled = fusewright.compile(program, dynamic=True)
                for n, f in ((4, 2.5), (7, 3.5)) if kind in ("int", "float") else ((4, 2.5),):
                    given = (n, f, VALUES[kind], ask, name)
                    got, expected = compiled(x.clone(), *given), program(x.clone(), *given)
                    assert got[1:] == expected[1:], (how, name, re.sub("0x[0-9a-f]+", "", str(got)))
    assert not heard


def test_deleted_gradients_and_attributes() -> None:
    def program(leaf: torch.Tensor) -> torch.Tensor:
        del leaf.grad, leaf.kept
        return leaf * 2

    compiled = fusewright.compile(program)
    for _ in range(2):
        leaf = torch.ones(2, requires_grad=True)
        leaf.grad, leaf.kept = torch.ones(2), 3  # type: ignore[attr-defined]
        compiled(leaf)
        assert leaf.grad is None
        assert not vars(leaf)


class ByIndex:
    def __getitem__(self, index: int) -> int:
        return [1, 2, 3][index]

    def __len__(self) -> int:
        return 3


class Thing:
    def method(self, x: int = 1) -> int:
        return x


def counting() -> Any:
    yield 1


def failed() -> Exception:
    try:
        raise ValueError
    except ValueError as error:
        return error


OUTSIDE, HELD, THING, INDEXED = {"a": 1, "b": 2}, [1, 2], Thing(), ByIndex()
FACTORY = collections.defaultdict(counting, a=1)
SHOWN: dict[str, Callable[[], Any]] = {
    **{
        f"dict.{name}": lambda name=name: getattr(OUTSIDE, name)
        for name in ("get", "pop", "setdefault", "update", "__getitem__", "__contains__", "__len__", "items")
    },
    "globals.get": lambda: globals().get, "attributes.get": lambda: THING.__dict__.get, "class attributes.get": lambda: Thing.__dict__.get,
    "class attributes.pop": lambda: Thing.__dict__.pop, "list.append": lambda: HELD.append, "method": lambda: THING.method,  # type: ignore
    "fresh method": lambda: Thing().method, "iter": lambda: iter(INDEXED), "reversed": lambda: reversed(INDEXED),
    "next of iter": lambda: iter(ByIndex()).__next__,
    "generator": counting, "generator.send": lambda: counting().send, "generator.__next__": lambda: counting().__next__,
    "default": lambda: collections.defaultdict(lambda: 3), "factory": lambda: FACTORY.default_factory,
    "fresh factory": lambda: collections.defaultdict(counting).default_factory, "partial": lambda: functools.partial(OUTSIDE.get, "a"),
    "partial of a method": lambda: functools.partial(THING.method, 1), "partial of an object": lambda: functools.partial(counting, x=THING),
    "node": lambda: (torch.ones(2, requires_grad=True) * 2).grad_fn, "array.sum": lambda: torch.ones(2).numpy().sum,
    "storage": lambda: torch.ones(2).untyped_storage(), "tensor": lambda: torch.ones(2), "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "traceback": lambda: failed().__traceback__, "tensor.add": lambda: torch.ones(2).add, "in a list": lambda: [OUTSIDE.get], "in an error": lambda: ValueError(HELD.append),
}  # fmt: skip
SAYS: dict[str, Callable[[Any], Any]] = {
    "type": lambda one: (type(one), one.__class__ is type(one), [cls.__name__ for cls in type(one).__mro__]),
    "text": lambda one: (repr(one), str(one), f"{one}", "%s %r" % (one, one), f"{one!r}"),  # noqa: UP031
    "text around": lambda one: (repr([one]), str({"k": one}), repr(functools.partial(len, one)), str(ValueError(one))),
    "text of a partial": lambda one: repr(functools.partial(one)),
    "__self__": lambda one: (type(one.__self__), one.__self__ is OUTSIDE, one.__self__ is HELD, one.__self__ is THING),
    "__func__": lambda one: one.__func__.__name__,
    "__name__": lambda one: one.__name__,
    "__qualname__": lambda one: one.__qualname__,
    "__module__": lambda one: one.__module__,
    "__doc__": lambda one: one.__doc__,
    "equal": lambda one: (one == one, one == OUTSIDE.get, one == HELD.append, one in [one], {one: 1}.get(one), hash(one) == hash(one)),
    "isinstance": lambda one: [
        isinstance(one, cls) for cls in (types.MethodType, types.BuiltinMethodType, types.GeneratorType, Iterator, Callable)  # type: ignore
    ],
    "inspect": lambda one: (inspect.ismethod(one), inspect.isbuiltin(one), inspect.isroutine(one), inspect.isfunction(one)),
    "copy": lambda one: type(copy.copy(one)),
    "deepcopy": lambda one: type(copy.deepcopy(one)),
    "wraps": lambda one: [*functools.wraps(one)(lambda: 3).__dict__],
    "hint": lambda one: operator.length_hint(one, 7),
    "dir": dir,
    "vars": lambda one: [*vars(one)],
    "hasattr": lambda one: [
        name for name in ("__setstate__", "__length_hint__", "__text_signature__", "__slots__", "sequence", "world", "tracer") if hasattr(one, name)
    ],
    "no arguments": lambda one: one(),
    "too many": lambda one: one(1, 2, 3, 4, 5),
    "by name": lambda one: one(key=1),
    "no attribute": lambda one: one.nothing,
    "returned": lambda one: one,
}  # fmt: skip


def told(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), [told(one) for one in value]
    return type(value), re.sub("0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))


@pytest.mark.parametrize("says", SAYS)
def test_methods_and_iterators_show_nothing_of_the_stand_in(says: str) -> None:
    say = SAYS[says]

    def outcome(run: Any, *args: Any) -> Any:
        OUTSIDE.clear()
        OUTSIDE.update(a=1, b=2)
        HELD[:] = [1, 2]
        try:
            return told(run(torch.ones(1), *args)[1]), told(OUTSIDE), told(HELD)
        except Exception as error:
            return type(error), re.sub("0x[0-9a-f]+", "", str(error)), getattr(error, "name", None)

    def asked(x: torch.Tensor, make: Any) -> Any:
        return x + 1, say(make())

    heard: list[Any] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for name, make in SHOWN.items():
            fusewright.reset()
            assert outcome(fusewright.compile(asked, backend="eager"), make) == outcome(asked, make), name
    assert not heard
