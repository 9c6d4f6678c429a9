"""What an unknown size is taken to be."""

from __future__ import annotations

import pytest
import torch

import fusewright
from fusewright.sizes.estimate import UNKNOWN, estimate
from fusewright.sizes.expressions import Expr, floor_div, symbol

FREE, SHORT, LONG = symbol("free", 2, None), symbol("short", 2, 16), symbol("long", 1000, None)


@pytest.mark.parametrize(
    ("size", "examples", "expected"),
    [
        (7, {}, 7),
        (FREE, {}, UNKNOWN),
        (SHORT, {}, 16),
        (LONG, {}, 1000),
        (FREE, {FREE: 5}, 5),
        (SHORT, {FREE: 5}, 16),
        (FREE * SHORT + 1, {FREE: 5}, 81),
        (FREE * LONG, {}, UNKNOWN * 1000),
        (floor_div(FREE + 3, 4), {FREE: 10}, 3),
        (floor_div(LONG, floor_div(12, FREE)), {}, UNKNOWN),
        (floor_div(LONG, floor_div(12, FREE)), {FREE: 3}, 250),
    ],
)
def test_a_symbol_counts_as_its_example_else_as_the_default_within_its_bounds(
    size: Expr | int, examples: dict[Expr, int], expected: int
) -> None:
    assert estimate(size, examples) == expected


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_products_over_rows_that_depend_on_data(rows: int) -> None:
    """The passes that choose between products estimate the number of rows, which has no example."""
    layers = [torch.nn.Linear(64, 48), torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(64, 16)]

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = x[x[:, 0] > 0]
        return tuple(torch.relu(layer(kept)) for layer in layers)

    x = torch.randn(2 * rows, 64, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.tensor([1.0, -1.0]).repeat(rows)
    compiled = fusewright.compile(f)
    with torch.no_grad():
        for some in (x, x[: rows + 1], x[:0]):
            torch.testing.assert_close(compiled(some), f(some))
