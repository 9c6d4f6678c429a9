"""Batch normalisation and log-softmax in training: their results are pointwise in their statistics, so that the backward computes them again
instead of reading them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.autograd import partition as stage
from fusewright.autograd.joint import JointGraph, Split
from fusewright.autograd.partition import choose_saved, saved_bytes
from fusewright.base.events import STREAM, Event, FellBack, InternalError

IMAGES = (4, 6, 5, 5)


def case(norm: nn.Module, shape: tuple[int, ...] = IMAGES, **layout: Any) -> tuple[nn.Module, torch.Tensor]:
    return norm, torch.randn(*shape).to(**layout)


CASES = {
    "plain": lambda: case(nn.BatchNorm2d(6)),
    "rows": lambda: case(nn.BatchNorm1d(6), (8, 6)),
    "sequences": lambda: case(nn.BatchNorm1d(6), (8, 6, 3)),
    "volumes": lambda: case(nn.BatchNorm3d(6), (2, 6, 3, 4, 5)),
    "channels_last": lambda: case(nn.BatchNorm2d(6), memory_format=torch.channels_last),
    "no_affine": lambda: case(nn.BatchNorm2d(6, affine=False)),
    "no_statistics": lambda: case(nn.BatchNorm2d(6, track_running_stats=False)),
    "cumulative": lambda: case(nn.BatchNorm2d(6, momentum=None)),
    "evaluated": lambda: case(nn.BatchNorm2d(6).eval()),
    "evaluated_without_statistics": lambda: case(nn.BatchNorm2d(6, track_running_stats=False).eval()),
    "instances": lambda: case(nn.InstanceNorm2d(6, affine=True)),
}


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu6(self.norm(x + self.scale * x.sin()) * 3)
        return (y * y).sum()


def steps(run: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of two steps and the running statistics after them."""
    x = x.detach().clone().requires_grad_()
    for factor in (1.0, 0.5):
        (run(x) * factor).backward()
    return [x.grad, *(value.grad for value in net.parameters()), *net.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_statistics(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = CASES[name]()
    net, x = Net(norm).to(dtype), x.to(dtype)
    eager = copy.deepcopy(net)
    double = copy.deepcopy(net).double()
    found, expected, exact = (
        steps(fusewright.compile(net), net, x),
        steps(eager, eager, x),
        steps(double, double, x.double()),
    )
    for mine, theirs, true in zip(found, expected, exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        error, scale = (mine.double() - true).abs().max(), true.abs().max().double() + 1
        # as near to the truth as eager is, which in half precision rounds between its operators
        assert (
            error
            <= 2 * (theirs.double() - true).abs().max()
            + {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] * scale
        )


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    net, x = Net(nn.BatchNorm2d(6)).double(), torch.randn(*IMAGES).double()
    eager = copy.deepcopy(net)
    found = []
    for run in (fusewright.compile(net), eager):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(leaf), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_under_autocast_the_statistics_are_float32() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
    )
    eager, x = copy.deepcopy(net), torch.randn(4, 3, 12, 12)
    results = []
    for model, run in ((net, fusewright.compile(net, fullgraph=True)), (eager, eager)):
        with torch.autocast("cpu", torch.bfloat16):
            run(x).square().mean().backward()
        results.append([*(value.grad for value in model.parameters()), *model.buffers()])
    for mine, theirs in zip(*results, strict=True):
        # the first convolution's bias has no gradient but rounding: the normalisation takes it away
        assert (mine.double() - theirs.double()).norm() <= 5e-2 * theirs.double().norm() + 1e-2


def saved_by(monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[Any]:
    """What a compiled training step saves beside its inputs."""
    seen: list[list[Any]] = []
    original = stage.split

    def partition(joint: JointGraph, **options: Any) -> Split:
        seen.append([node for node in choose_saved(joint) if node.op != "placeholder"])
        return original(joint, **options)

    monkeypatch.setattr(stage, "split", partition)
    fusewright.compile(function, fullgraph=True, options={"disk_cache": False})(*inputs).sum().backward()
    (saved,) = seen
    return saved


def test_only_the_convolutions_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the normalised result, nor the activation, nor padding by hand is saved beside the convolution's result."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.ConstantPad2d(1, 0.0),
        nn.Conv2d(16, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
    )
    saved = saved_by(monkeypatch, net, torch.randn(2, 3, 20, 20))
    large = [node for node in saved if saved_bytes(node) > 1024]
    assert [node.target for node in large] == [torch.ops.aten.convolution.default] * 2


def test_a_loss_over_classes_saves_two_numbers_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the scores in bfloat16, which are the caller's: not their log-softmax in float32."""
    x, y = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True), torch.randint(0, 512, (64,))
    saved = saved_by(monkeypatch, lambda x, y: nn.functional.cross_entropy(x.float(), y), x, y)
    assert sum(map(saved_bytes, saved)) <= 3 * 64 * 4, [(node, node.meta["type"]) for node in saved]


def test_a_loss_saves_the_product_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, y = torch.randn(64, 32), torch.randn(32, 512, requires_grad=True), torch.randint(0, 512, (64,))
    saved = saved_by(monkeypatch, lambda x, w, y: nn.functional.cross_entropy(x @ w, y), x, w, y)
    assert [node.target for node in saved if saved_bytes(node) > 1024] == [torch.ops.aten.mm.default]


SCORES = {
    "rows": lambda: (torch.randn(6, 7), 1),
    "columns": lambda: (torch.randn(6, 7, 3), 1),
    "transposed": lambda: (torch.randn(7, 6).t(), -1),
    "no_dimensions": lambda: (torch.randn(()), 0),
    "no_elements": lambda: (torch.randn(3, 0), 1),
    "infinities": lambda: (torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf], [math.inf, 0.0], [math.nan, 0.0]]), 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_log_softmax(name: str, dtype: torch.dtype) -> None:
    scores, dim = SCORES[name]()
    scores = scores.to(dtype)

    def step(run: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = run(x, dim)
        return [y, torch.autograd.grad(y.sin().sum(), x)[0]]

    expected, exact = step(torch.log_softmax, scores), step(torch.log_softmax, scores.double())
    found = step(fusewright.compile(lambda x, dim: torch.log_softmax(x, dim), fullgraph=True), scores)
    for mine, theirs, true in zip(found, expected, exact, strict=True):
        assert mine.stride() == theirs.stride() and torch.equal(mine.isfinite(), theirs.isfinite())
        rounded = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
        error, eager = ((one.double() - true).nan_to_num(0, 0, 0).abs() for one in (mine, theirs))
        assert not error.gt(eager + rounded * (1 + true.nan_to_num(0, 0, 0).abs())).any()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3, affine=False, track_running_stats=False), nn.InstanceNorm1d(3)])  # fmt: skip
def test_a_result_that_is_read_after_the_statistics(norm: nn.Module) -> None:
    """The gradient of a gradient that was taken inside reads the statistics first."""

    norm.double()

    def pulled(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(norm, x)[1](torch.ones_like(norm(x)))[0]

    found: list[Any] = []
    events: list[Event] = []
    for run in (pulled, fusewright.compile(pulled, fullgraph=True)):
        x = torch.linspace(-1, 2, 24, dtype=torch.float64).sin().reshape(2, 3, 4).requires_grad_()
        with STREAM.listening(events.append):
            result = run(x)
            (result * torch.arange(24.0).reshape(2, 3, 4)).sum().backward()
        found.append([result.detach(), x.grad])
    torch.testing.assert_close(found[1], found[0])
    assert not [event for event in events if isinstance(event, InternalError | FellBack)]
