"""Attributes of what stands for a number, a text, an array, a storage, a generator or a tensor: read, set and deleted as in eager, and none of the
stand-in's own shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError


class Sub(torch.Tensor):
    """A tensor of the program's."""


VALUES: dict[str, Callable[[torch.Tensor, int, float], Any]] = {
    "int": lambda x, n, f: n,
    "float": lambda x, n, f: f,
    "size": lambda x, n, f: x.shape[0],
    "comparison": lambda x, n, f: x.shape[0] > 3,
    "product": lambda x, n, f: x.numel() * 1.5,
    "text": lambda x, n, f: f"{x}",
    "address": lambda x, n, f: x.data_ptr(),
    "storage": lambda x, n, f: x.untyped_storage(),
    "array": lambda x, n, f: x.numpy(),
    "generator": lambda x, n, f: (one for one in (1, 2)),
    "shape": lambda x, n, f: x.shape,
    "method": lambda x, n, f: {"a": n}.get,
    "tensor": lambda x, n, f: x + 1,
    "argument": lambda x, n, f: x,
    "leaf": lambda x, n, f: torch.ones(2, requires_grad=True),
    "parameter": lambda x, n, f: torch.nn.Parameter(torch.ones(2)),
    "subclass": lambda x, n, f: x.as_subclass(Sub),
}
NAMES = ("foo", "real", "tensor", "__class__")
OF_TENSORS = ("foo", "tensor", "__class__", "grad", "shape")  # eager crashes at `del tensor.real`
OWN = ("node", "pieces", "what", "refuse", "world", "__dict__")  # what stand-ins have
ASKS: dict[str, Callable[[Any, str], Any]] = {
    "get": getattr,
    "has": hasattr,
    "set": lambda value, name: setattr(value, name, int),
    "delete": delattr,
    "set by object": lambda value, name: object.__setattr__(value, name, int),
    "delete by object": object.__delattr__,
}


def program(x: torch.Tensor, n: int, f: float, make: Any, ask: Any, name: str) -> Any:
    y = x + 1
    try:
        given = ask(make(x, n, f), name)
    except Exception as error:
        return y, type(error), str(error)
    return y, type(given), given is True


@pytest.mark.parametrize("kind", VALUES)
def test_as_eager(kind: str) -> None:
    heard: list[Any] = []
    x = torch.arange(6.0).reshape(2, 3)
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for how, ask in ASKS.items():
            names = OF_TENSORS if kind in ("tensor", "argument", "leaf", "parameter", "subclass") else NAMES
            for name in (*names, *OWN) if how == "get" else names:
                compiled = fusewright.compile(program, dynamic=True)
                for n, f in ((4, 2.5), (7, 3.5)) if kind in ("int", "float") else ((4, 2.5),):
                    given = (n, f, VALUES[kind], ask, name)
                    got, expected = compiled(x.clone(), *given), program(x.clone(), *given)
                    assert got[1:] == expected[1:], (how, name, re.sub("0x[0-9a-f]+", "", str(got)))
    assert not heard


def test_deleted_gradients_and_attributes() -> None:
    def program(leaf: torch.Tensor) -> torch.Tensor:
        del leaf.grad, leaf.kept
        return leaf * 2

    compiled = fusewright.compile(program)
    for _ in range(2):
        leaf = torch.ones(2, requires_grad=True)
        leaf.grad, leaf.kept = torch.ones(2), 3  # type: ignore[attr-defined]
        compiled(leaf)
        assert leaf.grad is None
        assert not vars(leaf)
