"""Lifetime: compiled code keeps nothing of its callers alive, is collected itself, and steady calls grow nothing."""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright


class Box:
    def __init__(self) -> None:
        self.scale, self.offset, self.seen, self.table = 2, 3, [1], {"second": 5}

    def part(self, more: int) -> int:
        return self.offset + more

    bound = functools.partialmethod(part, 1)

    def raising(self, number: int) -> int:
        raise ArithmeticError(number)


def plain(x: torch.Tensor, box: Box) -> torch.Tensor:
    return x * box.scale + 1


def broken(x: torch.Tensor, box: Box) -> torch.Tensor:
    y = x * box.scale
    fusewright.graph_break()
    return y + box.offset


def effects(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.last = x * 2
    box.seen = [len(box.seen)]
    return x + 1


def branch(x: torch.Tensor, box: Box) -> torch.Tensor:
    return x * box.scale if x.sum() > 0 else x


def trained(x: torch.Tensor, box: Box) -> torch.Tensor:
    return (torch.sin(x) * box.scale).sum()


def failing(x: torch.Tensor, box: Box) -> torch.Tensor:
    fusewright.graph_break()
    return x + torch.ones(len(x) + box.offset)


def caught(x: torch.Tensor, box: Box) -> tuple[torch.Tensor, str]:
    """What went wrong holds the frames that it passed, in capture, in the break's step and in what raises it again."""
    try:
        said = str(failing(x, box))
    except RuntimeError as error:
        said = type(error).__name__
    return x * box.scale, said


def counting(box: Box) -> Iterator[int]:
    with contextlib.suppress(ValueError):
        yield box.scale
    yield box.offset


def ended(x: torch.Tensor, box: Box) -> tuple[torch.Tensor, list[int]]:
    """The end of an iterator, what a generator is given, and what native code raises are exceptions too."""
    found = [value for _, value in vars(box).items() if type(value) is int]
    found += [next(iter(()), 4), getattr(box, "absent", 5), box.bound()]
    one, other = counting(box), counting(box)
    found += [next(one), one.throw(ValueError()), next(other)]
    other.close()
    for key in ("scale", "absent"):
        with contextlib.suppress(KeyError):
            found.append({"scale": 1}[key])
    with contextlib.suppress(ValueError, AttributeError):
        found.append(int("a"))
    try:
        found.append(sum(map(box.raising, found)))
    except ArithmeticError as error:
        found += error.args
    return x * sum(found), found


def unended(x: torch.Tensor, box: Box) -> torch.Tensor:
    """Generators that nobody ends, and a store to a container."""
    counting(box)
    begun = counting(box)
    box.table["first"] = next(begun)
    fusewright.graph_break()
    return x * sum(box.table.get(key, box.scale) for key in ("first", "second"))


PROGRAMS = (plain, broken, effects, branch, trained, caught, ended, unended)


def arguments(program: Callable[..., Any]) -> tuple[torch.Tensor, Box]:
    return torch.ones(4, requires_grad=program is trained), Box()


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", None), ("aot_eager", None), ("native", None), ("native", True)]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_arguments_die_at_once(program: Callable[..., Any], backend: str, dynamic: bool | None) -> None:
    """Without help from the cycle collector: activations are large."""
    compiled = fusewright.compile(program, backend=backend, dynamic=dynamic)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            x, box = arguments(program)
            result = compiled(x, box)
            if program is trained:
                result.backward()
            del result
            watched = [weakref.ref(x), weakref.ref(box)]
            del x, box
            assert [one() for one in watched] == [None, None]
    finally:
        gc.enable()


def live() -> Counter[str]:
    for _ in range(3):  # tensors are finalised in one collection and freed in the next
        gc.collect()
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if ours(kind))


def ours(kind: type) -> bool:
    """A class may keep something else than text under `__module__` (a property of its instances does)."""
    module = kind.__module__
    return isinstance(module, str) and module.startswith(("fusewright", "torch.fx"))


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def compile_and_delete(count: int, backend: str, dynamic: bool | None) -> None:
    for turn in range(count):
        program = PROGRAMS[turn % len(PROGRAMS)]
        compiled = fusewright.compile(program, backend=backend, dynamic=dynamic)
        x, box = arguments(program)
        result = compiled(x, box)
        if program is trained:
            result.backward()


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_compiled_functions_are_collected(count: int, backend: str, dynamic: bool | None) -> None:
    compile_and_delete(10, backend, dynamic)
    before, resident = live(), memory()
    compile_and_delete(count, backend, dynamic)
    after = live()
    grown = {name: after[name] - before[name] for name in after if after[name] > before[name] + 2}
    assert not grown
    assert memory() - resident < 30_000_000


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("calls", [2000, pytest.param(100_000, marks=pytest.mark.sweep)])
def test_calls_grow_nothing(program: Callable[..., Any], backend: str, calls: int) -> None:
    compiled = fusewright.compile(program, backend=backend)
    x, box = arguments(program)

    def call(count: int) -> None:
        for _ in range(count):
            result = compiled(x, box)
            if program is trained:
                result.backward()

    def growth() -> tuple[int, int]:
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), memory()
        call(calls)
        gc.collect()
        return sys.getallocatedblocks() - blocks, memory() - resident

    call(500)
    rounds: list[tuple[int, int]] = []
    while len(rounds) < 3 and not (rounds and rounds[-1][0] < 200 and rounds[-1][1] < 1_000_000):
        rounds.append(growth())  # what leaks does so each time; what other code in the process keeps once does not
    assert rounds[-1][0] < 200 and rounds[-1][1] < 1_000_000, f"blocks and bytes: {rounds}"


class Loud:
    def __init__(self) -> None:
        self.fail = False

    def __eq__(self, other: object) -> bool:
        if self.fail:
            raise ValueError("compared")
        return self is other

    __hash__ = object.__hash__


def abandoned(x: torch.Tensor, box: Box) -> Any:
    """A generator that the end of the frame closes, within which another one ends."""

    def inner() -> Any:
        try:
            yield from (1, 2)
        except GeneratorExit:
            "".join(str(one) for one in [1, 2])

    generator = inner()
    next(generator)
    return x * box.scale


def refusing(x: torch.Tensor, box: Box) -> Any:
    """Exceptions of native code, of callbacks, and those that are thrown into generators."""

    def caught() -> Any:
        try:
            yield 1
        except ValueError:
            yield 2

    def handing_on() -> Any:
        yield from caught()

    generator, said = handing_on(), []
    said += [next(generator), generator.throw(ValueError("a"))]
    generator.close()
    for call in (lambda: int("a"), lambda: sorted([1, 2], key=lambda one: one / 0), lambda: next(iter([])), lambda: dict(3)):  # type: ignore[call-overload]
        try:
            call()
        except Exception as error:
            said.append(str(error))
    return x * box.scale, said


@pytest.mark.parametrize("program", (*PROGRAMS, abandoned, refusing), ids=lambda program: program.__name__)
def test_no_frame_of_a_compile_stays_alive(program: Callable[..., Any]) -> None:
    """It would hold its callers' frames, and with them what their variables held when they ended."""
    root = str(Path(fusewright.__file__).parent)
    gc.collect()
    gc.disable()
    try:
        compiled = fusewright.compile(program)
        compiled(*arguments(program))
        alive = [one.f_code.co_qualname for one in gc.get_objects() if type(one) is types.FrameType]
        files = [one.f_code.co_filename for one in gc.get_objects() if type(one) is types.FrameType]
    finally:
        gc.enable()
    assert [name for name, file in zip(alive, files) if file.startswith(root)] == []


def test_exceptions_leave_no_references() -> None:
    loud, x = Loud(), torch.ones(3)

    def program(x, key, fail):
        y = x * 2
        if fail:
            raise KeyError("asked for")
        return y + ([key] == [loud])

    compiled = fusewright.compile(program, backend="eager")
    key = Loud()
    compiled(x, key, False)
    with pytest.raises(KeyError):
        compiled(x, key, True)
    counts = [sys.getrefcount(one) for one in (x, key, loud)]
    for turn in range(50):
        key.fail = bool(turn % 2)
        with pytest.raises((ValueError, KeyError)):
            compiled(x, key, not key.fail)
    gc.collect()
    assert [sys.getrefcount(one) for one in (x, key, loud)] == counts


def closure(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    return made, made


def default(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    made = lambda x, scale=scale: x * scale
    return made, made


def keyword_default(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def made(x: torch.Tensor, *, scale: torch.Tensor = scale) -> torch.Tensor:
        return x * scale

    return made, made


def recursive(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def made(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x if times == 0 else made(x * scale, times - 1)

    return made, made


def decorated(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    @torch.no_grad()
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    return made, made


def wrapped(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    @functools.wraps(inner)
    def made(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    return made, made


def with_attribute(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * made.scale  # type: ignore[attr-defined]

    made.scale = scale  # type: ignore[attr-defined]
    return made, made


def counting_calls(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    calls = 0

    def made(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * scale

    return made, made


def keeping(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    last = None

    def made(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = x * scale
        return last

    return made, made


def of_a_map(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    return (lambda x: next(map(inner, [x]))), inner


def partial(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    made = functools.partial(lambda scale, x: x * scale, scale)
    return made, made


def method(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    box = Box()
    box.offset = scale  # type: ignore[assignment]
    return types.MethodType(lambda self, x: x * self.offset, box), box


def instance(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    box: Any = Box()
    box.scale = scale
    return functools.partial(plain, box=box), box


def module(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    made = torch.nn.Linear(4, 4, bias=False)
    made.weight = torch.nn.Parameter(scale.diag())
    return made, made


def hooked(scale: torch.Tensor) -> tuple[Callable[..., Any], object]:
    made, hook = torch.nn.Identity(), lambda module, given, output: output * scale
    made.register_forward_hook(hook)
    return made, hook


KEPT = (closure, default, keyword_default, recursive, decorated, wrapped, with_attribute, counting_calls, keeping, of_a_map)
KEPT += (partial, method, instance, module, hooked)
PLACE = types.SimpleNamespace()


def by_argument(x: torch.Tensor, what: Callable[..., Any]) -> Any:
    return what(x)


def by_attribute(x: torch.Tensor, what: Callable[..., Any]) -> Any:
    return PLACE.what(x)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("call", [by_argument, by_attribute])
@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
def test_what_a_call_is_given_anew_dies_with_its_last_owner(make: Callable[..., Any], call: Any, backend: str) -> None:
    """Functions that a version knows by identity, and what they hold. Results are right for each of them, as often as one
    comes to lie where another was."""
    compiled = fusewright.compile(call, backend=backend)
    for turn in range(12):
        scale = torch.full((4,), turn + 2.0)
        what, inner = make(scale)
        PLACE.what = what
        for x in (torch.ones(4), torch.arange(4.0)):
            torch.testing.assert_close(compiled(x, what), what(x))
        watched = [weakref.ref(one) for one in (scale, inner)]
        del scale, what, inner, PLACE.what
        gc.collect()
        assert [one() for one in watched] == [None, None]
