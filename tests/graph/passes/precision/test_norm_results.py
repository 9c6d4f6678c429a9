"""Batch normalisation in training: its result is pointwise in its statistics, so that the backward computes it again instead of reading it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.autograd.joint import JointGraph, Split
from fusewright.autograd.partition import choose_saved, saved_bytes, split

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


def test_only_the_convolutions_are_saved() -> None:
    """Neither the normalised result, nor the activation, nor padding by hand is saved beside the convolution's result."""
    seen: list[list[Any]] = []

    def partition(joint: JointGraph) -> Split:
        seen.append([node for node in choose_saved(joint) if node.op != "placeholder"])
        return split(joint)

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.ConstantPad2d(1, 0.0),
        nn.Conv2d(16, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
    )
    from fusewright.autograd import partition as stage

    original = stage.split
    stage.split = lambda joint, **options: partition(joint)
    try:
        compiled = fusewright.compile(net, fullgraph=True, options={"disk_cache": False})
        compiled(torch.randn(2, 3, 20, 20)).sum().backward()
    finally:
        stage.split = original
    (saved,) = seen
    large = [node for node in saved if saved_bytes(node) > 1024]
    assert [node.target for node in large] == [torch.ops.aten.convolution.default] * 2
