"""Checks of the frame hook that need no torch: which frames it compiles, and which it leaves alone."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import traceback
import types
import weakref
from typing import Any

from tests.native.native_support import N, always, check, raises, type_program


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
    with Policy(
        {"double": (type_program(int), lambda x: (x * 100,)), "outer": (type_program(int), lambda x: ("wrong",))}
    ):
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
        {
            "closure": (
                type_program(int),
                lambda x: (x,),
                lambda outputs, function, x: ("hook", function.__closure__[0].cell_contents, x),
            )
        }
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
        {
            "down": (
                type_program(int),
                lambda n: (n,),
                lambda outputs, function, n: 0 if n == 0 else 1 + N.call_eager(function, n - 1),
            )
        }
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
