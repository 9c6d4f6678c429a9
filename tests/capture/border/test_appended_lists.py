# ruff: noqa  (odd code on purpose)
"""Lists from outside that the program only appends to: not read, so that a call that finds them longer needs no new compile; and read all
the same as soon as the program looks at them by any way.

Each maker gives a function, a list of argument tuples, the state to look at, and how many compiles its calls may take.
"""

from __future__ import annotations

import bisect
import collections
import copy
import heapq
from typing import Any

import pytest
import torch

import fusewright
from fusewright._native import may_hold
from fusewright.base.events import STREAM, Captured
from fusewright.capture.border import native_ready, world

from tests.capture.interpret.language.support import Program, check, x

CASES: list[Any] = []
GLOBAL: list = []


def case(compiles: int) -> Any:
    def enter(make: Any) -> Any:
        CASES.append(pytest.param(make, compiles, id=make.__name__))
        return make

    return enter


CALLS = [(x(),)] * 6


@case(1)
def a_closure():
    log = [1]

    def f(x):
        log.append(x.sum())
        return x + 1

    return f, CALLS, lambda: log


@case(1)
def a_global():
    GLOBAL.clear()

    def f(x):
        GLOBAL.append(x * 2)
        GLOBAL.extend([1, x.shape])
        return x + 1

    return f, CALLS, lambda: list(GLOBAL)


@case(1)
def an_attribute_of_a_module():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.losses = []
            self.window = collections.deque([0], maxlen=3)

        def forward(self, x):
            y = x * 2
            self.losses.append(y.mean())
            self.window.append(len(x))
            self.losses.append(1)
            return y

    net = Net()
    return net, CALLS, lambda: (net.losses, net.window)


@case(1)
def an_argument():
    out: list = []

    def f(x, into):
        for k in range(3):
            into.append(x * k)
        return x - 1

    return f, [(x(), out)] * 5, lambda: out


@case(6)
def read_afterwards():
    log = [0]

    def f(x):
        log.append(1)
        return x * len(log)

    return f, CALLS, lambda: log


@case(5)
def measured_where_it_is_full():
    window: collections.deque[int] = collections.deque([0], maxlen=3)
    none: collections.deque[int] = collections.deque((), 0)

    def f(x):
        window.append(len(window))
        none.append(1)
        return x * len(window) + len(none), bool(none)

    return f, CALLS, lambda: (window, none)


@case(6)
def read_in_the_argument():
    log = [0]

    def f(x):
        log.append(len(log))
        log.append(log[-1] + 1)
        return x + log[-1]

    return f, CALLS, lambda: log


@case(6)
def read_by_other_ways():
    class Holder:
        def __init__(self):
            self.items = [1]

        @property
        def same(self):
            return self.items

    holder = Holder()

    def f(x):
        holder.items.append(2)
        a = len(vars(holder)["items"])
        holder.items.append(3)
        b = getattr(holder, "items")[-1]
        holder.same.append(4)
        c = holder.__dict__.get("items")[-1]
        return x + a + b + c, copy.copy(holder.items)

    return f, CALLS, lambda: holder.items


@case(2)
def one_list_by_two_names():
    first: list = []
    second: list = []

    def f(x, a, b):
        a.append(1)
        b.append(2)
        a.append(3)
        return x + 1

    return (
        f,
        [(x(), first, second), (x(), first, first), (x(), second, first), (x(), second, second)],
        lambda: (first, second),
    )


@case(12)
def across_a_break():
    log = [0]

    def f(x):
        log.append(x + 1)
        fusewright.graph_break()
        log.append(x + 2)
        fusewright.graph_break()
        return x * len(log)

    return f, CALLS, lambda: log


@case(2)
def a_break_between_the_list_and_its_call():
    log = [0]

    def opaque(value):
        return value + 1

    opaque._fusewright_disable = True  # type: ignore[attr-defined]

    def f(x):
        y = x + 1
        log.append(opaque(y))
        return y * 2

    return f, CALLS, lambda: log


@case(1)
def appended_to_itself_and_to_others():
    log: list = []
    other: list = []

    def f(x):
        other.append(x)
        log.append(x)
        other.extend(y for y in (x + 1, x + 2))
        return x

    return f, CALLS, lambda: (log, other)


@case(6)
def extended_by_itself():
    log = [1]

    def f(x):
        log.append(2)
        log.extend(log[:2])
        log.extend(log[-1:])
        return x * 2

    return f, CALLS, lambda: log


@case(1)
def an_item_of_a_dict():
    state: dict = {"losses": [], "steps": {"a": []}}

    def f(x):
        state["losses"].append(x.sum())
        state["steps"]["a"].append(1)
        return x + 1

    return f, CALLS, lambda: state


@case(1)
def a_local_name_first():
    log: list = []

    def f(x, flag):
        try:
            log.append(x)
            log.append(1, 2)
        except TypeError as error:
            log.append(1)
        return x + 1

    return f, [(x(), True)] * 5, lambda: log


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("make, compiles", CASES)
def test_appending(make: Any, compiles: int, backend: str) -> None:
    seen: list[Any] = []
    with STREAM.listening(seen.append):
        check(Program(make, frozenset()), backend)
    assert sum(isinstance(event, Captured) for event in seen) <= compiles + (backend == "native")


def test_elements_of_a_list_that_is_appended_to_are_no_inputs() -> None:
    kept: list[torch.Tensor] = []

    def f(x):
        kept.append(x + 1)
        return x * 2

    compiled = fusewright.compile(f, backend="eager", recompile_limit=1)
    for size in range(3):
        compiled(x())
    assert len(kept) == 3 and fusewright.explain(f)(x()).graph_break_count == 0


def test_what_is_added_costs_as_much_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as much as what was there before: a call of `append` does not walk through the list, one of `heappush` by
    native code alone."""
    calls = [0]
    ready = native_ready._ready

    def counted(*given: Any) -> Any:
        calls[0] += 1
        return ready(*given)

    monkeypatch.setattr(native_ready, "_ready", counted)

    def program(x: torch.Tensor, count: int, known: dict[str, int]) -> Any:
        listed: list[Any] = []
        found: dict[int, Any] = {known["one"]: []}
        queue: collections.deque[Any] = collections.deque()
        chain: Any = None
        heap: list[Any] = []
        ordered: list[Any] = []
        for index in range(count):
            heapq.heappush(heap, (index * 7 % 11, [index]))
            bisect.insort(ordered, (index * 7 % 11, (index,)))
            chain = [chain]
            listed.append([index, (index,)])
            found.setdefault(index, []).append(chain)
            found.get(index)
            queue.appendleft({"a": [index]})
            listed.insert(0, listed.pop())
        return x + 1, listed, found, queue, heap, ordered

    spent = []
    for count in (30, 60, 120):
        calls[0] = 0
        compiled = fusewright.compile(program, fullgraph=True)
        assert str(compiled(torch.ones(1), count, {"one": 1})) == str(program(torch.ones(1), count, {"one": 1}))
        spent.append(calls[0])
    assert spent[2] - spent[1] <= 2.5 * (spent[1] - spent[0]), spent


def test_what_may_hold_a_type() -> None:
    class Sought:
        pass

    class Own(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the program's code")

    class Heir(Sought):
        pass

    circle: list[Any] = []
    circle.append({"of": (circle, [circle])})
    shared: Any = ()
    for _ in range(100):
        shared = (shared, shared)
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    nothing = [1, "a", circle, shared, Own([2]), {Heir(): 1}, {1, 2}, collections.deque([Heir()])]
    assert not any(may_hold(one, (Sought, bytes)) for one in (*nothing, nothing, {"a": nothing}))
    for one in (Heir(), [1, (2, Sought())], {"a": {"b": [b""]}}, Own([Heir()]), (circle, [[Heir()]]), deep):
        assert may_hold(one, (Sought, bytes)) and may_hold([{"a": one}], (int, bytes, Sought))
    with pytest.raises(TypeError):
        may_hold([], Sought)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [list, tuple, lambda rows: [list(row) for row in rows], collections.deque])
def test_more_elements_than_are_guarded_run_eagerly(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what `tolist` gives behind a graph break."""
    monkeypatch.setattr(world, "MOST_GUARDS", 500)
    table = make([(1.0,) * 30] * 30)

    def function(x: torch.Tensor, shift: float) -> torch.Tensor:
        rows = (x * 2).tolist()
        return x * table[3][2] + len(rows) + shift

    compiled = fusewright.compile(function)
    for shift in (1.0, 2.0, 3.0):
        x = torch.rand(40, 40)
        assert torch.equal(compiled(x, shift), function(x, shift))
    assert "large-container" in {one.code for one in fusewright.explain(function)(x, 1.0).break_reasons}


LONG = [float(number) for number in range(100)]


class Holder:
    rows = [[float(number) for number in range(70)] for _ in range(70)]


def measured(x: Any, i: int) -> Any:
    total = x + len(LONG)
    if LONG:
        total = total + len(Holder.rows) + len(Holder.rows[i])
    return total


def shadowed(x: Any, i: int) -> Any:
    len = lambda table: table[i] + sum(table)
    return x + len(LONG)


def grown(x: Any, i: int) -> Any:
    LONG.append(2.0)
    y = x + LONG[-1] + LONG[i] + len(LONG)
    LONG.pop()
    return y


ASKED: dict[str, Any] = {
    "item": lambda x, i: x * LONG[i] + LONG[i + 1], "from the end": lambda x, i: x * LONG[-i - 1] + LONG[len(LONG) - 1],
    "of rows": lambda x, i: x * Holder.rows[i][i + 1], "out of range": lambda x, i: x * LONG[i + 1000], "slice": lambda x, i: x + len(LONG[i:]),
    "of data": lambda x, i: x + LONG[x.long()[0]], "and all of it": lambda x, i: x * LONG[i] + sum(LONG) + LONG[i],
    "by two names": lambda x, i, held=LONG: x * LONG[i] + held[i] + sum(held), "no int": lambda x, i: x * LONG["a"],
    "identity": lambda x, i: x + (Holder.rows[i] is Holder.rows[i]) + Holder.rows.index(Holder.rows[i]),
    "written": lambda x, i: (LONG.__setitem__(i, LONG[i]), x + LONG[i])[1],
    "measured": measured, "shadowed": shadowed, "grown": grown,
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_long_list_that_is_only_asked_for_elements(name: str) -> None:
    """What was read is guarded, and nothing else."""
    program, before = ASKED[name], (LONG[:], Holder.rows[:])
    compiled = fusewright.compile(program)

    def told(run: Any, i: int) -> str:
        try:
            return str(run(torch.ones(2), i))
        except Exception as error:
            return type(error).__name__

    changes = (
        lambda: None, lambda: LONG.__setitem__(3, 7.5), lambda: LONG.append(8.5), lambda: LONG.__setitem__(50, 1.5), LONG.clear,
        lambda: Holder.rows[3].append(4.0), lambda: Holder.rows.__setitem__(3, [9.0] * 80), lambda: Holder.rows.pop(),
    )  # fmt: skip
    try:
        for change in changes:
            change()
            for i in (3, 4):
                assert told(compiled, i) == told(program, i), (name, i)
    finally:
        LONG[:], Holder.rows[:] = before
        del Holder.rows[3][70:]


def test_a_long_list_is_not_read_for_one_element() -> None:
    table = [float(number) for number in range(5000)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Any, given: Any, i: int) -> Any:
            return x * table[i] + self.table[i] + len(self.table) + given[i]

    model, seen = Model(), []  # type: ignore[var-annotated]
    with STREAM.listening(seen.append):
        compiled = fusewright.compile(model, fullgraph=True)
        given = [float(number) for number in range(6000)]
        assert torch.equal(compiled(x(), given, 5), model(x(), given, 5))
        table[17], given[18] = 1.0, 2.0
        assert torch.equal(compiled(x(), given, 5), model(x(), given, 5))
        assert sum(isinstance(event, Captured) for event in seen) == 1
        table[5] = 1.0
        assert torch.equal(compiled(x(), given, 5), model(x(), given, 5))
