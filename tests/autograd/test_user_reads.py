"""What a program's own code in a backward looks up is looked up when the backward runs, as in eager."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, FellBack

SCALE = 2.0
HOLDER = types.SimpleNamespace(scale=2.0)


def helper(g: torch.Tensor) -> torch.Tensor:
    return g * 5


def program_of(closed: list[float]) -> tuple[type, Callable[..., Any]]:
    """A function of its own class; `closed` is its closure."""
    scale = closed[0]

    class Scaled(torch.autograd.Function):
        k = 2.0

        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a)
            return a * 3

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor, usual: float = 1.5, *, named: float = 2.5) -> torch.Tensor:
            factor = 31.0 * SCALE * Scaled.k * HOLDER.scale * scale * usual * named
            return helper(g) * ctx.saved_tensors[0] * factor

    def program(x: torch.Tensor) -> torch.Tensor:
        return (Scaled.apply(x) * x).sum()

    return Scaled, program


def _set(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch, type], None]:
    def change(patch: pytest.MonkeyPatch, cls: type) -> None:
        patch.setattr(cls if target is None else target, name, value)

    return change


MODULE = __import__(__name__, fromlist=["SCALE"])
CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "the method": _set(None, "backward", staticmethod(lambda ctx, g: g * 7)),
    "its code": lambda patch, cls: setattr(cls.backward, "__code__", _code_over_the_same_closure(cls)),
    "its defaults": lambda patch, cls: setattr(cls.backward, "__defaults__", (3.5,)),
    "its keywords' defaults": lambda patch, cls: setattr(cls.backward, "__kwdefaults__", {"named": 4.5}),
    "a keyword's default": lambda patch, cls: cls.backward.__kwdefaults__.update(named=5.5),
    "an attribute of the class": _set(None, "k", 11.0),
    "a global": _set(MODULE, "SCALE", 13.0),
    "a function that it calls": _set(MODULE, "helper", lambda g: g * 17),
    "that function's code": lambda patch, cls: patch.setattr(helper, "__code__", (lambda g: g * 19).__code__),
    "an attribute of an object": _set(HOLDER, "scale", 23.0),
    "a variable of the enclosing function": lambda patch, cls: setattr(
        cls.backward.__closure__[cls.backward.__code__.co_freevars.index("scale")], "cell_contents", 29.0
    ),
    "nothing": lambda patch, cls: None,
}


def _code_over_the_same_closure(cls: Any) -> types.CodeType:
    code: types.CodeType = cls.backward.__code__
    return code.replace(co_consts=tuple(37.0 if one == 31.0 else one for one in code.co_consts))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_changed_between_forward_and_backward(
    change: Callable[[pytest.MonkeyPatch, Any], None], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, repeated = [], []

    def listen(event: Event) -> None:
        repeated.extend([event] if isinstance(event, FellBack) else [])

    for compiles in (False, True):
        cls, program = program_of([3.0])
        run = fusewright.compile(program, backend=backend) if compiles else program
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        run(x).backward()
        with monkeypatch.context() as patch, STREAM.listening(listen):
            loss = run(x)
            change(patch, cls)
            loss.backward()
            run(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    assert len(repeated) == (change is not CHANGES["nothing"])


WRITES: dict[str, Callable[[Any], None]] = {
    "a keyword's default": lambda backward: backward.__kwdefaults__.update(named=5.5),
    "its defaults": lambda backward: setattr(backward, "__defaults__", (3.5,)),
    "a variable of the enclosing function": lambda backward: setattr(backward.__closure__[0], "cell_contents", 29.0),
    "a global": lambda backward: globals().update(SCALE=7.0),
    "an attribute of an object": lambda backward: setattr(HOLDER, "scale", 23.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("where", ["before", "forward", "setup_context", "behind"])
def test_the_call_writes_to_what_its_backward_reads(write: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for compiles in (False, True):
        scale = 3.0

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(a: torch.Tensor) -> torch.Tensor:
                write(Scaled.backward) if where == "forward" else None
                return a * 3

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                write(Scaled.backward) if where == "setup_context" else None

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor, usual: float = 1.5, *, named: float = 2.5) -> torch.Tensor:
                return g * scale * usual * named * SCALE * HOLDER.scale

        def program(x: torch.Tensor) -> torch.Tensor:
            write(Scaled.backward) if where == "before" else None
            y = Scaled.apply(x)
            write(Scaled.backward) if where == "behind" else None
            return (y * x).sum()

        run = fusewright.compile(program) if compiles else program
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        with monkeypatch.context() as patch:
            patch.setattr(MODULE, "SCALE", 2.0)
            patch.setattr(HOLDER, "scale", 2.0)
            for _ in range(2):
                run(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_default_is_an_argument_that_may_have_a_gradient() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(a: torch.Tensor, by: float = 1.5) -> torch.Tensor:
            return a * by

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.inputs = len(inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.inputs

    def program(x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x).sum()

    for run in (program, fusewright.compile(program)):
        with pytest.raises(RuntimeError, match=r"expected 2, got 1"):
            run(torch.ones(3, requires_grad=True)).backward()


def test_of_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * SCALE)
        return y.sin().sum()

    found = []
    for run in (program, fusewright.compile(program)):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        run(x).backward()
        with monkeypatch.context() as patch:
            loss = run(x)
            patch.setattr(MODULE, "SCALE", 13.0)
            loss.backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("pack", [lambda t: t, lambda t: t * SCALE])
def test_of_hooks_on_what_is_saved(pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was packed otherwise cannot be packed so again."""

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / SCALE):
            return x.sin().sum()

    found, read_before = [], "SCALE" in pack.__code__.co_names
    for run in (program, fusewright.compile(program)):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        run(x).backward()
        loss = run(x)
        with monkeypatch.context() as patch:
            patch.setattr(MODULE, "SCALE", 13.0)
            if not read_before:
                loss.backward()
            elif run is not program:
                with pytest.raises(RuntimeError, match="packed by a function"):
                    loss.backward()
            run(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_where_the_forward_reads_it_too_it_is_an_error() -> None:
    class Scaled(torch.autograd.Function):
        k = 2.0

        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * Scaled.k

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * Scaled.k

    def program(x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x).sum()

    x = torch.ones(3, requires_grad=True)
    loss = fusewright.compile(program)(x)
    Scaled.k = 3.0
    with pytest.raises(RuntimeError, match="computes something else now"):
        loss.backward()
