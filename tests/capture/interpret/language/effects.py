# ruff: noqa
"""Side effects: their order, their aliasing, and what is left when the function raises after them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types

import torch

from tests.capture.interpret.language.support import program, x


@program
def what_is_said_of_missing_attributes():  # from CPython 3.13 on it depends on where an object keeps its attributes
    class A:
        pass

    class Error(Exception):
        pass

    class Numbers(list):
        pass

    class Slots:
        __slots__ = ("used",)

    class Both(Slots):
        pass

    class Layer(torch.nn.Module):
        pass

    class Full:  # the keys that all instances share are used up
        pass

    for number in range(40):
        setattr(Full(), f"k{number}", 1)
    used, shown, full = A(), A(), Full()
    used.k = shown.__dict__["k"] = full.k = 1
    made = (A(), used, shown, full, Full(), Error(1), ValueError(2), Numbers(), Slots(), Both(), Layer(), torch.nn.Linear(1, 1))
    others = (types.SimpleNamespace(), collections.OrderedDict(), types.ModuleType("m"), object(), x(), lambda: 1)
    plain = ([1], {}, (1,), {1}, 1, 1.5, "a", None, range(3), torch.float32, collections.deque(), f"{1}".join)

    def f(x):
        said = []
        for one in (*made, *others, *plain, A(), Error(), Slots()):
            try:
                del one.nothing
            except AttributeError as error:
                said.append((str(error), error.name, error.obj is None, error.obj is one))
        for name in ("args", "add_note"):  # which exceptions have
            try:
                delattr(used, name)
            except AttributeError as error:
                said.append((str(error), error.name, error.obj is None, error.obj is used))
        for one in (*plain, Slots(), object(), made[8]):
            try:
                one.nothing = 1
            except AttributeError as error:
                said.append((str(error), error.name, error.obj is None, error.obj is one))
        return x + len(said), said

    return f, [(x(),), (x(),)]


@program
def what_is_stored_and_deleted_again():
    """In a slot, an attribute, a dict, a global name: empty before, or not."""

    class Slots:
        __slots__ = ("v",)

    class Both(Slots):
        pass

    class Hidden(Both):
        v = 5

    class Plain:
        pass

    def f(x, o, d):
        global _stored
        o.v = d["v"] = _stored = x
        del o.v, d["v"], _stored
        return x + 1, hasattr(o, "v"), len(d)

    made = [kind() for kind in (Slots, Both, Plain, Hidden)]
    for one in made[1:]:
        one.v = 3
    return f, [(x(), one, d) for one in made for d in ({}, {"v": 1}, {})]


@program
def a_variable_of_an_enclosing_function_is_deleted():
    def outer(x):
        value = x

        def read():
            return value

        def deleting(x, again):
            nonlocal value
            del value
            if again:
                value = x
            return x + 1

        def asking(x):
            try:
                return x + 1, read()
            except NameError as error:
                return x + 2, str(error)

        return read, deleting, asking

    read, deleting, asking = outer(1)

    def f(x, again):
        found = asking(x)
        try:
            deleting(x, again)
        except NameError as error:
            found += (str(error),)
        return found, asking(x)

    return f, [(x(), True), (x(), False), (x(), False), (x(), True)]


@program
def prints_and_stores_in_order():
    class Noisy:
        def __setattr__(self, name, value):
            print("set", name)
            object.__setattr__(self, name, value)

    def f(x, o):
        print("a")
        o.v = 1
        print("b")
        o.w = x + 1
        print("c")
        return o.w

    return f, [(x(), Noisy()), (x(), Noisy())]


@program
def stores_are_seen_by_reads():
    def f(x, d, l, o):
        d["k"] = 1
        l.append(d["k"] + 1)
        o.v = l[-1] + 1
        d["k"] = o.v
        l[0] = d
        return x * d["k"], l[0]["k"]

    ns = types.SimpleNamespace
    return f, [(x(), {}, [0], ns()), (x(), {"k": 9}, [5], ns(v=1))]


@program
def objects_made_inside_are_stored_outside():
    class Node:
        def __init__(self, v):
            self.v, self.next = v, None

    def f(x, log):
        a, b = Node(x), Node(x + 1)
        a.next, b.next = b, a
        log.append(a)
        log.append(b)
        return a.next is b, log[-1].v

    return f, [(x(), []), (x(), [])]


@program
def the_same_new_list_is_stored_and_returned():
    def f(x, d):
        l = [x + 1]
        d["a"] = l
        d["b"] = (l, l)
        l.append(2)
        return l

    return f, [(x(), {}), (x(), {"a": 0})]


@program
def argument_tensor_is_stored():
    def f(x, d):
        d["x"] = x
        d["view"] = x[0]
        d["new"] = x + 1
        x.add_(1)
        return d["x"] is x

    return f, [(x(), {}), (x(), {})]


@program
def raising_after_mutations():
    @dataclasses.dataclass
    class S:
        n: int = 0

    def f(x, s, l, fail):
        s.n += 1
        l.append(s.n)
        x.mul_(2)
        if fail:
            raise ValueError(f"after {s.n}")
        s.n += 10
        return x

    s, l = S(), []
    return f, [(x(), s, l, False), (x(), s, l, True), (x(), s, l, False), (x(), s, l, True)]


@program
def attribute_error_after_mutations():
    def f(x, l):
        l.append(1)
        y = x + len(l)
        l.append(y)
        return y.no_such_method()

    return f, [(x(), []), (x(), [])]


@program
def swap_of_attributes():
    def f(x, o):
        o.a, o.b = o.b, o.a
        return o.a - o.b

    ns = types.SimpleNamespace
    return f, [(x(), ns(a=x(), b=x() + 1)), (x(), ns(a=torch.ones(3), b=torch.zeros(3)))]


@program
def clear_and_refill():
    def f(x, l, d, s):
        l.clear(), d.clear(), s.clear()
        l += [x]
        d.update(a=x)
        s |= {1}
        return l[0] + d["a"]

    return f, [(x(), [1], {"z": 1}, {9}), (x(), [], {}, set())]


@program
def mutation_while_iterating_a_copy():
    def f(x, l):
        for v in list(l):
            if v % 2:
                l.remove(v)
            else:
                l.append(v * 10)
        return x + len(l)

    return f, [(x(), [1, 2, 3, 4]), (x(), [])]


@program
def counters_in_closures_and_objects():
    calls = collections.Counter()

    class Tool:
        used = 0

        def use(self, x):
            self.used += 1
            calls["use"] += 1
            return x + self.used

    t = Tool()

    def f(x):
        return t.use(t.use(x))

    return f, [(x(),), (x(),)], lambda: (calls, vars(t))


@program
def module_level_cache():
    cache = {}

    def lookup(key, make):
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def f(x, k):
        return x * lookup(k, lambda: torch.ones(3) * len(cache))

    return f, [(x(), "a"), (x(), "b"), (x(), "a")], lambda: cache


@program
def argument_default_cache_by_shape():
    def f(x, cache={}):
        key = tuple(x.shape)
        if key not in cache:
            cache[key] = torch.arange(x.shape[-1])
        return x + cache[key]

    return f, [(x(),), (torch.ones(2, 4),), (x(),)], lambda: f.__defaults__


@program
def effects_in_nested_calls():
    def inner(log, n):
        log.append(("in", n))
        if n:
            inner(log, n - 1)
        log.append(("out", n))

    def f(x, log):
        inner(log, 2)
        return x + len(log)

    return f, [(x(), []), (x(), [0])]


@program
def del_of_attributes_and_items():
    def f(x, o, d, l):
        del o.a, d["a"], l[0]
        o.b = d["b"] = l[0] = x
        return hasattr(o, "a"), "a" in d, len(l)

    ns = types.SimpleNamespace
    return f, [(x(), ns(a=1), {"a": 1}, [1, 2]), (x(), ns(a=1, b=2), {"a": 1, "b": 3}, [1, 2, 3])]


@program
def grad_attribute():
    def f(w):
        w.grad = None
        return w * 2

    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    return f, [(w.detach(),), (torch.ones(3),)]


@program
def in_place_on_global_state_and_result():
    state = {"h": torch.zeros(3), "n": 0}

    def f(x):
        state["h"] = state["h"] + x[0]
        state["n"] += 1
        state["h"].mul_(2)
        return state["h"] * state["n"]

    return f, [(x(),), (x(),), (x(),)], lambda: state


@program
def many_effects_of_every_kind():
    def f(x, l, d, s, q, o):
        for i in range(3):
            l.append(i)
            d[i] = [i]
            s.add(i)
            q.append(i)
            setattr(o, f"a{i}", x + i)
        d[0].append(l)
        return o.a0 + o.a1 + o.a2

    ns = types.SimpleNamespace
    return f, [
        (x(), [], {}, set(), collections.deque(maxlen=2), ns()),
        (x(), [1], {0: 1}, {7}, collections.deque(), ns(a1=1)),
    ]


@program
def attributes_of_enumeration_members_outlive_the_call():
    class Shade(enum.Enum):
        RED = 1

    held, names = [1], {"a": 1}

    def f(x, number):
        Shade.RED.held, Shade.RED.names = held, names
        Shade.RED.count = getattr(Shade.RED, "count", 0) + number
        held.append(number)
        if number > 1:
            del Shade.RED.names
        return x + Shade.RED.count, Shade.RED.held is held

    return f, [(x(), 1), (x(), 1), (x(), 2)], lambda: (vars(Shade.RED), held, names)


@program("cannot-rebuild")
def objects_of_classes_that_nobody_may_call():
    def f(x, number):
        return x + 1, functools.lru_cache(lambda v: v + number)

    return lambda *args: f(*args)[1](2), [(x(), 1), (x(), 2)]


@program("cannot-rebuild")
def iterators_over_what_is_hashed():
    names, numbers = {"a": 1, "b": 2}, {1, 2}

    def f(x, key):
        first, second, third, ended = iter(names), iter(names.items()), iter(numbers), iter({})
        next(first)
        next(ended, None)
        kinds = [type(one).__name__ for one in (first, second, third, ended)]
        return x + 1, first, second, third, ended, iter({x: 1}), reversed(names), kinds, iter({key}), iter({}.values())

    return f, [(x(), "c"), (x(), "d")], lambda: (names, numbers)


@program
def iterators_see_what_happens_to_what_they_go_over():
    names, numbers = {"a": 1}, {1}

    def f(x):
        return x + 1, iter(names), iter(numbers)

    def grown(x):
        made = f(x)
        names[len(names)], _ = 2, numbers.add(len(numbers) + 5)
        said = []
        for one in made[1:]:
            try:
                next(one)
            except RuntimeError as error:
                said.append(str(error))
        return made[0], said

    return grown, [(x(),), (x(),)]


@program
def methods_of_dicts_leave_the_frame():
    names = {"a": 1}

    def f(x):
        return x + 1, names.get, names.pop, names.keys, [names.setdefault]

    return f, [(x(),), (x(),)], lambda: names


@program("data-dependent-scalar")
def a_bound_method_and_its_owner_stay_one():
    names = {}

    def f(x):
        names.setdefault("q", []).append(x.tolist())
        return x + 1, names["q"]

    return f, [(x(),), (x(),)], lambda: names


@program
def attributes_are_stored_after_all_of_them_were_read():
    one = types.SimpleNamespace(v=1, u=2)

    def f(x):
        names = list(vars(one))
        one.w = x + 1
        del one.u
        one.u = 3
        return names, one.w

    return f, [(x(),), (x(),)], lambda: one


@program
def messages_name_the_programs_classes():
    names, numbers = {"a": 1}, [1, 2]

    def said(ask):
        try:
            return ask()
        except (TypeError, AttributeError) as error:
            return str(error)

    def f(x):
        return x + 1, [
            said(lambda: {names}), said(lambda: -names), said(lambda: numbers[names]), said(lambda: "a".join([names])),
            said(lambda: names()), said(lambda: names.get()), said(lambda: names.get(1, 2, 3)), said(lambda: hash(names)),
            said(lambda: vars(1)), said(lambda: types.SimpleNamespace.m), said(lambda: collections.deque().m),
            said(lambda: collections.deque() < 1), said(lambda: setattr(names, "x", 1)), said(lambda: "a".join([x])),
        ]  # fmt: skip

    return f, [(x(),), (x(),)]


@program("cached-function")
def a_cached_function_reads_what_was_written_before_it():
    held = [1]

    @functools.lru_cache
    def cached(key):
        return held[0] + key

    def f(x, key):
        held[0] += 5
        return x + cached(key)

    return f, [(x(), 1), (x(), 2), (x(), 1)], lambda: held
