"""Random programs over random sizes (0, 1, primes, powers of two, very large): each call gives what eager gives."""

from __future__ import annotations

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, FellBack, InternalError
from tests.generalise.size_programs import program

pytestmark = pytest.mark.usefixtures("verified")

CASES_A_PROGRAM = 7
SWEEP = 1430  # programs: 10,000 cases


def check(seed: int) -> None:
    """One program over its shapes. A compiled call raises where eager raises, and the same type."""
    function, shapes, source = program(seed)
    events: list[Event] = []
    compiled = fusewright.compile(function, dynamic=True if seed % 3 == 0 else None, recompile_limit=32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), STREAM.listening(events.append):
        for shape in shapes:
            x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
            try:
                expected = function(x, y)
            except (RuntimeError, IndexError, ValueError) as error:
                with pytest.raises(type(error)):
                    compiled(x, y)
                continue
            try:
                got = compiled(x, y)
            except Exception as error:
                raise AssertionError(
                    f"seed {seed}, shape {shape}: {type(error).__name__}: {error}\n{source}"
                ) from error
            assert len(got) == len(expected) and got[-1] == expected[-1] and type(got[-1]) is int
            for index, (mine, theirs) in enumerate(zip(got[:-1], expected[:-1])):
                torch.testing.assert_close(
                    mine,
                    theirs,
                    rtol=2e-4,
                    atol=2e-4,
                    equal_nan=True,
                    msg=lambda text: f"seed {seed}, shape {shape}, output {index}: {text}\n{source}",
                )
    bad = [event for event in events if isinstance(event, FellBack | InternalError)]
    assert not bad, f"seed {seed}: {bad}\n{source}"


@pytest.mark.parametrize("seed", range(14))
def test_programs(seed: int) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(143))
def test_sweep(part: int) -> None:
    for seed in range(100 + part * 10, 110 + part * 10):
        check(seed)
        fusewright.reset()
