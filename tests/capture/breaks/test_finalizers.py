"""What dies in the midst of a call: finalizers, and handlers of generators that are left, run where eager runs them, once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.weak import WeakIdKeyDictionary

import fusewright

LOG: list[Any] = []
Program = Callable[[torch.Tensor], torch.Tensor]


@fusewright.disable
def note(*args: object) -> int:
    LOG.append("note")
    return len(args)


class Noted:
    def __init__(self, name: str = "died") -> None:
        self.name = name

    def __del__(self) -> None:
        LOG.append(self.name)

    def method(self) -> None:
        note()

    def __add__(self, other: int) -> int:
        return other + note()

    def __bool__(self) -> bool:
        return note() == 0

    def __iter__(self) -> Iterator[int]:
        note()
        yield from (1, 2)

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *args: object) -> None:
        note()


def counting(count: int) -> Iterator[int]:
    try:
        for i in range(count):
            note()
            yield i
    finally:
        LOG.append("closed")


def rebound() -> None:
    held: object = Noted()
    note(held)
    held = None


def deleted() -> None:
    held = Noted()
    note(held)
    del held
    LOG.append("deleted")


def kept() -> None:
    held = Noted()
    note(held)
    LOG.append("kept")


def watched() -> None:
    held: object = Noted()
    watch = weakref.ref(held)
    note(held)
    held = None
    LOG.append(watch() is None)


class Held:
    """Has no finalizer."""


def called_back() -> None:
    held = Held()
    watch = weakref.ref(held, lambda _: LOG.append("gone"))
    note()
    del held
    LOG.append(watch() is None)


def finalized() -> None:
    held = Held()
    weakref.finalize(held, LOG.append, "gone")
    note(held)
    del held
    LOG.append("deleted")


def in_weak_set() -> None:
    held: Any = Held()
    WEAK_SET.add(held)
    LOG.append(len(WEAK_SET))
    held = None
    LOG.append(len(WEAK_SET))


def weak_value() -> None:
    held = Held()
    WEAK_VALUES["a"] = held
    LOG.append(len(WEAK_VALUES))
    del held
    LOG.append(len(WEAK_VALUES))


def weak_key() -> None:
    held = Held()
    WEAK_KEYS[held] = 1
    LOG.append(len(WEAK_KEYS))
    del held
    LOG.append(len(WEAK_KEYS))


WEAK_SET: weakref.WeakSet[Any] = weakref.WeakSet()
WEAK_VALUES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
WEAK_KEYS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def loop() -> None:
    for _ in Noted():
        note()


def refused() -> None:
    try:
        note(Noted(), 1 // (note() - note()))
    except ZeroDivisionError:
        LOG.append("handled")


def made_by_new() -> None:
    made = object.__new__(Noted)
    made.name = "made"
    note(made)


def context() -> None:
    with Noted():
        note()


DYING: dict[str, Callable[[], object]] = {
    "argument": lambda: note(Noted()), "unused": lambda: Noted() and None, "method": lambda: Noted().method(), "operand": lambda: Noted() + 1,
    "condition": lambda: 1 if Noted() else 2, "generator": lambda: next(counting(2)), "default": lambda: next(counting(0), None),
    "made by __new__": made_by_new, "rebound": rebound, "deleted": deleted,
    "called back": called_back, "finalized": finalized, "in a weak set": in_weak_set, "weak value": weak_value, "weak key": weak_key,
    "kept": kept, "watched": watched, "loop": loop, "refused": refused, "context": context,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", DYING)
def test_as_eager(name: str, backend: str) -> None:
    use = DYING[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        use()
        LOG.append("after")
        note()
        return y * 2

    logs = []
    compiled = fusewright.compile(program, backend=backend)
    for function in (program, compiled, compiled, compiled):
        LOG.clear()
        function(torch.ones(3))
        logs.append(list(LOG))
    assert "note" in logs[0] and logs[1:] == [logs[0]] * 3


@pytest.mark.parametrize("again", [False, True])
def test_what_a_variable_holds_dies_in_the_call(again: bool) -> None:
    def program(x: torch.Tensor) -> Any:
        held: Any = Held()
        note()
        watch = weakref.ref(held)
        note()
        if again:
            held = watch() is None
        return x + 1, watch, held

    compiled = fusewright.compile(program, backend="eager")
    for _ in range(3):
        for function in (program, compiled):
            _, watch, held = function(torch.ones(3))
            assert (watch() is None, held) == ((True, False) if again else (False, watch()))


@pytest.mark.parametrize("make", [Held, lambda: lambda: 1, lambda: type("Made", (), {})(), lambda: {1, 2}.union], ids=["instance", "function", "of its class", "builtin"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_weak_reference_is_asked_when_what_the_call_has_made_is_dead(make: Callable[[], Any], backend: str) -> None:
    def program(x: torch.Tensor) -> Any:
        made, kept = make(), make()
        watch, other = weakref.ref(made), weakref.ref(kept)
        del made
        return x * 2, watch() is None, other() is kept

    for function in (program, *[fusewright.compile(program, backend=backend)] * 2):
        assert function(torch.ones(3))[1:] == (True, True)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def emptied(held: list[Any], holder: Holder, entries: dict[str, Any]) -> None:
    held.clear()


def rebound_attribute(held: list[Any], holder: Holder, entries: dict[str, Any]) -> None:
    holder.held = None


def deleted_entry(held: list[Any], holder: Holder, entries: dict[str, Any]) -> None:
    del entries["a"]


def counted(held: list[Any], holder: Holder, entries: dict[str, Any]) -> None:
    entries["count"] = len(entries)


@pytest.mark.parametrize("change", [emptied, rebound_attribute, deleted_entry, counted], ids=lambda change: change.__name__)
def test_a_weak_reference_to_what_the_call_lets_go_of(change: Callable[..., None]) -> None:
    def program(x: torch.Tensor, places: Any, watch: Any) -> tuple[Any, ...]:
        change(*places)
        return x + 1, watch() is None

    found = []
    for run in (program, fusewright.compile(program, backend="eager")):
        for place in (0, 1, 2, 0):
            kept = Held()
            places: Any = ([kept if place == 0 else 0], Holder(kept if place == 1 else 0), {"a": kept if place == 2 else 0})
            watch = weakref.ref(kept)
            del kept
            found.append(run(torch.ones(1), places, watch)[1])
    assert found[:4] == found[4:]
    assert True in found or change is counted
    report = fusewright.explain(program)(torch.ones(1), ([], Holder(0), {"a": 0}), weakref.ref(Held))
    assert change is not counted or not report.graph_break_count


def overwritten(held: list[Any], holder: Holder, entries: dict[str, Any]) -> None:
    LOG.append("before")
    held[0] = holder.held = entries["a"] = None
    LOG.append("after")


@pytest.mark.parametrize("change", [emptied, rebound_attribute, deleted_entry, overwritten], ids=lambda change: change.__name__)
@pytest.mark.parametrize("broken", [False, True])
def test_what_places_from_outside_hold_dies_where_eager_lets_go_of_it(change: Callable[..., None], broken: bool) -> None:
    def program(x: torch.Tensor, places: Any) -> torch.Tensor:
        change(*places)
        LOG.append("changed")
        if broken:
            note()
        return x + 1

    logs = []
    for run in (program, fusewright.compile(program, backend="eager")):
        for _ in range(2):
            LOG.clear()
            places: Any = ([Noted("list")], Holder(Noted("attribute")), {"a": Noted("dict")})
            run(torch.ones(1), places)
            logs.append(list(LOG))
            del places
    assert logs == [logs[0]] * 4


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Kept:
    """Keeps another object, and tells nothing of itself."""

    def __init__(self, held: object) -> None:
        self.held = held


def suspended() -> Iterator[int]:
    made = counting(2)
    next(made)
    return made


NAMED: object = None


def let_go_by_name() -> None:
    global NAMED
    NAMED = None


TOLD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "callback": (Held, lambda held: weakref.ref(held, lambda _: LOG.append("gone"))),
    "of a tensor": (lambda: torch.ones(1), lambda held: weakref.ref(held, lambda _: LOG.append("gone"))),
    "finalize": (Held, lambda held: weakref.finalize(held, LOG.append, "gone") and None),
    "proxy": (Held, lambda held: weakref.proxy(held, lambda _: LOG.append("gone"))),
    "weak key": (Held, lambda held: WEAK_KEYS.update({held: 1})),
    "weak value": (Held, lambda held: WEAK_VALUES.update({"a": held})),
    "finalizer": (Noted, lambda held: None),
    "finalizer of what it keeps": (lambda: Kept([Noted()]), lambda held: None),
    "generator": (suspended, lambda held: None),
}
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "attribute": (Holder, lambda holder: setattr(holder, "held", None)),
    "deleted attribute": (Holder, lambda holder: delattr(holder, "held")),
    "list": (lambda held: [held], lambda held: held.clear()),
    "nested list": (lambda held: Holder([[held]]), lambda holder: holder.held.clear()),
    "slot": (Slotted, lambda slotted: setattr(slotted, "held", None)),
    "cell": (lambda held: (lambda: held).__closure__[0], lambda cell: setattr(cell, "cell_contents", 1)),  # type: ignore[index]
    "global": (lambda held: globals().update(NAMED=held), lambda _: let_go_by_name()),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("told", TOLD)
def test_the_program_is_told_when_a_store_lets_go(told: str, place: str) -> None:
    make, watch = TOLD[told]
    hold, change = PLACES[place]
    def program(x: torch.Tensor, holder: Any) -> torch.Tensor:
        LOG.append(len(WEAK_KEYS) + len(WEAK_VALUES))
        change(holder)
        LOG.append(len(WEAK_KEYS) + len(WEAK_VALUES))
        return x + 1

    logs = []
    for run in (program, fusewright.compile(program, backend="eager")):
        for _ in range(2):
            LOG.clear()
            held = make()
            watched = watch(held)
            holder = hold(held)
            del held
            run(torch.ones(1), holder)
            logs.append(list(LOG))
            del holder, watched
    assert len(logs[1]) > 2 or logs[1][0] > logs[1][1]
    assert logs[:2] == logs[2:]


def test_what_the_captured_call_did_not_hold() -> None:
    """Its finalizer runs in the call, at its end: docs/guarantees.md."""

    def program(x: torch.Tensor, holder: Holder) -> torch.Tensor:
        holder.held = None
        LOG.append("stored")
        return x + 1

    logs = []
    for run in (program, fusewright.compile(program)):
        for make in (lambda: None, Noted):
            LOG.clear()
            holder = Holder(make())
            run(torch.ones(1), holder)
            logs.append(sorted(map(str, LOG)))
    assert len(logs[1]) == 2
    assert logs[:2] == logs[2:]


def test_pytorchs_own_weak_references_tell_the_program_nothing() -> None:
    kept = WeakIdKeyDictionary()

    def program(x: torch.Tensor, holder: Holder) -> torch.Tensor:
        holder.held = None
        return x + 1

    compiled = fusewright.compile(program, fullgraph=True)
    for _ in range(2):
        layer = torch.nn.Linear(1, 1)
        kept[layer] = 1  # as its compiler does with every module, once it was used
        holder = Holder(layer)
        del layer
        assert compiled(torch.ones(1), holder).tolist() == [2]
        assert not kept


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_generator_that_nothing_reads_any_more_ends_with_its_frame(backend: str, keeps: bool) -> None:
    """It breaks inside of it, where no variable is read any more; a traceback keeps the frame longer."""
    kept: list[Exception] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        def counted() -> Iterator[int]:
            try:
                note(x)
                yield 1
            finally:
                LOG.append("left")

        held = counted()
        try:
            1 // 0
        except ZeroDivisionError as error:
            kept.extend([error] * keeps)
        LOG.append(next(held))
        return x + 1

    logs = []
    compiled = fusewright.compile(program, backend=backend)
    for function in (program, compiled, compiled):
        kept.clear()
        LOG.clear()
        function(torch.ones(3))
        logs.append(list(LOG))
    assert logs == [["note", 1, *["left"] * (not keeps)]] * 3
