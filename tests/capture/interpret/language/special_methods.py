# ruff: noqa
"""Special methods: containers, operators and their reflected forms, comparison, hash, truth and iteration of the user's objects."""

from __future__ import annotations

import enum
import functools
import operator

import torch

from tests.capture.interpret.language.support import program, x


@program
def container_protocol():
    class Bag:
        def __init__(self, values):
            self.values = list(values)

        def __len__(self):
            return len(self.values)

        def __getitem__(self, i):
            return Bag(self.values[i]) if isinstance(i, slice) else self.values[i]

        def __setitem__(self, i, v):
            self.values[i] = v

        def __delitem__(self, i):
            del self.values[i]

        def __contains__(self, v):
            return any(v is w for w in self.values)

        def __iter__(self):
            return iter(self.values)

        def __reversed__(self):
            return reversed(self.values)

        def __bool__(self):
            return len(self.values) > 1

    def f(x, b):
        b[0] = x
        del b[1]
        return b[0] + len(b), x in b, 7 in b, bool(b), list(reversed(b)), b[0:1], sum(v for v in b)

    return f, [(x(), Bag([1, 2, 3])), (x(), Bag([4, 5, 6]))]


@program
def operators_and_reflected():
    class V:
        def __init__(self, v):
            self.v = v

        def __add__(self, o):
            return V(self.v + (o.v if isinstance(o, V) else o))

        __radd__ = __add__

        def __iadd__(self, o):
            self.v = self.v + o
            return self

        def __mul__(self, o):
            return NotImplemented

        def __rmul__(self, o):
            return V(o * self.v)

        def __neg__(self):
            return V(-self.v)

        def __matmul__(self, o):
            return "matmul"

        def __pow__(self, n, m=None):
            return ("pow", n, m)

        def __divmod__(self, o):
            return ("divmod", o)

        def __invert__(self):
            return "inv"

        def __abs__(self):
            return V(abs(self.v))

        def __index__(self):
            return 2

        def __call__(self, *a, **k):
            return (a, k)

    def f(x):
        v = V(x)
        w = v + 1
        w = 2 + w
        u = w
        u += 1
        try:
            v * 2
        except TypeError as error:
            message = str(error)
        return (
            w.v,
            u is w,
            (3 * v).v,
            (-v).v,
            v @ 1,
            v**2,
            pow(v, 2, 3),
            divmod(v, 1),
            ~v,
            abs(v).v,
            [1, 2, 3][v],
            v(1, a=2),
            message,
        )

    return f, [(x(),), (x(),)]


@program
def reflected_with_a_tensor():
    class Half:
        def __radd__(self, o):
            return ("radd", o)

        def __rmul__(self, o):
            return ("rmul", o)

    def f(x):
        a = x + Half() if False else 1
        return a, 2 * Half(), x + 1

    return f, [(x(),), (x(),)]


@program
def subclass_reflected_priority():
    class A:
        def __add__(self, o):
            return "A.add"

        def __radd__(self, o):
            return "A.radd"

    class B(A):
        def __radd__(self, o):
            return "B.radd"

    def f(x):
        return x + 1, A() + B(), A() + A(), B() + A(), A() == A(), A() != A()

    return f, [(x(),), (x(),)]


@program
def a_reflected_method_is_not_asked_of_the_same_class_and_first_only_where_it_is_another():
    log = []

    class A:
        def __add__(self, o):
            log.append("add")
            return NotImplemented

        def __sub__(self, o):
            log.append("sub")
            return "sub"

        __lt__ = __pow__ = __divmod__ = __add__

        def __radd__(self, o):
            log.append("radd")
            return "radd"

        __rsub__ = __gt__ = __rpow__ = __rdivmod__ = __radd__

    class B(A):
        pass

    def f(x):
        said = []
        for one, other in ((A(), A()), (A(), B()), (B(), A()), (B(), B())):
            for ask in (operator.add, operator.sub, operator.lt, pow, divmod):
                try:
                    said.append(ask(one, other))
                except TypeError as error:
                    said.append(str(error))
        return x + 1, said

    return f, [(x(),), (x(),)], lambda: log


@program
def what_builtin_containers_are_joined_with_is_asked_first():
    log = []

    class Refuses:
        def __radd__(self, o):
            log.append("refuses")
            return NotImplemented

        __rmul__ = __ror__ = __radd__

        def __iter__(self):
            return iter((7, 8))

    class Counts(Refuses):
        def __index__(self):
            return 2

    class Answers:
        def __radd__(self, o):
            log.append("answers")
            return "answered", o

        __rmul__ = __ror__ = __radd__

    class Text(str):
        def __radd__(self, o):
            return "text", o

    class Numbers(set):
        def __or__(self, o):
            log.append("or")
            return "or"

    class Nothing:
        __radd__ = __mul__ = __lt__ = None

    def join(one, other):
        one += other
        return one

    def repeat(one, other):
        one *= other
        return one

    def unite(one, other):
        one |= other
        return one

    def f(x):
        said = []
        asked = (operator.add, operator.mul, join, repeat, operator.or_, unite, operator.lt)
        for make in (lambda: [1], lambda: (1,), lambda: "a", lambda: b"a", lambda: {1}, lambda: {1: 2}, Nothing, Text):
            for other in (Refuses(), Counts(), Answers(), Text("b"), Numbers({3}), Nothing(), 2):
                for ask in asked:
                    for operands in ((make(), other), (other, make())):
                        try:
                            said.append(ask(*operands))
                        except TypeError as error:
                            said.append((type(error), str(error) if ask not in (repeat, join) else ""))
        return x + 1, said

    return f, [(x(),), (x(),)], lambda: log


@program
def comparisons_and_hash():
    @functools.total_ordering
    class P:
        def __init__(self, n):
            self.n = n

        def __eq__(self, o):
            return isinstance(o, P) and self.n == o.n

        def __lt__(self, o):
            return self.n < o.n

        def __hash__(self):
            return hash(self.n)

    def f(x):
        a, b, c = P(1), P(2), P(1)
        return (
            x + 1,
            a < b,
            a <= c,
            a >= b,
            a > b,
            a == c,
            a != b,
            len({a, b, c}),
            {a: "one"}[c],
            sorted([b, a])[0].n,
            max(a, b).n,
        )

    return f, [(x(),), (x(),)]


@program
def unhashable_and_default_eq():
    class E:
        def __eq__(self, o):
            return True

    def f(x):
        try:
            hash(E())
        except TypeError as error:
            return x + 1, str(error), E() == 3, E() in [1], E.__hash__ is None

    return f, [(x(),), (x(),)]


@program
def bool_len_hash_special_lookup_is_on_the_type():
    class A:
        def __len__(self):
            return 0

    def f(x):
        a = A()
        a.__len__ = lambda: 5
        a.__bool__ = lambda: True
        return x + 1, len(a), bool(a), not a

    return f, [(x(),), (x(),)]


@program
def iter_and_next_as_one_object():
    class It:
        def __init__(self, n):
            self.i, self.n = 0, n

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i > self.n:
                raise StopIteration
            return self.i

        def __length_hint__(self):
            return self.n

    def f(x, it):
        first = next(it)
        return [x * v for v in it], first, next(it, "end"), it.i

    return f, [(x(), It(3)), (x(), It(2))]


@program("data-dependent-scalar")
def methods_of_slots_cross_a_break():
    names = [1, 2]

    def f(x):
        made = [1]
        known = {"a": 1}
        kept = made.append, made.__len__, known.__setitem__, names.__len__, names.__iter__, (3).__add__, "a".__add__
        total = x.sum().item()
        kept[0](5)
        kept[2]("b", total)
        names.append(total)
        return x + 1, made, kept[1](), known, kept[3](), list(kept[4]()), kept[5](4), kept[6]("b")

    return f, [(x(),), (x() + 1,)], lambda: names


@program
def guards_of_an_empty_slot_run_nothing():
    asked = []

    class Slots:
        __slots__ = ("p", "q")

        def __getattr__(self, name):
            asked.append(name)
            return 7

    one = Slots()
    one.q = 1

    def f(x, fill):
        if fill:
            one.p = 3
        return x + one.p + one.q, len(asked)

    return f, [(x(), False), (x(), False), (x(), True), (x(), False), (x(), False)], lambda: asked


@program
def what_is_missing_is_said_as_cpython_says_it():
    class Slots:
        __slots__ = ("a", "b")

    class Plain:
        @property
        def bad(self):
            raise AttributeError("of the property")

    slots, plain = Slots(), Plain()
    changes = (lambda one: one.b, lambda one: getattr(one, "b"), lambda one: one.bad, lambda one: one.__delattr__("b"))

    def f(x):
        said = []
        for one in (slots, plain, Slots(), Plain(), Slots, (), 3, x):
            for change in changes:
                try:
                    change(one)
                except AttributeError as error:
                    said.append((str(error), error.name, error.obj is one))
        for one in (slots, plain, Slots(), Plain()):
            try:
                del one.b
            except AttributeError as error:
                said.append((str(error), error.name, error.obj is one))
        try:
            from math import nothing
        except ImportError as error:
            said.append((str(error), error.name, error.path))
        return x, said

    return f, [(x(),), (x(),)]


@program
def what_a_descriptor_has_decides_who_is_asked():
    class Field:
        def __get__(self, one, kind=None):
            return "got"

    class Owner:
        field = Field()

    owner = Owner()
    owner.__dict__["field"] = "held"

    def f(x):
        return x + 1, type(owner.field).__name__, owner.field if type(owner.field) is str else None

    changes = [  # one after each call
        lambda: setattr(Field, "__set__", lambda self, one, value: None),
        lambda: delattr(Field, "__get__"),
        lambda: owner.__dict__.clear(),
        lambda: delattr(Field, "__set__"),
        lambda: None,
    ]
    return f, [(x(),)] * len(changes), lambda: changes.pop(0)()


@program
def a_member_that_the_program_finds():
    seen = []

    class Shade(enum.Enum):
        RED = 1
        BLUE = 2

        @classmethod
        def _missing_(cls, value):
            seen.append(value)
            return cls.RED if value == 9 else None

    def f(x, name):
        try:
            return x, Shade({"nine": 9, "seven": 7}[name]), Shade(1)
        except ValueError as error:
            return str(error)

    def state():
        if len(seen) == 3:
            Shade._missing_ = classmethod(lambda cls, value: cls.BLUE)
        return seen

    return f, [(x(), "nine"), (x(), "nine"), (x(), "seven"), (x(), "nine"), (x(), "seven")], state


@program
def a_metaclass_is_asked_for_nothing_more():
    asked = []

    class Meta(type):
        def __getattr__(cls, name):
            asked.append(name)
            return 5

    class Made(metaclass=Meta):
        def __init__(self, v):
            self.v = v

    def f(x):
        return x + Made(2).v, isinstance(Made(1), Made), isinstance(x, Made), issubclass(int, Made), Made.other

    return f, [(x(),), (x(),)], lambda: asked


@program
def a_block_asks_the_class_alone():
    asked = []

    class Manager:
        def __getattribute__(self, name):
            asked.append(name)
            return object.__getattribute__(self, name)

        def __enter__(self):
            return 1

        def __exit__(self, *rest):
            asked.append(len(rest))

    outside = Manager()

    def f(x):
        with outside as one, Manager() as two:
            return x + one + two

    return f, [(x(),), (x(),)], lambda: asked


@program("generator-abandoned", "outside-iterator")
def what_is_dropped_closes_what_it_delegates_to():
    class Closed:
        def __init__(self, seen):
            self.seen = seen

        def __iter__(self):
            return self

        def __next__(self):
            return 3

        def close(self):
            self.seen.append("closed")

    def inner():
        yield 1
        yield 2

    def outer(it):
        yield from it

    def first(it):
        for value in outer(it):
            return value

    def f(x, how):
        seen, shared = [], inner()
        if how == "shared":
            seen += [first(shared), *shared]
        elif how == "close":
            seen += [first(Closed(seen)), "then"]
        else:
            seen += [first(inner()), first([4, 5]), *outer(inner())]
        return x, seen

    return f, [(x(), how) for how in ("shared", "close", "own")]


@program("print-tensor", "opaque-object")
def texts_of_tensors_that_an_iterator_gives():
    def f(x):
        said = [",".join(str(one) for one in [1, x]), "".join(map(repr, [x]))]
        try:
            said.append(sum((str(one) for one in [x]), 0))
        except TypeError as error:
            said.append(str(error))
        return said, x + 1

    return f, [(x(),), (x(),)]
