# ruff: noqa
"""What the standard library's own Python does for a program: single dispatch, weak dictionaries, typed dictionaries, stacks of contexts."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import sys
import types
import typing
import weakref

import torch

from tests.capture.interpret.language.support import program, x


@program(*(["untraceable-call"] if sys.version_info >= (3, 13) else []))  # methods are kept by weak references there
def single_dispatch():
    @functools.singledispatch
    def apply(value, x):
        return x

    @apply.register
    def _(value: int, x):
        return x + value

    @apply.register(list)
    def _(value, x):
        return x * len(value)

    class Scaled:
        @functools.singledispatchmethod
        def go(self, value, x):
            return x - 1

        @go.register
        def _(self, value: int, x):
            return x * value

    scaled = Scaled()

    def f(x, value):
        return apply(value, x), apply([1, 2], x), scaled.go(value, x)

    return f, [(x(), 3), (x(), "a"), (x(), 3)]


@program
def weak_value_dictionary():
    class Thing:
        scale = 2.0

    thing = Thing()
    table = weakref.WeakValueDictionary(k=thing)

    def f(x):
        return x * table["k"].scale

    return f, [(x(),), (x(),)], lambda: thing


class Options(typing.TypedDict):
    scale: int


@program
def typed_dictionary():
    def f(x, given):
        options = Options(scale=3)
        return x * options["scale"] + given["scale"], options

    return f, [(x(), Options(scale=1)), (x(), Options(scale=2))]


class Channels(enum.Flag):
    R = enum.auto()
    G = enum.auto()
    B = enum.auto()


@program
def flags_and_replaced_dataclasses():
    @dataclasses.dataclass
    class Config:
        scale: float = 2.0
        names: list = dataclasses.field(default_factory=lambda: ["a", "b"])
        total: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.total = len(self.names)

    def f(x, channels):
        config = dataclasses.replace(Config(scale=3.0), names=["q"])
        for channel in Channels:
            if channel & channels:
                x = x + channel.value
        return x * config.scale, config.total, (channels | Channels.G).value, dataclasses.asdict(config)["names"]

    return f, [(x(), Channels.R | Channels.B), (x(), Channels.G)]


if sys.version_info >= (3, 12):

    @program
    def batches():
        def f(x, numbers):
            made = [sum(batch) for batch in itertools.batched([x, x + 1, x + 2], 2)]
            halves = itertools.batched(numbers, n=2)
            try:
                itertools.batched(numbers, 0)
            except ValueError as error:
                said = str(error)
            return made, next(halves), list(halves), list(itertools.batched((n * 2 for n in numbers), 3)), said

        return f, [(x(), [1, 2, 3]), (x(), [1, 2, 3, 4]), (x(), [1, 2, 3])]


if sys.version_info >= (3, 13):

    @program
    def replaced_copies():
        @dataclasses.dataclass(frozen=True, slots=True)
        class Config:
            scale: float
            bias: typing.Any = None

        class Own:
            def __init__(self, value):
                self.value = value

            def __replace__(self, /, **changes):
                return Own(changes.get("value", self.value))

        Pair = collections.namedtuple("Pair", "a b")
        outside = Config(2.0, x())

        def f(x):
            said = []
            for one, changes in ((outside, {"nothing": 1}), (Pair(1, 2), {"c": 1}), ([1], {"a": 1})):
                try:
                    copy.replace(one, **changes)
                except (TypeError, ValueError) as error:
                    said.append((type(error).__name__, str(error)))
            made = copy.replace(outside, scale=3.0), copy.replace(Pair(1, 2), b=x * 2)
            space = copy.replace(types.SimpleNamespace({"a": 1}, b=x), a=2)
            return made[0].bias * made[0].scale, made[1].b, space.a, space.b, copy.replace(Own(1), value=x).value, said

        return f, [(x(),), (x(),)]

    @program
    def what_python_3_13_brought():
        class Shape:
            """Has
            two lines."""

            @property
            def area(self):
                return 3

            def grow(self):
                self.grown = self.area

        def f(x, n):
            first = locals()
            first["n"] = first["new"] = 0
            texts = "aXbXc".replace("X", "-", count=n), "aXbXc".replace("X", "-", count=-1), Shape.__doc__
            names = Shape.area.__name__, Shape.__static_attributes__, sorted(locals()), [sorted(locals()) for _ in "a"]
            said = []
            for wrong in (lambda: Shape().grow(sizes=1), lambda: sorted([1], revers=True), lambda: f(x, nn=2)):
                try:
                    wrong()
                except TypeError as error:
                    said.append(str(error))
            return x + math.fma(2.0, n, x.shape[0]), texts, names, said, first is locals()

        return f, [(x(), 1), (x(), 2), (x(), 3)]


@program
def stack_of_contexts():
    log: list = []

    @contextlib.contextmanager
    def noted(name):
        log.append("in " + name)
        try:
            yield name
        finally:
            log.append("out " + name)

    def f(x):
        with contextlib.ExitStack() as stack:
            names = [stack.enter_context(noted(name)) for name in "ab"]
            stack.callback(log.append, "called")
            y = x * len(names)
        with contextlib.suppress(KeyError):
            {}["missing"]
        return y

    return f, [(x(),), (x(),)], lambda: log

    @program
    def static_attributes_and_first_line():
        class A:
            def __init__(self):
                self.a = 1
                self.b = 2

        def f(x):
            return x + len(A.__static_attributes__), sorted(A.__static_attributes__), A.__firstlineno__, A.__name__

        return f, [(x(),), (x(),)]

    @program
    def static_attributes_inside():
        def f(x):
            class A:
                def __init__(self):
                    self.a = 1
                    self.b = 2

                def g(self):
                    self.c = 1

            a = A()
            return (
                x + a.a,
                sorted(A.__static_attributes__),
                A.__firstlineno__,
                [k for k in vars(A) if k.startswith("__s")],
            )

        return f, [(x(),), (x(),)]

    @program
    def deprecated():
        @warnings.deprecated("use other")
        def old(x):
            return x + 1

        @warnings.deprecated("use other class")
        class Old:
            def __init__(self, v):
                self.v = v

        @warnings.deprecated("silent", category=None)
        def silent(x):
            return x * 3

        class Plain:
            @warnings.deprecated("method")
            def m(self, x):
                return x - 1

            @classmethod
            @warnings.deprecated("cm")
            def c(cls, x):
                return x - 2

        def f(x):
            return old(x), Old(x).v, silent(x), Plain().m(x), Plain.c(x), old.__deprecated__

        return f, [(x(),), (x(),)]

    @program
    def deprecated_inside():
        def f(x):
            @warnings.deprecated("use other")
            def old(x):
                return x + 1

            return old(x), old.__deprecated__

        return f, [(x(),), (x(),)]
