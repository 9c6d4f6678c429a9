"""What a graph break costs when compiled code runs: the same function with 0, 1 and 10 breaks, and a loop with one in its body.

    python benchmarks/breaks.py [--rounds 200] [--no-torch-compile]

Prints microseconds a call for eager, fusewright and torch.compile, and the difference that one break makes. The three are measured in turn,
many short rounds each; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fusewright

CALLS = 50  # of one function in a round


def with_breaks(count: int, compile: Callable[[Any], Any], graph_break: Callable[[], None]) -> Any:
    """y = x + 1, then `count` times: a break and y * 2. A break adds one operator's launch too, so eager is shown beside it."""
    body = "".join("    graph_break()\n    y = y * 2\n" for _ in range(count))
    scope: dict[str, Any] = {"graph_break": graph_break}
    exec(compile_source(f"def f(x):\n    y = x + 1\n{body}    return y\n", count), scope)
    return compile(scope["f"])


def compile_source(source: str, count: int) -> Any:
    return compile(source, f"<{count} breaks>", "exec")


def loop(compile: Callable[[Any], Any], graph_break: Callable[[], None]) -> Any:
    """Ten iterations with a break in each."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        for _ in range(10):
            y = y * 2
            graph_break()
        return y

    return compile(f)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-torch-compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, tuple[Callable[[Any], Any], Callable[[], None]]] = {
        "eager": (lambda f: f, lambda: None),
        "fusewright": (fusewright.compile, fusewright.graph_break),
    }
    if not arguments.no_torch_compile:
        torch._dynamo.config.cache_size_limit = 64
        ways["torch.compile"] = (torch.compile, torch._dynamo.graph_break)
    functions: dict[tuple[str, str], Any] = {}
    for way, (compiler, graph_break) in ways.items():
        for count in (0, 1, 10):
            functions[way, str(count)] = with_breaks(count, compiler, graph_break)
        functions[way, "loop"] = loop(compiler, graph_break)
    x = torch.ones(16)
    for function in functions.values():
        for _ in range(5):
            function(x)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in functions}
    for _ in range(arguments.rounds):
        for key, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function(x)
            times[key].append((time.perf_counter() - start) / CALLS * 1e6)
    median = {key: statistics.median(values) for key, values in times.items()}
    print(
        f"{'':14s} {'no break':>9s} {'1 break':>9s} {'10 breaks':>10s} {'a break':>9s} {'loop of 10':>11s} {'a turn':>8s}   (us)"
    )
    for way in ways:
        none, one, ten, turns = (median[way, case] for case in ("0", "1", "10", "loop"))
        print(
            f"{way:14s} {none:9.2f} {one:9.2f} {ten:10.2f} {(ten - none) / 10:9.2f} {turns:11.2f} {(turns - none) / 10:8.2f}"
        )


if __name__ == "__main__":
    main()
