"""Builtin functions and methods that capture models, called with any number of arguments of any type: they give what
they give in plain Python, or complain as they do there, and nothing is an internal error. Among the arguments are texts that show a
tensor, which nobody may look at while the graph is recorded.

A sample of the calls runs always, all of them are a sweep.
"""

from __future__ import annotations

import collections
import itertools
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError
from fusewright.capture.call import builtins, of_constants, polyfills


class Odd:
    pass


class Index:
    def __index__(self) -> int:
        return 1


TEXT, LISTED = Odd(), Odd()  # what stands for a tensor's text, and a list of it, which the program makes
ARGUMENTS: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: 1, lambda: -1, lambda: 2.5, lambda: True, lambda: 1j, lambda: "a", lambda: b"b",
    lambda: [1, 2], lambda: {"a": 1}, lambda: (1,), lambda: {1}, lambda: slice(1), lambda: range(3),
    lambda: len, lambda: int, lambda: Odd, Index, lambda: lambda *given: 1,
    lambda: TEXT, lambda: LISTED,
)  # fmt: skip
NAMES = ("key", "start", "default", "value", "x", "iterable", "object", "name", "reverse", "memo", "func", "maxlen")
RECEIVERS: tuple[Callable[[], Any], ...] = (
    lambda: [3, 1, 2], lambda: {"a": 1, "b": 2}, lambda: collections.OrderedDict(a=1, b=2),
    lambda: collections.defaultdict(list, a=1), lambda: collections.deque([3, 1, 2], 4), lambda: {1, 2},
    lambda: frozenset((1, 2)), lambda: (1, 2), lambda: "b-a", lambda: b"b-a", lambda: bytearray(b"ab"), lambda: 5,
    lambda: 2.5, lambda: True, lambda: 1j, lambda: range(3), lambda: slice(1, 2), lambda: None,
    Odd, lambda: Odd, Index, lambda: lambda given: given, lambda: property(lambda given: 1), lambda: KeyError(1),
    lambda: iter([1, 2]), lambda: (one for one in (1, 2)), lambda: {"a": 1}.keys(), lambda: Index().__index__,
    lambda: types.MappingProxyType({"a": 1}), lambda: classmethod(lambda cls: 1), lambda: staticmethod(len),
    lambda: super(Odd, Odd()), lambda: types.SimpleNamespace(a=1), lambda: itertools.chain([1], [2]),
    lambda: enumerate("ab"), lambda: zip("ab"), lambda: types.CellType(1),
)  # fmt: skip
UNTOLD = {
    "id", "print", "__hash__", "__reduce__", "__reduce_ex__", "__sizeof__", "__dir__",  # an address, output, and sizes
}  # fmt: skip

Call = tuple[str, Any, Callable[[], tuple[Any, ...]]]


def functions() -> Iterator[Call]:
    tables = (builtins.ROWS, polyfills.ROWS, of_constants.ROWS)
    found = {id(fn): fn for fn in (*(fn for table in tables for fn, _ in table), *builtins.PURE_FUNCTIONS)}
    for module in (sys.modules.get(name) for name in builtins.PURE_MODULES):
        for name, fn in vars(module).items() if module else ():
            if isinstance(fn, types.BuiltinFunctionType | type) and not name.startswith("_"):
                found[id(fn)] = fn
    for fn in found.values():
        yield getattr(fn, "__qualname__", repr(fn)), fn, tuple


def methods() -> Iterator[Call]:
    for make in RECEIVERS:
        kind = type(make())
        for name in dir(kind):
            fn = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
            if isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType):
                yield f"{kind.__name__}.{name}", fn, lambda make=make: (make(),)
                if kind is str:
                    yield f"text.{name}", fn, lambda: (TEXT,)


def made(value: Any, text: str) -> Any:
    return text if value is TEXT else [text] if value is LISTED else value


def program(x: torch.Tensor, fn: Any, receive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    y = x + 1
    text = f"sum {y.sum()}"
    receiver, args = ([made(one, text) for one in given] for given in (receive(), args))
    try:
        given = fn(*receiver, *args, **kwargs)
    except Exception as error:
        return y, "raised", type(error), str(error)
    return y, "gave", given, receiver


def told(value: Any, depth: int = 0) -> Any:
    if isinstance(value, list | tuple | set | frozenset | dict | collections.deque) and depth < 4:
        parts = value.items() if isinstance(value, dict) else value
        return type(value).__name__, sorted(str(told(part, depth + 1)) for part in parts)
    plain = isinstance(value, int | float | complex | str | bytes | type | slice | range | None)
    return type(value).__name__, re.sub(r"0x[0-9a-f]+", "", repr(value)) if plain else ""


def found(function: Any, *given: Any) -> Any:
    try:
        result = function(torch.ones(2), *given)
    except BaseException as error:
        return "escaped", told(error), str(error)
    return told(result[1:])


def wrong(calls: list[Call], seed: int) -> list[str]:
    chosen = random.Random(seed)
    problems = []
    for name, fn, receive in calls:
        if name.rpartition(".")[2] in UNTOLD:
            continue
        for count in (0, 1, 1, 2, 2, 3, 4):
            makers = [chosen.choice(ARGUMENTS) for _ in range(count)]
            kwargs = {chosen.choice(NAMES): chosen.choice((None, 1, "a", len))} if chosen.random() < 0.3 else {}
            errors: list[str] = []

            def listen(event: object, errors: list[str] = errors) -> None:
                if isinstance(event, InternalError):
                    errors.append(event.trace)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = found(program, fn, receive, tuple(make() for make in makers), kwargs)
                fusewright.reset()
                args = tuple(make() for make in makers)
                with STREAM.listening(listen):
                    got = found(fusewright.compile(program, backend="eager"), fn, receive, args, kwargs)
            if errors or got != expected:
                problems.append(f"{name}{args} {kwargs}: {errors or (got, expected)}")
    return problems


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 6))])
@pytest.mark.parametrize("calls", [functions, methods])
def test_any_arguments(calls: Callable[[], Iterator[Call]], seed: int) -> None:
    listed = list(calls())
    np.random.seed(0)
    if not seed:
        listed = random.Random(0).sample(listed, 60)
    assert not wrong(listed, seed)


def test_of_sets_and_dicts_that_read_as_much_as_plain_python() -> None:
    """What comes before an argument that is no iterable is read."""

    def program(x: torch.Tensor, seen: list[object]) -> Any:
        def numbers(*held: int) -> Iterator[int]:
            seen.extend(held)
            yield from held

        found, rest = {0}, [0]
        for change in (
            lambda: found.update(numbers(1, 2), Odd(), numbers(3)),
            lambda: found.union(numbers(4), 5),
            lambda: rest.extend(Odd()),
            lambda: {"a": 1}.update(Odd()),
            lambda: ", ".join(Odd()),
            lambda: set(numbers(6), numbers(7)),
        ):
            try:
                change()
            except TypeError as error:
                seen.append(str(error))
        return x + 1, found, rest, seen

    x = torch.ones(2)
    expected = program(x, [])
    got = fusewright.compile(program, fullgraph=True)(x, [])
    assert got[1:] == expected[1:] and len(expected[3]) > 6


@pytest.mark.parametrize("name", "clear pop popitem setdefault update __delitem__ __setitem__".split())
def test_a_dicts_method_writes_to_an_ordered_dict(name: str) -> None:
    """The order does not hear of it: what such a dict then is, only itself can tell."""
    method, given = getattr(dict, name), {"pop": ("a",), "__delitem__": ("a",), "setdefault": ("c", 1)}
    args = given.get(name, ("c", 2) if name == "__setitem__" else ({"c": 3},) if name == "update" else ())

    def program(x: torch.Tensor, mine: Any) -> Any:
        made: Any = collections.OrderedDict(a=1, b=2)
        method(made, *args)
        method(mine, *args)
        return x + 1, len(made), dict.__repr__(made), len(mine), dict.__repr__(mine), made

    def told_of(result: Any) -> Any:
        try:
            return *result[1:5], list(result[5].items())
        except KeyError as error:
            return *result[1:5], repr(error)

    x = torch.ones(2)
    compiled = fusewright.compile(program)
    for _ in range(2):
        expected = program(x, collections.OrderedDict(a=1, b=2))
        assert told_of(compiled(x, collections.OrderedDict(a=1, b=2))) == told_of(expected)
    spoiled: Any = collections.OrderedDict(a=1, b=2)
    method(spoiled, *args)
    assert fusewright.compile(lambda x, mine: (x + 1, len(mine)))(x, spoiled)[1] == len(spoiled)


def test_a_memory_error_of_the_programs_own() -> None:
    """Wherever native code meets it, it is the program's, and no sign of missing memory."""

    class Short(MemoryError):
        pass

    def fail(*given: object) -> Any:
        raise Short("mine")

    class Asked:
        __len__ = __iter__ = __eq__ = __lt__ = __str__ = __index__ = __hash__ = __bool__ = fail

    def failing() -> Iterator[int]:
        yield 1
        fail()

    def program(x: torch.Tensor) -> Any:
        seen = []
        asked = Asked()
        for ask in (
            fail, lambda: list(failing()), lambda: len(asked), lambda: list(asked), lambda: [asked] == [Asked()],
            lambda: sorted([asked, asked]), lambda: sorted([1, 2], key=fail), lambda: str(asked), lambda: [1][asked],
            lambda: {asked}, lambda: bool(asked), lambda: list(map(fail, [1])), lambda: {1, 2}.union(failing()),
            lambda: [asked].index(1), lambda: max([asked, asked]),
        ):  # fmt: skip
            try:
                ask()
            except MemoryError as error:
                seen.append((type(error), error.args))
        return x + 1, seen

    x = torch.ones(2)
    expected = program(x)
    assert len(expected[1]) == 15
    assert fusewright.compile(program, fullgraph=True)(x)[1] == expected[1]


def test_a_request_for_more_memory_than_there_is() -> None:
    def program(x: torch.Tensor, count: int) -> Any:
        try:
            return x + 1, [0] * count
        except MemoryError as error:
            return x - 1, type(error)

    compiled, x = fusewright.compile(program), torch.ones(2)
    heard: list[object] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        assert compiled(x, 1 << 60)[1] is MemoryError
        assert compiled(x, 2)[1] == [0, 0]
    assert not heard


def lacks(a: torch.Tensor, k: Any) -> torch.Tensor:
    return a * k


def lacks_by_name(a: torch.Tensor, *, k: Any) -> torch.Tensor:
    return a * k


Pair = collections.namedtuple("Pair", "a k")


@pytest.mark.parametrize(
    ("call", "name", "defaults"),
    [
        (lacks, "__defaults__", (5,)),
        (lacks_by_name, "__kwdefaults__", {"k": 7}),
        (lambda a: a * Pair(a).k, "__defaults__", (3,)),
    ],
    ids=["by place", "by name", "a named tuple"],
)
def test_a_call_that_lacks_an_argument_is_right_once_there_is_a_default(call: Any, name: str, defaults: Any) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        try:
            return call(a)
        except TypeError:
            return a - 1

    compiled, x = fusewright.compile(f), torch.ones(2)
    owner: Any = call if call in (lacks, lacks_by_name) else Pair.__new__
    before = getattr(owner, name)
    try:
        assert torch.equal(compiled(x), f(x)) and torch.equal(f(x), x - 1)
        setattr(owner, name, defaults)
        assert torch.equal(compiled(x), f(x)) and not torch.equal(f(x), x - 1)
    finally:
        setattr(owner, name, before)


def scaled(a: torch.Tensor, *, k: float = 2.0) -> torch.Tensor:
    return a * k


def entered(k: float) -> None:
    scaled.__kwdefaults__["k"] = k


def updated(k: float) -> None:
    scaled.__kwdefaults__.update(k=k)


def removed(k: float) -> None:
    del scaled.__kwdefaults__["k"]


def replaced(k: float) -> None:
    scaled.__kwdefaults__ = {"k": k}


@pytest.mark.parametrize("write", [entered, updated, removed, replaced], ids=lambda write: write.__name__)
@pytest.mark.parametrize("native", [False, True], ids=["interpreted", "by native code"])
def test_a_call_finds_the_defaults_that_the_frame_has_written(write: Any, native: bool) -> None:
    def f(a: torch.Tensor) -> Any:
        write(3.0)
        try:
            return [*map(scaled, [a])] if native else scaled(a)
        except TypeError as error:
            return str(error)

    found = []
    for run in (f, fusewright.compile(f), fusewright.compile(f, backend="eager")):
        for _ in range(2):
            scaled.__kwdefaults__ = {"k": 2.0}
            found.append((str(run(torch.ones(2))), dict(scaled.__kwdefaults__)))
    scaled.__kwdefaults__ = {"k": 2.0}
    assert all(one == found[0] for one in found)
