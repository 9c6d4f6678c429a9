"""Packing: normalisation in evaluation is prepared, whether a convolution takes it in or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from tests.listening import stage_texts


class Normed(nn.Module):
    """A normalisation behind a convolution, and one that none takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False)])
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convolution(x)))
        return self.norms[1](y * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_in_evaluation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = Normed().eval().to(dtype), torch.randn(2, 4, 6, 6, dtype=dtype)
    compiled = fusewright.compile(net, fullgraph=True)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}
    with torch.no_grad(), stage_texts("parameters") as texts:
        torch.testing.assert_close(compiled(x), net(x), **tolerance)
        net.norms[1].running_mean.add_(1)
        net.norms[0].weight.mul_(-2)
        torch.testing.assert_close(compiled(x), net(x), **tolerance)
        x[0, 0, 0, 0] = torch.nan
        torch.testing.assert_close(compiled(x), net(x), **tolerance, equal_nan=True)
    assert texts and not any("native_batch_norm" in text for text in texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_are_one_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.Flatten(2)).eval().to(dtype),
        torch.randn(2, 3, 16, 16, dtype=dtype),
    )
    with torch.no_grad(), stage_texts("parameters") as texts:
        expected, got = net(x), fusewright.compile(net, fullgraph=True)(x)
    torch.testing.assert_close(got, expected, **({"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}))
    assert got.stride() == expected.stride()
    assert texts and not any("convolution" in text for text in texts)


@pytest.mark.parametrize("window", [1, 3])
@torch.no_grad()
def test_images_of_one_channel_lie_as_in_eager(window: int) -> None:
    net, x = nn.Conv2d(8, 1, window), torch.randn(1, 8, 16, 16)
    for run in (net, lambda x: net(x).relu()):
        torch.testing.assert_close(fusewright.compile(run, fullgraph=True)(x), run(x), check_stride=True)
