"""Weights' gradients of depthwise convolutions over small channels-last images go by contiguous copies; others stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from tests.listening import stage_texts


def gradients(run: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    (run(x).float().square().sum()).backward()
    return [x.grad, *(value.grad for value in net.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("dtype", "options", "channels_last", "split"),
    [
        (torch.float32, {"in_channels": 768, "kernel_size": 7, "padding": 3}, True, True),
        (torch.float32, {"in_channels": 768, "kernel_size": 7, "padding": 3, "bias": False}, True, True),
        (torch.float32, {"in_channels": 768, "kernel_size": 7, "padding": 3}, False, False),
        (torch.float32, {"in_channels": 64, "kernel_size": 7, "padding": 3}, True, False),
        (torch.float32, {"in_channels": 768, "kernel_size": 3}, True, False),
        (torch.bfloat16, {"in_channels": 32, "kernel_size": 5, "stride": 2}, True, True),
        (torch.bfloat16, {"in_channels": 32, "kernel_size": 3}, True, False),
    ],
)
@pytest.mark.parametrize("needed", ["all", "weight"])
def test_gradients(dtype: torch.dtype, options: dict[str, Any], channels_last: bool, split: bool, needed: str) -> None:
    torch.manual_seed(0)
    channels = options["in_channels"]
    net = nn.Conv2d(out_channels=channels, groups=channels, **options).to(dtype)
    x = torch.randn(2, channels, 7, 7, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    net, eager = net.to(memory_format=torch.channels_last), copy.deepcopy(net).to(memory_format=torch.channels_last)
    leaf = lambda: x.clone().requires_grad_(needed == "all")
    with stage_texts("backward graph") as texts:
        found = gradients(fusewright.compile(net, fullgraph=True), net, leaf())
    assert ("aten.clone" in texts[0]) == split
    for mine, theirs in zip(found, gradients(eager, eager, leaf()), strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
        assert (mine.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()
