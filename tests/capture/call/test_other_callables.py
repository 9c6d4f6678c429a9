"""A callable that a rule takes as known, not through what it holds, is another one at a later call."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusewright

Made = Callable[[float], Any]


def one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def two(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def closure(by: float) -> Any:
    return lambda x: x + by


def with_default(by: float) -> Any:
    return lambda x, by=by: x + by


def operation(by: float) -> Any:
    name = f"fusewright_tests::add_{by:.0f}_{next(_NAMES)}"

    @torch.library.custom_op(name, mutates_args=())
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + by

    add.register_fake(torch.empty_like)
    return add


_NAMES = iter(range(100))


def generic(by: float) -> Any:
    made = functools.singledispatch(one)
    made.register(torch.Tensor, closure(by))
    return made.dispatch


def first_or(first: Any, second: Any) -> Made:
    return lambda by: first if by == 1 else second


CALLABLES: dict[str, Made] = {
    "compiled": first_or(*(fusewright.compile(fn, backend="eager") for fn in (one, two))),
    "compiled closure": lambda by: fusewright.compile(closure(by), backend="eager"),
    "partial of a compiled one": lambda by: functools.partial(fusewright.compile(closure(by), backend="eager")),
    "torch.compile": lambda by: torch.compile(closure(by), backend="eager"),
    "disabled": lambda by: fusewright.disable(closure(by)),
    "allowed": lambda by: torch.compiler.allow_in_graph(closure(by)),
    "scripted": lambda by: torch.jit.script(one if by == 1 else two),
    "traced": lambda by: torch.jit.trace(closure(by), (torch.ones(3),)),
    "symbolically traced": lambda by: torch.fx.symbolic_trace(closure(by)),
    "custom operator": operation,
    "closure": closure,
    "default": with_default,
    "ufunc": first_or(np.sin, np.cos),
    "numpy function": first_or(np.sum, np.mean),
    "operator": first_or(torch.ops.aten.sin.default, torch.ops.aten.cos.default),
    "builtin": first_or(torch.sin, torch.cos),
    "method": first_or(torch.Tensor.sin, torch.Tensor.cos),
    "Python function of torch": first_or(torch.nn.functional.relu, torch.nn.functional.softplus),
    "dispatched": first_or(torch.nn.functional.max_pool1d, torch.nn.functional.adaptive_max_pool1d),
    "method caller": lambda by: operator.methodcaller("add", by),
    "mapped": lambda by: torch.func.vmap(closure(by)),
    "autograd": lambda by: torch.func.grad(lambda x: (x * by).sum()),
    "of a vjp": lambda by: torch.func.vjp(torch.sin, torch.arange(3.0) * by)[1],
    "generic": generic,
}
USES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "generic": lambda fn, x: fn(torch.Tensor)(x),
    "dispatched": lambda fn, x: fn(x[None], 2),
    "of a vjp": lambda fn, x: fn(x)[0],
    "ufunc": lambda fn, x: torch.as_tensor(fn(2.0)),
    "numpy function": lambda fn, x: torch.as_tensor(fn(x.numpy())),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_another_one_is_called(name: str) -> None:
    make, use = CALLABLES[name], USES.get(name, lambda fn, x: fn(x))
    compiled = fusewright.compile(use, backend="eager")
    x, alive = torch.arange(3.0), []
    for by in (1, 1, 2, 1, 2, 3, 1):
        alive.append(make(by))
        assert torch.equal(compiled(alive[-1], x), use(alive[-1], x)), by


@pytest.mark.parametrize("make", [with_default, lambda by: lambda x, *, by=by: x])
def test_the_signature_of_another_one(make: Made) -> None:
    def default(fn: Any) -> Any:
        return inspect.signature(fn).parameters["by"].default

    compiled = fusewright.compile(default, backend="eager")
    assert [compiled(make(by)) for by in (1, 1, 2, 1, 2)] == [1, 1, 2, 1, 2]


def test_a_function_that_is_compiled_in_the_call() -> None:
    def program(x: torch.Tensor, by: int) -> torch.Tensor:
        return fusewright.compile(lambda x: x + by, backend="eager")(x)

    compiled = fusewright.compile(program, backend="eager")
    assert [compiled(torch.zeros(()), by).item() for by in (2, 2, 1, 3, 1, 2)] == [2, 2, 1, 3, 1, 2]


def test_an_import_sees_what_the_call_has_put_into_the_table_of_modules() -> None:
    def program(x: torch.Tensor, stands: int) -> Any:
        sys.modules["put_by_a_call"] = stands  # type: ignore[assignment]
        import put_by_a_call  # type: ignore[import-not-found]

        return x + put_by_a_call, put_by_a_call

    compiled = fusewright.compile(program, backend="eager")
    try:
        for stands in (1, 2, 1):
            sys.modules["put_by_a_call"] = 7  # type: ignore[assignment]
            assert compiled(torch.ones(1), stands)[1] == stands
    finally:
        del sys.modules["put_by_a_call"]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


SEEN: list[tuple[str, str]] = []


def seen(frame: types.FrameType, event: str, argument: object) -> Any:
    SEEN.append((frame.f_code.co_name, event))
    return seen


def begun(setter: Any) -> None:
    setter(seen)


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("setter", [sys.settrace, sys.setprofile], ids=lambda setter: setter.__name__)
def test_a_tracer_that_the_call_sets_sees_the_programs_frames(setter: Any, inlined: bool) -> None:
    def program(x: torch.Tensor, watched: bool) -> torch.Tensor:
        x = doubled(x)
        if watched:
            begun(setter) if inlined else setter(seen)
        x = doubled(x)
        setter(None)
        return doubled(x)

    logs = []
    for run in (program, fusewright.compile(program, backend="eager")):
        for watched in (False, True, False, True):
            SEEN.clear()
            assert run(torch.ones(1), watched).item() == 8
            logs.append(list(SEEN))
    assert logs[:4] == logs[4:]
    assert ("doubled", "call") in logs[1]


def test_a_debugger_stops_in_the_programs_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor, stops: bool) -> torch.Tensor:
        y = x + 1
        if stops:
            breakpoint()
        return y * 2

    frames: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: frames.append(sys._getframe(1)))
    compiled = fusewright.compile(program, backend="eager")
    for stops in (True, False, True):
        compiled(torch.ones(1), stops)
    assert [frame.f_code for frame in frames] == [program.__code__] * 2
    assert frames[1].f_locals["y"].item() == 2


def changed(x: torch.Tensor, seen: list[Any] = []) -> list[Any]:
    seen.append(1)
    return seen


def wrapped_first(x: torch.Tensor) -> inspect.Signature:
    @functools.wraps(one)
    def wrapper(*args: Any) -> Any:
        return one(*args)

    return inspect.signature(one)


SIGNATURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dict's": lambda x: inspect.signature(OUTER.get),
    "a dict's that the call makes": lambda x: inspect.signature({"a": x}.get),
    "a list's": lambda x: inspect.signature([x].append),
    "of what is wrapped": wrapped_first,
    "a default that the call changes": lambda x: (changed(x), repr(inspect.signature(changed)))[1],
}
OUTER = {"a": 1}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    program = SIGNATURES[name]
    compiled = fusewright.compile(program, backend="eager")
    for _ in range(3):
        assert isinstance(changed.__defaults__, tuple)
        changed.__defaults__[0].clear()
        expected = repr(program(torch.ones(2)))
        changed.__defaults__[0].clear()
        assert repr(compiled(torch.ones(2))) == expected
