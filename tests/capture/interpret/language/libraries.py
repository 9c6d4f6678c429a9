# ruff: noqa
"""What the standard library's own Python does for a program: single dispatch, weak dictionaries, typed dictionaries, stacks of contexts."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
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
