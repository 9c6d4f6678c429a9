"""What versions, calls and closures share: a resume function is compiled once, and a function that is made afresh for each call is known by its code."""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Captured, Event, InternalError
from fusewright.base.signals import raised_by_handler
from fusewright.capture.interpret.interpreter import Tracer


def compiles(f: Callable[..., Any], calls: list[tuple[Any, ...]], backend: str = "native") -> list[int]:
    """The captures that each call takes; every call gives what eager gives."""
    compiled, counts = fusewright.compile(f, backend=backend), []
    for args in calls:
        expected = f(*args)
        heard: list[Event] = []
        with STREAM.listening(heard.append):
            got = compiled(*args)
        torch.testing.assert_close(got, expected)
        counts.append(sum(isinstance(event, Captured) for event in heard))
    return counts


def test_a_closure_that_breaks_is_compiled_once() -> None:
    def f(x: torch.Tensor, n: float) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            y = y + n
            if y.sum() > 1e6:
                y = y - 1
            return y * n

        if x.sum() > 1e6:
            return x
        return inner(x)

    x = torch.randn(4)
    counts = compiles(f, [(x, 2.0), (x, 2.0), (x, 2.0)])
    assert counts[1:] == [0, 0]


def test_versions_share_their_resume_functions() -> None:
    def f(x: torch.Tensor, mode: str) -> torch.Tensor:
        y = x * len(mode)
        if y.sum() > 1e6:
            y = y - 1
        return y.sin() + 1

    x = torch.randn(4)
    first, *others = compiles(f, [(x, mode) for mode in ("a", "ab", "abc", "abcd")])
    assert first == 2
    assert others == [1, 1, 1]


class Solver:
    def __init__(self, n: int, k: int) -> None:
        self.make = lambda x, factor=k: x * n + factor


def uses_fresh_function(x: torch.Tensor, n: int, k: int = 1) -> torch.Tensor:
    solver = Solver(n, k)
    y = x + 1
    torch._dynamo.graph_break()
    return solver.make(y) + 1


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_function_that_each_call_makes_is_known_by_its_code(backend: str) -> None:
    x = torch.randn(4)
    counts = compiles(uses_fresh_function, [(x, 3)] * 5, backend)
    assert counts[2:] == [0, 0, 0]
    # what it has in its cells and defaults still counts
    compiles(uses_fresh_function, [(x, 3), (x, 3), (x, 4), (x, 3, 7), (x, 4, 7), (x, 3)], backend)


def test_another_number_of_defaults_is_another_function() -> None:
    def made(*defaults: int) -> Any:
        def g(x: torch.Tensor, a: int = 0, b: int = 0, *, c: int = 1) -> torch.Tensor:
            return x + a + 10 * b + c

        g.__defaults__ = defaults
        return g

    def f(g: Any, x: torch.Tensor) -> torch.Tensor:
        return g(x) * 2

    x = torch.randn(4)
    compiles(f, [(made(1, 2), x), (made(1, 2), x), (made(3, 4), x), (made(0, 3, 4), x), (made(3, 4), x)])
    compiled = fusewright.compile(f)
    for _ in range(3):
        torch.testing.assert_close(compiled(made(1, 2), x), f(made(1, 2), x))
    with pytest.raises(TypeError, match="missing 2 required"):
        g = made(1, 2)
        g.__defaults__ = None
        compiled(g, x)


def test_the_identity_of_a_fresh_function_still_counts() -> None:
    def made(n: int) -> Any:
        return lambda x: x * n

    kept = made(2)

    def f(g: Any, x: torch.Tensor) -> torch.Tensor:
        return g(x) + (1 if g is kept else 2)

    x = torch.randn(4)
    compiles(f, [(made(2), x), (made(2), x), (kept, x), (made(2), x), (kept, x)])


def test_a_mark_on_a_fresh_function_counts() -> None:
    def made(marked: bool) -> Any:
        def g(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        return torch.compiler.disable(g) if marked else g

    def f(g: Any, x: torch.Tensor) -> torch.Tensor:
        return g(x) + getattr(g, "extra", 0)

    x, extra = torch.randn(4), made(False)
    extra.extra = 5
    compiles(f, [(made(False), x), (made(False), x), (extra, x), (made(True), x), (made(False), x)])


def test_wrappers_above_a_break_do_not_repeat_what_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame with the break, and each wrapper of it, are frames of their own in turn."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = helper(x)
        return x + 1 if x.sum() > 0 else x - 1

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def wrapper(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: function(x)

    entered: list[str] = []
    execute = Tracer.execute

    def counted(tracer: Tracer, frame: Any, error: BaseException | None) -> object:
        entered.append(frame.info.code.co_name)
        return execute(tracer, frame, error)

    monkeypatch.setattr(Tracer, "execute", counted)
    function = wrapper(wrapper(wrapper(wrapper(breaks))))
    compiled = fusewright.compile(function)
    for x in (torch.ones(3), -100 * torch.ones(3)):
        torch.testing.assert_close(compiled(x), function(x))
    # The outermost wrapper is captured once; of the frame itself one attempt finds the break, and one ends before it.
    assert entered.count("helper") == 3 * 20


@pytest.mark.parametrize("make", [
    lambda: typing.TypeVar("T"), lambda: typing.ParamSpec("P"), lambda: typing.TypeVarTuple("Ts"), object,  # type: ignore[misc]
    lambda: typing.NewType("N", int), lambda: typing.ParamSpec("P").args, lambda: type("C", (), {}),  # type: ignore[misc]
])  # fmt: skip
def test_what_is_made_once_is_one_object_behind_a_break(make: Callable[[], Any]) -> None:
    kept: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        one = make()
        kept.append(one)
        y = x + 1
        fusewright.graph_break()
        return y, [one], one is kept[-1]

    compiled, x, heard = fusewright.compile(f, backend="eager"), torch.ones(2), []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        given = [compiled(x) for _ in range(3)]
    assert not heard and all(same and held is one for (_, [held], same), one in zip(given, kept, strict=True))
    assert len({id(one) for one in kept}) == 3


class Elements(list):
    pass


def function() -> None:
    pass


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("make", [
    Asking := type("Asking", (), {}), lambda: Elements([1]), lambda: functools.partial(print, 1), lambda: ValueError(1),
    lambda: types.FunctionType(function.__code__, {}), lambda: torch.ones(2) + 1, types.SimpleNamespace, Elements,
])  # fmt: skip
def test_an_instance_dictionary_is_its_objects(make: Callable[[], Any], backend: str) -> None:
    """Made in the call, given beside it, alone and in itself, and written to behind a graph break; one that another took
    the place of stays what it is."""

    def f(x: torch.Tensor) -> Any:
        held, alone, left = make(), make(), Asking()
        inside, own, old = vars(held), alone.__dict__, left.__dict__
        held.first = inside["again"] = x + 1
        inside["inside"], own["owner"], old["a"] = inside, alone, x
        left.__dict__ = {"b": 1}
        n = int(x.sum())
        inside["second"] = own["third"] = old["c"] = n
        return held, inside, own, left, old

    compiled = fusewright.compile(f, backend=backend)
    for _ in range(3):
        (held, inside, own, left, old), eager = compiled(torch.ones(2)), f(torch.ones(2))
        assert inside is vars(held) and inside["inside"] is inside and vars(own["owner"]) is own
        assert inside.keys() == eager[1].keys() and own.keys() == eager[2].keys() and inside["first"] is inside["again"]
        assert vars(left) == {"b": 1} and old.keys() == eager[4].keys() and old["c"] == inside["second"] == 2


OWNED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "__kwdefaults__": lambda _: ((made := _function()), made.__kwdefaults__),
    "__annotations__": lambda _: ((made := _function()), made.__annotations__),
    "keywords": lambda x: ((made := functools.partial(dict, a=x)), made.keywords),
}


def _function() -> Any:
    def made(x: int = 1, *, k: int = 2) -> int:
        return k

    return made


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", OWNED)
def test_a_dict_that_an_object_holds_is_that_one(name: str, backend: str) -> None:
    make = OWNED[name]

    def f(x: torch.Tensor) -> Any:
        (held, inside), (_, alone) = make(x), make(x)
        n = int(x.sum())
        inside["k"] = alone["k"] = n
        return held, inside, alone, make(x)

    compiled = fusewright.compile(f, backend=backend)
    for _ in range(2):
        held, inside, alone, (other, of_other) = compiled(torch.ones(2))
        assert getattr(held, name) is inside and inside["k"] == alone["k"] == 2 and getattr(other, name) is of_other


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("view", [dict.keys, dict.values, dict.items, types.MappingProxyType])
def test_a_dict_that_is_met_through_its_view(view: Callable[[Any], Any], backend: str) -> None:
    """The dict itself is written to and given, not the read-only one that its view shows."""

    def f(x: torch.Tensor) -> Any:
        held = {"a": 1}
        shown = view(held)
        n = int(x.sum())
        before = len([*shown])
        held["b"] = n
        return before, shown, held

    def given(x: torch.Tensor, shown: Any, held: dict[str, Any]) -> Any:
        before = len([*shown])
        held["b"] = x + 1
        return before, len([*shown]), held

    compiled, compiled_given = fusewright.compile(f, backend=backend), fusewright.compile(given, backend=backend)
    for _ in range(3):
        before, shown, held = compiled(torch.ones(2))
        assert type(held) is dict and held == {"a": 1, "b": 2} and (before, len(shown)) == (1, 2)
        outside: dict[str, Any] = {"a": 1}
        assert compiled_given(torch.ones(2), view(outside), outside)[:2] == (1, 2)
        assert torch.equal(outside["b"], torch.full((2,), 2.0))


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_attributes_of_a_partial_from_outside(backend: str) -> None:
    """A store through its dictionary is one to it."""

    def f(x: torch.Tensor, held: functools.partial[Any]) -> Any:
        held.__dict__["new"] = x + held.args[0]
        return held

    compiled, held = fusewright.compile(f, backend=backend), functools.partial(print, 1)
    for n in range(3):
        x = torch.full((2,), float(n))
        assert compiled(x, held) is held
        torch.testing.assert_close(held.new, x + 1)  # type: ignore[attr-defined]


def test_a_handlers_question_asks_no_object_of_the_programs() -> None:
    """Whether an exception comes out of a signal's handler is seen by what its frames hold."""
    asked: list[str] = []

    class Asked:
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return object.__getattribute__(self, name)

    def fail(first: object, frame: object) -> None:
        raise ValueError

    try:
        fail(Asked(), sys._getframe())
    except ValueError as error:
        assert not raised_by_handler(error)
    assert not asked


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_the_annotations_that_a_wrapper_shares_are_the_functions(backend: str) -> None:
    def f(x: torch.Tensor, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return x + 1, wrapper

    def plain(x):  # type: ignore[no-untyped-def]
        return x

    def annotated(x: int) -> int:
        return x

    compiled = fusewright.compile(f, backend=backend)
    for function in (plain, annotated, plain):
        assert compiled(torch.ones(2), function)[1].__annotations__ is function.__annotations__


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_method_of_a_function_is_that_functions(backend: str) -> None:
    """`function.__get__` as an argument and over a break: one entry serves each that is asked for, whose function is it."""

    def given(x: torch.Tensor, get: Any) -> Any:
        return x + 1, get(3)

    def broken(x: torch.Tensor, _: Any) -> Any:
        return x + 1, function.__get__(x.sum().item())

    for program in (given, broken):
        compiled, heard = fusewright.compile(program, backend=backend, dynamic=True), []
        with STREAM.listening(lambda event, heard=heard: heard.append(event) if isinstance(event, Captured) else None):
            for call in range(3):
                if call == 1:
                    heard.clear()
                assert compiled(torch.ones(3), function.__get__)[1].__func__ is function
        assert not heard
