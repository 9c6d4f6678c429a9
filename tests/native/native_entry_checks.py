"""Checks of the native entry that need no torch: binding, the order of entries, errors, lifetime, threads."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from tests.native.native_support import OP, N, always, check, raises, type_program


def recorder(log: list[Any]) -> Callable[..., Any]:
    """A `finish` that returns the locals it was given."""

    def finish(outputs: tuple[object, ...], function: object, *locals: object) -> object:
        log.append((outputs, function))
        return locals

    return finish


@check("entry")
def test_a_set_is_made_again_as_it_was() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        one: set[Any] = set()
        for _ in range(drawn.choice((3, 8, 30, 200))):
            element = drawn.choice((drawn.randrange(40), str(drawn.randrange(30)), drawn.randrange(1 << 40)))
            drawn.choice((one.add, one.add, one.add, one.discard))(element)
        layout = N.set_layout(one)
        emptied = set(range(drawn.randrange(50)))
        made = [N.set_filled(target, layout, (), list(one)) for target in (set, frozenset, emptied)]
        assert made[2] is emptied and all(list(other) == list(one) and other == one for other in made)
        assert layout is None or all(N.set_layout(other) == layout for other in made)
        for element in range(20):
            one.add(element)
            emptied.add(element)
            one.discard(2 * element)
            emptied.discard(2 * element)
        assert list(one) == list(emptied) and all(element in emptied for element in one)
    # Layouts that do not fit the elements say nothing.
    for layout in (None, (3, 0, ((0, 1), (1, 2))), (7, 0, ((9, 1), (1, 2))), (7, 0, ((0, 5), (1, 2))), (7, 0, ((0, 1),))):
        assert N.set_filled(set, layout, (), [1, 2]) == {1, 2}
    assert type(N.set_filled(type("Sub", (frozenset,), {}), None, (), [1])).__name__ == "Sub"
    for target in (3, list, frozenset([1])):
        raises(TypeError, N.set_filled, target, None, (), [1])
    held = object()
    before = sys.getrefcount(held)
    for _ in range(10):
        N.set_filled(set, N.set_layout({held}), (True,), [held])
    assert sys.getrefcount(held) == before


@check("entry")
def test_binding_is_cpythons() -> None:
    def plain(a, b, c=3):
        return (a, b, c)

    def posonly(a, b=2, /, c=3, *, d, e=5):
        return (a, b, c, d, e)

    def varargs(a, *args, k=1, **kwargs):
        return (a, k, args, kwargs)

    def only_kwargs(**kwargs):
        return (kwargs,)

    def posonly_name_in_kwargs(a, /, **kwargs):
        return (a, kwargs)

    def cell(a, b):
        def inner():
            return a

        return (a, b) if inner() is a else None

    def many(
        a0,
        a1,
        a2,
        a3,
        a4,
        a5,
        a6,
        a7,
        a8,
        a9,
        b0,
        b1,
        b2,
        b3,
        b4,
        b5,
        b6,
        b7,
        b8,
        b9,
        c0,
        c1,
        c2,
        c3,
        c4,
        c5,
        c6,
        c7,
        c8,
        c9,
        d0,
        d1,
        d2,
        d3,
        *,
        z=9,
    ):
        return tuple(locals().values())

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((1,), {}),
        ((1, 2), {}),
        ((1, 2, 3), {}),
        ((1, 2, 3, 4), {}),
        ((1,), {"b": 5}),
        ((), {"b": 1, "a": 2}),
        ((1,), {"a": 3}),
        ((1, 2), {"zz": 4}),
        ((1,), {"d": 4}),
        ((1, 2, 3), {"d": 4, "e": 6}),
        ((1,), {"b": 3, "d": 4}),
        ((1, 2, 3, 4, 5), {"k": 7, "q": 8}),
        ((), {"x": 1}),
        ((1,), {"a": 3, "d": 1}),
        (tuple(range(34)), {}),
        (tuple(range(34)), {"z": 1}),
        (tuple(range(33)), {"d3": 1}),
        (tuple(range(35)), {}),
    ]
    for function in (plain, posonly, varargs, only_kwargs, posonly_name_in_kwargs, cell, many):
        code = function.__code__
        n = code.co_argcount + code.co_kwonlyargcount
        n += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        log: list[Any] = []
        compiled = N.CompiledFunction(function, None)
        compiled.append(N.Entry(always(n), None, recorder(log)))
        for args, kwargs in calls:
            log.clear()
            try:
                wanted: Any = function(*args, **kwargs)
            except TypeError as error:
                assert str(raises(TypeError, compiled, *args, **kwargs)) == str(error)
                assert not log
                continue
            assert compiled(*args, **kwargs) == wanted
            assert log == [((), function)]
    # defaults are read at the call
    compiled = N.CompiledFunction(plain, None)
    compiled.append(N.Entry(always(3), None, recorder([])))
    plain.__defaults__ = (7, 8)
    assert compiled(1) == (1, 7, 8)
    posonly.__kwdefaults__ = {"d": 1, "e": 2}
    compiled = N.CompiledFunction(posonly, None)
    compiled.append(N.Entry(always(5), None, recorder([])))
    assert compiled(0) == (0, 2, 3, 1, 2)


@check("entry")
def test_entries_are_tried_and_move_to_front() -> None:
    def f(x):
        return "eager"

    misses = []

    def miss(compiled, function, locals):
        misses.append(locals)
        assert function is f and compiled is c
        (value,) = locals
        return (
            N.Entry(type_program(type(value)), lambda x: [f"graph of {type(x).__name__}"])
            if not isinstance(value, str)
            else None
        )

    c = N.CompiledFunction(f, miss)
    assert [c(1), c(1.0), c(2), c(2.0), c("a"), c("a")] == ["graph of int", "graph of float"] * 2 + ["eager"] * 2
    assert misses == [(1,), (1.0,), ("a",), ("a",)]
    assert [entry.calls for entry in c.entries] == [2, 2]
    first = c.entries[0]
    c(1)
    assert c.entries[0] is not first and len(c.entries) == 2
    c.remove(first)
    raises(ValueError, c.remove, first)
    assert len(c.entries) == 1
    c.append(first)
    c.append(first)
    assert len(c.entries) == 2
    c.clear()
    assert c.entries == ()
    c.miss = None
    assert c(1) == "eager"
    c.miss = miss
    assert c(1) == "graph of int"


@check("entry")
def test_an_entry_that_miss_has_already_appended_is_kept_once() -> None:
    def f(x):
        return x

    def miss(compiled, function, locals):
        entry = N.Entry(type_program(int), lambda x: (x + 1,))
        compiled.append(entry)
        return entry

    c = N.CompiledFunction(f, miss)
    assert c(1) == 2 and len(c.entries) == 1
    assert c("a") == "a"  # a new entry whose guards fail at once: eager


@check("entry")
def test_results() -> None:
    def f(x):
        return "eager"

    def result(graph, finish=None):
        c = N.CompiledFunction(f, None)
        c.append(N.Entry(type_program(int), graph, finish))
        return c(1)

    assert result(lambda x: (x,)) == 1
    assert result(lambda x: [x]) == 1
    assert result(lambda x: "bare") == "bare"
    assert "one output" in str(raises(RuntimeError, result, lambda x: (x, x)))
    assert result(lambda x: [x, 2], lambda outputs, function, x: (outputs, function, x)) == ((1, 2), f, 1)
    assert result(lambda x: "bare", lambda outputs, function, x: outputs) == ("bare",)
    assert result(None, lambda outputs, function, x: (outputs, x)) == ((), 1)
    raises(TypeError, N.Entry, type_program(int), 3)
    raises(TypeError, N.Entry, type_program(int), None, 3)
    raises(TypeError, N.Entry, 3, None)


@check("entry")
def test_errors() -> None:
    class Fallback(Exception):
        pass

    class Special(Fallback):
        pass

    calls = []

    def f(x):
        calls.append(x)
        return "eager"

    def graph_raising(kind):
        def graph(x):
            raise kind("graph")

        c = N.CompiledFunction(f, None)
        c.append(N.Entry(type_program(int), graph))
        return c

    N.set_fallback_error(Fallback)
    try:
        assert graph_raising(Fallback)(1) == "eager" and graph_raising(Special)(2) == "eager"
        assert calls == [1, 2]
        raises(ValueError, graph_raising(ValueError), 1)

        def finish(outputs, function, x):
            raise Fallback("too late")

        c = N.CompiledFunction(f, None)
        c.append(N.Entry(type_program(int), lambda x: (x,), finish))
        raises(Fallback, c, 1)
        assert calls == [1, 2]

        def bad_miss(compiled, function, locals):
            raise KeyError("miss")

        raises(KeyError, N.CompiledFunction(f, bad_miss), 1)
        raises(TypeError, N.CompiledFunction(f, lambda *a: 3), 1)
    finally:
        N.set_fallback_error(type("Nobody", (Exception,), {}))


@check("entry")
def test_stance() -> None:
    def f(x):
        return "eager"

    c = N.CompiledFunction(f, None)
    c.append(N.Entry(type_program(int), lambda x: ("compiled",)))
    assert c(1) == "compiled"
    assert N.set_stance(1) == 0
    try:
        assert c(1) == "eager"
    finally:
        assert N.set_stance(0) == 1
    assert c(1) == "compiled"
    raises(ValueError, N.set_stance, 7)


@check("entry")
def test_it_reads_like_the_function() -> None:
    def f(x: int, *, y: int = 3) -> int:
        """Doc."""
        return x + y

    f.custom = 5  # type: ignore[attr-defined]
    c = N.CompiledFunction(f, None)
    assert (c.__name__, c.__qualname__, c.__doc__, c.__module__, c.custom) == (
        f.__name__,
        f.__qualname__,
        "Doc.",
        f.__module__,
        5,
    )
    assert c.__wrapped__ is f and c.function is f and c.__annotations__ == f.__annotations__
    assert inspect.signature(c) == inspect.signature(f)
    assert inspect.unwrap(c) is f
    assert callable(c) and repr(f) in repr(c)
    functools.update_wrapper(c, f)
    c.attribute = 1
    assert c.__dict__["attribute"] == 1
    assert c(1) == 4 and functools.partial(c, 2)(y=1) == 3

    class Sub(N.CompiledFunction):
        pass

    s = Sub(f, None)
    assert s(1) == 4 and isinstance(s, N.FrameCache)
    raises(TypeError, N.CompiledFunction, len, None)
    raises(TypeError, N.CompiledFunction, f, 3)


@check("entry")
def test_methods() -> None:
    def method(self, x=1):
        return (self, x)

    class A:
        compiled = N.CompiledFunction(method, None)

    A.compiled.append(N.Entry(type_program(A, int, inputs=2), lambda self, x: ((self, x, "graph"),)))
    a = A()
    assert a.compiled(2) == (a, 2, "graph") and a.compiled() == (a, 1, "graph") and A.compiled(a, 3) == (a, 3, "graph")
    assert a.compiled(x=4) == (a, 4, "graph") and a.compiled("s") == (a, "s")
    bound = a.compiled
    assert isinstance(bound, types.MethodType) and bound.__self__ is a and bound.__func__ is A.compiled
    assert A.__dict__["compiled"].__get__(None, A) is A.compiled


@check("entry")
def test_lifetime() -> None:
    def make():
        def f(x):
            return c

        c = N.CompiledFunction(f, lambda *a: None)
        c.append(N.Entry(type_program(int), lambda x: (c,), lambda outputs, function, x: c))
        c.me = c
        return c

    c = make()
    assert c(1) is c
    alive = weakref.ref(c)
    entry = c.entries[0]
    del c
    gc.collect()
    assert alive() is not None  # the entry's finish still refers to it
    del entry
    gc.collect()
    assert alive() is None

    before = sys.getrefcount(None) if sys.version_info < (3, 12) else 0

    def g(x, y=object(), *args, k=None, **kw):
        return None

    c = N.CompiledFunction(g, None)
    c.append(N.Entry(always(5), None, lambda outputs, function, *locals: None))
    marker = object()
    count = sys.getrefcount(marker)
    for _ in range(1000):
        c(marker)
        c(marker, marker, marker, k=marker, z=marker)
        raises(TypeError, c)
    assert sys.getrefcount(marker) == count
    if before:
        assert abs(sys.getrefcount(None) - before) < 200


@check("entry")
def test_the_list_may_change_while_an_entry_runs() -> None:
    def f(x):
        return "eager"

    def clearing(x):
        c.clear()
        gc.collect()
        return (x + 1,)

    c = N.CompiledFunction(f, None)
    c.append(N.Entry(type_program(int), clearing))
    assert c(1) == 2 and c(1) == "eager"

    def guard(value):
        c.clear()
        return False

    program = N.GuardProgram(
        1, 0, [(OP["LOCAL"], 0, 0, 0, 0, False, None, None), (OP["CALL"], 0, 1, 0, 0, False, guard, None)], []
    )
    for _ in range(3):
        c.append(N.Entry(program, None, lambda *a: 1))
        c.append(N.Entry(type_program(str), None, lambda *a: 2))
        assert c(1) == "eager"


@check("entry")
def test_recursion_and_threads() -> None:
    def fib(n):
        return n if n < 2 else c(n - 1) + c(n - 2)

    c = N.CompiledFunction(fib, None)
    c.append(N.Entry(type_program(int), lambda n: (n,), lambda outputs, function, n: function(n)))
    assert c(12) == 144

    def endless(n):
        return loop(n)

    loop = N.CompiledFunction(endless, None)
    loop.append(N.Entry(type_program(int), lambda n: (n,), lambda outputs, function, n: function(n)))
    raises(RecursionError, loop, 1)
    # with a limit that the C stack cannot hold, on the main thread and on one with less stack
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        raises(RecursionError, loop, 1)
        told: list[object] = []
        deep = threading.Thread(target=lambda: told.append(raises(RecursionError, loop, 1)))
        deep.start()
        deep.join()
        assert told
        raises(RecursionError, N.call_eager, endless, 1)
    finally:
        sys.setrecursionlimit(limit)
    errors: list[object] = []

    def work(value):
        for _ in range(200):
            if c(value) != value:
                errors.append(value)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@check("entry")
def test_a_changed_code_object_forgets_the_entries() -> None:
    def f(x):
        return "first"

    def g(x, y):
        return "second"

    c = N.CompiledFunction(f, None)
    c.append(N.Entry(type_program(int), lambda x: ("compiled",)))
    assert c(1) == "compiled"
    f.__code__ = g.__code__
    assert c(1, 2) == "second" and c.entries == ()
    raises(TypeError, c, 1)
