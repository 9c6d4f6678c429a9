"""Activations and their gradients against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright
from tests.loops.lower.checking import check

ACTIVATIONS: dict[str, Callable] = {
    "relu": F.relu, "relu6": F.relu6, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "elu": lambda x: F.elu(x, 0.7), "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3), "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "mish": F.mish, "softplus": lambda x: F.softplus(x, 2.0, 3.0), "hardtanh": F.hardtanh, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "hardshrink": F.hardshrink, "softshrink": F.softshrink, "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "glu": lambda x: F.glu(x, -1), "threshold": lambda x: F.threshold(x, 0.1, 20.0),
}  # fmt: skip
VALUES = torch.tensor(
    [-40.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 25.0, float("nan"), float("inf"), float("-inf")]
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values(name: str) -> None:
    # ATen's gelu of infinity is NaN where oneDNN computes it, else infinity.
    check(ACTIVATIONS[name], VALUES[:-2] if name == "gelu" else VALUES)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_half(name: str) -> None:
    check(ACTIVATIONS[name], torch.randn(4, 6).bfloat16())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[name](leaf), leaf, g)[0]

    x = torch.randn(4, 6) * 3
    check(gradient, x, torch.randn(4, 3 if name == "glu" else 6))


@pytest.mark.parametrize("function", [F.softplus, lambda x: F.logsigmoid(-x)], ids=["softplus", "logsigmoid"])
@pytest.mark.parametrize("dtype, start", [(torch.float32, -85.0), (torch.float64, -706.0)])
def test_gradients_that_vanish(function: Callable, dtype: torch.dtype, start: float) -> None:
    """Down to the least number: `exp(-x)` overflows long before."""
    gradients = []
    for run in (fusewright.compile(function), function):
        x = torch.linspace(start, start * 1.22, 50, dtype=dtype).requires_grad_()
        gradients.append(torch.autograd.grad(run(x).sum(), x)[0].abs())
    least = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=4 * least)


def test_prelu() -> None:
    def gradient(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.prelu(x, w)
        return [y, *torch.autograd.grad(y.sum(), (x, w))]

    check(gradient, torch.randn(2, 3, 4), torch.rand(3))
