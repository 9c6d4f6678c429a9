"""Numbers read from tensors that the program made from Python data: no break, and never a stale value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.errors import GraphBreakError

TABLE = torch.tensor([1.0, 2.0])


def index(x: torch.Tensor) -> torch.Tensor:
    span = torch.tensor(min(x.shape[0], 2))
    return x[2 - span : 2 + span] + torch.arange(5)[2:].sum().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    limit = torch.linspace(0, 1, 3)[1] * 2
    return x + 1 if limit > 0.5 and bool(limit < 2) else x - 1


def numbers(x: torch.Tensor) -> torch.Tensor:
    shape = torch.tensor([2, 3])
    return x.sum() + torch.ones(shape.tolist()) * float(shape[0]) + int(shape.prod())


def divided(x: torch.Tensor) -> torch.Tensor:
    chunks = torch.div(x.shape[0], 3, rounding_mode="trunc")  # two numbers, and no tensor
    return x[:chunks] + torch.add(1, 2.5) * int(chunks)


@pytest.mark.parametrize("program", [index, branch, numbers, divided])
def test_the_value_is_known(program: Callable[..., Any]) -> None:
    x = torch.randn(4)
    assert torch.equal(fusewright.compile(program, fullgraph=True)(x), program(x))


def written(x: torch.Tensor) -> torch.Tensor:
    t = torch.tensor([1.0, 2.0])
    t[0] += 4
    return x * t[0].item()


def written_from_outside(x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(2)
    t.view(1, 2)[0].copy_(x[:2])
    return x * t[0].item()


def outside(x: torch.Tensor) -> torch.Tensor:
    return x * TABLE[0].item()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(()).item()


@pytest.mark.parametrize("program", [written, written_from_outside, outside, drawn])
def test_what_may_change_is_a_break(program: Callable[..., Any]) -> None:
    compiled = fusewright.compile(program)
    for seed in range(3):
        x = torch.randn(4)
        TABLE[0] = seed
        torch.manual_seed(seed)
        expected = program(x)
        torch.manual_seed(seed)
        assert torch.equal(compiled(x), expected)
    with pytest.raises(GraphBreakError):
        fusewright.compile(program, fullgraph=True)(torch.randn(4))
