"""Depthwise convolutions over channels-last images are loops, together with what stands around them: eager's values on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base.events import STREAM, KernelMade

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


class Pad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 1, 1, 2))


def network(dtype: torch.dtype, padded: bool, *window: Any) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 3, 1, 1), nn.ReLU6()]
    layers += [Pad()] if padded else []
    layers += [nn.Conv2d(40, 40, *window, groups=40, bias=padded), nn.BatchNorm2d(40), nn.ReLU6(), nn.Conv2d(40, 24, 1)]
    net = nn.Sequential(*layers).to(dtype).eval()
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return net


def kernels_of(net: nn.Module, x: torch.Tensor) -> tuple[list[str], torch.Tensor, Any]:
    made: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, KernelMade):
            made.append(event.name)

    STREAM.subscribers.append(listen)
    try:
        compiled = fusewright.compile(net, options={"disk_cache": False})
        with torch.no_grad():
            result = compiled(x)
    finally:
        STREAM.subscribers.remove(listen)
    return made, result, compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (3, 1, 2, 2), (5, 2, 2), ((1, 5), 1, (0, 2))])
def test_values_are_eagers(window: tuple[Any, ...], padded: bool, dtype: torch.dtype) -> None:
    net, x = network(dtype, padded, *window), torch.randn(2, 3, 14, 18).to(dtype)
    made, got, compiled = kernels_of(net, x)
    with torch.no_grad():
        expected = net(x)
        assert got.stride() == expected.stride()
        assert (got.double() - expected.double()).norm() < TOLERANCE[dtype] * expected.double().norm()
        assert len(made) == 3  # the input's layout, the depthwise convolution with its surroundings, the result's layout
        if dtype is torch.float32:  # the library's bfloat16 convolutions spread NaN further than their windows
            for special in (float("nan"), float("inf")):
                y = x.clone()
                y[0, 0, 5, 5] = special
                got, expected = compiled(y), net(y)
                assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


def test_what_lies_outside_is_not_multiplied() -> None:
    net, x = network(torch.float32, False, 3, 1, 1), torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        net[2].weight[7, 0, 0, 0] = float("inf")
        _, got, _ = kernels_of(net, x)
        expected = net(x)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


@pytest.mark.parametrize("groups, out", [(40, 80), (20, 40)])
def test_other_groups_stay_with_the_library(groups: int, out: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, 40, 3, 1, 1), nn.ReLU(), nn.Conv2d(40, out, 3, 1, 1, groups=groups)).eval()
    x = torch.randn(2, 3, 10, 10)
    _, got, _ = kernels_of(net, x)
    with torch.no_grad():
        torch.testing.assert_close(got, net(x))
