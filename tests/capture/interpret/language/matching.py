# ruff: noqa
"""The match statement: every kind of pattern."""

from __future__ import annotations

import dataclasses
import enum

import torch

from tests.capture.interpret.language.support import program, x


@dataclasses.dataclass
class Point:
    a: int
    b: int


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Positional:
    __match_args__ = ("v", "w")

    def __init__(self, v, w):
        self.v, self.w = v, w


@program
def literals_and_alternatives():
    def f(x, v):
        match v:
            case 0 | 1:
                return x
            case "add":
                return x + 1
            case -1.5 | None | True:
                return x * 2
            case b"raw":
                return x * 3
            case _:
                return x - 1

    return f, [(x(), v) for v in (0, 1, "add", -1.5, None, True, b"raw", [], 0)]


@program
def sequences():
    def f(x, v):
        match v:
            case []:
                return "empty", x
            case [one]:
                return "one", x * one
            case [1, second]:
                return "starts with one", x * second
            case [first, *middle, last]:
                return "many", x + first + last, middle
            case str():
                return "text", x

    return f, [(x(), v) for v in ([], [5], [1, 2], (2, 3), [1, 2, 3], "ab", 7, range(4))]


@program
def mappings():
    def f(x, v):
        match v:
            case {"op": "add", "value": n}:
                return x + n
            case {"op": "mul", "value": n, **rest}:
                return x * n, rest
            case {"nested": {"k": [a, b]}}:
                return x + a - b
            case {}:
                return x, "some mapping"
            case _:
                return x

    return f, [
        (x(), v)
        for v in (
            {"op": "add", "value": 2},
            {"op": "mul", "value": 3, "more": 1},
            {"nested": {"k": [1, 2]}},
            {"z": 0},
            3,
        )
    ]


@program
def classes_and_captures():
    def f(x, v):
        match v:
            case Point(a=0, b=b):
                return "on axis", x + b
            case Point(a, b) if a == b:
                return "diagonal", x * a
            case Point() as p:
                return "point", x + p.a, p
            case Positional(1, w=w):
                return "positional", x + w
            case int(n) | float(n):
                return "number", x + n
            case list([a, *_]):
                return "list", x + a
            case (str() | bytes()) as s:
                return "text", len(s)

    return f, [
        (x(), v)
        for v in (
            Point(0, 3),
            Point(2, 2),
            Point(1, 2),
            Positional(1, 4),
            Positional(2, 4),
            3,
            2.5,
            [9, 8],
            "abc",
            b"ab",
            None,
        )
    ]


@program
def enums_and_dotted_names():
    def f(x, v):
        match v:
            case Color.RED:
                return x + 1
            case Color.BLUE:
                return x - 1
            case torch.float32:
                return x * 2

    return f, [(x(), v) for v in (Color.RED, Color.BLUE, torch.float32, 3)]


@program
def guards_and_fallthrough():
    def f(x, v, log):
        match v:
            case n if log.append("first") or n > 10:
                return x + n
            case n if n > 5:
                log.append("second")
                return x * n
        return n

    return f, [(x(), 11, []), (x(), 6, []), (x(), 1, [])]


@program
def star_patterns_and_tuples():
    def f(x, a, b):
        match a, b:
            case (int(p), int(q)):
                return x + p + q
            case (_, [*all]):
                return x, all
            case (p, q):
                return p, q

    return f, [(x(), 1, 2), (x(), 1, [2, 3]), (x(), "a", "b")]


@program
def match_on_shapes():
    def f(x):
        match tuple(x.shape):
            case (2, n):
                return x + n
            case (n,):
                return x * n
            case (_, _, *rest):
                return x - len(rest)

    return f, [(x(),), (x()[0],), (x()[None],), (x(),)]


@program
def match_errors():
    class Bad:
        __match_args__ = "v"

    def f(x, v):
        try:
            match v:
                case int(a, b):
                    return x
        except TypeError as error:
            first = str(error)
        try:
            match Bad():
                case Bad(1):
                    return x
        except TypeError as error:
            return x + 1, first, str(error)

    return f, [(x(), 3), (x(), 4)]


@program
def dispatcher():
    def run(x, program):
        for step in program:
            match step:
                case ("push", n):
                    x = x + n
                case ("repeat", n, [*body]):
                    for _ in range(n):
                        x = run(x, body)
                case "neg":
                    x = -x
                case other:
                    raise ValueError(other)
        return x

    def f(x, program):
        return run(x, program)

    return f, [(x(), [("push", 1), ("repeat", 2, ["neg", ("push", 3)])]), (x(), ["neg"]), (x(), ["bad"])]
