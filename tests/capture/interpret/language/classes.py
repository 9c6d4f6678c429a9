# ruff: noqa
"""Classes made inside and used from outside: every kind of attribute, special method, metaclass, descriptor."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import typing
from collections import namedtuple

import torch

from tests.capture.interpret.language.support import program, x


@program
def class_made_inside():
    def f(x):
        class A:
            scale = 2

            def __init__(self, v):
                self.v = v

            def out(self):
                return self.v * self.scale

        return A(x).out(), A.__name__, A.scale

    return f, [(x(),), (x(),)]


@program
def what_a_class_made_inside_holds_is_what_it_was_given():
    outer = [1]

    def f(x, n):
        y, shared = x + n, [n]

        class K:
            q = shared
            size = n
            tensor = y
            existing = outer
            entries = {"a": shared}

            def m(self, given=[n]):
                return self.size, given

        class L(K):
            again = K.size * 2

        made = type("M", (L,), {"own": shared})
        K.q.append(1)
        made.q.append(n)
        K.existing.append(n)
        K.entries["b"] = n
        L.late = shared
        same = [one is shared for one in (K.q, L().q, made.own, made().own, K.entries["a"], L.late, vars(K)["q"])]
        said = (L().m(), made.again, K.size, made().size, L.tensor is y, K.existing is outer)
        return y, shared, K.q, K.entries, same, said, K.m, K.m(L())

    return f, [(x(), 1), (x(), 2), (x(), 3), (x(), 4)], lambda: outer


@program
def inheritance_and_super():
    class Base:
        def __init__(self, v):
            self.v = v

        def step(self, x):
            return x + self.v

    class Middle(Base):
        def step(self, x):
            return super().step(x) * 2

    class Last(Middle):
        def __init__(self, v):
            super().__init__(v + 1)
            self.w = v

        def step(self, x):
            return super(Last, self).step(x) + super(Middle, self).step(x) + Base.step(self, x)

    def f(x, n):
        o = Last(n)
        return o.step(x), o.v, isinstance(o, Base), Last.__mro__[1] is Middle

    return f, [(x(), 1), (x(), 2)]


@program
def diamond_and_mro():
    class A:
        def go(self, log):
            log.append("A")

    class B(A):
        def go(self, log):
            log.append("B")
            super().go(log)

    class C(A):
        def go(self, log):
            log.append("C")
            super().go(log)

    class D(B, C):
        def go(self, log):
            log.append("D")
            super().go(log)

    def f(x):
        log = []
        D().go(log)
        return x + len(log), log, [c.__name__ for c in D.__mro__], D.__bases__ == (B, C)

    return f, [(x(),), (x(),)]


@program
def super_in_classmethod_and_staticmethod():
    class A:
        @classmethod
        def make(cls, v):
            o = cls()
            o.v = v
            return o

        @staticmethod
        def double(v):
            return v * 2

    class B(A):
        @classmethod
        def make(cls, v):
            o = super().make(v + 1)
            o.tag = cls.__name__
            return o

    def f(x):
        b = B.make(x)
        return b.v, b.tag, B.double(x), b.double(3), b

    return f, [(x(),), (x(),)]


@program
def properties():
    class A:
        def __init__(self):
            self._v = 1
            self.log = []

        @property
        def v(self):
            self.log.append("get")
            return self._v

        @v.setter
        def v(self, value):
            self.log.append("set")
            self._v = value

        @v.deleter
        def v(self):
            self.log.append("del")
            self._v = 0

    def f(x, a):
        a.v += 2
        y = x * a.v
        del a.v
        try:
            A.v.__set__(a, 5)
        except AttributeError:
            pass
        return y, a.v

    return f, [(x(), A()), (x(), A())]


@program
def read_only_property():
    class A:
        @property
        def v(self):
            return 1

    def f(x, a):
        try:
            a.v = 2
        except AttributeError as error:
            return x + a.v, str(error)

    return f, [(x(), A()), (x(), A())]


@program
def descriptors():
    class Field:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, obj, owner=None):
            return self if obj is None else getattr(obj, self.name, 0)

        def __set__(self, obj, value):
            setattr(obj, self.name, value * 2)

        def __delete__(self, obj):
            delattr(obj, self.name)

    class NonData:
        def __get__(self, obj, owner=None):
            return 10

    class A:
        a = Field()
        b = NonData()

    def f(x, o):
        o.a = 3
        first = o.a
        o.b = 7
        del o.a
        return x + first + o.b, o.a, type(A.a).__name__, A.a.name

    return f, [(x(), A()), (x(), A())]


@program
def getattr_and_getattribute():
    class Lazy:
        def __init__(self):
            self.real = 1

        def __getattr__(self, name):
            if name.startswith("x_"):
                return name[2:]
            raise AttributeError(f"no {name}")

    class Logged:
        def __init__(self):
            object.__setattr__(self, "log", [])
            object.__setattr__(self, "v", 3)

        def __getattribute__(self, name):
            if name != "log":
                object.__getattribute__(self, "log").append(name)
            return object.__getattribute__(self, name)

        def __setattr__(self, name, value):
            self.log.append(("set", name))
            object.__setattr__(self, name, value)

        def __delattr__(self, name):
            self.log.append(("del", name))
            object.__delattr__(self, name)

    def f(x, a, b):
        b.w = a.real
        y = x + len(a.x_abc) + b.v
        del b.w
        return y, hasattr(a, "x_q"), hasattr(a, "q"), getattr(b, "nope", 5)

    return f, [(x(), Lazy(), Logged()), (x(), Lazy(), Logged())]


@program
def slots():
    class S:
        __slots__ = ("a", "b")

        def __init__(self, a):
            self.a = a

    def f(x, s):
        s.b = s.a + 1
        y = x * s.b
        del s.a
        try:
            s.c = 1
        except AttributeError as error:
            return y, str(error), hasattr(s, "a"), S(x)

    return f, [(x(), S(1)), (x(), S(4))]


@program
def dataclasses_of_all_kinds():
    @dataclasses.dataclass
    class P:
        x: torch.Tensor
        n: int = 1
        tags: list = dataclasses.field(default_factory=list)

        def __post_init__(self):
            self.tags.append(self.n)

    @dataclasses.dataclass(frozen=True, order=True)
    class K:
        a: int
        b: str = "b"

    @dataclasses.dataclass(slots=True, kw_only=True)
    class S:
        v: int = 0

    def f(x):
        p = P(x, 2)
        q = dataclasses.replace(p, n=3)
        k = K(1)
        try:
            k.a = 5
        except dataclasses.FrozenInstanceError as error:
            message = str(error)
        return (
            p.x + q.n,
            p,
            q.tags is p.tags,
            k,
            k < K(2),
            k == K(1),
            hash(k) == hash(K(1)),
            message,
            S(v=3),
            [f.name for f in dataclasses.fields(p)],
            repr(k),
        )

    return f, [(x(),), (x(),)]


@program
def dataclass_argument_is_mutated():
    @dataclasses.dataclass
    class State:
        value: torch.Tensor
        count: int = 0

    def f(s):
        s.count += 1
        s.value = s.value + s.count
        return s, s.value

    s = State(x())
    return f, [(s,), (s,), (s,)]


@program("class-creation", "untraceable-call", "frame-access", "cannot-rebuild")
def classes_by_library_made_inside():
    def f(x):
        @dataclasses.dataclass
        class P:
            a: int
            b: int = 2

        class Color(enum.Enum):
            RED = 1
            BLUE = 2

        class T(typing.NamedTuple):
            a: int
            b: int = 3

        N = namedtuple("N", "u v")
        n = N(x, 2)
        return n.u + P(1).b + Color.BLUE.value + T(1).b, repr(P(1)), Color(1).name, T(1)._asdict(), n._fields

    return f, [(x(),), (x(),)]


@program("class-creation")
def init_subclass_and_class_getitem():
    registry = []

    class Base:
        def __init_subclass__(cls, tag="none", **kwargs):
            super().__init_subclass__(**kwargs)
            registry.append((cls.__name__, tag))

        def __class_getitem__(cls, item):
            return (cls.__name__, item)

    def f(x):
        class A(Base, tag="a"):
            pass

        return x + 1, Base[int], A["k"], A.__name__

    return f, [(x(),), (x(),)], lambda: registry


@program
def metaclass_used():
    class Meta(type):
        def __call__(cls, *args):
            o = super().__call__(*args)
            o.made_by = cls.__name__
            return o

        def __len__(cls):
            return 7

        def __getitem__(cls, k):
            return k * 2

        @property
        def label(cls):
            return cls.__name__.lower()

        def __contains__(cls, v):
            return v == 1

        def __iter__(cls):
            return iter([1, 2])

        def __instancecheck__(cls, o):
            return o == "magic" or super().__instancecheck__(o)

    class A(metaclass=Meta):
        def __init__(self, v):
            self.v = v

    def f(x):
        a = A(x)
        return (
            a.v + len(A) + A[3],
            a.made_by,
            A.label,
            1 in A,
            list(A),
            isinstance("magic", A),
            isinstance(a, A),
            isinstance(3, A),
        )

    return f, [(x(),), (x(),)]


@program("class-creation")
def metaclass_made_inside():
    def f(x):
        class Meta(type):
            def __new__(mcls, name, bases, ns, **kw):
                ns["added"] = len(ns)
                return super().__new__(mcls, name, bases, ns)

            @classmethod
            def __prepare__(mcls, name, bases, **kw):
                return {"prepared": 1}

        class A(metaclass=Meta, flag=1):
            pass

        return x + A.prepared, A.added > 0, type(A).__name__

    return f, [(x(),), (x(),)]


@program
def singleton_by_new():
    class One:
        instance = None

        def __new__(cls, *a):
            o = super().__new__(cls)
            o.args = a
            return o

        def __init__(self, v):
            self.v = v

    class Other:
        def __new__(cls):
            return 5

    def f(x):
        o = One(x)
        return o.v + Other(), len(o.args), o

    return f, [(x(),), (x(),)]


@program
def class_attribute_is_written():
    class A:
        count = 0

    def f(x):
        A.count += 1
        return x * A.count

    return f, [(x(),), (x(),), (x(),)], lambda: A.count


@program
def class_attribute_on_an_inner_class():
    def f(x):
        class A:
            count = 0

            def __init__(self):
                type(self).count += 1

        A(), A()
        A.extra = x
        return A.extra * A.count, vars(A)["count"]

    return f, [(x(),), (x(),)]


@program
def enums():
    class Color(enum.Enum):
        RED = 1
        BLUE = 2

        @property
        def pretty(self):
            return self.name.title()

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 5

    class Flag(enum.Flag):
        A = 1
        B = 2

    def f(x, c):
        if c is Color.RED:
            y = x + c.value
        else:
            y = x - c.value
        return (
            y,
            c.pretty,
            Color["BLUE"],
            Color(1),
            [m.name for m in Color],
            Level.HIGH > 3,
            x * Level.HIGH,
            Flag.A | Flag.B,
            Flag.A in (Flag.A | Flag.B),
            len(Color),
            c in Color,
        )

    return f, [(x(), Color.RED), (x(), Color.BLUE), (x(), Color.RED)]


@program
def named_tuples():
    class T(typing.NamedTuple):
        a: torch.Tensor
        b: int = 3

        def total(self):
            return self.a * self.b

    N = namedtuple("N", "u v", defaults=[9])

    def f(x, n):
        t = T(x)
        a, b = t
        u = n._replace(u=x)
        return (
            t.total(),
            t,
            u,
            u.v,
            t[0] + b,
            n._asdict(),
            N._make([1, 2]),
            t == T(x) if False else t.b,
            isinstance(n, tuple),
            repr(N(1)),
        )

    return f, [(x(), N(1)), (x(), N(2, 3))]


@program
def abstract_classes():
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

        def twice(self):
            return self.area() * 2

    class Square(Shape):
        def __init__(self, s):
            self.s = s

        def area(self):
            return self.s * self.s

    def f(x):
        try:
            Shape()
        except TypeError as error:
            message = str(error)
        return Square(x).twice(), isinstance(Square(1), Shape), issubclass(Square, Shape), message

    return f, [(x(),), (x(),)]


@program("frame-access")
def protocols_and_generics():
    T = typing.TypeVar("T")

    @typing.runtime_checkable
    class Sized(typing.Protocol):
        def size_of(self) -> int: ...

    class Box(typing.Generic[T]):
        def __init__(self, v: T):
            self.v = v

        def size_of(self):
            return 1

    def f(x):
        b = Box[int](x)
        return b.v + 1, isinstance(b, Sized), isinstance(3, Sized), typing.cast(int, "s")

    return f, [(x(),), (x(),)]


@program
def call_and_partialmethod():
    class A:
        def __init__(self, k):
            self.k = k

        def __call__(self, x, *, m=1):
            return x * self.k * m

        def base(self, x, n):
            return x + n

        plus_two = functools.partialmethod(base, 2) if False else functools.partialmethod(base, n=2)

    def f(x, a):
        return a(x), a(x, m=3), a.plus_two(x), callable(a), callable(3)

    return f, [(x(), A(2)), (x(), A(3))]


@program
def cached_property():
    class A:
        def __init__(self):
            self.calls = 0

        @functools.cached_property
        def big(self):
            self.calls += 1
            return self.calls * 10

    def f(x, a):
        return x + a.big + a.big, a.calls, "big" in vars(a)

    a = A()
    return f, [(x(), a), (x(), a), (x(), A())]


@program
def instance_dict_is_used():
    class A:
        def __init__(self, **kw):
            self.__dict__.update(kw)

    def f(x, a):
        a.__dict__["k"] = 5
        vars(a)["m"] = x
        del a.__dict__["gone"]
        return a.k * a.m, sorted(a.__dict__), "gone" in vars(a)

    return f, [(x(), A(gone=1)), (x(), A(gone=2, other=3))]


@program
def class_of_object_is_changed():
    class A:
        def go(self, x):
            return x + 1

    class B:
        def go(self, x):
            return x * 10

    def f(x):
        a = A()
        y = a.go(x)
        a.__class__ = B
        return y, a.go(x), type(a).__name__

    return f, [(x(),), (x(),)]


@program
def private_names_are_mangled():
    class A:
        def __init__(self):
            self.__secret = 3

        def get(self, x):
            return x * self.__secret

    def f(x):
        a = A()
        return a.get(x), a._A__secret, hasattr(a, "__secret")

    return f, [(x(),), (x(),)]


@program
def type_calls_and_checks():
    def f(x):
        T = type("T", (), {"v": 4, "go": lambda self, y: y * self.v})
        return (
            T().go(x),
            type(3) is int,
            isinstance(True, int),
            issubclass(bool, (str, int)),
            isinstance(x, torch.Tensor),
            type(x).__name__,
            T.__name__,
        )

    return f, [(x(),), (x(),)]


@program
def inner_instance_is_returned_with_class():
    class Node:
        def __init__(self, v, nxt=None):
            self.v, self.nxt = v, nxt

    def f(x):
        a = Node(x)
        b = Node(x + 1, a)
        a.nxt = b
        return a, [b, a]

    return f, [(x(),), (x(),)]


@program
def text_of_objects():
    class A:
        def __repr__(self):
            return f"A<{self.n}>"

        def __str__(self):
            return "str" + repr(self)

        def __format__(self, spec):
            return f"fmt[{spec}]{self.n}"

        def __bytes__(self):
            return b"b"

        def __init__(self, n):
            self.n = n

    def f(x):
        a = A(3)
        return (
            x + 1,
            f"{a} {a!r} {a!s:>9} {a:q}",
            str([a]),
            "%s %r" % (a, a),
            "{:z}".format(a),
            bytes(a),
            repr({"k": a}),
        )

    return f, [(x(),), (x(),)]


@program
def mixin_with_cooperative_init():
    class A:
        def __init__(self, *, a=1, **kw):
            super().__init__(**kw)
            self.a = a

    class B:
        def __init__(self, *, b=2, **kw):
            super().__init__(**kw)
            self.b = b

    class C(A, B):
        pass

    def f(x):
        c = C(a=5)
        try:
            C(z=1)
        except TypeError as error:
            return x * c.a * c.b, str(error)

    return f, [(x(),), (x(),)]


@program
def delattr_getattr_setattr_by_name():
    class A:
        pass

    def f(x, names):
        a = A()
        for i, n in enumerate(names):
            setattr(a, n, x + i)
        got = [getattr(a, n) for n in names]
        delattr(a, names[0])
        return got, hasattr(a, names[0]), getattr(a, names[0], None), sorted(vars(a))

    return f, [(x(), ["p", "q"]), (x(), ["r", "s", "t"])]


@program
def comprehension_scopes_in_classes():
    def f(x, n):
        class C:
            k = 3
            xs = [k2 for k2 in range(k)]

            def m(self):
                return [__class__.k for _ in range(2)], [self.k + i for i in self.xs]

            lam = [lambda: i for i in range(3)]
            ys = [i for i in xs if i]

        return x * n, C.xs, C().m(), [g() for g in C.lam], C.ys

    return f, [(x(), 1), (x(), 2)]
