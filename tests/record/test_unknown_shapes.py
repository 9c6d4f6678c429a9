"""Results whose shape depends on data are captured as long as nobody asks for the shape; else the graph breaks where they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from tests.ops.cases import Case
from tests.ops.running import run_case

X = torch.arange(-6.0, 6.0).reshape(3, 4).round()


def kept(x: torch.Tensor) -> object:
    chosen = x[x > 0]
    x.add_(1)
    return {"chosen": chosen, "again": [chosen, chosen.dtype], "all": x.sum()}


CAPTURED: dict[str, Callable[..., Any]] = {
    "nonzero": lambda x: torch.nonzero(x * 2),
    "a mask": lambda x: x[x > 0],
    "a mask that chooses nothing": lambda x: x[x > 100],
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "beside another result": lambda x: (x.exp(), torch.masked_select(x, x > 0)),
    "kept and handed on": kept,
    "what the shape does not decide": lambda x: (
        torch.nonzero(x).is_floating_point(),
        isinstance(x[x > 0], torch.Tensor),
    ),
}
BROKEN: dict[str, Callable[..., Any]] = {
    "an operator": lambda x: x[x > 0] * 2,
    "its size": lambda x: (torch.nonzero(x).shape[0], x + 1),
    "its length": lambda x: (len(torch.nonzero(x)), x + 1),
    "a list of operands": lambda x: torch.cat([x[x > 0], x.flatten()]),
    "iteration": lambda x: sum([row.sum() for row in torch.nonzero(x + 1)], x),
    "indices": lambda x: x[torch.nonzero(x[:, 0] + 7)],
}


def case(function: Callable[..., Any], x: torch.Tensor = X) -> Case:
    return Case("", lambda transform: transform(function), (x,), {})


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    assert run_case(case(CAPTURED[name])).kind == "captured"


@pytest.mark.parametrize("name", BROKEN)
def test_a_use_breaks_where_the_tensor_is_made(name: str) -> None:
    outcome = run_case(case(BROKEN[name]))
    assert (outcome.kind, outcome.code) == ("broke", "data-dependent-shape"), outcome


def test_other_data_give_another_shape_without_a_compile() -> None:
    compiled = fusewright.compile(lambda x: torch.nonzero(x * 2), fullgraph=True)
    for x in (X, X.abs() + 1, torch.zeros(3, 4)):
        assert torch.equal(compiled(x), torch.nonzero(x))


def test_a_gradient_breaks() -> None:
    outcome = run_case(case(lambda x: x[x > 0], X.clone().requires_grad_()))
    assert (outcome.kind, outcome.code) == ("broke", "data-dependent-shape")


OF_WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": torch.nonzero, "mask": lambda x: x[x > 1], "masked_select": lambda x: x.masked_select(x > 1),
    "unique": torch.unique, "unique_consecutive": torch.unique_consecutive, "bincount": lambda x: x.long().flatten().bincount(),
    "unique rows": lambda x: torch.unique(x, dim=0, return_counts=True), "argwhere": torch.argwhere,
    "repeat_interleave": lambda x: torch.repeat_interleave(x[:, 0].long()), "item": lambda x: x * x.sum().item(),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}])
@pytest.mark.parametrize("name", OF_WRITTEN)
def test_of_what_was_written_and_is_not_dense(name: str, options: dict[str, Any]) -> None:
    """The functional graph holds the written value densely: no meta kernel gives the type anew."""

    def function(x: torch.Tensor) -> Any:
        x.add_(x)
        return OF_WRITTEN[name](x)

    def columns() -> torch.Tensor:
        return torch.arange(30.0).reshape(10, 3)[::2]

    torch.testing.assert_close(fusewright.compile(function, options=options)(columns()), function(columns()))
