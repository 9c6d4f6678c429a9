"""Random programs over batches of sequences of random sizes (0, 1, primes, powers of two, large): each call gives what eager gives, and so
do gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, FellBack, InternalError
from tests.generalise.size_block_programs import program

pytestmark = pytest.mark.usefixtures("verified")

CASES_A_PROGRAM = 6
SWEEP = 1670  # programs: 10,000 cases


def _close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """In double precision nearly to the bit (gradients always); in single, programs that cancel (the sum of a normalised row) show their
    rounding."""
    relative, absolute = (1e-7, 1e-7) if expected.dtype == torch.float64 else (1e-3, 2e-3)
    scale = float(expected.detach().double().nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        got,
        expected,
        rtol=relative,
        atol=absolute * max(scale, 1.0),
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size != 1] if tensor.numel() else []


def _gradients(outputs: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    loss = sum((value * value).sum() for value in outputs[:-1] if value.requires_grad)
    if not isinstance(loss, torch.Tensor):
        return []
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for gradient, x in zip(found, inputs)]


def check(seed: int) -> None:
    """One program over its stream. A compiled call raises where eager raises, and the same type. Every fourth has gradients."""
    function, stream, source = program(seed)
    trains, dtype = seed % 4 == 0, torch.float64 if seed % 4 < 2 else torch.float32
    events: list[Event] = []
    compiled = fusewright.compile(function, dynamic=True if seed % 3 == 0 else None, recompile_limit=64)
    generator = torch.Generator().manual_seed(seed)
    with torch.set_grad_enabled(trains), STREAM.listening(events.append):
        for shape, count in stream:
            inputs = tuple(
                torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(trains) for _ in range(2)
            )
            what = f"seed {seed}, shape {shape}, {count}\n{source}"
            try:
                expected = function(*inputs, count)
                gradients = _gradients(expected, inputs) if trains else []
            except (RuntimeError, IndexError, ValueError) as error:
                with pytest.raises(type(error)):
                    _gradients(compiled(*inputs, count), inputs)
                events[:] = [
                    event for event in events if not isinstance(event, FellBack)
                ]  # that is how the error is eager's own
                continue
            try:
                got = compiled(*inputs, count)
                found = _gradients(got, inputs) if trains else []
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}; {what}") from error
            assert len(got) == len(expected) and got[-1] == expected[-1] and type(got[-1]) is int, what
            for index, (mine, theirs) in enumerate(zip(got[:-1], expected[:-1])):
                assert mine.requires_grad == theirs.requires_grad and _strides(mine) == _strides(theirs), what
                _close(mine, theirs, f"output {index}; {what}")
            for index, (mine, theirs) in enumerate(zip(found, gradients, strict=True)):
                _close(mine, theirs, f"gradient {index}; {what}")
    bad = [str(event)[-400:] for event in events if isinstance(event, FellBack | InternalError)]
    assert not bad, f"seed {seed}: {bad[0]}\n{source}"


@pytest.mark.parametrize("seed", range(12))
def test_programs(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(167))
def test_sweep(part: int) -> None:
    for seed in range(100 + part * 10, 110 + part * 10):
        check(seed)
        fusewright.reset()
