"""A backward cut into parts computes what the whole computes, each node once; buckets follow the order in which gradients are ready."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.fx

import fusewright
from fusewright.autograd.buckets import CompiledPart, Progress, buckets, chain, parts_of
from fusewright.backends import joint
from fusewright.sizes.tensor_type import TensorType, contiguous_strides


def kind(*shape: int) -> TensorType:
    return TensorType(shape, contiguous_strides(shape), torch.float32, torch.device("cpu"), False, 0)


def both(a: Any, b: Any) -> tuple[Any, Any]:
    return a + b, a * b


def random_graph(seed: int) -> tuple[torch.fx.Graph, int]:
    """A graph of additions, products and pairs of both over a few placeholders, with a handful of outputs (some of them
    intermediate, one twice)."""
    choose = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"p{index}") for index in range(4)]
    for _ in range(20):
        if choose.random() < 0.2:
            pair = graph.call_function(both, (choose.choice(nodes), choose.choice(nodes[-6:])))
            pair.meta["type"] = (kind(3), kind(3))
            nodes += (graph.call_function(operator.getitem, (pair, index)) for index in (0, 1))
            continue
        nodes.append(
            graph.call_function(
                choose.choice((operator.add, operator.mul, operator.sub)),
                (choose.choice(nodes), choose.choice(nodes[-6:])),
            )
        )
    for node in nodes:
        node.meta["type"] = kind(3)
    results = choose.sample(nodes[4:], 6)
    graph.output((*results, results[0], None))
    return graph, 7


def run(graph: torch.fx.Graph, values: list[Any]) -> tuple[Any, ...]:
    return torch.fx.GraphModule(torch.nn.Module(), graph)(*values)


@pytest.mark.parametrize("seed", range(20))
def test_parts_compute_what_the_whole_computes(seed: int) -> None:
    graph, outputs = random_graph(seed)
    values: list[Any] = [torch.randn(3, dtype=torch.float64) for _ in range(4)]
    expected = run(graph, values)
    groups = buckets(graph, 30, 12)
    assert sorted(position for group in groups for position in group) == list(range(outputs))
    parts = parts_of(graph, groups)
    assert len(parts) > 1
    found: dict[int, Any] = {}
    calls = 0
    for part in parts:
        results = run(part.graph, [values[number] for number in part.reads])
        found.update(zip(part.gradients, results))
        values += results[len(part.gradients) :]
        assert not any(isinstance(value, tuple) for value in results), "only tensors are handed on"
        calls += sum(node.op == "call_function" for node in part.graph.nodes)
    assert all(torch.equal(found[position], expected[position]) for position in range(outputs))
    needed = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    needed.output(needed.graph_copy(graph, copied))  # type: ignore[arg-type]
    needed.eliminate_dead_code()
    assert calls == sum(node.op == "call_function" for node in needed.nodes), "nothing is computed twice"


def test_the_first_bucket_is_small_and_the_order_is_that_of_readiness() -> None:
    graph = torch.fx.Graph()
    start = graph.placeholder("start")
    start.meta["type"] = kind(8)
    nodes = []
    last = start
    for _ in range(6):
        last = graph.call_function(operator.add, (last, start))
        last.meta["type"] = kind(8)
        nodes.append(last)
    graph.output(tuple(reversed(nodes)))
    assert buckets(graph, 64, 32) == [[5], [4, 3], [2, 1], [0]]


def test_the_parts_are_tied_together_where_their_gradients_are() -> None:
    """PyTorch's engine has a thread for each device: a token elsewhere would let a part begin before the gradients of
    the one before are accumulated."""
    x = torch.ones(2, device="meta", requires_grad=True)
    ran: list[int] = []
    parts = tuple(
        CompiledPart(lambda at=at: (ran.append(at), (torch.ones(2, device="meta"),))[1], (), (at,)) for at in range(3)
    )
    progress = Progress(parts, x.device, wanted=(True,) * 3)
    token = chain(progress, [[x]] * 3)
    assert token.device == x.device
    token.backward(torch.empty(0, device="meta"))
    assert ran == [1, 2]
    assert x.grad is not None


def test_what_only_a_missing_gradient_leads_to_adds_nothing_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero times infinity is no number: eager never multiplies what nothing depends on."""
    made: list[Any] = []
    monkeypatch.setattr(joint, "bucket_bytes", lambda: (4, 4))
    monkeypatch.setattr(joint, "parts_of", lambda *given: made.extend(parts_of(*given)) or made)

    def program(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = x.exp() - 1
        return (both * a).sin(), (both * b).log()

    def found(run: Any) -> list[torch.Tensor | None]:
        held = [torch.tensor([0.0, 1.0, 2.0], requires_grad=True) for _ in range(3)]
        run(*held)[0].sum().backward()
        return [one.grad for one in held]

    ours = found(fusewright.compile(program))
    assert len(made) > 1
    for mine, theirs in zip(ours, found(program)):
        assert (mine is None) is (theirs is None)
        assert theirs is None or torch.equal(mine, theirs)
