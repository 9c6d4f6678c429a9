"""Convolutions over lines run as convolutions over images of one row: values and strides are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from tests.listening import stage_texts


class Lines(nn.Module):
    def __init__(self, tail: Callable[[torch.Tensor], torch.Tensor], groups: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv1d(1, 32, 5, stride=2),
            nn.Conv1d(32, 48, 3, padding=2, dilation=2, groups=groups, bias=False),
        )
        self.tail = tail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.second(F.gelu(self.first(x))))


TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda y: y,
    "normalised": lambda y: F.layer_norm(y.transpose(1, 2), (48,)),
    "groups": lambda y: F.group_norm(y, 48),
    "view": lambda y: y.view(y.shape[0], -1)[:, 3:] * 2,
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("dtype", "groups"), [(torch.bfloat16, 1), (torch.bfloat16, 4), (torch.float32, 4), (torch.float32, 1)]
)
def test_values_and_strides(tail: str, dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    net, x = Lines(TAILS[tail], groups).eval().to(dtype), torch.randn(3, 1, 63, dtype=dtype)
    with torch.no_grad(), stage_texts("layout") as texts:
        expected, got = net(x), fusewright.compile(net, fullgraph=True)(x)
    assert got.stride() == expected.stride()
    exact = net.double()(x.double())
    allowed = 1.25 * (expected.double() - exact).abs().max() + (1e-2 if dtype is torch.bfloat16 else 1e-5)
    assert (got.double() - exact).abs().max() <= allowed
    assert any("squeeze" in text for text in texts) == (dtype is torch.bfloat16 or groups > 1)


def test_gradients_are_left_to_the_library() -> None:
    torch.manual_seed(0)
    net = Lines(TAILS["as it is"], 4)
    compiled = fusewright.compile(net, fullgraph=True)
    x = torch.randn(2, 1, 40)
    expected = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    got = torch.autograd.grad(compiled(x).square().mean(), list(net.parameters()))
    torch.testing.assert_close(got, expected)
