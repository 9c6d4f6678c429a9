"""The kernels' own random generator: a function of a seed and the element's position, and the operator that stands for
it in graphs.

Philox2x32 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, 2011) with seven rounds, the least number that passes
BigCrush there.
Always holds: the numbers depend on the seed, on which draw of the graph it is, and on the element's row-major position.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.base.pytorch import torch

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 7
WORD = 0xFFFFFFFF

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("bernoulli(Tensor seed, int draw, float p, SymInt[] size) -> Tensor", tags=(torch.Tag.pointwise,))
BERNOULLI = torch.ops.fusewright.bernoulli.default


def threshold(p: float) -> int:
    """A word below this is true with probability p (to within 2**-32)."""
    return round(p * 2**32)


def _bernoulli(seed: torch.Tensor, draw: int, p: float, size: Sequence[int]) -> torch.Tensor:
    """The operator on tensors, in int64 arithmetic, for what runs without kernels."""
    count = 1
    for extent in size:
        count *= extent
    position = torch.arange(count, dtype=torch.int64, device=seed.device)
    key, high = seed & WORD, (seed >> 32) + draw * WEYL
    left, right = position & WORD, ((position >> 32) ^ high) & WORD
    for _ in range(ROUNDS):
        product = left * MULTIPLIER
        left, right = ((product >> 32) & WORD) ^ key ^ right, product & WORD
        key = (key + WEYL) & WORD
    return (left < threshold(p)).view(list(size))


_LIBRARY.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")
