# ruff: noqa
"""Closures: made, returned, shared, mutated; defaults; names of all scopes."""

from __future__ import annotations

import functools

import torch

from tests.capture.interpret.language.support import program, x


@program
def counter_is_returned():
    def f(x):
        n = 0

        def add(y):
            nonlocal n
            n += 1
            return y + n

        return add(x), add(x), add

    return f, [(x(),), (x(),)]


@program
def returned_closures_share_a_cell():
    def f(x):
        total = x * 0

        def push(y):
            nonlocal total
            total = total + y
            return total

        def read():
            return total

        push(x)
        return push, read, read()

    return f, [(x(),), (x() + 1,)]


@program
def closure_over_loop_variable():
    def f(x):
        late = [lambda: x + i for i in range(3)]
        early = [lambda i=i: x + i for i in range(3)]
        return [g() for g in late], [g() for g in early]

    return f, [(x(),), (x(),)]


@program
def outer_cell_is_written():
    count, last = 0, None

    def f(x):
        nonlocal count, last
        count += 1
        last = x * count
        return last + 1

    return f, [(x(),), (x(),), (x(),)], lambda: (count, last)


@program
def outer_list_is_appended():
    seen = []

    def f(x):
        seen.append(x.shape)
        seen.append(len(seen))
        return x * len(seen)

    return f, [(x(),), (x(),), (x()[:1],)], lambda: seen


@program
def cell_is_deleted_and_set_again():
    def f(x):
        a = x + 1

        def g():
            return a

        before = g()
        del a
        try:
            g()
        except NameError as error:
            message = str(error)
        a = x + 2
        return before, message, g()

    return f, [(x(),), (x(),)]


@program
def recursion_through_a_cell():
    def f(x, n):
        def fact(k):
            return x if k == 0 else fact(k - 1) * k

        return fact(n)

    return f, [(x(), 3), (x(), 4), (x(), 3)]


@program
def mutual_recursion():
    def f(x, n):
        def even(k):
            return x + 1 if k == 0 else odd(k - 1)

        def odd(k):
            return x - 1 if k == 0 else even(k - 1)

        return even(n)

    return f, [(x(), 3), (x(), 4)]


@program
def nested_three_deep():
    def f(x):
        a = 1

        def g():
            b = a + 1

            def h():
                nonlocal b
                b += a
                return x * b

            return h() + b

        return g()

    return f, [(x(),), (x(),)]


@program
def decorator_made_inside():
    def f(x):
        def twice(fn):
            @functools.wraps(fn)
            def run(*args, **kwargs):
                return fn(fn(*args, **kwargs))

            return run

        @twice
        def step(y):
            "One step."
            return y * 2 + 1

        return step(x), step.__name__, step.__doc__, step.__wrapped__(x)

    return f, [(x(),), (x(),)]


@program
def mutable_default_is_shared():
    def g(y, log=[]):
        log.append(len(log))
        return y + len(log)

    def f(x):
        return g(x), g(x)

    return f, [(x(),), (x(),)], lambda: g.__defaults__


@program
def inner_mutable_default():
    def f(x):
        def g(y, log=[]):
            log.append(y)
            return log

        first = g(x)
        second = g(x + 1)
        return first is second, len(second), second

    return f, [(x(),), (x(),)]


@program
def keyword_only_default_is_a_tensor():
    def f(x):
        def g(y, *, scale=x * 2):
            return y + scale

        return g(x), g(x, scale=1), g

    return f, [(x(),), (x(),)]


@program
def attributes_of_an_inner_function():
    def f(x):
        def g():
            g.calls += 1
            return x + g.calls

        g.calls = 0
        g()
        return g(), g.calls, g

    return f, [(x(),), (x(),)]


@program
def attributes_of_an_outer_function():
    def g(y):
        return y + 1

    g.calls = 0

    def f(x):
        g.calls += 1
        return g(x) * g.calls

    return f, [(x(),), (x(),), (x(),)], lambda: g


@program
def lambda_in_a_dict():
    def f(x, op):
        table = {"add": lambda a: a + 1, "mul": lambda a: a * 3, "neg": lambda a: -a}
        return table[op](x), sorted(table)

    return f, [(x(), "add"), (x(), "mul"), (x(), "neg"), (x(), "add")]


@program
def composition():
    def f(x, *fns):
        return functools.reduce(lambda g, h: lambda v: h(g(v)), fns, lambda v: v)(x)

    double, inc = (lambda v: v * 2), (lambda v: v + 1)
    return f, [(x(), double, inc), (x(), inc, double), (x(),)]


@program
def currying():
    def f(x):
        def add(a):
            def with_a(b):
                def with_b(c):
                    return a + b * c

                return with_b

            return with_a

        return add(x)(2)(x + 1), add(1)

    return f, [(x(),), (x(),)]


@program
def closure_passed_and_called_elsewhere():
    def apply(fn, times, value):
        for _ in range(times):
            value = fn(value)
        return value

    def f(x):
        k = 2

        def step(v):
            nonlocal k
            k += 1
            return v * k

        return apply(step, 3, x), k

    return f, [(x(),), (x(),)]


@program
def free_variable_is_a_tensor():
    w = torch.ones(3)

    def f(x):
        return x * w

    return f, [(x(),), (x(),)]


@program
def free_variable_changes_between_calls():
    k = 1

    def f(x, new):
        nonlocal k
        y = x * k
        k = new
        return y

    return f, [(x(), 2), (x(), 3), (x(), 2), (x(), 2)], lambda: k


@program
def unbound_local():
    def f(x, flag):
        if flag:
            y = x + 1
        return y

    return f, [(x(), True), (x(), False), (x(), True)]


@program
def unbound_free_variable():
    def f(x, flag):
        def g():
            return y

        if flag:
            y = x
        return g()

    return f, [(x(), True), (x(), False)]


@program
def deleted_local():
    def f(x):
        y = x + 1
        z = y
        del y
        try:
            y
        except UnboundLocalError as error:
            return z, str(error), error.name if hasattr(error, "name") else None

    return f, [(x(),), (x(),)]


@program
def walrus():
    def f(x):
        values = [z for i in range(4) if (z := i * 2) > 1]
        if (n := len(values)) > 2:
            y = x + n
        while (n := n - 1) > 0:
            y = y + n
        return y, values, z, n

    return f, [(x(),), (x(),)]


@program
def function_identity():
    def g(v):
        return v

    def f(x, h):
        return h is g, h == g, hash(h) == hash(g), h, {g: x}[h]

    return f, [(x(), g), (x(), lambda v: v + 1)] if False else [(x(), g), (x(), g)]


@program
def bound_methods_compare():
    class A:
        def m(self, v):
            return v + 1

    def f(a, x):
        return a.m == a.m, a.m is a.m, a.m(x), a.m.__func__ is A.m, a.m.__self__ is a, a.m

    a = A()
    return f, [(a, x()), (a, x())]


@program
def closure_keeps_argument_alive_and_identical():
    def f(x, l):
        def get():
            return l

        l.append(x)
        return get, get() is l

    return f, [(x(), []), (x(), [1])]


@program
def generator_closure():
    def f(x):
        n = 1

        def gen():
            nonlocal n
            while n < 4:
                yield x * n
                n += 1

        return list(gen()), n

    return f, [(x(),), (x(),)]


@program
def class_body_reads_the_enclosing_scope():
    def f(x):
        k = 3

        class A:
            value = k + 1

            def get(self):
                return x * self.value + k

        return A().get(), A.value

    return f, [(x(),), (x(),)]
