# ruff: noqa
"""Type parameters and type aliases (PEP 695, CPython 3.12 and later), of what is made outside and inside of the compiled function."""

import dataclasses
import typing

import torch

from tests.capture.interpret.language.support import program, x

type Number = int | float
type Pair[T] = tuple[T, T]
type Tree[T] = T | list[Tree[T]]


def scaled[T: Number](x, by: T) -> T:
    return x * by


def gathered[*Ts, **P](function: typing.Callable[P, torch.Tensor], *args: *Ts, **kwargs: P.kwargs) -> tuple[*Ts]:
    return (function(args[0], **kwargs), *args[1:])


def named[T: (int, str)](x) -> str:
    return T.__name__ + str(x.shape[0])


class Box[T]:
    limit: T

    def __init__(self, held: T, *rest) -> None:
        self.held = held
        self.rest = rest

    def mapped[U](self, function: typing.Callable[[T], U]) -> "Box[U]":
        return Box(function(self.held))

    @classmethod
    def of[U](cls, held: U):
        return cls(held)

    @staticmethod
    def parameter():
        return T


class Twice[T, U: torch.Tensor](Box[T]):
    def double(self) -> U:
        return super().mapped(lambda held: held * 2)


@dataclasses.dataclass
class Point[T]:
    left: T
    right: T = 2

    def total(self) -> T:
        return self.left + self.right


class Grown[T](torch.nn.Module):
    def __init__(self, scale: T):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), float(scale)))

    def forward[U](self, x: U) -> U:
        return x * self.weight


@program
def functions_made_outside():
    def f(x, n):
        return scaled(x, n), gathered(torch.add, x, n, other=1), named(x), scaled.__type_params__[0].__name__

    return f, [(x(), 2), (x(), 3.0), (x(), 2)]


@program
def classes_made_outside():
    def f(x):
        box = Box(x).mapped(lambda held: held + 1)
        twice = Twice(box.held, 4).double()
        return box.held, twice.held, Box.of(x).held, Point(x).total(), Point[torch.Tensor](x, x).total()

    return f, [(x(),), (x(),)]


@program
def instances_go_in_and_out():
    def f(x, box, point):
        box.held = x * 2
        return box, Twice[int, torch.Tensor](x), Point(point.left + x, 1), isinstance(box, Box), Box[int] == Box[int]

    return f, [(x(), Box(1), Point(x(), x())), (x(), Twice(x()), Point(1)), (x(), Box(1), Point(x(), x()))]


@program
def module_with_type_parameters():
    model = Grown[int](3)

    def f(x):
        return model(x), Grown.__type_params__[0].__name__

    return f, [(x(),), (x(),)], lambda: model


@program
def parameters_and_aliases_are_read():
    def f(x):
        (T,) = scaled.__type_params__
        C = named.__type_params__[0]
        return (
            x + 1,
            T.__name__,
            T.__bound__ is Number,
            C.__constraints__,
            str(T),
            Number.__name__,
            Number.__value__ == int | float,
            Pair.__type_params__[0].__name__,
            Box.__parameters__ == Box.__type_params__,
            T.__infer_variance__,
            T.__covariant__,
        )

    return f, [(x(),), (x(),)]


@program
def what_an_alias_stands_for():
    def f(x, n):
        y = x + 1 if isinstance(n, Number.__value__) else x - 1
        return y, typing.get_args(Pair[int]), typing.get_origin(Pair[int]) is Pair, typing.get_args(Number.__value__)

    return f, [(x(), 1), (x(), 2.5), (x(), "a"), (x(), 1)]


@program
def parameters_and_aliases_as_arguments():
    def f(x, kind):
        if kind is Number:
            x = x + 1
        return x * len(kind.__name__), kind

    return f, [(x(), Number), (x(), Pair), (x(), scaled.__type_params__[0]), (x(), Number)]


@program
def function_made_inside():
    def f(x, n):
        def own[T](value: T, by: int = n) -> T:
            return value * by

        return own(x), own(x, 5)

    return f, [(x(), 2), (x(), 3), (x(), 2)]


@program
def bounds_and_constraints_made_inside():
    def f(x, n):
        made = []

        def own[A: int, B: (int, str), *C, **D](value: A, *rest: C, **named: D.kwargs) -> B:
            made.append(A.__name__)
            return value * n

        return own(x, 1, k=2), [str(one) for one in own.__type_params__], made

    return f, [(x(), 2), (x(), 3), (x(), 2)]


@program("opaque-object")
def evaluated_lazily():
    calls = []

    def noted(kind):
        calls.append(kind)
        return kind

    def f(x, kind):
        def own[T: noted(kind)](value: T) -> T:
            return value + 1

        type Own = noted(kind)
        y = own(x) * len(calls)
        return y, own.__type_params__[0].__bound__, y * len(calls), Own.__value__, Own.__value__, y + len(calls)

    return f, [(x(), int), (x(), str), (x(), int)], lambda: calls


@program("opaque-object")
def function_made_inside_leaves():
    def f(x, n):
        def own[T: int, *Ts](value: T) -> T:
            return value * n

        return own(x), own

    def g(x, n):
        y, own = f(x, n)
        T = own.__type_params__[0]
        return y, own, own.__annotations__["value"] is T, T.__bound__, T.__module__

    return g, [(x(), 2), (x(), 3)]


@program
def parameters_made_inside_leave():
    kept = []

    def f(x):
        def own[T: int, *Ts, **P](value: T):
            return value, T

        y, T = own(x)
        kept.append(T)
        return y + 1, T, own.__type_params__, T is own.__type_params__[0]

    return f, [(x(),), (x(),)], lambda: [one.__bound__ for one in kept]


@program("opaque-object")
def closures_over_type_parameters():
    def f(x):
        def outer[T](value: T):
            def inner[U: T](other: U):
                return value + other, T.__name__ + U.__name__, U.__bound__ is T

            return inner

        return outer(x)(1), outer(x)(x)

    return f, [(x(),), (x(),)]


@program("opaque-object")
def alias_made_inside():
    def f(x, n):
        type Own = int | float
        type Many[T] = list[T]
        return x * n, Own.__name__, isinstance(n, Own.__value__), Many[int].__args__, str(Own)

    return f, [(x(), 2), (x(), 2.5), (x(), 2)]


@program("opaque-object")
def alias_made_inside_leaves():
    def f(x, n):
        type Own[T] = list[T] | type(n)
        return x * n, Own

    def g(x, n):
        y, Own = f(x, n)
        return y, Own, Own.__value__, Own.__module__, Own.__type_params__

    return g, [(x(), 2), (x(), 2.5)]


@program("class-creation")
def class_made_inside():
    def f(x, n):
        class Own[T]:
            scale: T = n

            def apply[U](self, value: U) -> U:
                return value * self.scale

        class Sub[T](Own[T]):
            def apply(self, value):
                return super().apply(value) + 1

        return Own().apply(x), Sub[int]().apply(x), Own.__type_params__[0].__name__, Own.__name__

    return f, [(x(), 2), (x(), 3), (x(), 2)]


@program("opaque-object")
def methods_of_a_class_made_inside():
    def f(x, n):
        class Own:
            kind = int

            def apply[T: kind](self, value: T) -> T:
                return value * n

            type Kind = list[kind]

        return Own().apply(x), Own.apply.__type_params__[0].__bound__, Own.Kind.__value__

    return f, [(x(), 2), (x(), 3)]


@program
def name_of_the_class_in_its_scopes():
    class Outer:
        kind = int
        names = [one for one in ("a", "b")]

        class Inner[T: (list, dict)]:
            type Held = T | list[T]

            def make[U](self, value: U):
                return value, [(T.__name__, U.__name__, one) for one in range(2)], __class__.__qualname__

    def f(x):
        y, names, name = Outer.Inner().make(x + 1)
        return y, names, name, Outer.Inner.Held.__value__.__args__[0].__name__

    return f, [(x(),), (x(),)]


@program
def generators_with_type_parameters():
    def f(x):
        def numbers[T](start: T):
            sent = yield start
            while sent is not None:
                sent = yield sent * 2
            return T.__name__

        def outer[T](start: T):
            name = yield from numbers(start)
            yield start, name

        made = outer(x)
        return next(made), made.send(x + 1), made.send(None), [one for one in made]

    return f, [(x(),), (x(),)]


@program
def shadowed_and_mangled_names():
    T = "outer"

    def f(x):
        def own[T](value):
            return [T.__name__ for _ in range(2)]

        class Plain:
            def go[__U](self, value: __U):
                return value + 1, __U.__name__

        return x + 1, T, own(x), Plain().go(x)

    return f, [(x(),), (x(),)]


@program
def default_of_a_parameterised_function():
    def f(x, n):
        def own[T](value: T, by=x * n, *, plus=n):
            return value + by + plus

        return own(x), own(x, 1, plus=2), own.__defaults__, own.__kwdefaults__

    return f, [(x(), 2), (x(), 3)]


@program
def decorated():
    def twice(function):
        def run(*args):
            return function(*args) * 2

        run.__type_params__ = function.__type_params__
        return run

    def f(x):
        @twice
        def own[T](value: T):
            return value + 1

        return own(x), own.__type_params__[0].__name__, own.__name__

    return f, [(x(),), (x(),)]


@program("opaque-object")
def error_in_a_bound():
    def f(x):
        def own[T: missing](value: T):
            return value + 1

        try:
            own.__type_params__[0].__bound__
        except NameError as error:
            return own(x), str(error)

    return f, [(x(),), (x(),)]


@program("data-dependent-scalar", "opaque-object")
def broken_while_type_parameters_live():
    def f(x):
        def own[T: int](value: T):
            return value + float(value.sum()), T

        y, T = own(x)
        type Own = list[T]
        z = y + float(y.sum())
        return z, T.__name__, T.__bound__, Own.__value__.__args__[0] is T, own.__type_params__[0] is T

    return f, [(x(),), (x(),)]


@program
def annotations_of_type_parameters():
    kept = []

    def f(x, n):
        def g[T](v: list[T] | int, *a: tuple[T, ...]) -> typing.Callable[[T], dict[str, T]]:
            return v

        kept.append(g)
        return g(x) + 1, g

    return (
        f,
        [(x(), 1), (x(), 1)],
        lambda: [
            (g.__annotations__["v"].__args__[0].__args__[0] is g.__type_params__[0], str(g.__annotations__))
            for g in kept
        ],
    )


@program("class-creation", "class-mutation")
def dataclass_made_inside():
    def f(x, n):
        @dataclasses.dataclass
        class D[T]:
            a: T
            b: list[T] = dataclasses.field(default_factory=list)

        d = D(x + n)
        return d.a, d.b, D.__type_params__[0].__name__

    return f, [(x(), 1), (x(), 2)]


@program("class-mutation")
def protocols():
    class P[T](typing.Protocol):
        def m(self) -> T: ...

    @typing.runtime_checkable
    class Q[T](typing.Protocol):
        def m(self) -> T: ...

    class I(P[int]):
        def m(self):
            return 2

    def f(x):
        return x * I().m(), isinstance(I(), Q)

    return f, [(x(),), (x(),)]


@program
def methods_of_modules():
    class M[T](torch.nn.Module):
        def __init__(self, s: T):
            super().__init__()
            self.s = s
            self.lin = torch.nn.Linear(3, 3)

        def forward[U](self, x: U) -> U:
            def inner[V](v: V) -> V:
                return self.lin(v) * self.s

            return inner(x)

    torch.manual_seed(0)
    m = M(2)

    def f(x):
        return m(x).detach()

    return f, [(x(),), (x(),)]


@program("frame-kind")
def coroutine_with_type_parameters():
    def f(x):
        async def g[T](v: T) -> T:
            return v + 1

        c = g(x)
        try:
            c.send(None)
        except StopIteration as e:
            return e.value

    return f, [(x(),), (x(),)]


@program
def made_again_by_each_turn_of_a_loop():
    def f(x, n):
        r = []
        for i in range(n):

            def g[T](v: T, i=i) -> T:
                return v + i

            type A[T] = tuple[T, i]
            r.append((g, A))
        return [g(x) for g, _ in r], [str(A) for _, A in r], len({id(a) for _, a in r}), r[0][1] is r[-1][1]

    return f, [(x(), 2), (x(), 3)]


@program
def alias_of_itself():
    def f(x, n):
        def g[T](v: T, k: int) -> T:
            return v if k == 0 else g(v + 1, k - 1)

        type Json = dict[str, Json] | list[Json] | int
        return g(x, n), Json

    return f, [(x(), 2), (x(), 3)]


@program
def global_names_of_what_is_made():
    def f(x, n):
        global GA, gf
        type GA = list[int]

        def gf[T](v):
            return v

        return x + 1

    def state():
        return [globals()["GA"].__value__, globals()["gf"].__type_params__[0].__name__]

    return f, [(x(), 1), (x(), 1)], state


GA = type("GA", (), {"__value__": 1})


def gf[T]():
    pass
