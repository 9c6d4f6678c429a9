"""Training steps of one (model, engine) in a process of its own; prints one JSON object as its last line.

Usage: train_worker.py MODEL ENGINE {float32|bfloat16|float64} SECONDS {time|memory|check}. bfloat16 is autocast over float32 weights; float64
is for checks of networks that magnify rounding (batch normalisation of few images: eager's own gradients are 2e-2 off in float32).
time    the first step (forward, backward, optimizer) from before the engine's import; then the steady state interleaved with eager,
        step by step, as medians and the median of the pairwise ratios
memory  how much a step's resident memory grows beyond what is resident between steps, and what the engine keeps between steps
        (run it with MALLOC_MMAP_THRESHOLD_ set, so that freed tensors leave the process)
check   with dropout off, beside eager: the gradients' error (all together, and the worst parameter's), and the largest relative difference
        of the losses of STEPS steps on the same data
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])
from benchmarks.train_models import MODELS
from benchmarks.worker import compile_with

Step = Callable[[], None]
STEPS = 50


def stepper(run: Any, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> Step:
    """One training step, with an optimizer that is the same for every engine."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradients(run: Any, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = run(**inputs)
    loss.backward()
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of all gradients together, in the Euclidean norm, relative."""
    if len(got) != len(expected):
        return float("inf")
    difference = sum((a.double() - b.double()).square().sum().item() for a, b in zip(got, expected))
    return (difference / sum(b.double().square().sum().item() for b in expected)) ** 0.5


def _status(key: str) -> int:
    """A line of /proc/self/status, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def timed(
    engine: str, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool, seconds: float
) -> dict[str, Any]:
    reference = copy.deepcopy(module)
    eager = stepper(reference, reference, inputs, autocast)
    started = time.perf_counter()
    compiled, facts = compile_with(engine, module)
    step = stepper(compiled, module, inputs, autocast)
    step()
    first = time.perf_counter() - started
    eager()
    step()
    eager()
    pairs = []
    stop_at = time.perf_counter() + seconds
    while time.perf_counter() < stop_at or len(pairs) < 5:
        sample = []
        for call in (eager, step):
            begin = time.perf_counter()
            call()
            sample.append(time.perf_counter() - begin)
        pairs.append(sample)
    return {
        "first_step_s": first,
        "eager_ms": statistics.median(p[0] for p in pairs) * 1e3,
        "steady_ms": statistics.median(p[1] for p in pairs) * 1e3,
        "speedup": statistics.median(p[0] / p[1] for p in pairs),
        "samples": len(pairs),
        **facts(),
    }


def without_dropout(module: torch.nn.Module) -> None:
    """Sets every probability of dropping something to zero."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and (
                "drop" in name or (name == "p" and isinstance(part, torch.nn.modules.dropout._DropoutNd))
            ):
                setattr(part, name, 0.0)


def losses(run: Any, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    found = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def checked(engine: str, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> dict[str, Any]:
    without_dropout(module)
    reference = copy.deepcopy(module)
    compiled, _ = compile_with(engine, module)
    got, expected = gradients(compiled, module, inputs, autocast), gradients(reference, reference, inputs, autocast)
    largest = max(value.norm().item() for value in expected)
    sizes = [
        norm if (norm := value.norm().item()) > 1e-6 * largest else largest for value in expected
    ]  # some are zero but for rounding
    worst = max((mine - value).norm().item() / size for mine, value, size in zip(got, expected, sizes))
    module.load_state_dict(reference.state_dict())  # running statistics
    curves = zip(losses(compiled, module, inputs, autocast), losses(reference, reference, inputs, autocast))
    pairs = list(curves)
    return {
        "gradient_error": distance(got, expected),
        "worst_gradient_error": worst,
        "loss_difference": max(abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in pairs),
        "losses": [pairs[0][1], pairs[-1][1]],
    }


def kept_between_steps(engine: str) -> int:
    """Bytes of temporary memory that the engine keeps for the next step."""
    if engine != "fusewright":
        return 0
    from fusewright import _native

    return _native.memory_held()


def measured_memory(engine: str, module: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> dict[str, Any]:
    compiled, _ = compile_with(engine, module)
    step = stepper(compiled, module, inputs, autocast)
    for _ in range(3):
        step()
    gc.collect()
    grown = []
    for _ in range(3):
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        step()
        grown.append(_status("VmHWM") - before)
    return {"step_mib": statistics.median(grown) / 1024 + kept_between_steps(engine) / 2**20}


def main() -> None:
    name, engine, dtype, seconds, what = sys.argv[1:6]
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module.train()
    row = {"model": name, "engine": engine, "dtype": dtype}
    autocast = dtype == "bfloat16"
    if dtype == "float64":
        module, inputs = (
            module.double(),
            {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()},
        )
    if what == "check":
        row |= checked(engine, module, inputs, autocast)
    elif what == "time":
        row |= timed(engine, module, inputs, autocast, float(seconds))
    else:
        row |= measured_memory(engine, module, inputs, autocast)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
