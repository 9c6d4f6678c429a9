# ruff: noqa  (odd code on purpose)
"""Graph breaks at every kind of place: compiled equals eager, nothing runs twice, and what surrounds the break is captured.

Each program is a maker as in language/support.py; `graphs` is how many graphs its calls give at least, `skips` the codes of whole frames
that may run eagerly (none: everything around the breaks is captured).
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import fusewright

from tests.capture.breaks.breaking import adder, check_case
from tests.capture.interpret.language.support import Program, x

CASES: list[Any] = []
case = adder(CASES)


def counter() -> tuple[list, Any]:
    """A log, and an opaque function that notes its calls: twice would show."""
    log: list = []

    def note(name: Any, value: Any = None) -> Any:
        log.append(name)
        return value

    note._fusewright_disable = True  # type: ignore[attr-defined]
    return log, note


@case(2)
def in_the_root():
    log, note = counter()

    def f(x):
        y = x + 1
        note("a")
        return y * 2

    return f, [(x(),), (x(),)], lambda: log


@case(4)
def three_calls_deep():
    log, note = counter()

    def inner(x):
        y = x * 2
        note("inner")
        return y + 1

    def middle(x):
        log.append("middle in")
        y = inner(x - 1) * 3
        log.append("middle out")
        return y

    def f(x):
        return middle(x + 1) + 1

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_a_for_loop_over_a_range():
    log, note = counter()

    def f(x):
        for i in range(4):
            x = x * 2
            note(i)
            x = x + 1
        return x - 1

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_a_loop_over_zip_and_enumerate():
    log, note = counter()

    def f(x, names):
        for i, (name, k) in enumerate(zip(names, [1, 2, 3])):
            x = x * k
            note((i, name))
        return x + 1

    return f, [(x(), "abc"), (x(), "ab")], lambda: log


@case(2)
def in_a_loop_over_a_dict_midway():
    log, note = counter()

    def f(x, d):
        total = x
        for key, value in d.items():
            total = total + value
            if key == "b":
                note(key)
        return total * 2

    return f, [(x(), {"a": x(), "b": x(), "c": x()}), (x(), {"b": x(), "a": x()})], lambda: log


@case(2)
def in_a_loop_over_a_generator_from_outside():
    log, note = counter()

    def f(x, g):
        y = x + 1
        for v in g:
            y = y * v
        return y

    return f, [(x(), (i for i in (1, 2, 3))), (x(), iter([2, 3])), (x(), iter((5,)))], lambda: log


@case(2)
def in_a_while_loop_with_else_break_and_continue():
    log, note = counter()

    def f(x, n):
        i = 0
        while i < 6:
            i += 1
            if i == 2:
                continue
            x = x + i
            if i == n:
                break
            note(i)
        else:
            x = x * 10
        return x

    return f, [(x(), 3), (x(), 9)], lambda: log


@case(2)
def nested_loops():
    log, note = counter()

    def f(x):
        for i in range(2):
            x = x + i
            for j in range(2):
                x = x * (j + 1)
                note((i, j))
            x = x - 1
        return x

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def item_in_a_loop_accumulates():
    def f(x):
        total, seen = 0.0, []
        for i in range(4):
            x = x + 1
            value = x.sum().item()
            total += value
            seen.append(value)
        return x, total, seen

    return f, [(x(),), (x(),)]


@case(2)
def branch_on_data_in_a_loop():
    def f(x):
        steps = 0
        while x.sum() < 50:
            x = x * 2 + 1
            steps += 1
        return x, steps

    return f, [(x() + 3,), (x() + 4,), (x() + 30,)]


@case(2)
def in_a_with_block():
    log, note = counter()

    class Scope:
        def __enter__(self):
            log.append("enter")
            return 3

        def __exit__(self, *exc):
            log.append(("exit", exc[0]))

    def f(x):
        with Scope() as k:
            y = x * k
            note("inside")
            y = y + 1
        return y * 2

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_no_grad():
    log, note = counter()

    def f(x, w):
        with torch.no_grad():
            y = x * w
            note(torch.is_grad_enabled())
            y = y + w
        return y, y * w, torch.is_grad_enabled()

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))], lambda: log


@case(2)
def in_autocast():
    log, note = counter()

    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            note(torch.is_autocast_enabled("cpu"))
            z = x @ w
        return y, z, y.dtype, x @ w

    return f, [(x(), torch.ones(3, 2)), (x(), torch.ones(3, 2))], lambda: log


@case(2)
def in_nested_with_and_return():
    log, note = counter()

    @contextlib.contextmanager
    def scope(name):
        log.append("in " + name)
        try:
            yield name
        finally:
            log.append("out " + name)

    def f(x):
        y = x * 2
        with torch.no_grad(), torch.set_grad_enabled(True):
            z = y + 1
            note("mid")
            return z * 3

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_try_with_finally():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            note("body")
            y = y * 2
        except ValueError:
            log.append("never")
        finally:
            log.append("finally")
        return y - 1

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def that_raises_and_is_caught():
    log: list = []

    def bad(n):
        log.append(n)
        raise ValueError(n)

    bad._fusewright_disable = True

    def f(x, n):
        y = x + n
        try:
            bad(n)
        except ValueError:
            y = y * 2
        else:
            log.append("never")
        return y

    return f, [(x(), 1), (x(), 2), (x(), 1)], lambda: log


@case(1)
def that_raises_and_escapes():
    log: list = []

    def bad(n):
        log.append(n)
        raise ValueError(n)

    bad._fusewright_disable = True

    def f(x, n):
        log.append("start")
        y = x + 1
        bad(n)
        return y

    return f, [(x(), 1), (x(), 2)], lambda: log


@case(1, "data-dependent-scalar", "disabled-function", "print-tensor")
def in_a_handler():
    log, note = counter()

    def f(x):
        try:
            y = x + 1
            raise KeyError("k")
        except KeyError as error:
            note(str(error))
            y = x * 2
        finally:
            log.append("finally")
        return y

    def g(x):
        return f(x) + 1

    return g, [(x(),), (x(),)], lambda: log


@case(2, "disabled-function")  # small functions without tensors
def in_a_comprehension():
    log, note = counter()

    def f(x):
        y = x + 1
        values = [note(i, i) for i in range(3)]
        return y * sum(values), values

    return f, [(x(),), (x(),)], lambda: log


@case(1, "disabled-function")  # small functions without tensors
def in_a_sort_key_and_map():
    log, note = counter()

    def f(x):
        y = x + 1
        a = sorted([3, 1, 2], key=lambda v: note(v, -v))
        b = list(map(lambda v: note(v, v * 2), a))
        return y * b[0], a, b

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_init_and_property():
    log, note = counter()

    class A:
        def __init__(self, x):
            self.a = x + 1
            note("init")
            self.b = self.a * 2

        @property
        def c(self):
            note("property")
            return self.b + 1

    def f(x):
        a = A(x)
        return a.c * 2, a.a

    return f, [(x(),), (x(),)], lambda: log


@case(2, "disabled-function")  # small functions without tensors
def in_enter_and_exit():
    log, note = counter()

    class Scope:
        def __enter__(self):
            note("enter")
            return self

        def __exit__(self, *exc):
            note("exit")

    def f(x):
        y = x + 1
        with Scope():
            y = y * 2
        return y - 1

    return f, [(x(),), (x(),)], lambda: log


@case(2, "disabled-function")  # small functions without tensors
def in_a_descriptor_and_getitem():
    log, note = counter()

    class D:
        def __get__(self, obj, owner):
            note("get")
            return 3

    class A:
        d = D()

        def __getitem__(self, k):
            note(k)
            return k * 2

        def __add__(self, o):
            note("add")
            return o + 1

    def f(x, a):
        y = x * a.d
        z = y + a[2]
        return a + z

    return f, [(x(), A()), (x(), A())], lambda: log


@case(2)
def between_effects():
    log, note = counter()

    def f(x, l, d):
        l.append(x + 1)
        d["before"] = 1
        print("before", len(l))
        note(("seen", len(l), dict(d).keys() == {"before"}))
        l.append(x + 2)
        d["after"] = l[0] * 2
        print("after", len(l))
        return l[-1]

    return f, [(x(), [], {}), (x(), [], {})], lambda: log


@case(2)
def with_closures_alive():
    log, note = counter()

    def f(x):
        n = 1

        def add(v):
            nonlocal n
            n += 1
            return v + n

        y = add(x)
        note(n)
        y = add(y)
        note(n)
        return add(y), n, add

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def with_aliased_locals():
    log, note = counter()

    def f(x):
        a = [x + 1]
        b = a
        c = (a, b)
        note("mid")
        a.append(x * 2)
        return a, b, c, b is a

    return f, [(x(),), (x(),)], lambda: log


@case(3)
def several_in_one_expression():
    log, note = counter()

    def f(x):
        return (x + note("a", 1)) * note("b", 2) - (x * note("c", 3))

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_a_module_forward():
    log, note = counter()

    class Block(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            note("block")
            return y + 1

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x) - 1
            return x

    m = Model()
    return m.forward, [(x(),), (x(),)], lambda: log


@case(2)
def in_an_argument_of_a_call_with_stars():
    log, note = counter()

    def g(*a, **k):
        return sum(a) + sum(k.values())

    def f(x):
        return g(x + 1, *[note("a", 2)], k=note("b", 3), m=x * 2)

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def explicit():
    def f(x):
        y = x + 1
        fusewright.graph_break()
        return y * 2

    return f, [(x(),), (x(),)]


@case(2)
def print_of_a_tensor():
    def f(x):
        y = x + 1
        print(y)
        print("constant", y.shape)
        return y * 2

    return f, [(x(),), (x(),)]


@case(2)
def delete_and_rebind_around_it():
    log, note = counter()

    def f(x):
        a, b = x + 1, x * 2
        del a
        note("mid")
        try:
            a
        except UnboundLocalError:
            a = b
        return a - b

    return f, [(x(),), (x(),)], lambda: log


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("one, graphs, skips", CASES)
def test_a_break_changes_nothing(one: Program, graphs: int, skips: tuple[str, ...], backend: str) -> None:
    check_case(one, graphs, skips, backend)


def test_a_break_is_reported_with_cause_place_and_remedy() -> None:
    def f(x):
        y = x + 1
        if y.sum() > 0:
            return y * 2
        return y

    line = f.__code__.co_firstlineno + 2
    report = str(fusewright.explain(f)(x()))
    assert f"test_break_programs.py:{line}" in report
    with pytest.raises(fusewright.base.errors.GraphBreakError) as caught:
        fusewright.compile(f, fullgraph=True)(x())
    assert caught.value.code == "data-dependent-branch"
    assert f"test_break_programs.py:{line}" in str(caught.value)
    assert "torch.where" in str(caught.value)


def test_iterations_of_a_loop_that_breaks_share_what_is_compiled() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for label in range(40):
            row = x[:, label]
            parts.append((row[row > 0.3] * 2, label))
        return torch.cat([part for part, _ in parts])

    x = torch.rand(30, 40)
    report = fusewright.explain(f)(x)
    torch.testing.assert_close(report.result, f(x))
    assert report.graph_count < 12, report
