"""Which draws leave a graph before it is recorded."""

from __future__ import annotations

import torch
import torch.fx

from fusewright.graph.seeds import seeds_outside
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def graph_with(*targets: object) -> torch.fx.Graph:
    """A seed on a GPU, then nodes of the targets that draw too."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    seed = graph.call_function(aten.randint.low, (0, 2**31, []), {"device": CUDA})
    seed.meta = {"random": True, "type": TensorType((), (), torch.int64, CUDA, False, 0)}
    others = [graph.call_function(target, (x, x, x)) for target in targets]
    for node in others:
        node.meta = {"random": True}
    graph.output((seed, *others))
    return graph


def test_seeds_become_inputs() -> None:
    made, seeds = seeds_outside(graph_with(), "cuda")
    assert [node.op for node in made.nodes] == ["placeholder", "placeholder", "output"]
    assert [(seed.low, seed.high, seed.device) for seed in seeds] == [(0, 2**31, CUDA)]


def test_attention_draws_inside() -> None:
    """Every call of fused attention counts as a draw, with or without dropout."""
    made, seeds = seeds_outside(graph_with(aten._scaled_dot_product_flash_attention.default), "cuda")
    assert len(seeds) == 1 and [node.op for node in made.nodes] == [
        "placeholder",
        "placeholder",
        "call_function",
        "output",
    ]


def test_draws_on_the_cpu_stay_inside() -> None:
    graph = graph_with(aten.rand.default)
    drawn = next(node for node in graph.nodes if node.target is aten.rand.default)
    drawn.meta["type"] = TensorType((), (), torch.float32, torch.device("cpu"), False, 0)
    made, seeds = seeds_outside(graph, "cuda")
    assert len(seeds) == 1 and [node.target for node in made.nodes if node.op == "call_function"] == [aten.rand.default]
    assert seeds_outside(graph, "cpu") == (graph, ())


def test_another_draw_keeps_all_inside() -> None:
    graph = graph_with(aten.bernoulli.p)
    assert seeds_outside(graph, "cuda") == (graph, ())
