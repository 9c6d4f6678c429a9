"""The generated `finish`: what it rebuilds, in which order, and what it refuses to rebuild."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import operator
import struct
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.signals import GraphBreak, SkipFrame
from fusewright.capture.attempt import Tracer
from fusewright.capture.border.world import World
from fusewright.capture.breaks.finish import build
from fusewright.capture.call import dispatch as calls
from fusewright.capture.guards.sources import Local
from fusewright.capture.interpret.continuation import Continuation
from fusewright.capture.settings import CaptureOptions
from fusewright.record.recorder import Recorder
from tests.capture.border.border import capture, check, run, same
from tests.capture.border.border_programs import numbers


def test_a_frame_that_returns_the_only_output_needs_no_finish() -> None:
    def f(x: torch.Tensor) -> Any:
        return x + 1

    frame = check(f, lambda: (numbers(),))
    assert frame.finish is None and frame.finish_text == ""


def test_the_text_is_readable() -> None:
    def f(x: torch.Tensor, items: list[Any]) -> Any:
        items.append(x + 1)
        return {"sum": x.sum(), "n": len(items)}

    frame = check(f, lambda: (numbers(), [1]))
    assert frame.finish_text == (
        "def finish(__outputs, __function, x, items):\n"
        "    __result = {'sum': __outputs[0], 'n': 2}\n"
        "    __v1 = [__outputs[1]]\n"
        "    items.extend(__v1)\n"
        "    return __result\n"
    )


def test_an_input_is_returned_as_itself() -> None:
    def f(x: torch.Tensor, other: Any) -> Any:
        return x, other, x + 1

    x, other = numbers(), {"a": object()}
    frame = capture(f, (x, other))
    result = run(frame, f, (x, other))
    assert result[0] is x and result[1] is other and len(frame.graph.nodes) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("view", [torch.real, torch.imag, torch.view_as_real, lambda z: z[1:], lambda z: (z * 2).real])
def test_a_view_that_leaves_twice_is_one_object(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def f(z: torch.Tensor) -> Any:
        made = view(z)
        return made, [made], made[..., :1], made

    first, (second,), part, last = fusewright.compile(f)(numbers() + 1j)
    assert first is second and first is last and part is not first


def test_everything_is_read_before_anything_is_written() -> None:
    class Pair:
        pass

    def f(pair: Any, items: list[Any]) -> Any:
        pair.a, pair.b = pair.b, pair.a
        items[0], items[1] = items[1], items[0]
        return pair.a + 1

    def make() -> tuple[Any, ...]:
        pair = Pair()
        pair.a, pair.b = numbers(), numbers() + 1  # type: ignore[attr-defined]
        return pair, [[1], [2]]

    check(f, make)


def test_arguments_named_like_builtins() -> None:
    def f(list: Any, dict: Any, object: Any, _list: Any) -> Any:
        list.append(object + 1)
        dict["k"] = list
        return {"r": [_list]}

    check(f, lambda: ([], {}, numbers(), 3))


def test_cycles_and_sharing() -> None:
    class Node:
        def __init__(self, parent: Any) -> None:
            self.parent = parent
            self.children: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        root = Node(None)
        root.children.append(Node(root))
        root.children.append(root.children[0])
        table: dict[str, Any] = {"x": x + 1}
        table["self"] = table
        table["shared"] = (table["x"], [root])
        return root, table

    check(f, lambda: (numbers(),))


def test_closures_share_their_cells() -> None:
    def f(x: torch.Tensor) -> Any:
        count = 0

        def add() -> int:
            nonlocal count
            count += 1
            return count

        def read() -> Any:
            return count, x + 1

        add()
        return add, read

    frame = capture(f, (numbers(),))
    add, read = run(frame, f, (numbers(),))
    assert (add(), add()) == (2, 3)
    same((3, numbers() + 1), read())


class Record(collections.OrderedDict):
    """Runs user code when it is filled the ordinary way."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def test_a_container_subclass_is_filled_without_its_own_code() -> None:
    def f(x: torch.Tensor) -> Any:
        record = Record()
        record["a"] = x + 1
        record["b"] = [record["a"]]
        return record

    frame = check(f, lambda: (numbers(),))
    assert "_OrderedDict.__setitem__" in frame.finish_text


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]), lambda: enumerate([1, 2, 3]), lambda: zip([1, 2, 3], "abc"), lambda: map(str, [1, 2]),
        lambda: reversed([1, 2, 3]),
        lambda: iter({"a": 1, "b": 2}), lambda: iter({"a": 1, "b": 2}.items()), lambda: itertools.chain([1], [2, 3]),
        lambda: iter(range(4)),
        lambda: itertools.count(3), lambda: itertools.islice([1, 2, 3], 2),
    ],
)  # fmt: skip
def test_an_iterator_goes_on_where_it_stood(make: Callable[[], Any]) -> None:
    def f(x: torch.Tensor) -> Any:
        iterator = make()
        first = next(iterator)
        return iterator, first, x + 1

    if "__reduce__" not in vars(type(make())):  # those of itertools, from CPython 3.14 on
        with pytest.raises((GraphBreak, SkipFrame)):
            capture(f, (numbers(),))
        compiled, again = fusewright.compile(f)(numbers()), f(numbers())
        assert list(itertools.islice(compiled[0], 5)) == list(itertools.islice(again[0], 5))
        return
    eager, ours = f(numbers()), run(capture(f, (numbers(),)), f, (numbers(),))
    assert eager[1] == ours[1]
    assert list(itertools.islice(eager[0], 5)) == list(itertools.islice(ours[0], 5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2]), lambda: iter((1, 2)), lambda: iter("ab"), lambda: iter("\u0100"), lambda: iter(b"ab"),
        lambda: iter(range(2)), lambda: iter({"a": 1}), lambda: iter({"a": 1}.values()), lambda: iter({1, 9}),
        lambda: iter(collections.deque([1])), lambda: reversed([1, 2]), lambda: reversed((1, 2)), lambda: reversed({1: 2}),
        lambda: enumerate([1]), lambda: zip([1], [2]), lambda: map(str, [1]), lambda: filter(None, [1]),
        lambda: itertools.islice(itertools.count(3), 3), lambda: itertools.chain([1], [2]), lambda: itertools.accumulate([3]),
        lambda: itertools.product([1], [2]), lambda: itertools.takewhile(bool, [1, 0]), lambda: itertools.compress([1], [1]),
    ],
)  # fmt: skip
def test_an_iterator_that_has_ended_keeps_its_kind(make: Callable[[], Any]) -> None:
    def f(x: torch.Tensor) -> Any:
        iterator = make()
        return iterator, list(iterator), x + 1

    def said(iterator: Any) -> Any:
        parts = iterator.__reduce__() if "__reduce__" in vars(type(iterator)) else ()  # see above
        return type(iterator), [len(part) if isinstance(part, tuple) else part for part in parts], list(iterator)

    eager, ours = f(numbers()), fusewright.compile(f)(numbers())
    assert said(eager[0]) == said(ours[0]) and eager[1] == ours[1]


@pytest.mark.parametrize("left", range(4))
@pytest.mark.parametrize("taken", range(3))
@pytest.mark.parametrize("make", [iter, reversed])
def test_an_iterator_over_a_list_that_becomes_shorter(make: Callable[..., Any], taken: int, left: int) -> None:
    """Where it has come farther than the list goes it has not ended: it sees what is added."""

    def f(x: torch.Tensor) -> Any:
        held = [1, 2, 3]
        iterator = make(held)
        for _ in range(taken):
            next(iterator)
        del held[left:]
        return iterator, held, x + 1

    seen = []
    for function in (f, fusewright.compile(f)):
        iterator, held, _ = function(numbers())
        given = [iterator.__length_hint__(), iterator.__reduce__()[2:]]
        held += [7, 8]
        seen.append([*given, *iterator])
    assert seen[0] == seen[1]


def pieces(log: list[Any]) -> Any:
    for number in range(3):
        log.append(number)
        yield [number, number]


@pytest.mark.parametrize("number", range(9))
def test_an_iterator_goes_as_far_as_in_eager(number: int) -> None:
    """Not farther, where what it goes over is made or changed by the program."""

    def f(x: torch.Tensor, held: list[Any], log: list[Any]) -> Any:
        if number < 3:
            iterator: Any = itertools.chain.from_iterable((pieces(log), held, [{"a": 1}, "bc"])[number])
            log.append(next(iterator))
        elif number < 5:
            iterator = (zip(held, "ab"), enumerate(held))[number - 3]
            log += list(itertools.islice(iterator, 3))
            held.append([9])
            log.append(next(iterator, 0))
        elif number < 7:
            iterator = iter(held)
            log += list(itertools.islice(iterator, 3))
            held.append([9])
            if number == 6:
                log.append(next(iterator))
        else:
            try:
                iterator = itertools.chain.from_iterable(3) if number == 7 else iter(dict([1]))  # type: ignore
            except TypeError as error:
                return str(error), x + 1
        return iterator, x + 1

    seen = []
    for function in (f, fusewright.compile(f)):
        held: list[Any] = [[3], [1], [2]]
        log: list[Any] = []
        given = function(numbers(), held, log)[0]
        held.append([7])
        seen.append((given if isinstance(given, str) else list(given), held, log))
    assert seen[0] == seen[1]


def grown(*elements: Any, without: tuple[Any, ...] = ()) -> set[Any]:
    made: set[Any] = set()
    for element in elements:
        made.add(element)
    made.difference_update(without)
    return made


class ByValue:
    """An object with a hash of its own, which is asked for as often as in eager."""

    asked: list[int] = []

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        self.asked.append(self.value)
        return self.value

    def __repr__(self) -> str:
        return str(self.value)


class Ordered(set):
    pass


@pytest.mark.parametrize("elements", [
    (3, 1, 11), (11, 3, 1), (5, 13, 21, 29), (1, 9, 17, 25), (25, 9, 1, 17), (*range(40, 0, -3), 65, 97), (8, 0, 16, "a", "b", 1.5, None, (1, 2)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [set, frozenset, Ordered])
def test_a_set_keeps_its_order(kind: Any, elements: tuple[Any, ...]) -> None:
    """It follows from all that was ever added and removed, and so does where the next element goes."""
    outside = grown(*elements, without=elements[1:2])

    def f(x: torch.Tensor, held: set[Any]) -> Any:
        mine = grown(*elements, without=elements[:1])
        by_value = {ByValue(element) for element in elements if isinstance(element, int)}
        held.add(x.shape[0])
        held.discard(elements[-1])
        held &= set(held)  # the same elements, in a smaller table
        displayed = {5, 13, 21}, {*range(3), *{9, 17, 25}}, {*{"a": 1}, *elements}
        return kind(mine), mine, kind(elements), by_value, list(held), *displayed, x + 1

    seen = []
    for function in (f, fusewright.compile(f)):
        ByValue.asked.clear()
        held = outside.copy()
        results = [function(numbers(), held) for _ in range(2)]
        mine = results[0][1]
        texts = [repr([list(one) for one in result[:-1]]) for result in results]
        mine.update(range(20, 60, 8))
        seen.append((texts, repr(mine), list(held), [mine.pop() for _ in range(3)], type(results[0][0]), ByValue.asked[:]))
    assert seen[0] == seen[1]


def generator(x: torch.Tensor) -> Any:
    yield x
    yield x + 1


@pytest.mark.parametrize("name", [
    "gi_frame", "gi_running", "gi_suspended", "gi_yieldfrom", "gi_code", "__name__", "__qualname__", "__doc__",
    "__class__", "frame", "gi_other", "started",
])  # fmt: skip
@pytest.mark.parametrize("advanced", [0, 1, 3])
def test_what_a_generator_says_of_itself(name: str, advanced: int) -> None:
    def f(x: torch.Tensor) -> Any:
        made = generator(x)
        for _ in range(advanced):
            next(made, None)
        said: Any = "none"
        try:
            said = getattr(made, name)
            said = said if said in (None, True, False) or isinstance(said, str) else type(said).__name__
        except AttributeError as error:
            said = str(error)
        made.close()
        return said, getattr(made, "gi_frame", 0) is None, x + 1

    compiled = fusewright.compile(f)
    for _ in range(2):
        assert compiled(numbers())[:2] == f(numbers())[:2]


@pytest.mark.parametrize("name", ["send", "throw", "close", "__next__", "__iter__"])
def test_methods_of_a_generator_are_the_generators(name: str) -> None:
    """One leaves the call; one is called, and the graph is broken inside; one is called behind that break."""
    given = {"send": (None,), "throw": (ValueError("thrown"),)}.get(name, ())

    def asking(x: torch.Tensor) -> Any:
        if x.sum() > 0:
            yield 1
        yield 2

    def f(x: torch.Tensor) -> Any:
        kept, said, later = getattr(generator(x), name), [], getattr(asking(x), name)
        for method in (getattr(asking(x), name), later):
            try:
                said.append(type(method(*given)).__name__)
            except ValueError as error:
                said.append(str(error))
        return kept, said, x + 1

    (eager, *expected), (ours, *found) = f(numbers()), fusewright.compile(f)(numbers())
    assert type(ours) is type(eager) and ours.__qualname__ == eager.__qualname__ and str(found) == str(expected)
    assert type(ours.__self__) is types.GeneratorType


def test_a_live_generator_is_a_break() -> None:
    def f(x: torch.Tensor) -> Any:
        made = generator(x)
        next(made)
        return made

    with pytest.raises((GraphBreak, SkipFrame)) as caught:
        capture(f, (numbers(),))
    assert caught.value.code == "cannot-rebuild"


def test_outside_containers_are_written_in_place() -> None:
    def f(d: Any, o: Any, s: Any, q: Any, items: Any, x: torch.Tensor) -> Any:
        for name in [*d]:
            d[name + "2"] = d.pop(name)
        o.move_to_end("a")
        s.discard(1)
        q.rotate(1)
        items[1:1] = [x + 1, items]
        return len(items)

    def make() -> tuple[Any, ...]:
        return (
            {"a": 1, "b": 2},
            collections.OrderedDict(a=1, b=2),
            {1, 2},
            collections.deque([1, 2, 3]),
            [1, 2],
            numbers(),
        )

    check(f, make)


def _attempt(function: Any, args: tuple[Any, ...]) -> Tracer:
    tracer = Tracer(function, args, CaptureOptions(), calls.call)
    tracer.recorder = Recorder("aten", None, tracer.stack)
    tracer.world = World(tracer)
    return tracer


def test_a_break_gets_its_values_its_effects_then_its_lines() -> None:
    def f(x: torch.Tensor, seen: list[Any]) -> None: ...

    x, seen = numbers(), []
    tracer = _attempt(f, (x, seen))
    world = tracer.world
    inside_x, inside_seen = world.load(x, Local(0, "x")), world.load(seen, Local(1, "seen"))
    inside_seen.append("before the break")
    made = [world.binary("+", inside_x, 1)]

    def step(values: list[Any]) -> tuple[list[Any], list[Any]]:
        return values, list(seen)

    finished = build(
        tracer, Continuation((made, inside_seen), ("__a", "__b"), ("return __step(__a) + (__b,)",), {"__step": step})
    )
    world.close()
    assert len(finished.outputs) == 1 and finished.function is not None
    values, seen_by_step, same_list = finished.function((x + 1,), f, x, seen)
    same([x + 1], values)
    assert seen_by_step == ["before the break"] and same_list is seen


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


NESTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda value: [value], lambda made: made[0]),
    "tuple": (lambda value: (value,), lambda made: made[0]),
    "dict": (lambda value: {"k": value}, lambda made: made["k"]),
    "object": (Box, lambda made: made.held),
    "partial": (lambda value: functools.partial(print, value), lambda made: made.args[0]),
}


@pytest.mark.parametrize("depth", [3, 31, 32, 33, 250])
@pytest.mark.parametrize("kind", NESTS)
def test_results_nest_as_deep_as_the_program_nests_them(kind: str, depth: int) -> None:
    wrap, unwrap = NESTS[kind]

    def f(x: torch.Tensor) -> Any:
        made = x + 1
        for _ in range(depth):
            made = wrap(made)
        return made

    made = fusewright.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
    for _ in range(depth):
        made = unwrap(made)
    assert made.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_views_of_a_dict_leave_the_frame(kind: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        made = kind(a=x + 1, b=2)
        return made, made.keys(), made.values(), made.items()

    made, *views = fusewright.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
    assert list(map(type, views)) == [type(made.keys()), type(made.values()), type(made.items())]
    made["c"] = 3
    assert [len(view) for view in views] == [3, 3, 3]


OVER_CHANGED = [
    lambda held: reversed(held["list"]), lambda held: iter(held["list"]), lambda held: iter(held["dict"]),
    lambda held: iter(held["dict"].items()), lambda held: iter(held["dict"].values()), lambda held: reversed(held["dict"]),
    lambda held: enumerate(held["dict"]), lambda held: zip(held["list"], held["dict"].items()), lambda held: map(str, held["dict"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OVER_CHANGED)))
def test_iterators_over_what_the_call_has_changed(number: int) -> None:
    def program(held: dict[str, Any]) -> Any:
        held["list"].append(2)
        held["dict"]["b"] = held["dict"].pop("c", 2)
        return OVER_CHANGED[number](held)

    compiled = fusewright.compile(program)
    for extra in ({}, {}, {"c": 3}):
        results = []
        for function in (program, compiled):
            held = {"list": [1], "dict": {"a": 1, **extra}}
            results.append(list(function(held)))
        assert results[0] == results[1]


@pytest.mark.parametrize("taken", range(4))
@pytest.mark.parametrize("make", [iter, reversed, enumerate, lambda held: itertools.islice(held, 1, 3)])
def test_an_iterator_stands_where_it_stood_in_what_has_become_shorter(make: Callable[[Any], Any], taken: int) -> None:
    def program(x: torch.Tensor) -> Any:
        held = [3, 4, 5]
        iterator = make(held)
        for _ in range(taken):
            next(iterator, None)
        held.pop()
        held.pop()
        return iterator, held, x + 1

    seen = []
    for function in (program, fusewright.compile(program)):
        iterator, held, _ = function(torch.ones(2))
        held.extend([7, 8, 9])
        seen.append(list(iterator))
    assert seen[0] == seen[1]


def test_the_text_of_a_generator() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        made = (i for i in range(2))
        return x + 1, [repr(made), str([made]), f"{ {'a': made} }"]

    for text in fusewright.compile(program)(torch.ones(2))[1]:
        assert "<generator object test_the_text_of_a_generator.<locals>.program.<locals>.<genexpr> at" in text


def test_a_loop_behind_a_break_whose_handler_nothing_reaches() -> None:
    """CPython 3.12 skips the instruction that a loop jumps to when it ends: it has to be END_FOR."""
    log: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 3:
                log.append(0)
            raise ValueError(1)
        except ValueError:
            pass
        for number in range(2):
            try:
                continue
            except KeyError:
                log.append(number)
        return x + 1

    compiled = fusewright.compile(f)
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(4)), torch.ones(4) + 1)
    assert log == [0, 0, 0]


OUTSIDE = operator.methodcaller("add", [1])
MAKERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "itemgetter": lambda held, listed: operator.itemgetter(0, slice(0, 2)),
    "attrgetter": lambda held, listed: operator.attrgetter("a.b"),
    "methodcaller": lambda held, listed: operator.methodcaller("append", listed),
    "methodcaller of a tensor": lambda held, listed: operator.methodcaller("add", held, alpha=2),
    "property": lambda held, listed: property(lambda self: (held, listed)),
    "property with setter": lambda held, listed: property(lambda self: 1).setter(lambda self, value: (held, listed)),
    "property with text": lambda held, listed: property(None, None, None, "text"),
    "cached_property": lambda held, listed: functools.cached_property(lambda self: (held, listed)),
    "field": lambda held, listed: dataclasses.field(default=held),
    "parameter": lambda held, listed: inspect.Parameter("a", inspect.Parameter.KEYWORD_ONLY, default=held),
    "struct": lambda held, listed: struct.Struct("ii"),
}


def _shown(made: Any, listed: list[Any]) -> list[Any]:
    """What an object made by a row of MAKERS gives to those who use it, as text."""
    if isinstance(made, operator.methodcaller):
        return [repr(made(torch.zeros(3))) if "add" in repr(made) else (made([]), made(found := []), found == [listed])]
    if isinstance(made, operator.itemgetter):
        return [made([1, 2, 3])]
    functions = [getattr(made, name, None) for name in ("fget", "fset", "func")]
    given = [function(*[None] * function.__code__.co_argcount) for function in functions if function is not None]
    holds = [one[1] is listed for one in given if isinstance(one, tuple)]
    state = [getattr(made, name, None) for name in ("__doc__", "default", "name", "init", "kind", "format")]
    return [repr(given), holds, repr(state)]


@pytest.mark.parametrize("name", MAKERS)
def test_what_compares_by_identity_is_made_afresh(name: str) -> None:
    """Each call makes another, which holds what that call has computed; one from outside stays the same."""

    def program(x: torch.Tensor) -> Any:
        listed = [1]
        made = MAKERS[name](x * 2, listed)
        return made, [made], listed, OUTSIDE

    compiled = fusewright.compile(program)
    made = []
    for number in range(3):
        x = torch.full((3,), float(number))
        one, (again,), listed, outside = compiled(x)
        assert one is again and outside is OUTSIDE and all(one is not other for other in made)
        made.append(one)
        wanted, _, list_wanted, _ = program(x)
        assert type(one) is type(wanted) and _shown(one, listed) == _shown(wanted, list_wanted)


def test_iterators_that_leave_warn_of_nothing() -> None:
    """CPython 3.12 and 3.13 warn when an iterator of itertools is asked how to make it again."""

    def program(x: torch.Tensor) -> Any:
        count, chain, cycle = itertools.count(3), itertools.chain([1, 2], [3]), itertools.cycle([1, 2])
        first = next(count), next(chain), next(cycle)
        return x + 1, first, itertools.repeat(3, 2), itertools.islice([1, 2, 3], 2), count, chain, cycle

    compiled = fusewright.compile(program, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _, first, repeat, sliced, count, chain, cycle = compiled(torch.ones(1))
            found = first, list(repeat), list(sliced), next(count), list(chain), next(cycle)
            assert found == ((3, 1, 1), [3, 3], [1, 2], 4, [2, 3], 2)
