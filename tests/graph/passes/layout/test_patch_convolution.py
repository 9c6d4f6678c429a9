"""Convolutions over patches become matrix products in training; others stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from tests.listening import stage_texts


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 10, **options)
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.patches(x.tanh()).flatten(2).transpose(1, 2)).square().mean()


def gradients(run: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    run(x).backward()
    return [value.grad for value in (x, *net.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "by_product", "channels_last"),
    [
        ({"kernel_size": 4, "stride": 4, "bias": True}, True, False),
        ({"kernel_size": 8, "stride": 8, "bias": False}, True, True),
        ({"kernel_size": (2, 4), "stride": (2, 4), "bias": True}, True, False),
        ({"kernel_size": 3, "stride": 3}, False, False),
        ({"kernel_size": 4, "stride": 2}, False, True),
        ({"kernel_size": 4, "stride": 4, "padding": 2}, False, False),
    ],
)
def test_gradients(options: dict[str, Any], by_product: bool, channels_last: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = Net(**options), torch.randn(2, 3, 16, 24)
    double = copy.deepcopy(net).double()
    exact = gradients(double, double, x.double())
    net, x = (
        net.to(dtype),
        x.to(dtype).contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format),
    )
    eager = copy.deepcopy(net)
    expected = gradients(eager, eager, x)
    with stage_texts("joint graph") as texts:
        found = gradients(fusewright.compile(net, fullgraph=True), net, x)
    assert ("aten.convolution" not in texts[0]) == by_product
    for mine, theirs, truth in zip(found, expected, exact, strict=True):
        assert mine.stride() == theirs.stride()
        assert (mine - truth).norm() <= 1.25 * (theirs - truth).norm() + (
            1e-6 if dtype is torch.float32 else 5e-3
        ) * truth.norm()
