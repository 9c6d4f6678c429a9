"""Objects from outside that share what they hold: what is written to one is read through the other, as in eager; and objects whose memory native
code reads without asking them, changed between calls."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import itertools
import mmap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright

Maker = Callable[[], Any]
KEYS = {"a": 1}


def both(part: Callable[[Any], Any], whole: Maker) -> Maker:
    """Makes an object and what is had from it."""

    def make() -> tuple[Any, Any]:
        made = whole()
        return made, part(made)

    return make


def grown(t: torch.Tensor, held: Any, part: Any) -> Any:
    held.append(5)
    return list(part), held


def stored(t: torch.Tensor, held: Any, part: Any) -> Any:
    held["a"] = 7
    return list(part), held


def through(t: torch.Tensor, held: Any, part: Any) -> Any:
    part["b"] = 3
    n = int(t.sum())
    part["c"] = n
    return part


def attributes(t: torch.Tensor, held: Any, part: Any) -> Any:
    part["b"] = 3
    held.w = 1
    n = int(t.sum())
    part["c"] = n
    return held.b, sorted(vars(held)), part is vars(held)


SHARED: dict[str, tuple[Maker, Callable[..., Any]]] = {
    **{f"{name} of a list": (both(part, lambda: [1, 2, 3]), grown) for name, part in {
        "iterator": iter, "reversed": reversed, "zip": lambda held: zip(held, held), "enumerate": enumerate,
        "map": lambda held: map(str, held), "chain": lambda held: itertools.chain(held, held),
    }.items()},
    **{f"{name} of a dict": (both(part, KEYS.copy), stored) for name, part in {
        "iterator": iter, "items": lambda held: iter(held.items()), "values": lambda held: iter(held.values()),
        "view": dict.items, "proxy": types.MappingProxyType, "chain": lambda held: collections.ChainMap({}, held).items(),
    }.items()},
    "iterator of a deque": (both(iter, lambda: collections.deque([1])), grown),
    "proxy of another dict": (both(types.MappingProxyType, lambda: collections.OrderedDict(a=1)), stored),
    "memory": (both(memoryview, lambda: bytearray(b"abc")), lambda t, held, part: (held.__setitem__(0, 65), bytes(part))),
    "attributes of a partial": (both(vars, lambda: functools.partial(print)), attributes),
    "attributes of an exception": (both(vars, lambda: ValueError(1)), attributes),
    "attributes of a function": (both(vars, lambda: lambda: 1), attributes),
    "attributes of a tensor": (both(vars, lambda: torch.ones(2)), attributes),
    "attributes of a module": (both(vars, types.SimpleNamespace), attributes),
    "keywords": (both(lambda held: held.keywords, lambda: functools.partial(dict, q=1)),
                 lambda t, held, part: (through(t, held, part), held(), part is held.keywords)),
    "arguments of an exception": (both(lambda held: held.args, lambda: ValueError([1])),
                                  lambda t, held, part: (part[0].append(3), held.args[0], held.args is part)),
    "parameters": (both(lambda held: held._parameters, lambda: torch.nn.Linear(2, 2)),
                   lambda t, held, part: (part.update(b=None), sorted(held._parameters), part is held._parameters)),
}  # fmt: skip


def outcome(run: Callable[..., Any], *args: Any) -> str:
    try:
        return repr(run(*args))
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", SHARED)
def test_what_is_written_to_one_is_read_through_the_other(name: str, backend: str) -> None:
    make, function = SHARED[name]
    compiled = fusewright.compile(function, backend=backend)
    for _ in range(3):
        expected = outcome(function, torch.ones(2), *make())
        assert outcome(compiled, torch.ones(2), *make()) == expected
        assert " at 0x" not in expected


class Holder:
    pass


BESIDE: dict[str, Callable[..., Any]] = {
    "stored to the dictionary": lambda t, held, part: (part.update(y=t + 1), held.y),
    "stored to the object": lambda t, held, part: (setattr(held, "y", t + 1), part["y"]),
    "compared": lambda t, held, part: (vars(held) is part, vars(held) == part),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_dict_that_is_an_objects_at_some_calls(name: str) -> None:
    function = BESIDE[name]
    compiled = fusewright.compile(function)
    for own in (True, False, True, False):
        given = []
        for _ in range(2):
            held: Any = Holder()
            held.y = 5
            given.append((held, vars(held) if own else {"y": 5}))
        assert outcome(compiled, torch.ones(2), *given[0]) == outcome(function, torch.ones(2), *given[1])


MEMORY: dict[str, Maker] = {
    "memoryview": lambda: memoryview(bytearray(b"abc")), "array": lambda: array.array("b", [1, 2, 3]),
    "mmap": lambda: mmap.mmap(-1, 3), "ctypes": lambda: (ctypes.c_int8 * 3)(1, 2, 3),
}  # fmt: skip
READ: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda held: bytes(held)[0], "bytearray": lambda held: bytearray(held)[0], "join": lambda held: sum(b"".join([held])),
    "tensor": lambda held: torch.tensor(held, dtype=torch.int32).sum(), "int": lambda held: int.from_bytes(held, "little"),
    "held": lambda held: bytes([held, held][1])[0], "element": lambda held: held[0],
}  # fmt: skip


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_changes_between_calls(kind: str, read: str) -> None:
    def function(t: torch.Tensor, held: Any) -> Any:
        return t * READ[read](held)

    compiled, held = fusewright.compile(function), MEMORY[kind]()
    for number in (4, 5, 6):
        held[0] = number
        assert outcome(compiled, torch.ones(2), held) == outcome(function, torch.ones(2), held)


def sharing() -> tuple[Callable[..., Any], Callable[[], int]]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    def program(t: torch.Tensor, count: Callable[[], int]) -> tuple[torch.Tensor, int]:
        counted = count()
        return t * calls + counted, calls

    return program, count


@pytest.mark.parametrize("through", ["the function itself", "a call of it"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_variable_that_functions_share_or_do_not(backend: str, through: str) -> None:
    """The compiled function reads a variable that the function which it is given counts up: its own one, or one of the same
    name."""

    def call(program: Callable[..., Any], t: torch.Tensor, count: Callable[[], int]) -> Any:
        fusewright.graph_break()
        return program(t, count)

    compiled = fusewright.compile(call, backend=backend)
    ours, eager = [sharing() for _ in range(3)], [sharing() for _ in range(3)]
    programs = [fusewright.compile(program, backend=backend) for program, _ in ours]
    for turn in range(40):
        own, other = turn % 3, turn // 5 % 3
        if turn % 11 == 10:
            ours[own], eager[own] = sharing(), sharing()
            programs[own] = fusewright.compile(ours[own][0], backend=backend)
        count, t = ours[other][1], torch.ones(2)
        found = programs[own](t, count) if through == "the function itself" else compiled(ours[own][0], t, count)
        expected = eager[own][0](t, eager[other][1])
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
