"""Training replayed from CUDA graphs on a real GPU: loops, accumulation, kept graphs, dropout, statistics, mixed precision, streams, memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.backends import graph_cache
from fusewright.base import events
from fusewright.runtime.training_graphs import KEPT, PENDING, TrainingGraphs
from tests.gpu.test_gpu import Block, quiet
from tests.runtime.test_host_steps import Drops, forwards, steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Program = Callable[[Any, nn.Module], Any]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrainingGraphs]]:
    """The pairs of recordings that compiles make."""
    found: list[TrainingGraphs] = []
    original = graph_cache.training_graphs

    def listed(*args: Any) -> TrainingGraphs | None:
        pair = original(*args)
        if pair is not None:
            found.append(pair)
        return pair

    monkeypatch.setattr(graph_cache, "training_graphs", listed)
    yield found


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )  # fmt: skip


def batch(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k)).cuda()


def train(run: Any, model: nn.Module, steps: int, shape: tuple[int, ...], first: int = 0) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for k in range(first, first + steps):
        loss = run(batch(k, *shape)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def both(model: nn.Module, program: Program) -> None:
    """The program gives with a recorded model what it gives eagerly, and no call is repeated."""
    model = model.cuda()
    eager = copy.deepcopy(model)
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        found = program(fusewright.compile(model, mode="reduce-overhead", fullgraph=True), model)
    torch.testing.assert_close(found, program(eager, eager), rtol=1e-3, atol=1e-4)
    quiet(heard)


def recorded(pair: TrainingGraphs) -> bool:
    return not pair.reason and all(one.graph is not None and one.back is not None for one in pair.recordings.values())


@pytest.mark.parametrize("name", ["block", "convolutions"])
def test_a_loop(name: str, made: list[TrainingGraphs]) -> None:
    torch.manual_seed(0)
    model, shape = (Block(), (2, 16, 64)) if name == "block" else (convolutions(), (4, 3, 8, 8))
    both(model, lambda run, model: [*train(run, model, 10, shape), *model.state_dict().values()])
    assert [recorded(pair) for pair in made] == [True] and not made[0].without


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [value.grad.clone() for value in model.parameters()]  # type: ignore[union-attr]


def test_two_forwards_a_kept_graph_and_accumulation(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        train(run, model, 4, (2, 16, 64))
        first, second = run(batch(0, 2, 16, 64)), run(batch(1, 2, 16, 64))
        (first.sin().mean() + second.square().mean()).backward()
        found = [first, second, *gradients(model)]
        third = run(batch(2, 2, 16, 64))
        third.square().mean().backward(retain_graph=True)
        third.sin().mean().backward()
        kept = torch.autograd.grad(run(batch(3, 2, 16, 64)).square().mean(), list(model.parameters()))
        for k in (4, 5):
            run(batch(k, 2, 16, 64)).square().mean().backward()
        return [*found, *kept, third, *gradients(model)]

    torch.manual_seed(0)
    both(Block(), program)
    assert recorded(made[0]) and made[0].without == {PENDING: 1, KEPT: 1}


def test_other_recordings_run_between_forward_and_backward(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        other = torch.nn.functional.softmax
        scale = (
            fusewright.compile(lambda x: other(x * 3, -1) @ x.mT, mode="reduce-overhead") if run is not model else None
        )
        found = []
        for k in range(6):
            y = run(batch(k, 2, 16, 64))
            with torch.no_grad():
                x = batch(k + 100, 2, 16, 64)
                found.append(scale(x) if scale is not None else other(x * 3, -1) @ x.mT)
            y.square().mean().backward()
        return [*found, *gradients(model)]

    torch.manual_seed(0)
    both(Block(), program)
    assert recorded(made[0])


def test_dropout(made: list[TrainingGraphs]) -> None:
    torch.manual_seed(0)
    model = Block(dropout=0.3).cuda()
    results = []
    for mode in ("reduce-overhead", "default"):
        net = copy.deepcopy(model)
        run = fusewright.compile(net, mode=mode, fullgraph=True)
        torch.manual_seed(5)
        x = batch(0, 2, 16, 64)
        seen = []
        for _ in range(6):
            y = run(x)
            y.square().mean().backward()
            seen.append(y.detach())
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))
        results.append([*seen, *gradients(net)])
    torch.testing.assert_close(*results)
    assert recorded(made[0])


def test_autocast_and_a_scaler(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        losses = []
        for k in range(8):
            with torch.autocast("cuda", torch.float16):
                loss = run(batch(k, 2, 16, 64)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(0)
    model = Block().cuda()
    eager = copy.deepcopy(model)
    found = program(fusewright.compile(model, mode="reduce-overhead"), model)
    torch.testing.assert_close(found, program(eager, eager), rtol=2e-2, atol=2e-2)
    assert any(recorded(pair) for pair in made)


def test_a_side_stream(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        losses = train(run, model, 4, (2, 16, 64))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses += train(run, model, 4, (2, 16, 64), 4)
        torch.cuda.current_stream().wait_stream(stream)
        return [*losses, *train(run, model, 2, (2, 16, 64), 8)]

    torch.manual_seed(0)
    both(Block(), program)
    assert recorded(made[0])


def test_memory_does_not_grow(made: list[TrainingGraphs]) -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    run = fusewright.compile(model, mode="reduce-overhead")
    train(run, model, 5, (2, 16, 64))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(run, model, 20, (2, 16, 64))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert recorded(made[0])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_of_gradients_see_the_same_masks(mode: str) -> None:
    """The recorded operators run again draw from the GPU's generator what the forward drew, and leave it as it was."""
    torch.manual_seed(0)
    run = fusewright.compile(lambda x: F.dropout(x * x * x, 0.5), mode=mode, fullgraph=True)
    x = torch.randn(1000, device="cuda", requires_grad=True)
    for _ in range(5):
        y = run(x)
        kept = (y != 0).float() * 2
        torch.rand(3, device="cuda")  # the program draws meanwhile
        state = torch.cuda.get_rng_state()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.testing.assert_close(first, 3 * x * x * kept)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 6 * x * kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_halves_are_added(dtype: torch.dtype) -> None:
    """Gradients of reads at indices: sums in float32, whatever the order."""
    index = torch.randint(0, 50, (4096,), device="cuda")
    columns = torch.randint(0, 64, (50, 300), device="cuda")
    weight = torch.randn(50, 64, device="cuda", dtype=dtype)

    def reads(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.embedding(index, w, padding_idx=3), w.index_select(0, index), w[index], w.gather(1, columns)

    def gradient(function: Any, w: torch.Tensor) -> torch.Tensor:
        leaf = w.detach().requires_grad_()
        torch.manual_seed(1)
        made = function(leaf)
        return torch.autograd.grad(made, leaf, [torch.randn_like(one.float()).to(dtype).to(one.dtype) for one in made])[0]

    found, wanted = gradient(fusewright.compile(reads, fullgraph=True), weight), gradient(reads, weight.double())
    eagers = gradient(reads, weight)
    error, usual = ((one.double() - wanted).norm() / wanted.norm() for one in (found, eagers))
    assert error <= 1.2 * usual


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.05])
def test_work_on_the_cpu_beside_a_recording(
    probability: float, training: bool, made: list[TrainingGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random decisions and a counter in the CPU's memory run at each call; the rest is recorded."""
    monkeypatch.setattr(fusewright.config, "speculate", True)
    model = Drops(probability).cuda()
    model.calls = model.calls.cpu()
    eager = copy.deepcopy(model)
    heard: list[events.Event] = []
    program = steps if training else forwards
    with events.STREAM.listening(heard.append):
        found = program(fusewright.compile(model, mode="reduce-overhead"), model)
    torch.testing.assert_close(found, program(eager, eager), rtol=1e-3, atol=1e-4)
    assert any(isinstance(event, events.FellBack) for event in heard) == (probability > 0)
    if not probability:
        assert not [event.text for event in heard if isinstance(event, events.Hint) and "CUDA graph" in event.text]
        assert [recorded(pair) for pair in made] == [True] * training
