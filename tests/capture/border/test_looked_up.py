"""What a program puts under a name that PyTorch's own Python looks up is called, also by functions that run natively."""

from __future__ import annotations

import functools
import operator
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fusewright
from fusewright.capture.border import looked_up

ATTENTION = torch.nn.MultiheadAttention(4, 2)

# (what the program calls, the name that this looks up)
CALLS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("attention", lambda x: ATTENTION(x, x, x, need_weights=False)[0], "torch.nn.functional.linear"),
    ("a function that it calls", lambda x: F.gumbel_softmax(x * 0 + 1, hard=True).sum(), "torch.zeros_like"),
    ("by a method", lambda x: x.norm(), "torch.norm"),
    ("by a method that a function calls", lambda x: F.normalize(x), "torch.norm"),
    ("of another namespace", lambda x: torch.functional.split(x, 2), "torch.Tensor.split"),
    ("of the C part", lambda x: F.mse_loss(x, x + 1), "torch._C._nn.mse_loss"),
    ("of what is chosen by a flag", lambda x: F.max_pool2d(x[None], 2), "torch.max_pool2d"),
    ("recorded as other operators", lambda x: F.interpolate(x[None], 4), "torch._C._nn.upsample_nearest1d"),
    ("a reflected operator", lambda x: 2**x, "torch.pow"),
    ("a reflected operator by name", lambda x: operator.floordiv(7, x + 9), "torch.floor_divide"),
    ("contracted", lambda x: torch.einsum("ij,jk->ik", x, x), "torch.functional._VF"),
)
WRITTEN: tuple[Callable[[Any], Any], ...] = (
    lambda original: lambda *args, **kwargs: args[0] * 3,
    lambda original: functools.wraps(original)(lambda *args, **kwargs: args[0] * 3),
    lambda original: lambda *args, **kwargs: "no tensor",
    lambda original: functools.partial(torch.add, torch.ones(())),
    lambda original: lambda *args, **kwargs: original(*args, **kwargs),
    lambda original: torch.tanh,
)


def told(run: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:
        return type(error)


def same(ours: Any, eager: Any) -> None:
    if isinstance(eager, torch.Tensor | tuple):
        torch.testing.assert_close(ours, eager)
    else:
        assert ours == eager


@pytest.mark.parametrize("call, name", [one[1:] for one in CALLS], ids=[one[0] for one in CALLS])
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_replaced_between_calls(
    call: Callable[[Any], Any], name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    compiled = fusewright.compile(call, backend=backend)
    owner, _, last = name.rpartition(".")
    place = pkgutil.resolve_name(owner)
    original = getattr(place, last)
    same(told(lambda: compiled(x)), told(lambda: call(x)))
    for write in WRITTEN:
        monkeypatch.setattr(place, last, write(original))
        same(told(lambda: compiled(x)), told(lambda: call(x)))
        monkeypatch.setattr(place, last, original)
        same(told(lambda: compiled(x)), told(lambda: call(x)))


def test_replaced_by_the_call_itself() -> None:
    def program(x: Any) -> Any:
        before, F.linear = F.linear, lambda *args: args[0] * 3
        try:
            return ATTENTION(x, x, x, need_weights=False)[0]
        finally:
            F.linear = before

    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    with torch.no_grad():
        same(told(lambda: fusewright.compile(program)(x)), told(lambda: program(x)))


class _World:
    """Guards nothing."""

    store_count = 0

    def __init__(self) -> None:
        self.as_written: dict[int, Any] = {}

    def constant(self, obj: Any, hint: str) -> Any:
        return hint

    def dict_stand_in(self, real: Any, source: Any) -> Any:
        return real

    def guard_identity(self, value: Any) -> None:
        pass


def test_pytorchs_own_functions_are_as_written() -> None:
    namespaces = (F, torch.functional, torch, torch.Tensor)
    functions = [one for place in namespaces for one in vars(place).values() if type(one) is types.FunctionType]
    world: Any = _World()
    assert [one.__name__ for one in functions if not looked_up.as_written(world, one)] == []


def test_work_of_ours_calls_nothing_that_a_program_has_put_in_the_place_of_pytorchs() -> None:
    path = Path(__file__).with_name("replaced_functions.py")
    run = subprocess.run([sys.executable, "-W", "error::fusewright.base.errors.InternalErrorWarning", str(path)], capture_output=True, text=True)
    assert not run.returncode, run.stderr
