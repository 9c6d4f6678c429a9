"""One (stream, way) in a process of its own; prints one JSON object as its last line.

Usage: dynamic_worker.py STREAM WAY SECONDS. The stream's calls are timed one by one, compiles included (eager's answer to each is computed
outside of the timing, and compared). Then the steady state at the stream's chosen sizes: eager, the compiled module and, for fusewright, a
static compile of each size, interleaved call by call. The way "cold" times compiles only: static and dynamic in turn, no caches.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

sys.path.insert(0, __file__.rsplit("/", 2)[0])
from benchmarks.dynamic_streams import STREAMS, Call, Stream
from benchmarks.worker import relative_error


def compiled_copy(module: nn.Module, way: str, **more: Any) -> nn.Module:
    """A copy of the module with its forward compiled."""
    made = copy.deepcopy(module)
    if way.startswith("torch.compile"):
        made.forward = torch.compile(made.forward, dynamic=True if way.endswith("dynamic") else None)  # type: ignore[method-assign]
    else:
        import fusewright

        made.forward = fusewright.compile(made.forward, **more)  # type: ignore[method-assign]
    return made


class Facts:
    """What fusewright's events or torch.compile's counters say about the compiles."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.compiles: Counter[str] = Counter()
        self.fallbacks: list[str] = []
        self.reused = 0
        if not way.startswith("torch.compile"):
            from fusewright.base.events import STREAM

            STREAM.subscribers.append(self.listen)

    def listen(self, event: Any) -> None:
        from fusewright.base import events

        self.compiles[event.function] += isinstance(event, events.Compiled)
        self.reused += isinstance(event, events.Reused)
        if isinstance(
            event, events.Skipped | events.Broken | events.FellBack | events.LimitReached | events.InternalError
        ):
            self.fallbacks.append(f"{type(event).__name__} {event}"[:400])

    def result(self) -> dict[str, Any]:
        if self.way.startswith("torch.compile"):
            from torch._dynamo.utils import counters

            return {
                "compiles": counters["stats"]["unique_graphs"],
                "fallbacks": sum(counters["graph_break"].values()),
            }
        most = max(self.compiles.values(), default=0)
        return {
            "compiles": most,
            "reused": self.reused,
            "fallbacks": len(self.fallbacks),
            "fallback_texts": self.fallbacks[:5],
        }


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """All gradients as one vector: some (a key's bias) are zero but for rounding, and a relative error of theirs would say nothing."""
    return [torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])]


def run_stream(stream: Stream, module: nn.Module) -> tuple[list[float], float]:
    """Seconds of each call, and the largest relative error against eager."""
    seconds: list[float] = []
    worst = 0.0
    for call in stream.calls:
        expected = call(stream.module)()
        run = call(module)
        started = time.perf_counter()
        got = run()
        seconds.append(time.perf_counter() - started)
        if stream.trains:
            got, expected = [got, *gradients(module)], [expected, *gradients(stream.module)]
        worst = max(worst, relative_error(_tensors(got), _tensors(expected)))
    return seconds, worst


def _tensors(value: Any) -> Any:
    return dict(value) if hasattr(value, "to_tuple") else value


def interleaved(call: Call, modules: list[nn.Module], seconds: float) -> list[list[float]]:
    """Samples of each module's time for this call, taken in turns. Every order of the modules comes equally often: one that runs after
    itself finds its weights in the caches."""
    samples: list[list[float]] = []
    for module in modules:
        for _ in range(2):
            call(module)()
    orders = itertools.cycle(itertools.permutations(range(len(modules))))
    stop_at = time.perf_counter() + seconds
    while time.perf_counter() < stop_at or len(samples) < 12:
        turn = [0.0] * len(modules)
        for number in next(orders):
            run = call(modules[number])
            started = time.perf_counter()
            run()
            turn[number] = time.perf_counter() - started
        samples.append(turn)
    return samples


def steady(stream: Stream, module: nn.Module, way: str, seconds: float) -> list[dict[str, float]]:
    rows = []
    for call in stream.steady:
        modules = [stream.module, module]
        if not way.startswith("torch.compile"):
            modules.append(compiled_copy(stream.module, way, dynamic=False))
        samples = interleaved(call, modules, seconds)
        row = {
            "eager_ms": statistics.median(s[0] for s in samples) * 1e3,
            "dynamic_ms": statistics.median(s[1] for s in samples) * 1e3,
            "speedup": statistics.median(s[0] / s[1] for s in samples),
        }
        if len(modules) == 3:
            row["static_ms"] = statistics.median(s[2] for s in samples) * 1e3
            row["static_over_dynamic"] = statistics.median(s[2] / s[1] for s in samples)
        rows.append(row)
    return rows


def cold(stream: Stream) -> dict[str, Any]:
    """Medians of three first calls each, static and dynamic in turn, after one compile that pays the imports."""
    import fusewright

    call = stream.steady[0]
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(4):
        for dynamic in (False, True):
            fusewright.reset()
            module = compiled_copy(stream.module, "fusewright", dynamic=dynamic, options={"disk_cache": False})
            run = call(module)
            started = time.perf_counter()
            run()
            if turn:
                times[dynamic].append(time.perf_counter() - started)
    static, symbolic = (statistics.median(times[dynamic]) for dynamic in (False, True))
    return {"static_compile_s": static, "dynamic_compile_s": symbolic, "dynamic_over_static": symbolic / static}


def main() -> None:
    name, way, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.manual_seed(0)
    stream = STREAMS[name]()
    row: dict[str, Any] = {"stream": name, "way": way}
    context: Callable[[], Any] = torch.enable_grad if stream.trains else torch.no_grad
    with context():
        if way == "cold":
            row |= cold(stream)
        else:
            facts = Facts(way)
            module = compiled_copy(stream.module, way, **({"dynamic": True} if way == "fusewright-dynamic" else {}))
            each, error = run_stream(stream, module)
            row |= {
                "calls": len(each),
                "stream_s": sum(each),
                "each_s": each,
                "relative_error": error,
                **facts.result(),
            }
            row["steady"] = steady(stream, module, way, seconds) if seconds else []
    print(json.dumps(row))


if __name__ == "__main__":
    main()
