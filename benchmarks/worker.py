"""One (model, engine) measured in a process of its own; prints one JSON object as its last line.

Usage: worker.py MODEL ENGINE DTYPE SECONDS (MODEL: see `benchmarks.models.case`). The first call is timed from before the engine's import; the steady state is interleaved with
eager, call by call, and reported as medians and the median of the pairwise ratios.
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
        if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)) or not bool(torch.isfinite(a[finite]).all()):
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
    torch.onnx.export(Flat().eval(), (*args, *kwargs.values()), file, dynamo=False, opset_version=17)
    torch.backends.mha.set_fastpath_enabled(True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
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
        from fusewright import events

        facts = {"kernels": 0, "breaks": 0, "graphs": 0}

        def listen(event: events.Event) -> None:
            facts["kernels"] += isinstance(event, events.KernelMade)
            facts["breaks"] += isinstance(event, events.Broken | events.Skipped)
            facts["graphs"] += isinstance(event, events.Captured)

        events.STREAM.subscribers.append(listen)
        return fusewright.compile(function), lambda: facts
    if engine == "freezing":
        import torch._inductor.config as inductor_config

        inductor_config.freezing = True
        engine = "torch.compile"
    mode = "max-autotune" if engine == "max-autotune" else None
    return torch.compile(function, mode=mode), dict


def main() -> None:
    name, engine, dtype_name, seconds = sys.argv[1:5]
    torch.manual_seed(0)
    function, args, kwargs = case(name, getattr(torch, dtype_name))
    reference = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    with torch.no_grad():
        expected = reference(*args, **kwargs)
        memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        compiled, facts = compile_with(engine, function, args, kwargs)
        got = compiled(*args, **kwargs)
        first = time.perf_counter() - started
        error = relative_error(got, expected)
        del got
        second_started = time.perf_counter()
        compiled(*args, **kwargs)
        one = time.perf_counter() - second_started
        inner = max(1, int(0.002 / max(one, 1e-7)))
        pairs = []
        stop_at = time.perf_counter() + float(seconds)
        while time.perf_counter() < stop_at or len(pairs) < 7:
            sample = []
            for call in (reference, compiled):
                begin = time.perf_counter()
                for _ in range(inner):
                    call(*args, **kwargs)
                sample.append((time.perf_counter() - begin) / inner)
                if engine == "onnxruntime" and call is compiled:
                    time.sleep(0.03)  # its threads go on spinning for a while, and would take the processor from what is measured next
            pairs.append(sample)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    print(
        json.dumps(
            {
                "model": name,
                "engine": engine,
                "dtype": dtype_name,
                "first_call_s": first,
                "eager_ms": statistics.median(p[0] for p in pairs) * 1e3,
                "steady_ms": statistics.median(p[1] for p in pairs) * 1e3,
                "speedup": statistics.median(p[0] / p[1] for p in pairs),
                "relative_error": error,
                "peak_memory_growth_mib": memory / 1024,
                "samples": len(pairs),
                **facts(),
            }
        )
    )


if __name__ == "__main__":
    main()
