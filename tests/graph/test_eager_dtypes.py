"""Dtypes that PyTorch's CPU kernels refuse, or answer otherwise than its meta kernels: compiled code does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.cases import Case
from tests.ops.running import run_case

BOOL, INT = torch.tensor([True, False]), torch.tensor([1, 2, 3])

REFUSED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "abs of bool": (torch.abs, BOOL),
    "a list's floor of bool": (lambda x: torch._foreach_floor([x]), BOOL),
    "in place": (lambda x: torch._foreach_abs_([x]), BOOL),
    "lerp of integers": (lambda x: torch._foreach_lerp([x], [x], 0.5), INT),
    "frac of integers": (torch.frac, INT),
    "subtraction of bool": (lambda x: x - x, BOOL),
    "a number less a bool": (lambda x: torch.rsub(x, 1), BOOL),
    "deviation of integers": (lambda x: torch.std(x, 0), INT.to(torch.int16)),
    "variance of bool": (lambda x: torch.var(x, -1), BOOL),
    "softmax of integers": (lambda x: torch.softmax(x, 0), INT),
    "pooling of bool": (lambda x: torch.nn.functional.max_pool1d(x[None], 2), BOOL),
    "a loss over other dtypes": (lambda x: torch.nn.functional.huber_loss(x, x.float()), BOOL),
    "a loss of integers": (lambda x: torch.nn.functional.mse_loss(x, x, reduction="none"), INT),
    "addcmul of bool": (lambda x: torch.addcmul(x, x, x), BOOL),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, x = REFUSED[name]
    assert run_case(Case(name, lambda transform: transform(lambda x: function(x)), (x,), {})).kind == "same error"


def test_another_dtype() -> None:
    dropped = Case("", lambda transform: transform(lambda x: torch.ops.aten.native_dropout_backward(x, x, 2.0)), (BOOL,), {})
    assert run_case(dropped).kind == "captured"  # a bool gradient, and a float result
    assert run_case(Case("", lambda transform: transform(lambda x: torch.pow(x, True)), (BOOL,), {})).kind == "broke"
    assert run_case(Case("", lambda transform: transform(lambda x: torch.pow(x, 2)), (BOOL,), {})).kind == "captured"
