"""How much memory a call takes, as PyTorch's allocators tell.

Takes a function without arguments; gives the bytes above what was there before: at the peak, and afterwards. Always
holds: on a CPU an allocation counts when it is made and freed, whatever the C library keeps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

from fusewright import _native
from fusewright.base.records import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """peak: bytes while the call ran, its result included; kept: bytes after the result was dropped; steps: bytes by
    time, as pairs of seconds and bytes."""

    peak: int
    kept: int
    steps: tuple[tuple[float, int], ...] = ()


def measure(call: Callable[[], Any]) -> Memory:
    """The memory of one call: a GPU's if it takes any there, else the CPU's."""
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # PyTorch's other profiler writes to the terminal, and its events have no memory in the order of time.
    experimental = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, experimental)  # type: ignore[call-arg]
    )
    try:
        call()
        gc.collect()  # a compile leaves cycles
    finally:
        events = _disable_profiler_legacy()
    if on_gpu:
        torch.cuda.synchronize()
        if peak := torch.cuda.max_memory_allocated() - before:
            return Memory(peak, torch.cuda.memory_allocated() - before)
    changes = list(_changes(events))
    levels = list(accumulate((change for _, change in changes), initial=0))
    steps = tuple((seconds, level) for (seconds, _), level in zip(changes, levels[1:]))
    return Memory(max(levels), levels[-1], steps)


def _changes(threads: Any) -> Iterator[tuple[float, int]]:
    start = next((event for thread in threads for event in thread if event.kind() == "mark"), None)
    found: list[tuple[float, int]] = []
    for event in (event for thread in threads for event in thread if event.kind() == "memory_alloc"):
        seconds = start.cpu_elapsed_us(event) / 1e6 if start is not None else float(len(found))
        found.append((seconds, event.cpu_memory_usage()))
    yield from sorted(found, key=lambda change: change[0])


def measure_compiled(call: Callable[[], Any]) -> Memory:
    """The memory of a compiled function, whose first call this is: what it keeps between calls (weights in another
    layout), and the peak of a later call with what is kept and its temporary memory."""
    kept = max(0, measure(call).kept)
    _native.release_memory()
    before = _native.memory_held()
    call()
    temporary = _native.memory_held() - before
    steady = measure(call)
    return Memory(kept + temporary + steady.peak, kept, steady.steps)
