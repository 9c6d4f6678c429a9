"""What compare.py measures of one model in a process of its own; prints one JSON object as its last line.

Usage: worker.py first MODEL ENGINE DTYPE 0, or worker.py steady MODEL ENGINE,ENGINE DTYPE SECONDS (MODEL: see `benchmarks.models.case`).
"""

from __future__ import annotations

import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])
from benchmarks.models import case


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def relative_error(got: Any, expected: Any) -> float:
    """Largest ||got - expected|| / ||expected|| (Euclidean norms) over the tensors of the two results; inf if they differ in number, shape, dtype,
    or in which elements are not finite."""
    pairs = list(zip(_tensors(got), _tensors(expected)))
    if len(_tensors(got)) != len(_tensors(expected)) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    worst = 0.0
    for a, b in pairs:
        finite = torch.isfinite(b)
        if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)) or not bool(
            torch.isfinite(a[finite]).all()
        ):
            return float("inf")
        difference, scale = (a[finite].double() - b[finite].double()).norm().item(), b[finite].double().norm().item()
        worst = max(worst, difference / scale if scale else difference)
    return worst


def onnx_session(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The program exported for these inputs, run by ONNX Runtime on as many threads as PyTorch."""
    import io

    import onnxruntime

    class Flat(torch.nn.Module):
        """Takes tensors only, gives a tuple of tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            named = dict(zip(kwargs, tensors[len(args) :]))
            return tuple(_tensors(self.function(*tensors[: len(args)], **named)))

    file = io.BytesIO()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator that ONNX does not have
    try:
        torch.onnx.export(Flat().eval(), (*args, *kwargs.values()), file, dynamo=False, opset_version=17)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would spin for some 100 ms after a call, and take the processor from what is measured next (T5: 41 ms for 21). Without that it
    # is the quicker one too, where calls of several engines alternate (MobileNetV2: 8.9 ms for 14.5).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(names, (*args, *kwargs.values()))}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    return run


def compile_with(
    engine: str, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> tuple[Callable[..., Any], Callable[[], dict[str, Any]]]:
    """The compiled callable, and a function that reports what is known of the compile afterwards."""
    if engine == "eager":
        return function, dict
    if engine == "onnxruntime":
        return onnx_session(function, args, kwargs or {}), dict
    if engine == "fusewright":
        import fusewright
        from fusewright.base import events

        facts = {"kernels": 0, "breaks": 0, "graphs": 0}

        def listen(event: events.Event) -> None:
            facts["kernels"] += isinstance(event, events.KernelMade)
            facts["breaks"] += isinstance(event, events.Broken | events.Skipped)
            facts["graphs"] += isinstance(event, events.Captured)

        events.STREAM.subscribers.append(listen)
        return fusewright.compile(function), lambda: facts
    settings: dict[str, Any] = {
        "freezing": {"options": {"freezing": True}},
        "max-autotune": {"mode": "max-autotune"},
    }.get(engine, {})
    return torch.compile(function, **settings), dict


def own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    return copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function


def first_call(name: str, engine: str, dtype: torch.dtype) -> dict[str, Any]:
    """The first call, timed from before the engine's import; how far its result is from eager's; and by how much the process's peak memory grew."""
    function, args, kwargs = case(name, dtype)
    expected = own_copy(function)(*args, **kwargs)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    compiled, facts = compile_with(engine, function, args, kwargs)
    got = compiled(*args, **kwargs)
    seconds = time.perf_counter() - started
    error = relative_error(got, expected)
    compiled(*args, **kwargs)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return {"first_call_s": seconds, "relative_error": error, "peak_memory_growth_mib": growth} | facts()


def steady(name: str, engines: list[str], dtype: torch.dtype, seconds: float) -> dict[str, dict[str, Any]]:
    """Eager and the engines in turn, another one first in each round, for `seconds` for each of them and at least seven rounds: for each engine medians of its time,
    of eager's over it, and of each other engine's over it, round by round. An engine that fails has an error instead."""
    function, args, kwargs = case(name, dtype)
    calls: dict[str, Callable[..., Any]] = {"eager": function}
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        try:
            call, _ = compile_with(engine, own_copy(function), args, kwargs)
            error = relative_error(call(*args, **kwargs), function(*args, **kwargs))
        except Exception as problem:  # an engine that can't run this model leaves the others to be measured
            found[engine] = {
                "error": f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            }
            continue
        calls[engine] = call
        found[engine] = {"relative_error": error}
    inner = {}
    for engine, call in calls.items():
        call(*args, **kwargs)
        begin = time.perf_counter()
        call(*args, **kwargs)
        inner[engine] = max(1, int(0.002 / max(time.perf_counter() - begin, 1e-7)))
    rounds: list[dict[str, float]] = []
    stop_at = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < stop_at or len(rounds) < 7:
        order = list(calls)
        turn = len(rounds) % len(order)
        sample = {}
        for engine in order[turn:] + order[:turn]:
            call = calls[engine]
            begin = time.perf_counter()
            for _ in range(inner[engine]):
                call(*args, **kwargs)
            sample[engine] = (time.perf_counter() - begin) / inner[engine]
        rounds.append(sample)
    for engine in calls:
        found.setdefault(engine, {"relative_error": 0.0}).update(
            {
                "steady_ms": statistics.median(one[engine] for one in rounds) * 1e3,
                "eager_ms": statistics.median(one["eager"] for one in rounds) * 1e3,
                "speedup": statistics.median(one["eager"] / one[engine] for one in rounds),
                "over": {
                    other: statistics.median(one[other] / one[engine] for one in rounds)
                    for other in calls
                    if other != engine
                },
                "samples": len(rounds),
            }
        )
    return found


def main() -> None:
    stage, name, engines, dtype_name, seconds = sys.argv[1:6]
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    with torch.no_grad():
        found = (
            first_call(name, engines, dtype)
            if stage == "first"
            else steady(name, engines.split(","), dtype, float(seconds))
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
