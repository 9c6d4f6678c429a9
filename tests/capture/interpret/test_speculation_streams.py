"""Programs that read tensors, over calls of other sizes and values: what is taken for granted, and what is dropped again, gives
eager's results and gradients at every call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, InternalError


def masks(x: torch.Tensor) -> Any:
    y = x[x > 0.2]
    return y * 2, y.sum(), x.shape[0]


def branch(x: torch.Tensor) -> Any:
    return x.cumsum(0) if x.shape[0] > 2 and x.sum() > 0 else x - 1


def writes(x: torch.Tensor) -> Any:
    x = x.clone()
    x[0] += 1
    if bool((x > 2).any()):
        x[x > 2] = 0
    return x, x.nonzero().shape[0]


def sizes(x: torch.Tensor) -> Any:
    n = int((x > 0).sum())
    return x.new_ones(n) + x.sum(), x[:n]


def numbers(x: torch.Tensor) -> Any:
    most = x.max().item()
    return x / most if most > 0.5 else x * most


def places(x: torch.Tensor) -> Any:
    places = torch.where(x > 0)[0]
    out = torch.zeros_like(x)
    out[places] = x[places] * 3
    return out - 1 if places.numel() == 0 else out


def turns(x: torch.Tensor) -> Any:
    total: Any = 0
    for turn in range(min(3, x.shape[0])):
        total = total + x[turn] if x[turn] > 0 else total - 1
    return total + x


def counts(x: torch.Tensor) -> Any:
    values, number = torch.unique((x * 2).long(), return_counts=True)
    return values * 2, number + 1, torch.bincount((x * 2).long().abs())


def run(f: Callable[..., Any], x: torch.Tensor, train: bool) -> Any:
    leaf = x.clone().requires_grad_(train)
    try:
        result = f(leaf)
    except RuntimeError as error:
        return str(error)[:40], None
    if train:
        parts = [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in parts):
            torch.stack([one.sum() for one in parts if one.requires_grad]).sum().backward()
    return result, leaf.grad


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("program", [masks, branch, writes, sizes, numbers, places, turns, counts], ids=lambda f: f.__name__)
def test_a_stream_of_calls(program: Callable[..., Any], train: bool) -> None:
    if train and program in (writes, sizes, counts):
        pytest.skip("nothing to differentiate")
    draws = random.Random(3)
    compiled = fusewright.compile(program, options={"speculate": True})
    events: list[Event] = []
    with STREAM.listening(events.append):
        for _ in range(14):
            size = draws.choice([1, 1, 2, 3, 3, 5])
            x = torch.randn(size) if draws.random() < 0.6 else torch.full((size,), draws.choice([1.0, -1.0, 3.0]))
            torch.testing.assert_close(run(compiled, x, train)[1], run(program, x, train)[1], equal_nan=True)
            got, expected = run(compiled, x, train)[0], run(program, x, train)[0]
            assert got == expected if isinstance(expected, str) else torch.testing.assert_close(got, expected) is None
    assert not [event for event in events if isinstance(event, InternalError)]
