"""Random nets of linear layers and convolutions, and streams of calls of changing sizes between which the weights change.

Takes a seed; gives a net in evaluation, a stream of inputs, and the changes. Always holds: the same seed gives the same net, stream and
changes; sizes repeat often enough for what is prepared for a size to be prepared anew.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class Blocks(nn.Module):
    """Attention and feed-forward over a sequence, with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Patches(nn.Module):
    """A small vision transformer: patches of any image, then blocks."""

    def __init__(self, width: int, patch: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Blocks(width, 2) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


def net(rng: random.Random) -> tuple[nn.Module, Callable[[int], tuple[int, ...]]]:
    """(the net, the shape of its input for a size)."""
    kind = rng.randrange(4)
    width = rng.choice((16, 32, 48, 96))
    if kind == 0:
        widths = [width, *(rng.choice((8, 17, 64, 128)) for _ in range(rng.randint(1, 4)))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [
                nn.Linear(before, after, bias=rng.random() < 0.7),
                rng.choice((nn.ReLU(), nn.GELU(), nn.Tanh(), nn.LayerNorm(after))),
            ]
        return nn.Sequential(*layers), lambda size: (size, width)
    if kind == 1:
        kernel = rng.choice((1, 3))
        stack = [
            nn.Conv2d(3, width, kernel, padding=kernel // 2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 24, 1),
        ]
        if rng.random() < 0.5:
            stack += [nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 8, 1, bias=False)]
        return nn.Sequential(*stack), lambda size: (1 + size % 3, 3, 4 + size % 17, 5 + size % 7)
    if kind == 2:
        patch = rng.choice((2, 4))
        return Patches(width, patch, rng.randint(1, 2)), lambda size: (
            1 + size % 2,
            3,
            patch * (1 + size % 6),
            patch * (1 + size % 4),
        )
    return nn.Sequential(*(Blocks(width, 2) for _ in range(rng.randint(1, 2)))), lambda size: (
        1 + size % 4,
        1 + size,
        width,
    )


def change(module: nn.Module, rng: random.Random) -> str:
    """Changes some weights in one of the ways that programs have; says which."""
    parameter = rng.choice(list(module.parameters()))
    noise = torch.randn(parameter.shape).to(parameter.dtype)
    kind = rng.randrange(6)
    with torch.no_grad():
        if kind == 0:
            parameter.mul_(0.5).add_(noise, alpha=0.05)
            return "in place"
        if kind == 1:
            parameter.data = parameter.data * 0.5 + 0.05 * noise
            return "another .data"
        if kind == 2:
            parameter.data.mul_(0.5).add_(noise, alpha=0.05)
            return "through .data"
        if kind == 3:
            module.load_state_dict(
                {
                    name: value * 0.75 if value.is_floating_point() else value
                    for name, value in module.state_dict().items()
                }
            )
            return "load_state_dict"
        if kind == 4:
            module.to(torch.float64 if parameter.dtype == torch.float32 else torch.float32)
            return "dtype"
        layer = rng.choice([layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)])
        layer.weight = nn.Parameter(copy.deepcopy(layer.weight) * 0.5)
        return "another parameter"


def sizes(rng: random.Random, calls: int) -> Iterator[int]:
    """Runs of one size, sizes that come back, and sizes that come once."""
    usual = [rng.choice((1, 2, 3, 8, 16, 17, 31, 64)) for _ in range(3)]
    while calls > 0:
        run = rng.choice((1, 1, 2, 9, 12))
        size = rng.choice(usual) if rng.random() < 0.75 else rng.randint(1, 80)
        for _ in range(min(run, calls)):
            yield size
        calls -= run
