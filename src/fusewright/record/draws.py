"""Random truths (dropout's masks) from a generator that kernels compute in place: a function of a seed and the
element's position.

Takes PyTorch's operators as the recorder meets them; gives `fusewright::bernoulli` in their place. One seed a call of
the graph comes from PyTorch's generator, so `torch.manual_seed` reproduces what is drawn, and an element can be
computed again wherever it is read: in another kernel, or in the backward. Always holds: the numbers depend on the seed,
on which draw of the graph it is, and on the element's row-major position, never on the memory layout or on the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.operators.philox import BERNOULLI

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


class Draws:
    """The draws of one graph: the seed on each device, and how many there were."""

    def __init__(self) -> None:
        self.seeds: dict[torch.device, Any] = {}
        self.count = 0

    def bernoulli(self, recorder: Recorder, like: Any, p: float) -> Any:
        """Records a truth for each element of `like`."""
        device = like.device
        if device not in self.seeds:
            self.seeds[device] = recorder.dispatch(
                aten.randint.low, (-(2**63), 2**63 - 1, []), {"dtype": torch.int64, "device": device}
            )
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
