# ruff: noqa
"""Defaults of type parameters (PEP 696, CPython 3.13 and later)."""

import typing

from tests.capture.interpret.language.support import program, x


def scaled[T = int, *Ts = *tuple[int, str], **P = [int]](x, by: T = 2) -> T:
    return x * by


class Box[T = int, U: float = T]:
    def __init__(self, held: T):
        self.held = held


type Many[T = int] = list[T]


@program
def made_outside():
    def f(x):
        T, Ts, P = scaled.__type_params__
        return (
            scaled(x),
            T.__default__,
            T.has_default(),
            typing.get_args(Many[()].__value__),
            Box[str](x).held,
            P.__default__,
        )

    return f, [(x(),), (x(),)]


@program("opaque-object")
def made_inside():
    def f(x, kind):
        def own[T = kind, U = T](value: T) -> U:
            return value + 1

        T, U = own.__type_params__
        type Own[V = T] = list[V]
        return own(x), T.__default__, U.__default__ is T, T.has_default(), Own.__type_params__[0].__default__ is T

    return f, [(x(), int), (x(), str), (x(), int)]


@program("opaque-object", "loop-goes-on")
def made_inside_leave():
    def f(x, kind):
        def own[T = kind, *U = *tuple[kind], V: int = bool](value: T):
            return value + 1

        return own(x), own

    def g(x, kind):
        y, own = f(x, kind)
        return y, [(one.__name__, one.__default__) for one in own.__type_params__], own.__type_params__[2].__bound__

    return g, [(x(), int), (x(), str)]
