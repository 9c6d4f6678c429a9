"""Which of the library's candidates a linear layer or a 1x1 convolution takes: every way gives eager's values, and a choice is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base import events, thresholds
from fusewright.graph.passes.library.linear_paths import (
    CONVOLUTION,
    MKL,
    ONEDNN,
    PLAIN,
    TURNED,
    Linear,
    candidates_for,
    likely,
)
from fusewright.runtime import host
from fusewright.select import linear as linear_choice
from fusewright.select.linear import Chooser, key, measured

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def compare(net: nn.Module, x: torch.Tensor) -> None:
    """Eager's values, NaN and infinities at eager's places."""
    compiled = fusewright.compile(net, options={"disk_cache": False})
    with torch.no_grad():
        got, expected = compiled(x), net(x)
        assert got.stride() == expected.stride()
        assert relative_error(got, expected) < TOLERANCE[x.dtype]
        for special in (float("nan"), float("inf")):
            y = x.clone()
            y[(0,) * (y.ndim - 1)][-1] = special
            got, expected = compiled(y), net(y)
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.isinf(), expected.isinf())


@pytest.fixture
def stage_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stage that packs parameters prints, one text a compile."""
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage == "parameters":
            texts.append(event.text())

    monkeypatch.setattr(events.STREAM, "subscribers", [*events.STREAM.subscribers, listen])
    return texts


def force(monkeypatch: pytest.MonkeyPatch, way: str) -> list[str]:
    """Takes `way` wherever it exists; gives the list of choices made."""
    made: list[str] = []

    def choose(self: Chooser, linear: Linear, candidates: tuple[str, ...]) -> str:
        made.append(way if way in candidates else candidates[0])
        return made[-1]

    monkeypatch.setattr(Chooser, "__call__", choose)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [PLAIN, TURNED, MKL, ONEDNN])
def test_a_linear_layer_gives_eagers_values(monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype) -> None:
    made = force(monkeypatch, way)
    net = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 16, bias=False)).to(dtype).eval()
    compare(net, torch.randn(12, 24, dtype=dtype))
    candidates = candidates_for(Linear(dtype, 12, 24, 40, True, True))
    assert made  # also where the library has one way: a kernel of ours may be another
    assert way in made or way not in candidates


@pytest.mark.parametrize("way", [TURNED, MKL, ONEDNN])
def test_weights_that_lie_by_inputs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    class ByInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight)

    force(monkeypatch, way)
    compare(ByInputs(), torch.randn(12, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [CONVOLUTION, PLAIN, TURNED, MKL, ONEDNN])
def test_a_convolution_by_1x1_gives_eagers_values(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype
) -> None:
    made = force(monkeypatch, way)
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU6(),
        nn.Conv2d(24, 8, 1),
        nn.Hardswish(),
    ]
    net = nn.Sequential(*layers).to(dtype).eval()
    net[3].running_mean.normal_()
    net[3].running_var.uniform_(0.5, 2.0)
    compare(net, torch.randn(2, 3, 12, 12, dtype=dtype))
    # where oneDNN has no bfloat16, the layout stays as it is, and the first of the two is a convolution
    assert len(made) == (2 if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported() else 1)


def test_a_changed_weight_is_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, MKL)
    net = nn.Linear(32, 32).eval()
    compiled, x = fusewright.compile(net, options={"disk_cache": False}), torch.randn(20, 32)
    with torch.no_grad():
        compiled(x)
        net.weight.mul_(2)
        assert relative_error(compiled(x), net(x)) < 2e-6


@pytest.mark.parametrize("linear", [
    Linear(torch.float32, 20, 32, 48, True, True),
    Linear(torch.float32, 20, 32, 48, False, False),
    Linear(torch.bfloat16, 1, 32, 48, True, True),
    Linear(torch.float32, 32, 32, 48, True, True, (2, 4, 4)),
])  # fmt: skip
def test_every_way_can_be_measured(linear: Linear) -> None:
    candidates = candidates_for(linear)
    assert measured(linear, candidates, likely(linear, candidates)) in candidates
    assert likely(linear, candidates) in candidates


def test_a_choice_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(linear_choice, "_known", {})
    linear = Linear(torch.float32, 33, 128, 128, True, True)
    candidates = candidates_for(linear)
    odd = next(way for way in candidates if way != likely(linear, candidates))
    monkeypatch.setattr(linear_choice, "measured", lambda *args: odd)
    assert Chooser()(linear, candidates) == odd
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(linear_choice, "measured", lambda *args: pytest.fail("it was measured before"))
    assert Chooser()(linear, candidates) == odd
    host.store().put(key(linear, candidates), "linear layer", b"no such way")
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(linear_choice, "measured", lambda *args: likely(linear, candidates))
    assert Chooser()(linear, candidates) == likely(linear, candidates)


def test_without_budget_the_likely_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(linear_choice, "measured", lambda *args: pytest.fail("there is no time for it"))
    linear = Linear(torch.float32, 34, 128, 128, True, True)
    assert Chooser(store=False, budget=0.0)(linear, candidates_for(linear)) == likely(linear, candidates_for(linear))


class SqueezeExcite(nn.Module):
    """Channels weighted by two small layers over their means, written as convolutions by 1x1."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y * torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))


@pytest.mark.parametrize(
    "channels", [64, 512]
)  # the smaller one's products are not worth a try, the larger one's get no time for it
@pytest.mark.parametrize("batch", [1, 8])
def test_convolutions_over_a_pixel_are_products(
    monkeypatch: pytest.MonkeyPatch, stage_texts: list[str], channels: int, batch: int
) -> None:
    monkeypatch.setattr(Chooser, "remembered", lambda self, linear, candidates: None)
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(Chooser.__init__, "__defaults__", (True, 0.0, thresholds.LONGEST))
    compare(SqueezeExcite(channels, channels // 4).eval(), torch.randn(batch, 3, 10, 10))
    assert len(stage_texts) == 1 and stage_texts[0].count("mkldnn._convolution_pointwise") == 1


@pytest.mark.parametrize("way", [PLAIN, TURNED, MKL, ONEDNN])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_the_kernel_behind_a_product_adds_its_bias(
    monkeypatch: pytest.MonkeyPatch, stage_texts: list[str], way: str, layer: str
) -> None:
    """Where a pointwise operator alone reads the product; not where it is a result, nor in half precision, whose sums eager rounds once."""
    force(monkeypatch, way)
    made = {"linear": lambda: nn.Linear(24, 40), "convolution": lambda: nn.Conv2d(24, 40, 1)}[layer]
    x = (
        torch.randn(20, 24)
        if layer == "linear"
        else torch.randn(2, 24, 6, 6).contiguous(memory_format=torch.channels_last)
    )
    for net, dtype, expected in (
        (nn.Sequential(made(), nn.ReLU()), torch.float32, way != ONEDNN),
        (nn.Sequential(made(), nn.Tanh()), torch.float32, way != ONEDNN),
        (made(), torch.float32, False),
        (nn.Sequential(made(), nn.Softmax(1)), torch.float32, False),
        (nn.Sequential(made(), nn.ReLU()), torch.bfloat16, False),
    ):
        stage_texts.clear()
        compare(net.to(dtype).eval(), x.to(dtype))
        assert len(stage_texts) == 1 and ("aten.add.Tensor" in stage_texts[0]) == expected, stage_texts[0]
    stage_texts.clear()
    few = x[:8] if layer == "linear" else x[:1, :, :2, :2]
    compare(nn.Sequential(made(), nn.ReLU()).eval(), few)  # of few rows, the bias costs nothing
    assert "aten.add.Tensor" not in stage_texts[0]


HAS_QUICK_ONEDNN = Chooser.has_quick_onednn


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_quicker_library_is_measured_once_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Chooser, "has_quick_onednn", HAS_QUICK_ONEDNN)
    monkeypatch.setattr(linear_choice, "_quick_onednn", {})
    tried: list[Linear] = []

    def times(linear: Linear, candidates: tuple[str, ...]) -> dict[str, float]:
        tried.append(linear)
        return {PLAIN: 1.0, ONEDNN: share}

    monkeypatch.setattr(linear_choice, "times", times)
    assert Chooser(store=True).has_quick_onednn() == (share < 1)
    linear_choice._quick_onednn.clear()  # as in another process
    assert Chooser(store=True).has_quick_onednn() == (share < 1)
    assert len(tried) == 1
    large = Linear(torch.float32, 4096, 4096, 4096, True, True)
    assert Chooser(store=True, budget=0.0)(large, candidates_for(large)) == (ONEDNN if share < 1 else MKL)


def test_a_quick_onednn_is_likely() -> None:
    for linear in (
        Linear(torch.float32, 512, 768, 768, True, True),
        Linear(torch.float32, 98, 128, 256, False, True, (2, 7, 7)),
    ):
        assert likely(linear, candidates_for(linear), quick_onednn=True) == ONEDNN
    narrow = Linear(torch.float32, 98, 32, 256, False, True, (2, 7, 7))
    assert likely(narrow, candidates_for(narrow), quick_onednn=True) == CONVOLUTION
    halves = Linear(torch.float16, 512, 768, 768, True, True)
    assert likely(halves, candidates_for(halves), quick_onednn=True) == likely(halves, candidates_for(halves))
