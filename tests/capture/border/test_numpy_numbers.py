"""NumPy arithmetic on numbers, named tuples from outside, and stores that change nothing: no reason to break the graph."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch
from torch import nn

import fusewright

Pair = namedtuple("Pair", "scale shift")
PAIR = Pair(2.0, str.upper)


def test_numpy_arithmetic_on_numbers_is_done() -> None:
    def scaled(x: torch.Tensor, size: int) -> torch.Tensor:
        return x * np.sqrt(size) + np.float32(2) - float(np.exp(np.float64(0)))

    x = torch.randn(4)
    assert torch.equal(fusewright.compile(scaled, fullgraph=True)(x, 9), scaled(x, 9))


def test_a_field_of_a_named_tuple_from_outside_is_read() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * PAIR.scale if PAIR.shift("a") == "A" else x

    x = torch.randn(4)
    assert torch.equal(fusewright.compile(scaled, fullgraph=True)(x), scaled(x))


def test_a_module_that_is_moved_to_where_it_is_stays_whole() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.classifier = self.classifier.to(torch.float32)
            return self.classifier(x.to(torch.float32))

    model, x = Router(), torch.randn(2, 4)
    weight = model.classifier.weight
    with torch.no_grad():
        assert torch.equal(
            fusewright.compile(model, fullgraph=True)(x), nn.functional.linear(x, weight, model.classifier.bias)
        )
    assert model.classifier.weight is weight
