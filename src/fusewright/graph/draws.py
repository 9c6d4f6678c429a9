"""Random truths (dropout's masks) from a generator that kernels compute in place: a function of a seed and the element's position.

Takes PyTorch's operators as the recorder meets them; gives `fusewright::bernoulli` in their place. One seed a call of the graph comes
from PyTorch's generator, so `torch.manual_seed` reproduces what is drawn, and an element can be computed again wherever it is read: in
another kernel, or in the backward. Always holds: the numbers depend on the seed, on which draw of the graph it is, and on the element's
row-major position, never on the memory layout or on the machine.

The generator is Philox2x32 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, 2011) with seven rounds, the least number that passes
BigCrush there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fusewright.graph.recorder import Recorder

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 7
WORD = 0xFFFFFFFF

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("bernoulli(Tensor seed, int draw, float p, SymInt[] size) -> Tensor", tags=(torch.Tag.pointwise,))
BERNOULLI = torch.ops.fusewright.bernoulli.default

aten = torch.ops.aten


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


class Draws:
    """The draws of one graph: the seed on each device, and how many there were."""

    def __init__(self) -> None:
        self.seeds: dict[torch.device, Any] = {}
        self.count = 0

    def bernoulli(self, recorder: Recorder, like: Any, p: float) -> Any:
        """Records a truth for each element of `like`."""
        device = like.device
        if device not in self.seeds:
            self.seeds[device] = recorder.dispatch(aten.randint.low, (-(2**63), 2**63 - 1, []), {"dtype": torch.int64, "device": device})
        self.count += 1
        return recorder.dispatch(BERNOULLI, (self.seeds[device], self.count - 1, p, list(like.shape)), {})


def _probability(p: object) -> float | None:
    """A probability that is known; None for one that eager refuses, and for what is no number."""
    if isinstance(p, torch.SymFloat):
        p = p.node.guard_float("", 0)
    return float(p) if isinstance(p, (int, float)) and 0.0 <= p <= 1.0 else None


def _fill(draws: Draws, recorder: Recorder, args: tuple[Any, ...]) -> object:
    """tensor.bernoulli_(p)"""
    p = _probability(args[1] if len(args) > 1 else 0.5)
    if p is None or args[0].is_complex():
        return NotImplemented
    return recorder.dispatch(aten.copy_.default, (args[0], draws.bernoulli(recorder, args[0], p)), {})


def _dropout(draws: Draws, recorder: Recorder, args: tuple[Any, ...]) -> object:
    """native_dropout(input, p, train) → (output, mask)"""
    p = _probability(args[1])
    if p is None or args[2] is False or not args[0].is_floating_point():
        return NotImplemented
    mask = draws.bernoulli(recorder, args[0], 1.0 - p)
    scaled = recorder.dispatch(aten.mul.Scalar, (args[0], 1.0 / (1.0 - p) if p < 1 else 0.0), {})
    return recorder.dispatch(aten.mul.Tensor, (scaled, mask), {}), mask


_HANDLERS = {aten.bernoulli_.float: _fill, aten.native_dropout.default: _dropout}


def record(draws: Draws, recorder: Recorder, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Records a random operator as draws of this kind; NotImplemented for one that PyTorch's generator serves."""
    handler = _HANDLERS.get(func)  # type: ignore[call-overload]
    if handler is None or kwargs:
        return NotImplemented
    return handler(draws, recorder, args)
