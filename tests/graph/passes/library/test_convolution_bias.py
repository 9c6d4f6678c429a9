"""Convolutions whose bias is added in a loop give eager's results and gradients, with their strides."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine's library took no bias."""
    monkeypatch.setattr(importlib.import_module("fusewright.graph.passes.library.convolution_bias"), "DEVICES", {"cpu"})


NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "images": (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU(), nn.Conv2d(8, 4, 1)
        ),
        (2, 3, 9, 9),
    ),
    "an image": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU()), (3, 9, 9)),
    "lines": (nn.Sequential(nn.Conv1d(3, 8, 3), nn.SiLU(), nn.Conv1d(8, 4, 3)), (2, 3, 19)),
    "volumes": (nn.Sequential(nn.Conv3d(3, 4, 3), nn.SiLU()), (2, 3, 5, 5, 5)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 8, 3, stride=2), nn.SiLU()), (2, 3, 9, 9)),
    "patches": (nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU()), (2, 3, 16, 16)),
    "a bias alone learns": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh()), (2, 3, 9, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, shape = NETS[name]
    # Weights from this seed. Activations are smooth: this CPU's library rounds once where a GPU's rounds twice, and a ReLU makes much of that.
    net = net.to(dtype)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    if name == "a bias alone learns":
        net[0].weight.requires_grad_(False)
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage == "layout":
            texts.append(event.text())

    compiled = fusewright.compile(net, fullgraph=True, options={"disk_cache": False})
    x = torch.randn(shape).to(dtype)
    half = dtype is torch.bfloat16
    with events.STREAM.listening(listen):
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(x), net(x), rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 1e-5, check_stride=True
            )
        found = []
        for run in (compiled, net):
            mine = x.clone().requires_grad_(name != "a bias alone learns")
            result = run(mine)
            (result.float() * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum().backward()
            found.append([mine.grad, *(parameter.grad for parameter in net.parameters())])
            net.zero_grad()
    for ours, eagers in zip(*found):
        assert (ours is None) == (eagers is None)
        if ours is not None:
            assert ours.stride() == eagers.stride()
            assert (ours - eagers).float().norm() <= (2e-2 if half else 1e-5) * eagers.float().norm()
    assert len(texts) == 2
    for text in texts:
        for line in text.splitlines():
            assert "aten.convolution(" not in line or ", None, [" in line
            assert "convolution_backward" not in line or line.split("#")[0].rstrip().endswith("False])")


@pytest.mark.parametrize("groups", [1, 3])
def test_results_over_varying_sizes_lie_as_eagers(groups: int) -> None:
    compiled = fusewright.compile(lambda x, w, b: F.silu(F.conv2d(x, w, b, groups=groups)) * 2, dynamic=True)
    for size in (16, 7):
        x = torch.randn(2, 3, size, size).to(memory_format=torch.channels_last)
        given = x, torch.randn(6, 3 // groups, 3, 3), torch.randn(6)
        with torch.no_grad():
            expected = F.silu(F.conv2d(*given, groups=groups)) * 2
            torch.testing.assert_close(compiled(*given), expected, check_stride=True)
