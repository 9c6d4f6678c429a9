"""CUDA graphs of training, on a machine that stands for a GPU: a recording keeps its tensors and writes to them at each replay.

What the recordings must never do (overwrite what a backward, or the program, still needs) shows in wrong numbers here as it would there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.backends import graph_cache
from fusewright.base import events
from fusewright.base.errors import RuntimeFallback
from fusewright.runtime import training_graphs
from fusewright.runtime.training_graphs import CAPTURING, HOOKED, KEPT, MOVING, PENDING, SHORT, TrainingGraphs

STATE: list[torch.Tensor] = []
"""What a forward writes to in place."""
BATCHES: list[torch.Tensor] = []


class Recording:
    """As on a GPU, the plan that is recorded counts its writes and makes none; a replay makes them, and counts none."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        before = [value.clone() for value in STATE]
        self.results = run()
        for value, old in zip(STATE, before):
            value.data.copy_(old)
        self.replays = 0
        self.poison()

    def floats(self) -> list[torch.Tensor]:
        return [value for value in self.results if isinstance(value, torch.Tensor) and value.is_floating_point()]

    def poison(self) -> None:
        """Recording computes nothing."""
        for value in self.floats():
            value.fill_(float("nan"))

    def replay(self) -> None:
        self.replays += 1
        self.poison()
        with torch.autograd._unsafe_preserve_version_counter(tuple(STATE)):
            results = self.run()
        for kept, value in zip(self.results, results, strict=True):
            if isinstance(kept, torch.Tensor) and kept.data_ptr() != value.data_ptr():
                kept.copy_(value)


class Machine:
    def __init__(self, index: int) -> None:
        self.recordings: list[Recording] = []
        self.busy = False
        self.fails = ""
        self.current = "main"
        self.waits: list[tuple[str, str]] = []

    def capturing(self) -> bool:
        return self.busy

    def memory(self) -> object:
        return object()

    def record(self, memory: object, run: Callable[[], Any]) -> tuple[Recording, Any]:
        if self.fails:
            raise RuntimeError(self.fails)
        made = Recording(run)
        self.recordings.append(made)
        return made, made.results

    def replay(self, recording: Recording) -> None:
        recording.replay()

    def stream(self) -> str:
        return self.current

    def wait(self, stream: str, other: str) -> None:
        self.waits.append((stream, other))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrainingGraphs]]:
    """The pairs that compiles make, on the machine above."""
    found: list[TrainingGraphs] = []

    def listed(*args: Any) -> TrainingGraphs | None:
        pair = original(*args)
        if pair is not None:
            found.append(pair)
        return pair

    original = graph_cache.training_graphs
    monkeypatch.setattr(graph_cache, "training_graphs", listed)
    monkeypatch.setattr(graph_cache, "RECORDED", "cpu")
    monkeypatch.setattr(training_graphs, "Gpu", Machine)
    monkeypatch.setattr(training_graphs, "unsafe_reason", lambda plan, **options: "")
    STATE.clear()
    yield found
    STATE.clear()


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))
    STATE[:] = model.buffers()
    return model


def compiled(model: Any, **options: Any) -> Any:
    return fusewright.compile(model, mode="reduce-overhead", options={"disk_cache": False}, **options)


def batch(k: int, rows: int = 5) -> torch.Tensor:
    """All that were made are kept, so that none lies where another has lain: how often a forward is recorded depends on
    that."""
    BATCHES.append(torch.randn(rows, 6, generator=torch.Generator().manual_seed(k)))
    return BATCHES[-1]


def train(run: Any, model: nn.Module, steps: int = 8) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for k in range(steps):
        loss = (run(batch(k)) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def replays(pair: TrainingGraphs) -> list[int]:
    return [recording.replays for recording in pair.machine.recordings]  # type: ignore[attr-defined]


def test_a_training_loop(made: list[TrainingGraphs]) -> None:
    model = network()
    eager = copy.deepcopy(model)
    torch.testing.assert_close(train(compiled(model, fullgraph=True), model), train(eager, eager))
    (pair,) = made
    assert (
        replays(pair) == [6, 6] and not pair.without
    )  # two calls warm up; then each forward and each backward is a replay


def both(program: Callable[[Any, nn.Module], Any], warm: bool = True) -> None:
    """The program gives with a recorded model what it gives eagerly."""
    model = network()
    eager = copy.deepcopy(model)
    results = []
    for net, run in ((model, compiled(model, fullgraph=True)), (eager, eager)):
        train(run, net, 4)
        results.append(program(run, net))
        net.zero_grad()
    torch.testing.assert_close(*results)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [value.grad.clone() for value in model.parameters()]  # type: ignore[union-attr]


def test_two_forwards_before_their_backwards(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        first, second, third = (run(batch(k)) for k in range(3))
        second.square().sum().backward()
        (first.exp().sum() + third.sin().sum()).backward()
        return first, second, third, gradients(model)

    both(program)
    assert made[0].without == {PENDING: 2}


def test_a_kept_graph(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        y = run(batch(0))
        for factor in (1, 2, 3):
            (y.square().sum() * factor).backward(retain_graph=True)
        other = run(batch(1))  # the first one may still be asked for gradients
        other.sum().sin().backward()
        y.square().sum().backward()
        return gradients(model)

    both(program)
    assert made[0].without == {PENDING: 1, KEPT: 1}


def test_results_and_gradients_are_the_programs_own(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        kept = []
        for k in range(4):
            y = run(batch(k))
            kept.append((y.detach(), torch.autograd.grad(y.square().sum(), list(model.parameters()))))
        return kept

    both(program)
    assert made[0].without == {KEPT: 1}


def test_gradients_accumulate(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        for k in range(3):
            run(batch(k)).square().sum().backward()
        return gradients(model)

    both(program)
    assert made[0].without == {KEPT: 1}


def test_gradients_are_lent_while_the_program_keeps_none(made: list[TrainingGraphs]) -> None:
    model = network()
    run = compiled(model, fullgraph=True)
    train(run, model, 4)
    places = []
    for k in range(3):
        run(batch(k)).square().sum().backward()
        places.append([value.grad.data_ptr() for value in model.parameters()])  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad()
    assert places[0] == places[1] == places[2] and not made[0].without


@pytest.mark.parametrize("kept", ["gradient", "a view", "its storage"])
def test_kept_gradients_are_never_overwritten(made: list[TrainingGraphs], kept: str) -> None:
    def keep(value: torch.Tensor) -> Any:
        return {"gradient": value, "a view": value[0].view(-1), "its storage": value.detach().numpy()}[kept]

    def program(run: Any, model: nn.Module) -> Any:
        found = []
        for k in range(4):
            run(batch(k)).square().sum().backward()
            found.append(keep(model[0].weight.grad))  # type: ignore[arg-type]
            model.zero_grad()
        return [torch.as_tensor(value).clone() for value in found]

    both(program)
    assert made[0].without == {KEPT: 1}


def test_a_forward_whose_backward_never_comes(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        idle = run(batch(0))
        y = run(batch(1))
        y.square().sum().backward()
        del idle
        z = run(batch(2))
        z.square().sum().backward()
        return y, z, gradients(model)

    both(program)
    assert made[0].without == {PENDING: 1}


def test_gradients_of_gradients(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        y = run(batch(0))
        first = torch.autograd.grad(y.square().sum(), list(model.parameters()), create_graph=True)
        sum(value.square().sum() for value in first).backward()  # type: ignore[union-attr]
        return gradients(model)

    both(program)


def test_gradients_of_gradients_of_what_the_forward_writes_to(made: list[TrainingGraphs]) -> None:
    """What it held before lies in the recording's memory, which no other forward takes meanwhile."""
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3), n_power_iterations=2)
    start, found = copy.deepcopy(model.state_dict()), []
    for run in (model, compiled(model)):
        model.load_state_dict(start)
        model.zero_grad()
        STATE[:] = list(model.buffers())
        for k in range(6):
            x = batch(k).requires_grad_()
            first, second = run(x), run(batch(k + 1).requires_grad_())
            (once,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
            (once.square().sum() + first.sum() + second.sum()).backward()
        found.append([*gradients(model), *(one.clone() for one in model.buffers())])
    torch.testing.assert_close(found[1], found[0])
    assert made[0].recordings and made[0].without[PENDING]


def test_saved_tensors_that_hooks_replace(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            y = run(batch(0))
        y.square().sum().backward()
        return gradients(model)

    both(program)
    assert made[0].without == {HOOKED: 1}


def test_statistics_that_move_are_not_written_elsewhere(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        for k in range(3):
            model[1].running_mean = model[1].running_mean.clone()
            if run is not model:
                STATE[:] = model.buffers()
            run(batch(k)).square().sum().backward()
        return list(model.buffers())

    both(program)
    assert "stay in place" in made[0].reason


class Written(nn.Module):
    """Buffers that are written to once, twice, in parts, and through `data`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        for name in ("once", "twice", "parts", "through_data", "filled"):
            self.register_buffer(name, torch.zeros(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        self.once += mean
        self.twice.mul_(0.9).add_(mean, alpha=0.1)
        self.parts[0].copy_(mean)
        self.parts[1].add_(1)
        self.through_data.data.add_(mean)
        torch._foreach_add_([self.filled, self.filled], 1.0)
        return self.norm(self.norm(x)) * self.once[0]


def test_writes_are_counted_as_eagers(made: list[TrainingGraphs]) -> None:
    """At each call: warm, recorded, replayed, and in evaluation. Of a batch norm's buffers, that is the number of batches alone."""
    grown: list[Any] = []
    for compile_it in (True, False):
        model = Written()
        STATE[:] = model.buffers()
        run = compiled(model) if compile_it else model
        for call in range(7):
            model.train(call < 6)
            before = {name: one._version for name, one in model.named_buffers()}
            train(run, model, 1)
            grown.append({name: one._version - before[name] for name, one in model.named_buffers()})
    assert grown[:7] == grown[7:]
    assert any(count > 2 for pair in made for count in replays(pair))


def test_parameters_that_move(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        found = []
        for k in range(9):
            model[0].weight.data = model[0].weight.data.clone() + 0.1
            run(batch(k)).square().sum().backward()
            found.append(gradients(model))
        return found

    both(program)
    assert set(made[0].without) <= {MOVING, KEPT}


def test_a_result_written_to_before_the_backward(made: list[TrainingGraphs]) -> None:
    model = network()
    run = compiled(model)
    train(run, model, 4)
    y = run(batch(0))  # softmax's gradient reads its result
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()
    train(run, model, 2)


def test_sizes_have_recordings_of_their_own(made: list[TrainingGraphs]) -> None:
    model = network()
    eager = copy.deepcopy(model)
    run = compiled(model, dynamic=True, fullgraph=True)
    for k in range(6):
        found = []
        for net, call in ((model, run), (eager, eager)):
            small, large = call(batch(k, 5)), call(batch(k, 7))
            (small.exp().sum() + large.square().sum()).backward()
            found.append((small, large, gradients(net)))
            net.zero_grad()
        torch.testing.assert_close(*found)
    (pair,) = made
    assert replays(pair) == [4, 4, 4, 4] and not pair.without


def test_dropout_draws_anew_at_each_replay(made: list[TrainingGraphs]) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    x = torch.ones(4, 64, requires_grad=True)
    nn.init.eye_(layer[0].weight)
    masks = {}
    for mode in ("reduce-overhead", "default"):
        run = fusewright.compile(layer, mode=mode, options={"disk_cache": False}, fullgraph=True)
        torch.manual_seed(7)
        masks[mode] = []
        for _ in range(6):
            y = run(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(gradient, y)  # forward and backward see the same mask: 0 or 2
            masks[mode].append(y.detach())
    assert all(torch.equal(a, b) for a, b in zip(*masks.values()))  # the seeds are those of the default mode
    assert not any(torch.equal(a, b) for a, b in zip(masks["default"], masks["default"][1:]))
    assert replays(made[0]) == [4, 1, 2] and made[0].without == {KEPT: 1}


def test_what_cannot_be_recorded_runs_the_plans(made: list[TrainingGraphs]) -> None:
    heard: list[events.Event] = []
    model = network()
    eager = copy.deepcopy(model)
    run = compiled(model)
    with events.STREAM.listening(heard.append):
        train(run, model, 1)
        made[0].machine.fails = "no such thing here"  # type: ignore[attr-defined]
        train(run, model, 5)
    train(eager, eager, 1)
    train(eager, eager, 5)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert "no such thing" in made[0].reason
    assert any(isinstance(event, events.Hint) and "no such thing" in event.text for event in heard)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_memory_that_is_short_is_no_reason_for_ever(half: str, made: list[TrainingGraphs]) -> None:
    """Where a half finds none, all that was recorded is given back, and both are recorded later."""
    model = network()
    eager = copy.deepcopy(model)
    run = compiled(model)
    train(run, model, 1)
    (pair,) = made
    machine, asked = pair.machine, []
    record = machine.record

    def short(*given: Any) -> Any:
        asked.append(len(machine.recordings))  # type: ignore[attr-defined]
        if len(asked) == 1 + (half == "backward"):
            raise RuntimeFallback("allocating temporary memory: CUDA out of memory. Tried to allocate 2 GiB")
        return record(*given)

    machine.record = short  # type: ignore[method-assign]
    train(run, model, 9)
    train(eager, eager, 1)
    train(eager, eager, 9)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert not pair.reason and pair.without == {SHORT: 1}
    assert len(asked) == 3 + (half == "backward") and all(replays(pair)[-2:])


def test_inside_a_recording_of_the_programs_own(made: list[TrainingGraphs]) -> None:
    def program(run: Any, model: nn.Module) -> Any:
        if made and run is not model:
            made[0].machine.busy = True  # type: ignore[attr-defined]
        run(batch(0)).square().sum().backward()
        return gradients(model)

    both(program)
    assert made[0].without == {CAPTURING: 1}


def test_another_stream_waits(made: list[TrainingGraphs]) -> None:
    model = network()
    run = compiled(model)
    train(run, model, 4)
    machine: Any = made[0].machine
    machine.current = "side"
    train(run, model, 2)
    assert machine.waits == [("side", "main")]
