"""Concatenation, padding, repetition, triangles, factories, pooling, resampling, losses: against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusewright.loops.ir import Pointwise
from tests.loops.lower.checking import check

X = torch.randn(2, 4, 6)
IMAGE = torch.randn(2, 3, 9, 8)
ARRANGED: dict[str, Callable] = {
    "cat": lambda x: torch.cat([x, x * 2, x[:, :, :1]], 2),
    "cat_lazy": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1) * x,
    "cat_types": lambda x: torch.cat([x, (x > 0)], 1),
    "stack": lambda x: torch.stack([x, x.exp()], 1) + 1,
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=7.0),
    "crop": lambda x: F.pad(x, (-1, 2, -2, -1)),
    "reflect": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 3), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 3), mode="circular"),
    "repeat": lambda x: x.repeat(3, 1, 2, 1),
    "interleave": lambda x: [x.repeat_interleave(3, 1), x.repeat_interleave(2)],
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: [x.roll(2, 1), x.roll((1, -2), (0, 2)), x.roll(5)],
    "triangles": lambda x: [x.tril(), x.triu(1), x.tril(-2)],
    "diag_embed": lambda x: [torch.diag_embed(x), torch.diag_embed(x, 1, 0, 2)],
}


@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arranged(name: str, dtype: torch.dtype) -> None:
    check(ARRANGED[name], X.to(dtype), mutating=name == "circular")


def test_cat_is_lazy_when_it_feeds_arithmetic() -> None:
    assert len(check(ARRANGED["cat_lazy"], X).operations) == 1


def test_cat_is_written_piece_by_piece_when_memory_holds_it() -> None:
    program = check(ARRANGED["cat"], X)
    assert (
        len(program.operations) == 3
        and len({op.stores[0].buffer for op in program.operations if isinstance(op, Pointwise)}) == 1
    )


def test_shuffles() -> None:
    check(
        lambda x: [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), torch.channel_shuffle(x, 4)], torch.randn(2, 8, 4, 6)
    )


def test_factories() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.full((2, 3), 1.5) + x[0, 0, 0], torch.zeros_like(x), x.new_ones(3), torch.arange(10), torch.arange(2, 17, 3),
            torch.arange(0.5, 3, 0.25), torch.arange(5, dtype=torch.float32), torch.linspace(-1, 2, 7), torch.eye(3, 4),
            torch.full((2,), True), torch.tensor(3.0) * x,
        ]  # fmt: skip

    check(function, X)


POOLS: dict[str, Callable] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max_indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max_dilated": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), 2, ceil_mode=True),
    "avg": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive_uneven": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "adaptive_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_size": lambda x: F.interpolate(x, size=(5, 13)),
    "nearest_exact": lambda x: F.interpolate(x, size=(5, 16), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear_corners": lambda x: F.interpolate(x, size=(5, 13), mode="bilinear", align_corners=True),
    "bilinear_scale": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=False),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_and_resampling(name: str) -> None:
    check(POOLS[name], IMAGE)
    check(lambda x: POOLS[name](x.relu()), IMAGE.to(memory_format=torch.channels_last), mutating=name == "adaptive_one")
    check(POOLS[name], IMAGE.bfloat16())


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(5, 13), (11, 3), (1, 2), (9, 7), None])
def test_bicubic_resampling_of_channels_that_lie_side_by_side(corners: bool, size: tuple[int, int] | None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size, None if size else 1.7, mode="bicubic", align_corners=corners)

    channels_last = IMAGE.contiguous(memory_format=torch.channels_last)
    check(function, channels_last)
    check(function, channels_last.bfloat16())
    check(function, IMAGE, externs=("upsample_bicubic2d.default",))


def test_max_pool_of_nan_and_lowest_values() -> None:
    x = torch.full((1, 1, 4, 4), float("-inf"))
    x[0, 0, 0, 1] = float("nan")
    check(POOLS["max_indices"], x)
    check(POOLS["max_indices"], torch.randint(-9, 9, (1, 2, 6, 6)))


def test_pool_gradient() -> None:
    def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.max_pool2d(x, 3, 2, 1), x, g)[0]

    check(gradient, IMAGE, torch.randn(2, 3, 5, 4))


@pytest.mark.parametrize("kernel", [2, 3, (3, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"ceil_mode": True, "count_include_pad": False}, {"divisor_override": 3}], ids=str)
def test_gradient_of_averages(kernel: object, stride: int, options: dict[str, object]) -> None:
    def average(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, kernel, stride, 1, **options)

    def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(average(x), x, g)[0]

    check(gradient, IMAGE, torch.randn_like(average(IMAGE)))


LOSSES: dict[str, Callable] = {
    "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.4), "huber": F.huber_loss,
    "bce_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "sum": lambda x, y: F.mse_loss(x, y, reduction="sum"), "none": lambda x, y: F.mse_loss(x, y, reduction="none"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LOSSES[name], torch.randn(4, 5), torch.randn(4, 5))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4)])
def test_cross_entropy_and_gradient(reduction: str, shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 5, (shape[0], *shape[2:]))
    target.view(-1)[1] = -100
    weight = torch.rand(5)

    def function(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, t, w, reduction=reduction)
        return [loss, *torch.autograd.grad(loss.sum(), x)]

    check(function, torch.randn(shape), target, weight)
