# ruff: noqa
"""What CPython 3.14 has brought: template strings, annotations that are evaluated when they are asked for, and what its library has."""

import annotationlib
import contextlib
import dataclasses
import functools
import typing

from tests.capture.interpret.language.support import program, x


@program("unsupported-instruction")
def template_strings():
    def f(x, n):
        t = t"a{n}b{n + 1!r:>5}"
        return x + n, t.strings, [(i.value, i.expression, i.conversion, i.format_spec) for i in t.interpolations]

    return f, [(x(), 1), (x(), 2)]


@program("unsupported-instruction")
def template_of_tensor():
    def f(x, n):
        t = t"{x * n}"
        return t, t.values

    return f, [(x(), 1), (x(), 2)]


@program("unsupported-instruction", "opaque-object", "loop-goes-on")
def template_is_gone_through():
    def html(t):
        return "".join(p if isinstance(p, str) else f"<{p.value}>" for p in t)

    def f(x, n):
        return x + len(html(t"{n} and {'x'}")), html(t"{n}{n}!")

    return f, [(x(), 1), (x(), 2)]


@program
def except_without_brackets():
    def f(x, n):
        try:
            if n:
                raise KeyError(n)
            raise ValueError
        except KeyError, ValueError:
            return x + 1

    return f, [(x(), 1), (x(), 0)]


@program
def except_star_without_brackets():
    def f(x, n):
        try:
            raise ExceptionGroup("g", [KeyError(n), ValueError()])
        except* KeyError, ValueError:
            x = x + 1
        return x

    return f, [(x(), 1), (x(), 0)]


@program("untraceable-call")
def deferred_annotations():
    def f(x, n):
        def g(a: missing, b: int = n) -> list[n]:
            return a * b

        return g(x), g

    def h(x, n):
        y, g = f(x, n)
        return y, annotationlib.get_annotations(g, format=annotationlib.Format.STRING)

    return h, [(x(), 1), (x(), 2)]


@program
def annotations_read_inside():
    def f(x, n):
        def g(a: int, b: list[n] = n):
            return a * b

        return g(x), g.__annotations__["a"], len(g.__annotations__)

    return f, [(x(), 1), (x(), 2)]


@program("untraceable-call", "cannot-rebuild")
def class_annotations():
    def f(x, n):
        class C:
            a: int = n
            b: missing

        return x * C.a, C

    def h(x, n):
        y, C = f(x, n)
        return y, annotationlib.get_annotations(C, format=annotationlib.Format.STRING)

    return h, [(x(), 1), (x(), 2)]


@program("frame-access")
def dataclass_inside():
    def f(x, n):
        @dataclasses.dataclass
        class C:
            a: int = n
            b: typing.Any = None

        return C(b=x).b + C().a

    return f, [(x(), 1), (x(), 2)]


@program
def dataclass_outside():
    @dataclasses.dataclass
    class C:
        a: int
        b: "typing.Any" = None

    def f(x, n):
        c = C(n, b=x)
        return c.b + c.a, c, dataclasses.replace(c, a=0), C.__annotations__["a"]

    return f, [(x(), 1), (x(), 2)]


@program
def partial_placeholder():
    def g(a, b, c):
        return a * b + c

    def f(x, n):
        p = functools.partial(g, functools.Placeholder, n)
        q = functools.partial(p, functools.Placeholder, 3)
        return p(x, 1), q(x)

    return f, [(x(), 1), (x(), 2)]


@program
def union_types():
    def f(x, n):
        u = int | None
        return (
            x + isinstance(n, u),
            u == typing.Optional[int],
            type(u) is typing.Union,
            u.__args__,
            typing.get_origin(u),
        )

    return f, [(x(), 1), (x(), 2)]


@program
def map_strict():
    def f(x, n):
        r = list(map(lambda a, b: a * b, [x, x], [1, n], strict=True))
        try:
            list(map(lambda a, b: a, [1], [1, 2], strict=True))
        except ValueError as e:
            return r, str(e)

    return f, [(x(), 1), (x(), 2)]


@program
def finally_and_consumed_generators():
    def f(x, n):
        for i in range(3):
            try:
                if i == n:
                    continue
                x = x + i
            finally:
                x = x * 2
        assert x.dim() == 2
        return all(v for v in [1, n]), any(v for v in [0, n]), tuple(v for v in [n]), x

    return f, [(x(), 1), (x(), 0), (x(), 2)]


@program
def small_numbers_and_subscripts():
    @contextlib.contextmanager
    def m(v):
        yield v + 1

    def f(x, n):
        with m(n) as a, m(a) as b:
            x = x * b + 255 - 256 + 1
        a = b = 7
        return x[0:1], x[:, 1], "abc"[1], [1, 2, 3][n], (a, b), {1: 2}.get(n), x[..., 0]

    return f, [(x(), 1), (x(), 0)]
