"""Random programs of several operators, compiled and compared with eager.

The default run takes the same few every time; `pytest -m sweep tests/ops/test_programs.py` takes thousands.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.ops.cases import Case, Differentiated
from tests.ops.programs import case_of, make, text_of
from tests.ops.running import GOOD, run_case


def check(choose: random.Random) -> None:
    program = make(choose)
    outcome = run_case(case_of(program, "a program"))
    assert outcome.kind in GOOD, f"{outcome}\n{text_of(program)}"


@pytest.fixture(autouse=True)
def quick_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_some_programs(first: int) -> None:
    for seed in range(first, first + 10):
        check(random.Random(seed))


def rows_that_end_elsewhere(x: torch.Tensor) -> object:
    rows = x.view(5, 8)
    rows[0].mul_(2)
    return rows, x.view(4, 10)


def two_views_of_a_result(x: torch.Tensor) -> object:
    y = x.exp()
    return y, y.view(5, 8), y.view(-1).abs()


def nothing_of_an_input(x: torch.Tensor) -> object:
    return x[8:].mul_(2), (x[8:] + 1).sum(), torch.nn.functional.logsigmoid(x[:, 5:])


def counted_from_the_end(x: torch.Tensor) -> object:
    return x.index_fill(0, torch.tensor([-2, 1]), 3)


def contiguous_result(x: torch.Tensor) -> object:
    return torch.sinc(torch.nn.functional.logsigmoid(x.t()))


def equal_results_of_several(x: torch.Tensor) -> object:
    return x.sort(-1)[0], x.sort(-1)[0].view(-1), x.max(0)[0], x.max(0)[0]


FOUND = [
    equal_results_of_several,
    rows_that_end_elsewhere,
    two_views_of_a_result,
    nothing_of_an_input,
    counted_from_the_end,
    contiguous_result,
]
"""What random programs have found, as small as it goes."""


@pytest.mark.parametrize("program", FOUND)
def test_found_before(program: Callable[[torch.Tensor], object]) -> None:
    x = torch.arange(-20.0, 20.0).reshape(8, 5)
    assert run_case(Case("", lambda transform: transform(program), (x,), {})).kind == "captured"


def test_a_gradient_that_is_zeros_without_memory() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sgn(x), x.exp()

    case = Case("", lambda transform: Differentiated(transform(program), second=False), (x,), {}, gradients=True)
    assert run_case(case).kind == "captured"


@pytest.mark.sweep
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_many_programs(choose: random.Random) -> None:
    check(choose)
