# ruff: noqa
"""Calls: how arguments are bound, and what a wrong call says."""

from __future__ import annotations

import functools
import inspect
import operator

import torch

from tests.capture.interpret.language.support import program, x


@program
def kinds_of_parameters():
    def g(a, b=2, /, c=3, *args, d, e=5, **kw):
        return (a, b, c, args, d, e, kw)

    def f(x):
        return g(x, d=1), g(x, 7, 8, 9, 10, d=2, e=3, z=4), g(x, c=1, d=0, a=9), g(*[x, 1], **{"d": 3, "q": 1})

    return f, [(x(),), (x(),)]


@program
def wrong_calls():
    def g(a, b, *, c=1):
        return a

    def h(a, /):
        return a

    def f(x, which):
        try:
            (
                lambda: g(1),
                lambda: g(1, 2, 3),
                lambda: g(1, 2, d=1),
                lambda: g(1, a=2, b=3),
                lambda: h(a=1),
                lambda: g(),
                lambda: [3][0](),
                lambda: g(*5),
                lambda: g(**5),
                lambda: g(1, 2, **{"c": 1}, c=2) if False else g(1, **{"a": 1}, b=2),
                lambda: len(),
                lambda: len(3),
                lambda: int("z"),
                lambda: g(1, 2, **{1: 2}),
            )[which]()
        except (TypeError, ValueError) as error:
            return x + which, str(error)

    return f, [(x(), i) for i in range(14)]


@program
def compiled_function_itself_is_called_wrongly():
    def f(x, y, *, k=1):
        return x + y + k

    def call(*a, **k):
        return f(*a, **k)

    return f, [(x(), 1), (x(),), (x(), 1, 2), (x(), 2)]


@program
def default_arguments_of_the_root():
    def f(x, n=2, *rest, k=3, **more):
        return x * n + k, rest, more

    return f, [(x(),), (x(), 5), (x(), 5, 6, 7), (x(),)]


@program
def star_arguments_of_the_root():
    def f(*args):
        return sum(args), len(args), args

    return f, [(x(), x()), (x(),), (x(), x(), x()), (x(), x())]


@program
def spread_in_all_forms():
    def g(*args, **kw):
        return args, kw

    def f(x, l, d):
        return g(*l, x, *l[:1], k=1, **d), g(*"ab"), g(*(v for v in l)), g(**{**d, "z": 1}), g(*{1: 2}, *range(2))

    return f, [(x(), [1, 2], {"a": 1}), (x(), [], {})]


@program
def partials():
    def g(a, b, c=0, *rest, k=1):
        return a + b * k + c, rest

    def f(x, p):
        q = functools.partial(g, x, k=3)
        r = functools.partial(q, 2)
        return q(1), r(), r(5, 6), p(x), r.func is g, r.args, r.keywords, q

    return f, [(x(), functools.partial(g, 1)), (x(), functools.partial(g, b=2))]


@program
def partials_of_a_class():  # CPython 3.13 warns of those that are read through an instance, 3.14 binds them
    def add(*numbers):
        return sum(numbers[-2:])

    class Kept(functools.partial):
        pass

    class A:
        one, kept = functools.partial(add, 1), Kept(add, 3)
        fixed = staticmethod(functools.partial(add, 4))
        of_class = classmethod(functools.partial(lambda k, cls, v: v + k, 5))
        number = property(functools.partial(lambda k, self: k, 6))

        def m(self, x):
            return self.one(x) + self.kept(x) + self.fixed(x) + A.one(x)

    outside = A()
    outside.own = functools.partial(add, 9)

    def f(x):
        inside = A()
        inside.held = inside.one
        read = getattr(outside, "one")(x), hasattr(outside, "one"), A.one.func is add
        return outside.m(x), inside.one(x), outside.own(x), inside.held(x), outside.of_class(x), outside.number, read

    return f, [(x(),), (x(),)]


@program
def evaluation_order():
    def note(log, v):
        log.append(v)
        return v

    def f(x, log):
        d = {note(log, "k"): note(log, "v")}
        l = [note(log, 1), note(log, 2)]
        note(log, l)[note(log, 0)] = note(log, 9)
        (lambda a, b=note(log, "default"), *c, **k: None)(note(log, "a"), *[note(log, "c")], z=note(log, "z"))
        t = note(log, 1) < note(log, 2) < note(log, 0) < note(log, 5)
        u = note(log, 0) or note(log, 3) and note(log, 4)
        return x + len(log), log, t, u, note(log, "if") if note(log, False) else note(log, "else")

    return f, [(x(), []), (x(), [])]


@program
def higher_order_builtins():
    def f(x, l):
        return (
            list(map(lambda v, w: x + v + w, l, l)), list(filter(None, l)), list(filter(lambda v: v > 1, l)), functools.reduce(operator.add, l, x),
            any(map(lambda v: v > 2, l)), all([]), sum([x, x], x), max(l, key=lambda v: -v), min(l, default=0), sorted(l, reverse=True),
            list(zip(l, l[1:])), list(enumerate(l, 1)), list(reversed(l)), [*map(str, l)], dict(map(lambda v: (v, x), l)),
        )  # fmt: skip

    return f, [(x(), [1, 2, 3]), (x(), [0, 5])]


@program
def operator_module():
    def f(x, d):
        get = operator.itemgetter("a", "b")
        attr = operator.attrgetter("real", "imag")
        call = operator.methodcaller("upper")
        return (
            operator.mul(x, 2), get(d), attr(3), call("s"), operator.itemgetter(1)([4, 5]), operator.contains(d, "a"), operator.index(3),
            operator.truth([]), operator.concat([1], [2]), operator.countOf([1, 1], 1), operator.neg(x), operator.iadd([1], [2]),
            operator.matmul(x, x.t()), operator.getitem(x, 0), operator.length_hint([1]),
        )  # fmt: skip

    return f, [(x(), {"a": 1, "b": 2}), (x(), {"a": x(), "b": 3})]


@program
def arguments_of_getters():
    def f(x, make, args, kwargs):
        try:
            return x + make(*args, **kwargs)
        except TypeError as error:
            return x, error.args

    makers = (operator.itemgetter(0), operator.attrgetter("real"), operator.methodcaller("count", 2))
    wrong = (((), {}), (([1, 2], 3), {}), (([1, 2],), {"obj": 1}), ((), {"obj": [1, 2]}))
    return f, [(x(), make, args, kwargs) for make in makers for args, kwargs in wrong]


@program
def signatures():
    def g(a, b: int = 2, *c, d="q", **e) -> str: ...

    def f(x):
        s = inspect.signature(g)
        names = list(s.parameters)
        return x + len(names), names, s.parameters["b"].default, str(s.parameters["c"].kind), s.return_annotation

    return f, [(x(),), (x(),)]


@program
def introspection_of_functions():
    def g(a, b=1, *, c=2):
        "Doc."
        z = 1
        return a

    def f(x):
        return (
            x + 1, g.__name__, g.__doc__, g.__defaults__, g.__kwdefaults__, g.__code__.co_argcount, g.__code__.co_varnames, callable(g),
            inspect.isfunction(g), inspect.ismethod(g), g.__module__.rpartition(".")[2], hasattr(g, "__wrapped__"), type(g).__name__,
        )  # fmt: skip

    return f, [(x(),), (x(),)]


@program
def cached_functions():
    calls = []

    @functools.lru_cache(maxsize=None)
    def slow(n):
        calls.append(n)
        return n * n

    @functools.cache
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def f(x, n):
        return x + slow(n) + slow(n), fib(n + 5)

    return f, [(x(), 2), (x(), 3), (x(), 2)], lambda: list(calls)


@program("untraceable-call")
def single_dispatch():
    @functools.singledispatch
    def show(v):
        return "object"

    @show.register
    def _(v: int):
        return "int"

    @show.register(list)
    def _(v):
        return f"list of {len(v)}"

    @show.register(torch.Tensor)
    def _(v):
        return "tensor"

    def f(x):
        return x + 1, show(3), show([1]), show(x), show("s"), show(True)

    return f, [(x(),), (x(),)]


@program
def decorators_stacked():
    def times(n):
        def outer(fn):
            @functools.wraps(fn)
            def run(*a, **k):
                out = fn(*a, **k)
                for _ in range(n - 1):
                    out = fn(out, **k)
                return out

            run.n = n
            return run

        return outer

    @times(2)
    @times(3)
    def inc(x, by=1):
        return x + by

    def f(x):
        return inc(x), inc(x, by=2), inc.n, inc.__name__, inc.__wrapped__.n

    return f, [(x(),), (x(),)]


@program
def methods_as_values():
    class A:
        def __init__(self, k):
            self.k = k

        def m(self, x):
            return x * self.k

        @classmethod
        def c(cls, x):
            return x + 1

        @staticmethod
        def s(x):
            return x - 1

    def f(x, a):
        fns = [a.m, A.c, a.s, A(5).m, functools.partial(A.m, a), x.add, str.upper, "a".join, [].append, len]
        return [g(x) for g in fns[:5]], fns[5](1), fns[6]("q"), fns[7]("bc"), fns[8](1), fns[9]("abc"), a.m

    return f, [(x(), A(2)), (x(), A(3))]


@program
def recursion_with_accumulator():
    def walk(t, depth=0, acc=None):
        acc = [] if acc is None else acc
        if isinstance(t, (list, tuple)):
            for v in t:
                walk(v, depth + 1, acc)
        else:
            acc.append((depth, t))
        return acc

    def f(x, t):
        found = walk(t)
        return x + sum(d for d, _ in found), found

    return f, [(x(), [1, [2, (3,)]]), (x(), [])]


@program
def fibonacci_recursion_and_ackermann():
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def ack(m, n):
        return n + 1 if m == 0 else ack(m - 1, 1) if n == 0 else ack(m - 1, ack(m, n - 1))

    def f(x):
        return x + fib(10), ack(2, 3)

    return f, [(x(),), (x(),)]


@program
def object_call_chain():
    class Chain:
        def __init__(self):
            self.ops = []

        def __getattr__(self, name):
            def record(*a):
                self.ops.append((name, a))
                return self

            return record

    def f(x):
        c = Chain().add(1).mul(2)
        for name, a in c.ops:
            x = getattr(x, name)(*a)
        return x, c.ops

    return f, [(x(),), (x(),)]


@program
def builtins_with_keywords():
    def f(x):
        return (
            x + 1, int("ff", base=16), round(2.567, ndigits=1), sum([1], start=5), sorted([3, 1], key=None, reverse=True), enumerate("a", start=3).__next__(),
            str(b"a", encoding="ascii"), pow(2, 5, mod=7), max(1, 2, key=lambda v: -v), dict(a=1), complex(1, 2), divmod(-7, 3), bin(5), oct(8), hex(255),
            bool([]), abs(-3), callable(len), slice(1, 2, 3).indices(10), list(range(5, 0, -2)), isinstance(3, (int, str)), print.__name__, float("inf"), ascii("é"),
        )  # fmt: skip

    return f, [(x(),), (x(),)]
