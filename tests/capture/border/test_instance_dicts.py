"""An instance dictionary that the program replaces between calls: by an equal one, by one of a subclass, by that of another object."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError


class Plain:
    k = 100.0


class Answers(dict):
    """What its methods say is not what it holds."""

    def __getitem__(self, key: object) -> float:
        return 99.0

    def get(self, *given: object) -> float:
        return 98.0


class Asked:
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Deque(collections.deque):
    pass


class Ordered(collections.OrderedDict):
    pass


class Number(int):
    pass


KINDS: dict[str, Callable[[], Any]] = {
    "object": Plain, "asked": Asked, "error": type("Error", (Exception,), {}), "list": type("List", (list,), {}),
    "deque": Deque, "set": type("Set", (set,), {}), "ordered": Ordered, "number": Number, "tuple": type("Tuple", (tuple,), {}),
    "function": lambda: lambda: None, "module": torch.nn.Module,
}  # fmt: skip


def read(x: torch.Tensor, one: Any, other: Any) -> Any:
    return x * one.k + getattr(other, "k", 8)


def asked(x: torch.Tensor, one: Any, other: Any) -> Any:
    return x * vars(one)["k"] + other.__dict__.get("k", 4)


def written(x: torch.Tensor, one: Any, other: Any) -> Any:
    one.q = x.shape[0]
    other.k += 1
    return x * one.k


def entered(x: torch.Tensor, one: Any, other: Any) -> Any:
    one.__dict__["k"] = 5
    return x * other.k, one.__dict__ is other.__dict__


def cleared(x: torch.Tensor, one: Any, other: Any) -> Any:
    one.__dict__.clear()
    return x * getattr(one, "k", 8) + getattr(other, "k", 9)


def contents(one: Any) -> tuple[Any, ...]:
    held = object.__getattribute__(one, "__dict__")
    return type(held), [(key, dict.__getitem__(held, key)) for key in dict.__iter__(held) if not key.startswith("_")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", [read, asked, written, entered, cleared], ids=lambda program: program.__name__)
def test_replaced_between_calls(kind: str, program: Callable[..., Any]) -> None:
    def history(run: Callable[..., Any]) -> list[Any]:
        one, other = KINDS[kind](), KINDS[kind]()
        seen: list[Any] = []

        def give(target: Any, made: type[dict] = dict, **values: float) -> None:
            target.__dict__ = made({**(vars(target) if kind == "module" else {}), **values})

        def call() -> None:
            for _ in range(2):
                try:
                    result = str(run(torch.ones(2), one, other))
                except (AttributeError, KeyError) as error:
                    result = str(error)
                seen.append((result, contents(one), contents(other)))

        give(one, k=2.0), give(other, k=3.0), call()
        give(one, k=2.0), call()
        give(one, zz=1.0, k=2.0), give(other, k=3.0), call()
        other.__dict__ = one.__dict__
        call()
        give(other, k=2.0), call()
        give(one, k=4.0)
        other.__dict__ = one.__dict__
        call()
        give(one, k=4.0), call()
        if kind != "module":  # PyTorch's own methods ask it
            give(one, Answers, k=6.0), call()
            give(one, k=6.0), give(other, collections.OrderedDict, k=6.0), call()
            give(one, Answers, k=6.0), call()
        return seen

    heard: list[Any] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for backend in ("native", "eager"):
            assert history(fusewright.compile(program, backend=backend)) == history(program)
    assert not heard


def test_a_module_without_a_name_and_one_that_keeps_its_dict() -> None:
    def program(x: torch.Tensor, module: Any) -> Any:
        try:
            module.__dict__ = {}
        except AttributeError:
            x = x + module.k
        try:
            return x + module.absent
        except AttributeError as error:
            return x, str(error)

    found = []
    for run in (program, fusewright.compile(program)):
        module = types.ModuleType("named")
        module.k = 2.0  # type: ignore[attr-defined]
        found.append(str(run(torch.ones(1), module)))
        del module.__dict__["__name__"]
        found.append(str(run(torch.ones(1), module)))
    assert found[:2] == found[2:]
