"""Products of halves that run in float32: as near to the exact result as one rounding allows, with eager's types, strides and gradients."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events

half_products = importlib.import_module("fusewright.graph.passes.precision.half_products")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor had no instructions for halves."""
    monkeypatch.setattr(half_products, "multiplies", lambda dtype: False)


class Widened:
    """Counts the products that were made float32, and calls that ran eagerly."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failed: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage == "precision":
            self.texts.append(event.text())
        if isinstance(event, (events.FellBack, events.InternalError, events.Broken)):
            self.failed.append(event)

    def count(self, name: str) -> int:
        lines = [line for text in self.texts for line in text.splitlines() if f"aten.{name}(" in line]
        return sum(": float32[" in line or ": (float32[" in line for line in lines)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


PROGRAMS: dict[str, tuple[str, Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "mm": ("mm", lambda a, b: a @ b, [r(40, 64), r(64, 48)]),
    "mm of a transposed matrix": ("mm", lambda a, b: a.t() @ b.t(), [r(64, 40), r(48, 64)]),
    "addmm": ("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [r(48), r(40, 64), r(64, 48)]),
    "linear": ("addmm", lambda x, w, b: F.linear(x, w, b), [r(4, 20, 64), r(48, 64), r(48)]),
    "bmm": ("bmm", lambda a, b: torch.bmm(a, b.mT), [r(3, 40, 64), r(3, 48, 64)]),
    "baddbmm": (
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.25),
        [r(3, 1, 48), r(3, 40, 64), r(3, 64, 48)],
    ),
    "line": ("convolution", lambda x, w, b: F.conv1d(x, w, b, padding=2), [r(2, 32, 60), r(48, 32, 5), r(48)]),
    "image": ("convolution", lambda x, w: F.conv2d(x, w, padding=1, stride=2), [r(2, 32, 15, 14), r(48, 32, 3, 3)]),
    "image, channels last": (
        "convolution",
        lambda x, w: F.conv2d(x, w, padding=1),
        [laid_out(r(2, 32, 15, 14)), laid_out(r(48, 32, 3, 3))],
    ),
    "groups": ("convolution", lambda x, w: F.conv2d(x, w, groups=4, dilation=2), [r(2, 64, 15, 14), r(64, 16, 3, 3)]),
    "transposed": ("convolution", lambda x, w: F.conv_transpose2d(x, w, stride=2), [r(2, 32, 9, 9), r(32, 24, 3, 3)]),
    "volume": ("convolution", lambda x, w: F.conv3d(x, w, padding=1), [r(1, 16, 6, 6, 6), r(24, 16, 3, 3, 3)]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    operator, function, inputs = PROGRAMS[name]
    halves = [x.to(dtype) for x in inputs]
    heard = Widened()
    with events.STREAM.listening(heard):
        result = fusewright.compile(function, fullgraph=True, options={"disk_cache": False})(*halves)
    eager = function(*halves)
    assert heard.count(operator) == 1 and not heard.failed
    assert result.dtype is dtype and result.stride() == eager.stride()
    exact = function(*(x.double() for x in halves))
    # Half a unit in the last place, and what a sum of some hundred numbers loses in float32.
    allowed = exact.abs() * torch.finfo(dtype).eps * 0.51 + exact.abs().max() * 1e-6
    assert bool(((result.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    x, w = r(40, 64).to(dtype), r(48, 64).to(dtype)
    x[1, 2], x[3, 4], w[5, 6] = float("inf"), float("nan"), float("-inf")
    x[7], w[8] = torch.finfo(dtype).max / 16, 1  # their product is beyond the largest number
    compiled = fusewright.compile(F.linear, fullgraph=True, options={"disk_cache": False})
    torch.testing.assert_close(
        compiled(x, w), F.linear(x.float(), w.float()).to(dtype), rtol=1e-2, atol=1e-2, equal_nan=True
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_layers_with_prepared_weights(dtype: torch.dtype) -> None:
    """Weights are widened once for all calls, and again when they change."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128, bias=False), nn.LayerNorm(128), nn.Linear(128, 32)
    ).eval()
    exact = torch.nn.Sequential(*(layer for layer in net)).double()
    heard = Widened()
    half = nn.Sequential(*(type(layer)(*_sizes(layer)) for layer in net)).eval()
    half.load_state_dict(exact.state_dict())
    half.to(dtype)
    compiled = fusewright.compile(half, fullgraph=True, options={"disk_cache": False})
    with torch.no_grad(), events.STREAM.listening(heard):
        for rows in (30, 30):
            x = torch.randn(rows, 64).to(dtype)
            torch.testing.assert_close(compiled(x), half(x), rtol=2e-2, atol=2e-2)
        half[2].weight.mul_(-3)
        torch.testing.assert_close(compiled(x), half(x), rtol=2e-2, atol=2e-2)
    assert heard.count("mm") + heard.count("addmm") == 3 and not heard.failed


def _sizes(layer: nn.Module) -> tuple[object, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, layer.bias is not None
    return (layer.normalized_shape,) if isinstance(layer, nn.LayerNorm) else ()


def test_weights_that_are_computed_are_not_kept_beside_their_packed_form() -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("PyTorch without MKL")
    net = nn.Linear(256, 512).bfloat16().eval()
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StageDone) and event.stage == "parameters":
            texts.append(event.text())

    x = torch.randn(64, 256).bfloat16()
    with torch.no_grad(), events.STREAM.listening(listen), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fusewright.select.linear.Chooser.__call__", lambda self, linear, ways: "mkl" if "mkl" in ways else ways[0]
        )
        compiled = fusewright.compile(net, fullgraph=True, options={"disk_cache": False})
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-2, atol=1e-2)
    prepared = [line for line in texts[0].splitlines() if re.match(r"%prepared\w*: float32\[512, 256", line)]
    assert "mkl._mkl_linear" in texts[0] and len(prepared) == 2
    assert sum("0, 0]" in line for line in prepared) == 1, prepared  # a shape, without memory of its own


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.first, self.second = nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32, 48), nn.Linear(48, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.image(x)).flatten(2).mT
            return self.second(F.gelu(self.first(y))).float().square().mean()

    torch.manual_seed(0)
    exact = Net().to(dtype).double()
    net = Net().to(dtype)
    net.load_state_dict(exact.state_dict())
    x = torch.randn(2, 16, 12, 12, dtype=dtype)
    heard = Widened()
    grads = []
    with events.STREAM.listening(heard):
        for run, given in (
            (exact, x.double()),
            (fusewright.compile(net, fullgraph=True, options={"disk_cache": False}), x),
        ):
            mine = given.clone().requires_grad_()
            run(mine).backward()
            grads.append([mine.grad, *(parameter.grad for parameter in (exact if run is exact else net).parameters())])
    assert (
        not heard.failed and heard.count("convolution_backward") == 1 and heard.count("mm") + heard.count("addmm") >= 5
    )
    for ours, right in zip(grads[1], grads[0], strict=True):
        assert ours is not None and right is not None and ours.dtype is dtype
        assert float((ours.double() - right).norm() / right.norm()) < 8 * torch.finfo(dtype).eps


def test_any_number_of_rows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16().eval()
    compiled = fusewright.compile(net, dynamic=True, fullgraph=True, options={"disk_cache": False})
    heard = Widened()
    with torch.no_grad(), events.STREAM.listening(heard):
        for shape in [(4, 20), (4, 20), (3, 7), (0, 5), (1, 1), (1, 9), *[(6, 11)] * 10, (4, 20)]:
            x = torch.randn(*shape, 64).bfloat16()
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-2, atol=1e-2)
    assert heard.count("addmm") == 2 and not heard.failed


def test_what_stays_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: there is nothing to gain. Few rows by a matrix that each call would have to widen. What the processor multiplies."""
    compiled = fusewright.compile(lambda x, w: x @ w, fullgraph=True, dynamic=False, options={"disk_cache": False})
    heard = Widened()
    w = torch.randn(64, 128).bfloat16()
    with events.STREAM.listening(heard):
        for rows in (1, 2):
            x = torch.randn(rows, 64).bfloat16()
            torch.testing.assert_close(compiled(x, w), x @ w, rtol=1e-2, atol=1e-2)
        monkeypatch.setattr(half_products, "multiplies", lambda dtype: True)
        x = torch.randn(99, 64).bfloat16()
        torch.testing.assert_close(compiled(x, w), x @ w, rtol=1e-2, atol=1e-2)
    assert heard.count("mm") == 0
