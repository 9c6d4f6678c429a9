"""What a call costs beside its work: a function of two operators on 16 elements, and a narrow 12-layer BERT on one token (as many layers,
parameters to guard and steps as the base model has, but kernels so short that a few microseconds beside them can be measured).

    python benchmarks/overhead.py [--rounds 200] [--no-torch-compile] [--json FILE]

Prints microseconds a call: eager, fusewright and torch.compile, measured in turn in many short rounds, medians; the time of fusewright's
guards alone; and, for the model, what a call takes beyond the sum of its kernels and library operators (each measured in place by
`Plan.timed`). One thread, so that the figures are about calls and not about waking threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fusewright
from fusewright.backends.registry import Backend, GraphToCompile, resolve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Way = Callable[[], Any]


def medians(ways: dict[str, Way], rounds: int, calls: int) -> dict[str, float]:
    """Microseconds a call of each, measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(20):
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(calls):
                way()
            samples[name].append((time.perf_counter() - started) / calls * 1e6)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def small(rounds: int, torch_compile: bool) -> dict[str, float]:
    """relu(x + y) * 2 on 16 elements."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) * 2

    x, y = torch.randn(16), torch.randn(16)
    compiled = fusewright.compile(f)
    compiled(x, y)
    program, arguments = compiled.entries[0].program, (x, y)
    ways: dict[str, Way] = {"eager": lambda: f(x, y), "fusewright": lambda: compiled(x, y)}
    if torch_compile:
        peer = torch.compile(f)
        ways["torch.compile"] = lambda: peer(x, y)
    ways["guards"] = lambda: program.check(arguments, f)
    ways["nothing"] = lambda: None
    found = medians(ways, rounds, 200)
    nothing = found.pop("nothing")
    return {name: taken - nothing for name, taken in found.items()}


class Watched:
    """The native backend, whose plan and inputs can be looked at."""

    plan: Any = None
    inputs: tuple[Any, ...] = ()

    def compile(self, graph: GraphToCompile) -> Callable[..., Any]:
        self.plan = resolve("native").compile(graph)

        def run(*inputs: Any) -> Any:
            self.inputs = inputs
            return self.plan(*inputs)

        return run

    def computing(self) -> float:
        """Microseconds that the kernels and operators of one call take together."""
        plan, inputs = (
            (self.plan.plan, (*self.inputs, *self.plan.values))
            if hasattr(self.plan, "values")
            else (self.plan, self.inputs)
        )
        return sum(nanoseconds for _, nanoseconds in plan.timed(*inputs)[1]) / 1e3


def model(rounds: int, torch_compile: bool) -> dict[str, float]:
    """BERT with 12 layers of width 128 on one token."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    net = BertModel(BertConfig(hidden_size=128, intermediate_size=512, num_attention_heads=2)).eval()
    arguments = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    compiled, watched = fusewright.compile(net), Watched()
    compiled(**arguments)
    fusewright.compile(net, backend=Backend("watched", "aten", watched.compile, follows_autograd=False, trains=True))(
        **arguments
    )
    ways: dict[str, Way] = {"eager": lambda: net(**arguments), "fusewright": lambda: compiled(**arguments)}
    if torch_compile:
        peer = torch.compile(net)
        ways["torch.compile"] = lambda: peer(**arguments)
    sums: list[float] = []
    calls: list[float] = []
    found = medians(ways, rounds, 3)
    for _ in range(10 * rounds):  # in turn: the model's weights pass through the caches either way
        started = time.perf_counter()
        compiled(**arguments)
        calls.append((time.perf_counter() - started) * 1e6)
        sums.append(watched.computing())
    return {
        **found,
        "kernels": statistics.median(sums),
        "beyond kernels": statistics.median(a - b for a, b in zip(calls, sums)),
    }


def main() -> None:
    from benchmarks.tables import save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-torch-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, measure in (("16 elements", small), ("narrow BERT-12, one token", model)):
            results[name] = found = measure(arguments.rounds, not arguments.no_torch_compile)
            print(f"{name}: " + ", ".join(f"{way} {taken:.2f} us" for way, taken in found.items()))
            peers = [way for way in ("eager", "torch.compile") if way in found]
            print("  " + ", ".join(f"{found['fusewright'] / found[way]:.2f}x of {way}" for way in peers))
    if arguments.json:
        save_rows(arguments.json, [{"program": name, **found} for name, found in results.items()])


if __name__ == "__main__":
    main()
