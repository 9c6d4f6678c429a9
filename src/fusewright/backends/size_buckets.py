"""The option `bucket`: graphs over named sizes are compiled for the size's bucket, where padding is shown to change
nothing.

Takes a captured graph whose sizes carry buckets (ShapeEnv.buckets); gives the graph to compile: for a bucket, with
guards on the range of sizes that it serves, or the graph as it is, with a hint that says why. Always holds: guards on
sizes are added only for what is bucketed.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from fusewright.backends.registry import GraphToCompile
from fusewright.base.events import Hint
from fusewright.graph.builder import env_of
from fusewright.graph.passes.layout.bucket import NotExact, bucketed
from fusewright.sizes.expressions import Relation, Symbol
from fusewright.sizes.shape_env import ShapeEnv


def with_buckets(to_compile: GraphToCompile, graph: torch.fx.Graph) -> torch.fx.Graph:
    """The functional graph, with each size that has buckets padded to the one it belongs in."""
    env: Any = env_of(graph)
    named: dict[Symbol, tuple[Any, tuple[int, ...]]] = {}
    for symbol, buckets in env.buckets.items():
        tied, source = env.simplify(symbol), env.symbols[symbol].source
        if isinstance(tied, Symbol):
            named.setdefault(tied, (source, buckets))
        else:
            why = (
                f"the program fixes that size to {tied}"
                if isinstance(tied, int)
                else f"the program ties that size to others: {tied}"
            )
            to_compile.notify(Hint(to_compile.function, f"{_place(source)} is not put into buckets: {why}"))
    for symbol, (source, buckets) in named.items():
        bucket = next((size for size in buckets if size >= env.hint(symbol)), None)
        if bucket is None:
            continue  # larger than all of them: compiled for any size
        try:
            bucketed(graph, symbol, bucket, _bounded(env.copy(), symbol, buckets, bucket))
        except NotExact as reason:
            text = f"{_place(source)} is not put into buckets, but compiled for any size: {reason}"
            to_compile.notify(Hint(to_compile.function, text))
            continue
        graph = bucketed(graph, symbol, bucket, _bounded(env, symbol, buckets, bucket))
    return graph


def _place(source: Any) -> str:
    return f"dimension {source.dim} of {source.base.text()}"


def _bounded(env: ShapeEnv, symbol: Symbol, buckets: tuple[int, ...], bucket: int) -> ShapeEnv:
    """Guards that the size belongs in this bucket."""
    smaller = max((size for size in buckets if size < bucket), default=0)
    env.guard(Relation("<", smaller, symbol))
    env.guard(Relation("<=", symbol, bucket))
    return env


__all__ = ["with_buckets"]
