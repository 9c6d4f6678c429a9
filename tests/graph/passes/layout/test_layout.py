"""The layout pass: convolution chains become channels-last, results and their strides stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from tests.listening import stage_texts


class Net(nn.Module):
    def __init__(self, tail: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4)
        self.norm, self.tail = nn.BatchNorm2d(8), tail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu6(self.norm(self.first(x)))
        return self.tail(self.second(y + y.mean((2, 3), keepdim=True)))


TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda y: y,
    "view": lambda y: y.view(y.shape[0], -1) * 2,
    "pooled": lambda y: F.adaptive_avg_pool2d(y, 1).flatten(1),
    "max pool": lambda y: F.max_pool2d(y, 2),
    "indices": lambda y: F.max_pool2d(y, 2, return_indices=True)[1],
    "permuted": lambda y: y.permute(0, 2, 3, 1).reshape(-1, 8).softmax(-1),
    "strided": lambda y: y.as_strided((4, 4), (3, 5), 2),
    "cat": lambda y: torch.cat([y, y.sigmoid()], 1),
    "matmul": lambda y: y @ y.transpose(-1, -2),
    "interpolated": lambda y: F.interpolate(y, scale_factor=2.0),
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("batch", [1, 2])
def test_values_and_strides_are_eagers(name: str, batch: int) -> None:
    net, x = Net(TAILS[name]).eval(), torch.randn(batch, 3, 8, 8)
    with torch.no_grad(), stage_texts("layout") as texts:
        expected, got = net(x), fusewright.compile(net, fullgraph=True)(x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert any("channels_last" in text for text in texts)


class Block(nn.Module):
    """Convolutions, normalisations, a residual addition, pooling and a layer norm over channels: what chains are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.wide, self.narrow, self.deep = (
            nn.Conv2d(8, 16, 1, bias=False),
            nn.Conv2d(16, 8, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (8, 16, 16))
        self.layer_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        y = F.hardtanh(self.norms[1](self.wide(x)))
        y = F.silu(self.norms[2](self.deep(F.pad(y, (1, 0, 0, 1)))[:, :, 1:, :-1]))
        z = x + self.narrow(y)
        z = self.layer_norm(z.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(F.avg_pool2d(z, 2).mean((2, 3)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_training_in_half_precision(channels_last: bool) -> None:
    torch.manual_seed(0)
    net, x = Block().double(), torch.randn(2, 3, 24, 24, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)

    def gradients(run: Callable[..., torch.Tensor], module: nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
        leaf = given.detach().requires_grad_()
        module.zero_grad()
        run(leaf).float().square().mean().backward()
        return [value.grad for value in (leaf, *module.parameters())]  # type: ignore[misc]

    exact = gradients(net, net, x)
    half = net.to(torch.bfloat16)
    expected = gradients(half, half, x.bfloat16())
    with stage_texts("layout") as texts:
        got = gradients(fusewright.compile(half, fullgraph=True), half, x.bfloat16())
    assert channels_last or any("channels_last" in text for text in texts)
    error = [sum((a.double() - b).square().sum() for a, b in zip(values, exact)) ** 0.5 for values in (got, expected)]
    assert error[0] <= 1.25 * error[1] + 1e-3
    assert [value.stride() for value in got] == [value.stride() for value in expected]


class OneChannel(nn.Module):
    """Images of one channel, whose layouts other images of any size decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(3, 1, 1)
        self.third, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = self.first(x).relu() * mask, self.second(x)
        return self.last(self.third(y + z)), y, z, self.first(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@torch.no_grad()
def test_images_of_one_channel(dynamic: bool, channels_last: bool) -> None:
    net, x, mask = OneChannel(), torch.randn(2, 3, 9, 8), torch.rand(2, 1, 9, 8)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    got = fusewright.compile(net, fullgraph=True, dynamic=dynamic)(x, mask)
    torch.testing.assert_close(got, net(x, mask), check_stride=True)


@pytest.mark.parametrize("grad", [False, True])
def test_images_of_known_sizes_and_unknown_steps(grad: bool) -> None:
    """Whether they are channels-last is not known before the call."""
    conv = nn.Conv2d(4, 4, 3, padding=1).to(torch.bfloat16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return conv(x[:2, :, -2:, :2]).relu()

    compiled = fusewright.compile(function, dynamic=True)
    for rows, columns in ((3, 2), (3, 3), (5, 4)):
        for x in (torch.randn(2, 4, rows, columns), torch.randn(2, rows, columns, 4).permute(0, 3, 1, 2)):
            with torch.set_grad_enabled(grad):
                expected, got = function(x.bfloat16()), compiled(x.bfloat16())
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()
