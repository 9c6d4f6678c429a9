"""Programs for the border: each gives a function and a maker of its arguments; capturing it whole must show no difference to eager."""

# ruff: noqa

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import importlib.metadata
import importlib.util
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch

Program = Callable[[], tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]
PROGRAMS: list[Program] = []


def program(maker: Program) -> Program:
    """Enters a program into the list."""
    PROGRAMS.append(maker)
    return maker


def numbers() -> torch.Tensor:
    """A 3 x 4 tensor."""
    return torch.arange(12.0).reshape(3, 4)


class Cfg:
    def __init__(s):
        s.a = 1
        s.names = ["p", "q"]
        s.d = {"k": torch.ones(4)}

    @property
    def twice(s):
        return s.a * 2

    def __len__(s):
        return 3


@program
def attr_store():
    def f(c, x):
        c.a += 1
        c.new = x * 2
        c.names.append("z")
        c.d["n"] = x + c.d["k"]
        del c.names[0]
        return c.twice, x + len(c)

    return f, lambda: (Cfg(), numbers())


@program
def list_args():
    def f(l, d):
        l.append(l[0] + 1)
        l.insert(0, 5)
        d.update(z=l[1])
        d.pop("a")
        return [v for v in l if not isinstance(v, int)]

    return f, lambda: ([numbers()], {"a": 1, "b": 2})


@program
def closure():
    def f(x):
        n = 0

        def add(y):
            nonlocal n
            n += 1
            return y + n

        r = add(x) + add(x)
        return r, (lambda z: z + n + r)(x)

    return f, lambda: (numbers(),)


@dataclasses.dataclass
class DC:
    x: torch.Tensor
    n: int = 3
    l: list = dataclasses.field(default_factory=list)


@program
def dc():
    def f(x):
        d = DC(x + 1)
        d.l.append(d.n)
        e = dataclasses.replace(d, n=4)
        return d.x, d, e, dataclasses.asdict(e)["n"]

    return f, lambda: (numbers(),)


NT = collections.namedtuple("NT", "a b")


@program
def nt():
    def f(x):
        t = NT(x, b=x * 2)
        a, b = t
        return t._replace(a=b), t.a + t[1], t._asdict()

    return f, lambda: (numbers(),)


class Kept(NT):
    """A namedtuple whose instances have a dictionary."""


def kept() -> Kept:
    made = Kept(torch.ones(4), 2)
    made.old, made.count, made.gone = torch.ones(4), 1, 0
    return made


@program
def attributes_of_a_namedtuple():
    def f(t, x):
        t.extra = x * 2
        t.old = x.sum()
        t.count = 5
        del t.gone
        return t, vars(t), hasattr(t, "gone"), Kept(x, 1).__dict__

    return f, lambda: (kept(), numbers())


class Color(enum.Enum):
    R = 1
    Gn = 2


@program
def en():
    def f(x, c):
        return x * c.value if c is Color.R else x, Color(2), Color["R"].name, [m.name for m in Color]

    return f, lambda: (numbers(), Color.R)


class Base:
    def go(s, x):
        return x + 1


class Sub(Base):
    def go(s, x):
        return super().go(x) * 2

    def __getattr__(s, n):
        return n + "!"

    @classmethod
    def mk(cls):
        return cls()

    @staticmethod
    def st(x):
        return x - 1


@program
def sup():
    def f(o, x):
        return o.go(x), o.zzz, Sub.mk().go(x), o.st(x), Sub.st(x), hasattr(Base(), "q")

    return f, lambda: (Sub(), numbers())


@program
def gens():
    def g(n):
        for i in range(n):
            yield i

    def f(x):
        return (
            sum(x * i for i in g(3)),
            list(zip(g(2), g(2))),
            list(map(lambda v: v + 1, g(3))),
            dict(enumerate(g(2))),
            max(g(4)),
            sorted(g(3), key=lambda v: -v),
            any(v > 1 for v in g(3)),
            functools.reduce(lambda a, b: a * b, [1, 2, x]),
        )

    return f, lambda: (numbers(),)


@program
def exc():
    def f(x, d):
        try:
            d["nope"]
        except KeyError as e:
            a = str(e)
        try:
            raise ValueError("v", x)
        except ValueError as e:
            b = e.args[1]
        finally:
            c = 3
        return a, b + 1, c

    return f, lambda: (numbers(), {})


@program
def ctx():
    @contextlib.contextmanager
    def cm(l):
        l.append("in")
        try:
            yield 5
        finally:
            l.append("out")

    def f(x):
        l = []
        with cm(l) as v, torch.no_grad():
            y = x * v
        return y, l

    return f, lambda: (numbers().requires_grad_(),)


@program
def cached():
    class C:
        @functools.cached_property
        def p(s):
            return s.v * 2

    c = C()
    c.v = 3

    def f(c, x):
        return x * c.p + c.p

    return f, lambda: (copy.copy(c), numbers())


@program
def partial():
    def h(a, b, *, c=1):
        return a + b * c

    p = functools.partial(h, c=3)

    def f(x):
        return p(x, 2), functools.partial(h, x)(1), functools.partial(h, b=x)

    return f, lambda: (numbers(),)


@program
def strs():
    def f(x):
        return (
            f"{x.shape} {x.dtype!s:>20} {3.14159:.2f}",
            "%s-%d" % ("a", 3),
            "{}:{k}".format(1, k=2),
            ",".join(str(i) for i in range(3)),
            repr([1, "a"]),
        )

    return f, lambda: (numbers(),)


@program
def prints():
    def f(x):
        print("shape", x.shape, sep="|")
        y = x + 1
        print("done")
        return y

    return f, lambda: (numbers(),)


@program
def dd():
    def f(x):
        d = collections.defaultdict(list)
        d["a"].append(x)
        od = collections.OrderedDict(a=1)
        od["b"] = x
        od.move_to_end("a")
        c = collections.Counter("abca")
        dq = collections.deque([1, 2], maxlen=2)
        dq.append(x)
        return d, od, c.most_common(1), dq, dict(od)

    return f, lambda: (numbers(),)


@program
def dd_in():
    def f(d, od, s, dq):
        d["n"].append(1)
        od["z"] = 2
        od.move_to_end("a")
        s.add(9)
        dq.appendleft(0)
        return d["x"] + 1

    return f, lambda: (
        collections.defaultdict(list, x=numbers()),
        collections.OrderedDict(a=1, b=2),
        {1, 2},
        collections.deque([3], maxlen=3),
    )


@program
def alias():
    def f(x):
        a = [x + 1]
        b = [a, a]
        a.append(b)
        return b

    return f, lambda: (numbers(),)


@program
def inplace():
    def f(x):
        x.add_(1)
        y = x[0]
        y.mul_(2)
        return x.sum()

    return f, lambda: (numbers(),)


@program
def swap():
    class P:
        pass

    def mk():
        p = P()
        p.a = numbers()
        p.b = numbers() + 1
        return (p,)

    def f(p):
        p.a, p.b = p.b, p.a
        return p.a + 1

    return f, mk


@program
def tensorattr():
    def f(x):
        y = x.clone()
        y.tag = "t"
        return (
            y,
            y.tag,
            x.T,
            x.ndim,
            x.numel(),
            x.size(-1),
            isinstance(x, torch.Tensor),
            type(x),
            x.is_contiguous(),
            len(x),
            [r.sum() for r in x],
        )

    return f, lambda: (numbers(),)


class Slot:
    __slots__ = ("u", "v")

    def __init__(s, u):
        s.u = u


@program
def slots():
    def f(o, x):
        o.v = x + o.u
        n = Slot(2)
        n.v = x
        return n, hasattr(Slot(1), "v")

    return f, lambda: (Slot(3), numbers())


class V:
    def __init__(s, v):
        s.v = v

    def __add__(s, o):
        return V(s.v + (o.v if isinstance(o, V) else o))

    def __radd__(s, o):
        return V(o + s.v)

    def __eq__(s, o):
        return isinstance(o, V) and s.v is o.v

    def __hash__(s):
        return 1

    def __bool__(s):
        return False

    def __getitem__(s, i):
        if i > 2:
            raise IndexError
        return s.v * i

    def __call__(s, x):
        return x + s.v

    def __contains__(s, k):
        return k == 1

    def __str__(s):
        return "V!"


@program
def dunders():
    def f(x):
        v = V(x)
        w = v + v
        u = 1 + v
        q = x.sum()
        return w.v, u.v, v == V(x), not v, list(v), v(x), 1 in v, f"{v}", str([1, 2]), v != w

    return f, lambda: (numbers(),)


@program
def itert():
    def f(x):
        return (
            [list(p) for p in itertools.product([1, 2], [3])],
            list(itertools.accumulate([x, x, x])),
            list(itertools.chain([1], [2])),
            list(itertools.islice(itertools.count(), 3)),
            [list(g) for k, g in itertools.groupby([1, 1, 2])],
            list(reversed([1, 2])),
            list(filter(None, [0, 1])),
            list(zip([x], [x])),
            list(itertools.starmap(lambda a, b: a * b, [(x, 2)])),
        )

    return f, lambda: (numbers(),)


@program
def deep():
    def f(c, x):
        d = copy.deepcopy({"a": [1, 2], "b": (1, [2])})
        d["a"].append(3)
        e = copy.copy([x])
        return d, e, c["q"]

    return f, lambda: ({"q": 1}, numbers())


@program
def warn():
    def f(x):
        warnings.warn("careful")
        return x + 1

    return f, lambda: (numbers(),)


@program
def grads():
    def f(x):
        return (x * 2).sum(), x.requires_grad, x.grad

    return f, lambda: (numbers().requires_grad_(),)


@program
def match():
    def f(x, c):
        match c:
            case {"k": int(v), **rest}:
                return x * v, rest
            case [a, *b]:
                return x + a, b
        return x

    return f, lambda: (numbers(), {"k": 2, "o": 1})


@program
def lambdas():
    def f(x):
        fs = [lambda y, i=i: y + i for i in range(3)]
        return fs[2](x), fs, sorted([3, 1], key=lambda v: v)

    return f, lambda: (numbers(),)


@program
def autocast():
    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T, torch.is_autocast_enabled("cpu")

    return f, lambda: (numbers(),)


@program
def setgrad_leak():
    def f(x):
        torch.set_grad_enabled(False)
        y = x * 2
        torch.set_grad_enabled(True)
        return y

    return f, lambda: (numbers().requires_grad_(),)


@program
def mutdict_iter():
    def f(d, x):
        r = 0
        for k, v in d.items():
            r = r + v * x
        return r, list(d), {**d, "z": 1}, dict(d), "a" in d, d.get("q", 7), len(d), d | {"w": 1}, d == {"a": 1, "b": 2}

    return f, lambda: ({"a": 1, "b": 2}, numbers())


class Names:
    def __init__(self, table):
        self.table = table
        self.names = table.keys()
        self.pairs = table.items()


@program
def views_from_outside():
    def f(plain, ordered, x):
        del plain.table["a"]
        plain.table["c"] = 3
        ordered.table["z"] = 4
        return list(plain.names), len(plain.pairs), "a" in plain.names, list(ordered.names), x + len(ordered.names)

    return f, lambda: (Names({"a": 1, "b": 2}), Names(collections.OrderedDict(p=1, q=2)), numbers())


@program
def pickled_constants():
    def f(x):
        return pickle.dumps({}), pickle.dumps(("a", 1, [2.0, None, b"b"])), pickle.dumps({"k": {}}, 2), x + 1

    return f, lambda: (numbers(),)


@program
def set_of_names():
    def f(names, x):
        return f"{names}", list(names), "w3" in names, x + len(names)

    return f, lambda: ({f"w{i}" for i in range(4)}, numbers())


@program
def what_is_installed():
    def f(x):
        found = importlib.util.find_spec("torch"), importlib.util.find_spec("no_such_module_at_all")
        try:
            importlib.metadata.version("no-such-distribution-at-all")
        except importlib.metadata.PackageNotFoundError:
            x = x + 1
        return [one is None for one in found], importlib.metadata.version("torch"), x * 2

    return f, lambda: (numbers(),)
