"""Random nets over sizes that change and come back while weights change: each call gives what eager gives, from several threads too."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base.events import STREAM, Event, FellBack, InternalError
from tests.models.net_streams import change, net, sizes

CALLS = 60
THREADS = 4


def _compare(module: nn.Module, compiled: nn.Module, x: torch.Tensor, what: str) -> None:
    with torch.no_grad():
        expected, got = module(x), compiled(x)
    tolerance = 1e-9 if x.dtype == torch.float64 else 2e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def check(seed: int, threads: int = 1) -> int:
    """One net over its stream, changed every few calls; gives the number of calls. With threads, each has calls of its own between changes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module, shape = net(rng)
    module.eval()
    events: list[Event] = []
    compiled = fusewright.compile(module, dynamic=True if seed % 3 == 0 else None, recompile_limit=32)
    stream, changed, calls = sizes(rng, CALLS), "", 0
    with STREAM.listening(events.append), ThreadPoolExecutor(threads) as pool:
        while batch := [size for _, size in zip(range(rng.randint(1, 24)), stream)]:
            dtype = next(module.parameters()).dtype
            inputs = [torch.randn(shape(size), dtype=dtype) for size in batch]
            what = [
                f"seed {seed}, call {calls + at}, shape {tuple(x.shape)}, after {changed or 'nothing'}"
                for at, x in enumerate(inputs)
            ]
            if threads == 1:
                for x, text in zip(inputs, what):
                    _compare(module, compiled, x, text)
            else:
                list(pool.map(lambda pair: _compare(module, compiled, *pair), zip(inputs, what)))
            calls += len(batch)
            changed = change(module, rng)
    bad = [str(event)[-400:] for event in events if isinstance(event, FellBack | InternalError)]
    assert not bad, f"seed {seed}: {bad[0]}"
    return calls


@pytest.mark.parametrize("seed", range(6))
def test_streams(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", range(6))
def test_streams_of_threads(seed: int, restless_threads: None) -> None:
    check(seed, THREADS)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(50))
def test_sweep(part: int) -> None:
    for seed in range(100 + part * 4, 104 + part * 4):
        check(seed, THREADS if seed % 2 else 1)
        fusewright.reset()
