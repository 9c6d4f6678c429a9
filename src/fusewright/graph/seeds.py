"""Seeds of a graph's random truths, drawn before the graph runs instead of inside it: so that a recording of the graph
holds no draw.

Takes a functional graph; gives a copy of it that takes its seeds as further inputs, and how to draw them.
Always holds: the same numbers come from PyTorch's generator, in the same order (but for those of fused attention, whose
draws a recording may hold: they come after all seeds). A graph that draws anything else there stays as it is; what
other kinds of devices draw stays inside.
"""

from __future__ import annotations

from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.graph.generators import devices_of
from fusewright.sizes.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Seed:
    """One int64 between `low` and `high`, on a device."""

    low: int
    high: int
    device: torch.device

    def draw(self) -> torch.Tensor:
        return torch.randint(self.low, self.high, (), dtype=torch.int64, device=self.device)


def seeds_outside(graph: torch.fx.Graph, device: str) -> tuple[torch.fx.Graph, tuple[Seed, ...]]:
    """The graph with its seeds as last inputs, and the seeds in that order; the graph itself unless seeds on GPUs (or
    whatever kind `device` is) are all that it draws."""
    drawn = [node for node in graph.nodes if _draws_on(node, device) and not replays_draws(node.target)]
    seeds = [seed for node in drawn if (seed := _seed(node)) is not None]
    if not drawn or len(seeds) != len(drawn):
        return graph, ()
    made = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.find_nodes(op="placeholder"):
        values[node] = _copy(node, made, values)
    for node in drawn:
        values[node] = made.placeholder(f"seed_{node.name}")
        values[node].meta = {key: value for key, value in node.meta.items() if key != "random"}
    for node in graph.nodes:
        if node not in values:
            values[node] = _copy(node, made, values)
    made.lint()
    return made, tuple(seeds)


def _draws_on(node: torch.fx.Node, device: str) -> bool:
    """Whether the node draws, and not for other kinds of devices alone."""
    kinds = {one.type for one in devices_of(node.meta.get("type"))}
    return bool(node.meta.get("random")) and (not kinds or device in kinds)


def replays_draws(target: Any) -> bool:
    """Whether a recorded CUDA graph of the operator draws anew at each replay: fused attention takes its place in the
    generator's sequence from memory, which PyTorch moves on before a replay."""
    return isinstance(target, torch._ops.OpOverload) and "attention" in target._schema.name


def _copy(node: torch.fx.Node, graph: torch.fx.Graph, values: dict[torch.fx.Node, Any]) -> torch.fx.Node:
    made = graph.node_copy(node, lambda argument: values[argument])
    made.meta = dict(node.meta)
    return made


def _seed(node: torch.fx.Node) -> Seed | None:
    """What the node draws, if it is a seed."""
    kind = node.meta.get("type")
    if node.target is not torch.ops.aten.randint.low or not isinstance(kind, TensorType):
        return None
    low, high, _ = node.args
    known = isinstance(low, int) and isinstance(high, int) and kind.shape == () and kind.dtype is torch.int64
    return Seed(low, high, kind.device) if known else None  # type: ignore[arg-type]
