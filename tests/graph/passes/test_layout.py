"""The layout pass: convolution chains become channels-last, results and their strides stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright import events


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
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage == "layout":
            texts.append(event.text())

    with torch.no_grad(), events.STREAM.listening(listen):
        expected, got = net(x), fusewright.compile(net, fullgraph=True)(x)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert any("channels_last" in text for text in texts)
