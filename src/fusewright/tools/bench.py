"""`fusewright.benchmark`: warms up, synchronises, interleaves functions call by call, and compares their results.

Takes a function (compiled beside eager) or several by name, and their arguments; gives a `Benchmark` that prints as a
table. Always holds: the functions take turns, so that a noisy machine disturbs all of them alike; each has arguments of
its own, so that one which writes to them does not disturb the next.
"""

from __future__ import annotations

import copy
import statistics
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from fusewright import api
from fusewright.base.errors import OptionError
from fusewright.base.records import dataclass, fields

SAMPLE_SECONDS = 0.002
"""Quick functions are called several times a sample, so that the clock and the synchronisation do not count."""
LEAST_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """One function: seconds of its first call; the median and the quartiles of one call, in milliseconds; the median
    ratio to the first function's time, pair by pair; whether its result is the first function's (None: random)."""

    first_call_s: float
    median_ms: float
    low_ms: float
    high_ms: float
    speedup: float
    correct: bool | None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Timings by name, in the order in which they were given. `samples`: how often each function had its turn."""

    timings: dict[str, Timing]
    samples: int

    @property
    def correct(self) -> bool:
        """Whether no result differs from the first function's."""
        return all(timing.correct is not False for timing in self.timings.values())

    @property
    def last(self) -> Timing:
        """The function that was given last: the compiled one, where only one was given."""
        return list(self.timings.values())[-1]

    @property
    def eager_ms(self) -> float:
        """The first function's median."""
        return next(iter(self.timings.values())).median_ms

    @property
    def compiled_ms(self) -> float:
        """The last function's median."""
        return self.last.median_ms

    @property
    def speedup(self) -> float:
        """The first function's time over the last one's: the median of the ratios, pair by pair."""
        return self.last.speedup

    @property
    def first_call_s(self) -> float:
        """Seconds of the last function's first call: the compile."""
        return self.last.first_call_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        names = [each.name for each in fields(Timing)]
        rows = {name: {each: getattr(timing, each) for each in names} for name, timing in self.timings.items()}
        return {"samples": self.samples, "timings": rows}

    def __str__(self) -> str:
        head = ("", "median", "quartiles", "first call", "speed-up", "result")
        rows = [head, *(_row(name, timing) for name, timing in self.timings.items())]
        return f"{table(rows)}\n{self.samples} samples each, taken by turns"

    __repr__ = __str__


def _row(name: str, timing: Timing) -> tuple[str, ...]:
    return (
        name,
        milliseconds(timing.median_ms),
        f"{milliseconds(timing.low_ms)} to {milliseconds(timing.high_ms)}",
        milliseconds(timing.first_call_s * 1e3),
        f"{timing.speedup:.2f}x",
        {True: "equal", False: "DIFFERS", None: "random"}[timing.correct],
    )


def milliseconds(value: float) -> str:
    """A time in the unit that suits it."""
    if value >= 1000:
        return f"{value / 1e3:.2f} s"
    return f"{value:.3f} ms" if value >= 0.1 else f"{value * 1e3:.2f} µs"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def synchronise() -> None:
    """Waits for the accelerator, where one has been used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], calls: int = 1) -> float:
    """Seconds of one call: the mean of `calls`."""
    synchronise()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    synchronise()
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
                torch.testing.assert_close(a, b, equal_nan=True)
            except AssertionError:
                return False
        elif a != b:
            return False
    return True


def copy_of(value: Any) -> Any:
    """Arguments of a call of their own: tensors copied, everything else copied deeply."""
    return _pytree.tree_map(_copy, value)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value)


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Any]:
    """`function` with copies of the arguments."""
    own_args, own_kwargs = copy_of((args, kwargs))
    return lambda: function(*own_args, **own_kwargs)


def seeded(call: Callable[[], Any], seed: int = 0) -> Any:
    """What a call gives that starts from a fixed seed; the generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call()


def eager_copy(function: Any) -> Any:
    """The eager original of what `compile` takes, with a state of its own where it is a module or a module's method."""
    original = api._original(function)
    owner = getattr(original, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return types.MethodType(original.__func__, copy.deepcopy(owner))
    return copy.deepcopy(original) if isinstance(original, torch.nn.Module) else original


def is_random(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the eager function gives other results for another seed: then nothing can be compared."""
    first, second = (seeded(bound(eager_copy(function), args, kwargs), seed) for seed in (1, 2))
    return not same(first, second)


def compare_times(functions: Mapping[str, Callable[[], Any]], seconds: float) -> tuple[dict[str, list[float]], int]:
    """Seconds of one call of each function, sample by sample, taken by turns for about `seconds` seconds in all."""
    once = {name: min(seconds_of(call) for _ in range(2)) for name, call in functions.items()}  # warms up
    repeats = {name: max(1, int(SAMPLE_SECONDS / max(spent, 1e-7))) for name, spent in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    taken, stop_at = 0, time.perf_counter() + seconds
    while taken < LEAST_SAMPLES or time.perf_counter() < stop_at:
        for name, call in functions.items():
            samples[name].append(seconds_of(call, repeats[name]))
        taken += 1
    return samples, taken


def benchmark(
    function: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *args: Any,
    seconds: float = 2.0,
    compile_arguments: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Benchmark:
    """Times `function` eagerly and compiled, in turns, for about `seconds` seconds in all, and compares their results.

    function           what `compile` takes, or something compiled, whose original is the eager one then; a mapping of
                       names to functions times just those, as they are, against the first of them
    compile_arguments  arguments of `compile`
    args, kwargs       the arguments of each call; every function gets a copy of its own

    Gradients are recorded as the caller's mode says: under torch.no_grad() inference is timed. A module is copied for
    the eager side. Raises OptionError for an empty mapping.
    """
    if isinstance(function, Mapping):
        if not function:
            raise OptionError("benchmark takes a function, or a mapping of names to functions, got an empty mapping")
        functions: dict[str, Any] = dict(function)
    else:
        compiled = function
        if compile_arguments or api._settings_of(function) is None:
            compiled = api.compile(function, **(compile_arguments or {}))
        functions = {"eager": eager_copy(function), "compiled": compiled}
    random = is_random(next(iter(functions.values())), args, kwargs)
    turns = {name: bound(one, args, kwargs) for name, one in functions.items()}
    results: list[Any] = []
    first_call, correct = {}, {}
    for name, call in turns.items():
        first_call[name] = seconds_of(lambda call=call: results.append(seeded(call)))  # type: ignore[misc]
        correct[name] = None if random else same(results[-1], results[0])
        del results[1:]
    return summary(*compare_times(turns, seconds), first_call, correct)


def summary(
    samples: Mapping[str, list[float]], taken: int, first_call: Mapping[str, float], correct: Mapping[str, bool | None]
) -> Benchmark:
    """The medians of what `compare_times` gives."""
    base = next(iter(samples.values()))
    timings = {}
    for name, times in samples.items():
        low, median, high = (quartile * 1e3 for quartile in statistics.quantiles(times, n=4))
        speedup = statistics.median(a / b for a, b in zip(base, times))
        timings[name] = Timing(first_call[name], median, low, high, speedup, correct.get(name))
    return Benchmark(timings, taken)
