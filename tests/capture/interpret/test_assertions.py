"""Branches of which one side only raises: no break, the program's own exception, and nothing changed when it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from tests.ops.cases import Case
from tests.ops.running import run_case


def raises_if_negative(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError(f"negative: {x.min()}")
    return x.sqrt()


def asserts(x: torch.Tensor) -> torch.Tensor:
    assert (x >= 0).all(), "negative"
    return x.sqrt()


def writes_before(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y = x * 2
    if not y.sum() > 0:
        raise KeyError("small")
    x.mul_(2)
    return y


def caught_outside(x: torch.Tensor) -> torch.Tensor:
    try:
        return raises_if_negative(x) + 1
    except ValueError:
        return x


def checked_loss(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gaussian_nll_loss(x, x * 2, x)


PROGRAMS = [raises_if_negative, asserts, writes_before, caught_outside, checked_loss]


def case(function: Callable[..., Any], x: torch.Tensor) -> Case:
    return Case(function.__name__, lambda transform: transform(function), (x,), {})


@pytest.mark.parametrize("function", PROGRAMS)
def test_the_side_that_goes_on_is_captured(function: Callable[..., Any]) -> None:
    assert run_case(case(function, torch.ones(4))).kind == "captured"


@pytest.mark.parametrize("function", PROGRAMS)
def test_the_exception_is_the_programs_own(function: Callable[..., Any]) -> None:
    """Also at a call of code that was compiled for values which pass; what the program wrote before is there, once."""
    compiled = fusewright.compile(function)
    compiled(torch.ones(4))
    outcomes = []
    for run in (function, compiled):
        x = torch.full((4,), -10.0)
        try:
            outcomes.append((run(x).tolist(), x.tolist()))
        except Exception as error:
            outcomes.append(
                (type(error), str(error).partition("\n")[0], x.tolist())
            )  # pytest adds lines to an assertion
    assert outcomes[0] == outcomes[1]


def test_both_sides_go_on() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            if (x < 0).any():
                raise ValueError
            return x + 1
        except ValueError:
            return x - 1

    outcome = run_case(case(function, torch.ones(4)))
    assert (outcome.kind, outcome.code) == ("broke", "data-dependent-branch")


def test_several_elements_are_ambiguous() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        assert x, "which?"
        return x + 1

    assert run_case(case(function, torch.ones(4))).kind == "same error"
