"""States of the generators that a graph draws from. A second generator stands for a GPU's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

import fusewright
from fusewright.graph import generators
from fusewright.operators.host_draws import HOST_DRAW, MODULES
from fusewright.sizes.tensor_type import TensorType

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """What stands for the GPU's generator."""
    made = torch.Generator().manual_seed(3)
    original = generators.generator_of
    monkeypatch.setattr(generators, "generator_of", lambda device: made if device.type == "cuda" else original(device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_where_a_graph_draws() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["type"] = TensorType((2,), (1,), torch.float32, GPU, False, 0)
    assert generators.drawing_devices(graph) == ()
    drawn = graph.call_function(torch.ops.aten.native_dropout.default, (x, 0.5, True))
    drawn.meta = {"type": (x.meta["type"], 3), "random": True}
    assert generators.drawing_devices(graph) == (CPU, GPU)


def test_each_generator_gets_its_own_state_back(gpu: torch.Generator) -> None:
    states = generators.states_of((CPU, GPU))
    assert states is not None
    first = torch.rand(3), torch.rand(3, generator=gpu)
    now = torch.get_rng_state(), gpu.get_state()
    with states.again():
        assert torch.equal(torch.rand(3), first[0]) and torch.equal(torch.rand(3, generator=gpu), first[1])
    assert torch.equal(torch.get_rng_state(), now[0]) and torch.equal(gpu.get_state(), now[1])


def test_nothing_is_kept_while_a_graph_is_recorded(gpu: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert generators.states_of((CPU, GPU)) is None and generators.states_of((CPU,)) is not None


def test_gradients_of_gradients_ask_the_generators_of_the_graphs_devices(
    gpu: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the graph's dropout drew on a GPU: the stand-in's state is that of the forward while the operators run again."""
    monkeypatch.setattr("fusewright.backends.joint.drawing_devices", lambda graph: (CPU, GPU))
    seen: list[torch.Tensor] = []
    torch.manual_seed(0)
    run = fusewright.compile(lambda x: F.dropout(x * x * x, 0.5), fullgraph=True)
    x = torch.randn(100, requires_grad=True)
    y = run(x)
    kept = (y != 0).float() * 2
    before = gpu.get_state()
    torch.rand(2), torch.rand(2, generator=gpu)
    after = gpu.get_state()
    original = generators.States.restore
    monkeypatch.setattr(generators.States, "restore", lambda self: (original(self), seen.append(gpu.get_state()))[0])
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert [torch.equal(state, expected) for state, expected in zip(seen, (before, after), strict=True)] == [True, True]
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * x * x * kept)
    torch.testing.assert_close(second, 6 * x * kept)


def test_modules_are_asked_where_a_graph_draws_from_them() -> None:
    """To ask them takes longer than a small graph."""
    graph = Graph()
    drawn = graph.call_function(HOST_DRAW, ("random.random", [], None))
    drawn.meta = {"type": TensorType((), (), torch.float64, CPU, False, 0), "random": True}
    places = generators.drawing_devices(graph)
    assert places == (CPU, MODULES)
    states, without = generators.states_of(places), generators.states_of((CPU,))
    assert states is not None and without is not None and not without.hosts
    first = random.random(), np.random.rand()
    with states.again():
        assert (random.random(), np.random.rand()) == first
