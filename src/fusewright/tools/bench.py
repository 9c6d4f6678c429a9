"""A benchmark helper: warms up, synchronises, interleaves eager and compiled calls, and compares their results.

Takes a function and its arguments; gives a `Benchmark` that prints. Times are medians in milliseconds, interleaved call
by call, so that a noisy machine disturbs both sides alike.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from fusewright import api
from fusewright.base.records import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """first_call_s: seconds of the first compiled call; eager_ms, compiled_ms: median of one call; speedup: median of
    the pairwise ratios."""

    first_call_s: float
    eager_ms: float
    compiled_ms: float
    speedup: float
    correct: bool
    samples: int

    def __str__(self) -> str:
        return (
            f"eager {self.eager_ms:.4f} ms, compiled {self.compiled_ms:.4f} ms, speed-up {self.speedup:.2f}x "
            f"(first call {self.first_call_s:.3f} s, results {'equal' if self.correct else 'DIFFER'}, {self.samples} "
            "samples)"
        )


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], calls: int) -> float:
    _synchronise()
    started = time.perf_counter()
    for _ in range(calls):
        function(*args, **kwargs)
    _synchronise()
    return (time.perf_counter() - started) / calls


def same(got: Any, expected: Any) -> bool:
    """Whether two results have the same structure, and tensors within torch.testing's tolerances for their dtype."""
    left, left_spec = _pytree.tree_flatten(got)
    right, right_spec = _pytree.tree_flatten(expected)
    if left_spec != right_spec:
        return False
    for a, b in zip(left, right):
        if isinstance(b, torch.Tensor):
            try:
                torch.testing.assert_close(a, b)
            except AssertionError:
                return False
        elif a != b:
            return False
    return True


def benchmark(
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 2.0,
    compile_arguments: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Benchmark:
    """Compiles `function`, checks it against eager on the same arguments, and times both for about `seconds`
    seconds."""
    reference = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    compiled = api.compile(function, **(compile_arguments or {}))
    expected = reference(*args, **kwargs)
    first = _seconds(compiled, args, kwargs, 1)
    correct = same(compiled(*args, **kwargs), expected)
    calls = max(1, int(0.002 / max(_seconds(compiled, args, kwargs, 1), 1e-7)))
    pairs: list[tuple[float, float]] = []
    stop_at = time.perf_counter() + seconds
    while time.perf_counter() < stop_at or len(pairs) < 5:
        pairs.append((_seconds(reference, args, kwargs, calls), _seconds(compiled, args, kwargs, calls)))
    return Benchmark(
        first_call_s=first,
        eager_ms=statistics.median(pair[0] for pair in pairs) * 1e3,
        compiled_ms=statistics.median(pair[1] for pair in pairs) * 1e3,
        speedup=statistics.median(pair[0] / pair[1] for pair in pairs),
        correct=correct,
        samples=len(pairs),
    )
