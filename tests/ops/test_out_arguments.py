"""`out=` arguments: several of them, ones that PyTorch's composite operators forget, empty ones, and ones of another dtype or memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from tests.ops.cases import Case
from tests.ops.running import run_case


def made(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    return out + 1


def made_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = x * 2
    out = whole[1:1]
    torch.add(x[0], x[1], out=out)
    return whole, out


X = torch.arange(20.0).reshape(4, 5).sin()
SQUARE = X @ X.T + torch.eye(4)

CAPTURED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two results": (lambda x, v, i: torch.max(x, 1, out=(v, i)), (X, torch.zeros(4), torch.zeros(4, dtype=torch.long))),
    "sort": (lambda x, v, i: torch.sort(x, 1, out=(v, i)), (X, torch.zeros(4, 5), torch.zeros(4, 5, dtype=torch.long))),
    "an empty tensor of the program's": (made, (X,)),
    "columns are kept": (lambda a, b, out: torch.linalg.solve(a, b, out=out), (SQUARE, X, torch.zeros(4, 5))),
    "a result beside the one wanted": (lambda a, out: torch.linalg.cholesky(a, out=out), (SQUARE, torch.zeros(4, 4))),
    "other strides": (lambda x, out: torch.add(x, 1, out=out), (X, torch.zeros(5, 4).t())),
}
BROKEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a composite that forgets": (
        lambda x, out: torch.linalg.matrix_rank(x, out=out),
        (X, torch.zeros((), dtype=torch.long)),
    ),
    "a view that is none by its schema": (lambda x, out: torch.kron(x, x, out=out), (X, torch.zeros(16, 25))),
    "a view that is resized": (made_view, (X,)),
    "an input that is resized": (lambda x, out: torch.add(x, 1, out=out), (X, torch.zeros(0))),
    "another dtype": (lambda x, out: torch.sum(x, 1, out=out), (X, torch.zeros(4, dtype=torch.float64))),
}


def case(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Case:
    return Case(name, lambda transform: transform(function), args, {})


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    assert run_case(case(name, *CAPTURED[name])).kind == "captured"


@pytest.mark.parametrize("name", BROKEN)
def test_eager_by_a_break(name: str) -> None:
    assert run_case(case(name, *BROKEN[name])).kind == "broke"


def test_the_result_is_the_out_tensor() -> None:
    out = torch.zeros(4, 5)
    assert fusewright.compile(lambda x, out: torch.add(x, 1, out=out))(X, out) is out
