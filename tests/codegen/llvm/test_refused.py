"""Kernels whose text LLVM does not take: their operators alone are left to PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, CacheUse, Event, Hint, InternalError, KernelMade
from fusewright.base.records import replace
from fusewright.codegen.llvm import module
from fusewright.schedule.plan import Kernel
from fusewright.schedule.printer import kernel_text


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).erf() + 1
    z = torch.mm(y, w).tanh()
    return z.sum(-1), z.cos()


def repeating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.mm(x.erf() + x.mean(1, True), w) * 0.1
    return x


def training(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = torch.mm((x * 2).erf(), w).cos().sum()
    return torch.autograd.grad(y, x)[0]


def refusing(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    emit = module._emit

    def broken(kernel: Kernel, *given: Any) -> Any:
        made = emit(kernel, *given)
        return replace(made, body=f"{made.body}\nnonsense") if part in kernel_text(kernel) else made

    monkeypatch.setattr(module, "_emit", broken)


@pytest.mark.parametrize("part", ["erf(", "sum", "mean", "tanh(", ""])
@pytest.mark.parametrize("function", [program, repeating, training])
def test_only_that_kernel_is_replaced(
    function: Callable[..., Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, part)
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    for _ in range(2):
        heard: list[Event] = []
        fusewright.reset()
        with warnings.catch_warnings(record=True) as told, STREAM.listening(heard.append):
            warnings.simplefilter("always", InternalErrorWarning)
            torch.testing.assert_close(fusewright.compile(function)(x, w), function(x, w))
        assert not [event for event in heard if isinstance(event, InternalError)]
        kernels = [event for event in heard if isinstance(event, KernelMade)]
        hints = [event.text for event in heard if isinstance(event, Hint)]
        assert not [text for text in hints if "by operator" in text]
        if part in ("erf(", "tanh(") and function is program:
            assert kernels
        cached = any(isinstance(event, CacheUse) and event.hit for event in heard)
        assert bool(told) == bool([text for text in hints if "LLVM does not take" in text]), (cached, hints)
