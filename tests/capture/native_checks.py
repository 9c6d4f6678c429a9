"""Checks of the entry and of the frame hook that need no torch: run by test_entry.py and test_hook.py, and by hand on every CPython.

By hand: build the extension for that CPython into a folder, then `python tests/capture/native_checks.py FOLDER`.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import inspect
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    folder = sys.argv[1]
    path = next(os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.startswith("_native") and name.endswith(".so"))
    spec = importlib.util.spec_from_file_location("fusewright._native", path)
    assert spec is not None and spec.loader is not None
    N: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(N)
else:
    from fusewright import _native as N

OP = {name: code for code, name in enumerate(N.OPCODES)}
CHECKS: dict[str, dict[str, Callable[[], None]]] = {"entry": {}, "hook": {}}


def check(part: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(fn: Callable[[], None]) -> Callable[[], None]:
        CHECKS[part][fn.__name__] = fn
        return fn

    return register


def type_program(*types_: type, inputs: int | None = None) -> Any:
    """A guard program: argument i has the type types_[i]; the first `inputs` arguments are the graph's inputs."""
    code: list[tuple[object, ...]] = []
    for i, cls in enumerate(types_):
        code.append((OP["LOCAL"], i, 0, i, 0, False, None, None))
        code.append((OP["TYPE"], i, i, 0, 0, False, cls, None))
    n = len(types_) if inputs is None else inputs
    return N.GuardProgram(len(types_), 0, code, [(False, i) for i in range(n)])


def always(n_locals: int = 0) -> Any:
    return N.GuardProgram(n_locals, 0, [(OP["LOCAL"], i, 0, i, 0, False, None, None) for i in range(n_locals)], [])


def raises(kind: type[BaseException], fn: Callable[..., object], *args: object, **kwargs: object) -> BaseException:
    try:
        fn(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{fn} did not raise {kind.__name__}")


# --- entry -----------------------------------------------------------------------------------------------------------


def recorder(log: list[Any]) -> Callable[..., Any]:
    """A `finish` that returns the locals it was given."""

    def finish(outputs: tuple[object, ...], function: object, *locals: object) -> object:
        log.append((outputs, function))
        return locals

    return finish


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
        return N.Entry(type_program(type(value)), lambda x: [f"graph of {type(x).__name__}"]) if not isinstance(value, str) else None

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
    assert (c.__name__, c.__qualname__, c.__doc__, c.__module__, c.custom) == (f.__name__, f.__qualname__, "Doc.", f.__module__, 5)
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

    program = N.GuardProgram(1, 0, [(OP["LOCAL"], 0, 0, 0, 0, False, None, None), (OP["CALL"], 0, 1, 0, 0, False, guard, None)], [])
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


# --- hook ------------------------------------------------------------------------------------------------------------


class Policy:
    """Compiles functions by name: table[name] = (program, graph, finish); remembers what it was asked."""

    def __init__(self, table: dict[str, tuple[Any, ...]] | None = None) -> None:
        self.table = table or {}
        self.asked: list[str] = []
        self.missed: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, code: types.CodeType, function: types.FunctionType) -> Any:
        self.asked.append(code.co_name)
        assert function.__code__ is code
        return N.FrameCache(self.miss) if code.co_name in self.table else None

    def miss(self, cache: Any, function: types.FunctionType, locals: tuple[Any, ...]) -> Any:
        self.missed.append((function.__name__, locals))
        row = self.table[function.__name__]
        return None if row[0] is None else N.Entry(*row)

    def __enter__(self) -> Policy:
        N.hook_set_policy(self)
        return self

    def __exit__(self, *exc: object) -> None:
        N.hook_set_policy(None)
        N.hook_reset()
        state = N.hook_state()
        assert not state["installed"] and state["regions"] == 0 and state["depth"] == 0 and state["caches"] == 0, state


def double(x):
    return x * 2


def outer(x):
    return double(x) + 1


@check("hook")
def test_callees_of_an_eager_region_are_replaced() -> None:
    with Policy({"double": (type_program(int), lambda x: (x * 100,))}) as policy:
        assert outer(3) == 7
        assert N.call_eager(outer, 3) == 301
        assert outer(3) == 7
        assert policy.asked == ["outer", "double"] and policy.missed == [("double", (3,))]
        assert N.call_eager(outer, x=4) == 401
        assert N.call_eager(outer, "a" if False else 5) == 501
        assert policy.asked == ["outer", "double"] and len(policy.missed) == 1
        assert N.call_eager(double, "ab") == "abab"  # guards fail, the new entry's too
        assert N.hook_cache(double.__code__).entries and N.hook_cache(outer.__code__) is None
        N.hook_reset()
        assert N.hook_cache(double.__code__) is None
        assert N.call_eager(outer, 3) == 301 and policy.asked[2:] == ["outer", "double"]
    assert outer(3) == 7 and N.call_eager(outer, 3) == 7


@check("hook")
def test_eager_runs_of_compiled_functions() -> None:
    with Policy({"double": (type_program(int), lambda x: (x * 100,)), "outer": (type_program(int), lambda x: ("wrong",))}):
        c = N.CompiledFunction(outer, None)
        assert c(3) == 301  # `outer` itself runs, its callee is compiled
        c.hooked = False
        assert c(3) == 7
        c.hooked = True

        def caller(x):
            return outer(x)

        assert N.CompiledFunction(caller, None)(3) == "wrong"

        def recurse(n):
            return n if n == 0 else recurse(n - 1) + outer(1) if False else [n, outer(n)]

        assert N.CompiledFunction(recurse, None)(2) == [2, "wrong"]


@check("hook")
def test_argument_kinds_and_closures() -> None:
    captured = 10

    def callee(a, b=2, /, c=3, *args, d, e=5, **kwargs):
        def inner():
            return a

        local = 1
        return ("eager", inner(), b, c, d, e, args, kwargs, captured, local)

    def finish(outputs, function, *locals):
        return ("hook", *locals, function.__closure__[0].cell_contents)

    def caller(*args, **kwargs):
        return callee(*args, **kwargs)

    with Policy({"callee": (always(7), None, finish)}):
        assert N.call_eager(caller, 1, d=4) == ("hook", 1, 2, 3, 4, 5, (), {}, 10)
        assert N.call_eager(caller, 1, 7, 8, 9, 10, d=4, e=6, z=0) == ("hook", 1, 7, 8, 4, 6, (9, 10), {"z": 0}, 10)
        raises(TypeError, N.call_eager, caller, 1)

    def make(n):
        def closure(x):
            return (n, x)

        return closure

    def both():
        return make(1)(5), make(2)(5)

    with Policy(
        {"closure": (type_program(int), lambda x: (x,), lambda outputs, function, x: ("hook", function.__closure__[0].cell_contents, x))}
    ) as policy:
        assert N.call_eager(both) == (("hook", 1, 5), ("hook", 2, 5))
        assert policy.asked.count("closure") == 1


@check("hook")
def test_generators_coroutines_and_class_bodies_are_left_alone() -> None:
    def generator(n):
        yield from range(n)

    async def coroutine():
        return double(2)

    def run():
        class Body:
            value = double(1)

        try:
            coroutine().send(None)
        except StopIteration as stop:
            answer = stop.value
        g = generator(3)
        next(g)
        raises(KeyError, g.throw, KeyError)
        return list(generator(3)), [double(i) for i in range(3)], [*(double(i) for i in range(2))], answer, Body.value

    with Policy(
        {
            "double": (type_program(int), lambda x: (x * 100,)),
            "generator": (always(1), None, lambda *a: "wrong"),
            "coroutine": (always(0), None, lambda *a: "wrong"),
            "Body": (always(0), None, lambda *a: "wrong"),
        }
    ) as policy:
        assert N.call_eager(run) == ([0, 1, 2], [0, 100, 200], [0, 100], 200, 100)
        assert not {"generator", "coroutine", "Body", "<genexpr>"} & set(policy.asked)


@check("hook")
def test_exceptions() -> None:
    def fails(x):
        raise AssertionError("must be replaced")

    def finish(outputs, function, x):
        raise ValueError("from finish")

    def catching(x):
        try:
            return fails(x)
        except ValueError as error:
            return ("caught", str(error), traceback.extract_tb(error.__traceback__)[0].name)

    def first_thing(x):
        try:
            y = fails(x)
        finally:
            x = 3
        return y

    with Policy({"fails": (type_program(int), lambda x: (x,), finish)}):
        assert N.call_eager(catching, 1) == ("caught", "from finish", "catching")
        for _ in range(50):
            raises(ValueError, N.call_eager, first_thing, 1)
    with Policy({"fails": (type_program(int), lambda x: 1 / 0, None)}):
        raises(ZeroDivisionError, N.call_eager, catching, 1)

    def try_from_the_start(x):
        try:
            return 1
        except ValueError:
            return "handled by the frame itself"

    # a replaced frame's own handlers must not catch what its replacement raises
    with Policy({"try_from_the_start": (type_program(int), lambda x: (x,), finish)}):

        def caller():
            return try_from_the_start(1)

        raises(ValueError, N.call_eager, caller)

    def policy(code, function):
        raise LookupError("policy")

    N.hook_set_policy(policy)
    try:
        raises(LookupError, N.call_eager, outer, 1)
        N.hook_set_policy(lambda code, function: 3)
        raises(TypeError, N.call_eager, outer, 1)
    finally:
        N.hook_set_policy(None)
        N.hook_reset()
    assert N.hook_state()["regions"] == 0 and outer(1) == 3


@check("hook")
def test_off_while_policy_miss_graph_and_finish_run() -> None:
    depths = []

    def spy(*args):
        depths.append((N.hook_state()["depth"], double(1)))
        return None

    def finish(outputs, function, x):
        spy()
        depths.append(("inside call_eager", N.call_eager(outer, 1)))
        depths.append(double(1))
        return x

    class Spying(Policy):
        def __call__(self, code, function):
            spy()
            return super().__call__(code, function)

        def miss(self, cache, function, locals):
            spy()
            return super().miss(cache, function, locals)

    def target(x):
        return x

    def run(x):
        return target(x), double(x)

    def graph(x):
        spy()
        return (x,)

    with Spying({"target": (type_program(int), graph, finish), "double": (type_program(int), lambda x: (x * 100,))}):
        assert N.call_eager(run, 5) == (5, 500)
    assert ("inside call_eager", 101) in depths
    assert all(item in ((0, 2), 2) for item in depths if item != ("inside call_eager", 101)), depths


@check("hook")
def test_tracing_and_profiling_see_the_users_code() -> None:
    with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
        seen = []

        def tracer(frame, event, arg):
            seen.append(frame.f_code.co_name)
            return tracer

        assert N.call_eager(outer, 3) == 301
        sys.settrace(tracer)
        try:
            answer = N.call_eager(outer, 3)
        finally:
            sys.settrace(None)
        assert answer == 7 and "double" in seen
        sys.setprofile(lambda *a: None)
        try:
            answer = N.call_eager(outer, 3)
        finally:
            sys.setprofile(None)
        assert answer == 7
        assert N.call_eager(outer, 3) == 301


@check("hook")
def test_only_the_thread_with_a_region() -> None:
    with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
        inside, done = threading.Event(), threading.Event()
        answers: dict[str, object] = {}

        def hold(x):
            first = double(x)
            inside.set()
            assert done.wait(10)
            return first, double(x)

        worker = threading.Thread(target=lambda: answers.update(worker=N.call_eager(hold, 3)))
        worker.start()
        assert inside.wait(10)
        answers["main"] = outer(3)
        assert N.hook_state()["installed"] and N.hook_state()["depth"] == 0
        answers["main, in its own region"] = N.call_eager(outer, 3)
        done.set()
        worker.join()
        assert answers == {"worker": (300, 300), "main": 7, "main, in its own region": 301}


@check("hook")
def test_regions_nest() -> None:
    with Policy({"double": (type_program(int), lambda x: (x * 100,))}):
        N.hook_region(True)
        try:
            N.hook_region(True)
            assert outer(1) == 101
            N.hook_region(False)
            assert outer(1) == 101
            assert N.call_eager(outer, 1) == 101
            assert outer(1) == 101
        finally:
            N.hook_region(False)
        assert outer(1) == 3
        raises(RuntimeError, N.hook_region, False)


@check("hook")
def test_recursion() -> None:
    def down(n):
        return 0 if n == 0 else 1 + down(n - 1)

    def endless(n):
        return endless(n + 1)

    with Policy({"down": (None,), "endless": (None,)}) as policy:
        assert N.call_eager(down, 100) == 100
        assert len(policy.missed) == 101
        raises(RecursionError, N.call_eager, endless, 0)
    with Policy(
        {"down": (type_program(int), lambda n: (n,), lambda outputs, function, n: 0 if n == 0 else 1 + N.call_eager(function, n - 1))}
    ):
        assert N.call_eager(down, 50) == 50


@check("hook")
def test_code_objects_and_references_do_not_leak() -> None:
    with Policy({"temporary": (always(1), None, lambda outputs, function, x: x)}) as policy:

        def make():
            namespace: dict[str, Any] = {}
            exec("def temporary(x):\n    return [x]\ndef skipped(x):\n    return temporary(x)", namespace)
            return namespace["skipped"], namespace["temporary"]

        skipped, temporary = make()
        assert N.call_eager(skipped, 4) == 4
        codes = [weakref.ref(skipped.__code__), weakref.ref(temporary.__code__)]
        assert N.hook_state()["caches"] == 1
        del skipped, temporary
        gc.collect()
        assert [code() for code in codes] == [None, None]
        assert N.hook_state()["caches"] == 0

        marker = object()
        count = sys.getrefcount(marker)
        skipped, temporary = make()
        for _ in range(2000):
            assert N.call_eager(skipped, marker) is marker
        policy.missed.clear()  # it remembers the first call's arguments
        assert sys.getrefcount(marker) == count
        del skipped, temporary


@check("hook")
def test_unhooked_parts_of_a_region_behave_as_always() -> None:
    """A stretch of ordinary Python under the hook: comprehension scopes, context managers, star calls, deepcopy, dataclass-like code."""

    class Manager:
        def __enter__(self):
            return double(2)

        def __exit__(self, *exc):
            return exc[0] is ValueError

    def body():
        out = []
        with Manager() as value:
            out.append(value)
            raise ValueError
        out += [a + b for a, b in zip(range(3), map(double, range(3)))]
        out.append(copy.deepcopy({"a": [1, {2}]}))
        out.append(sorted([3, 1, 2], key=lambda v: -v))
        out.append(functools.reduce(lambda a, b: a + b, (x for x in range(4))))
        out.append((lambda *args, **kwargs: (args, kwargs))(*[1, 2], k=3))
        return out

    wanted = body()
    with Policy({}):
        assert N.call_eager(body) == wanted
    with Policy({"double": (None,)}):
        assert N.call_eager(body) == wanted


if __name__ == "__main__":
    for part, checks in CHECKS.items():
        for name, fn in checks.items():
            fn()
            sys.stdout.write(f"{part}: {name}\n")
