"""What `inspect`, `pydoc`, `typing` and `functools` say of what is compiled, and which frames a program sees."""

from __future__ import annotations

import cProfile
import functools
import inspect
import io
import pstats
import pydoc
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright

FACTOR = 3


def scaled(x: torch.Tensor, n: int = 2, *rest: int, key: str = "a", **others: float) -> torch.Tensor:
    """The text of a function."""
    return x * n + FACTOR + len(rest)


class Holder:
    def method(self, x: torch.Tensor) -> torch.Tensor:
        """The text of a method."""
        return x + FACTOR

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x


def closing() -> Callable[..., Any]:
    values = [5]

    def closed(x: torch.Tensor) -> Any:
        return x * values[0] + len(values)

    return closed


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


def generator(x: torch.Tensor) -> Any:
    yield x


def help_of(one: Any) -> str:
    text = io.StringIO()
    pydoc.Helper(output=text).help(one)
    return text.getvalue()


def updated(one: Any) -> tuple[Any, ...]:
    @functools.wraps(one)
    def wrapper(*args: Any) -> None: ...

    return wrapper.__name__, wrapper.__qualname__, wrapper.__doc__, wrapper.__module__, str(inspect.signature(wrapper))


ASKED: dict[str, Callable[[Any], Any]] = {
    "getfile": inspect.getfile, "getsourcefile": inspect.getsourcefile, "getsource": inspect.getsource,
    "getsourcelines": inspect.getsourcelines, "getmodule": inspect.getmodule, "getdoc": inspect.getdoc,
    "getclosurevars": lambda one: repr(inspect.getclosurevars(one)), "getfullargspec": inspect.getfullargspec,
    "signature": inspect.signature, "annotations": inspect.get_annotations, "hints": typing.get_type_hints,
    "help": help_of, "describe": pydoc.describe, "wraps": updated,
    "isfunction": inspect.isfunction, "ismethod": inspect.ismethod, "isroutine": inspect.isroutine,
    "iscoroutinefunction": inspect.iscoroutinefunction, "isgeneratorfunction": inspect.isgeneratorfunction,
    "is a function": lambda one: isinstance(one, types.FunctionType), "__class__": lambda one: one.__class__,
    "names": lambda one: sorted({*dir(one)} - {"__wrapped__", "__builtins__", "__dict__"} - VARIABLES),
}  # fmt: skip
VARIABLES = {"__annotations__", "__annotate__", "__module__", "__name__", "__qualname__", "__type_params__"}  # what a method has from `update_wrapper`


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize(
    "original",
    [scaled, Holder().method, Holder.static, closing(), coroutine, generator, lambda x, y=1: x],
    ids=lambda one: one.__name__,
)
def test_what_is_compiled_answers_as_the_original(question: str, original: Any) -> None:
    asked = ASKED[question]
    assert asked(fusewright.compile(original)) == asked(original)


def test_a_program_that_asks_what_a_compiled_function_is_gets_one_answer() -> None:
    inner = fusewright.compile(scaled)

    def program(x: torch.Tensor) -> tuple[Any, ...]:
        return isinstance(inner, types.FunctionType), inspect.isfunction(inner), inner.__class__, inner(x)

    assert fusewright.compile(program)(torch.ones(())) == program(torch.ones(()))


# --- frames of the program's ---


def callers() -> list[str]:
    frame, names = sys._getframe(1), []
    while frame.f_code.co_name != "asked":
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def name_of_caller(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return sys._getframe(1).f_code.co_name, x + 1


def through_f_back(x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return inspect.currentframe().f_back.f_code.co_name, x + 1  # type: ignore[union-attr]


def behind_a_break(x: torch.Tensor) -> tuple[Any, ...]:
    read = x.sum().item()
    frame = sys._getframe(1)
    return frame.f_code.co_name, frame.f_locals.get("variable"), frame.f_lineno, read


def all_of_them(x: torch.Tensor) -> tuple[Any, ...]:
    read = x.sum().item()
    names = [one.function for one in inspect.stack()]
    return names[: names.index("asked")], read


def by_another(x: torch.Tensor) -> tuple[Any, ...]:
    read = x.sum().item()
    return callers(), read


class Asks:
    def method(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x.sum().item(), sys._getframe(1).f_code.co_name


ASKING = (name_of_caller, through_f_back, behind_a_break, all_of_them, by_another, Asks().method)


@pytest.mark.parametrize("asking", ASKING, ids=lambda one: one.__name__)
def test_a_function_that_looks_at_its_callers_sees_the_programs_frames(asking: Callable[..., Any]) -> None:
    def inner(x: torch.Tensor) -> Any:
        variable = 5
        y = x + 1
        return asking(y), y * variable

    def program(x: torch.Tensor) -> Any:
        y = x * 2
        return inner(y), y + 1

    def asked(function: Callable[..., Any]) -> str:
        return repr(function(torch.ones(2)))

    compiled = fusewright.compile(program)
    for _ in range(3):
        assert asked(compiled) == asked(program)


def test_frames_of_ours_may_lie_between() -> None:
    """Where nothing tells what is called behind a break: the result is right, and the program's frames are there."""

    def inner(x: torch.Tensor, through: Any) -> tuple[list[str], torch.Tensor]:
        y = x * x.sum().item()
        return through.callers(), y

    def program(x: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        names, y = inner(x + 1, types.SimpleNamespace(callers=callers))
        return names, y * 2

    def asked(function: Callable[..., Any]) -> Any:
        return function(torch.ones(2))

    names, result = asked(fusewright.compile(program))
    expected, eager = asked(program)
    assert set(expected) <= {*names, "program"} and torch.equal(result, eager)


def test_a_profiler_that_begins_inside_sees_the_programs_frames() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def begun(x: torch.Tensor) -> Any:
        profile = cProfile.Profile()
        profile.enable()
        y = doubled(x) + 1
        profile.disable()
        return y, profile

    def within(x: torch.Tensor) -> Any:
        with cProfile.Profile() as profile:
            y = doubled(x) + 1
        return y, profile

    def by_a_call(x: torch.Tensor) -> Any:
        profile = cProfile.Profile()
        return profile.runcall(doubled, x), profile

    for program in (begun, within, by_a_call):
        compiled = fusewright.compile(program)
        seen = [program(torch.ones(2)), *(compiled(torch.ones(2)) for _ in range(3))]
        names = [sorted(name for _, _, name in pstats.Stats(profile).stats) for _, profile in seen]  # type: ignore
        assert "doubled" in names[0] and names == names[:1] * 4
