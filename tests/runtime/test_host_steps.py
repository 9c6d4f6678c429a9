"""A plan's work in the CPU's memory beside a recording of its work on a GPU: what is in which part, and that both mean what the plan means.

Most run on the machine of test_training_graphs.py; numbers (tensors without dimensions) are what lies in the CPU's memory there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.backends import gpu, graph_cache
from fusewright.base import events
from fusewright.base.records import replace
from fusewright.codegen.call_plan import build_call_plan
from fusewright.codegen.call_plan_types import CallPlan, KernelCall, LaunchCall, SlotSpec, touched_by
from fusewright.codegen.llvm import compile_kernels
from fusewright.codegen.triton import Processor, generate
from fusewright.loops.lower import lower
from fusewright.runtime import launch
from fusewright.runtime.cudagraphs import unsafe_reason
from fusewright.runtime.host_steps import apart, together
from fusewright.runtime.training_graphs import TrainingGraphs
from fusewright.schedule import ScheduleOptions, with_memory
from fusewright.sizes.tensor_type import TensorType
from tests.loops.tracing import record
from tests.runtime import test_training_graphs as machine
from tests.runtime.test_training_graphs import replays

aten = torch.ops.aten
GPU = torch.device("cuda", 0)


def is_number(slot: SlotSpec) -> bool:
    return slot.ndim == 0 and slot.dtype is not torch.int64  # a seed of dropout is drawn on the GPU


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrainingGraphs]]:
    monkeypatch.setattr(graph_cache, "on_host", is_number)
    yield from machine.made.__wrapped__(monkeypatch)  # type: ignore[attr-defined]


# --- plans as for a GPU, made without one -----------------------------------------------------------------------------


def gpus_plan(function: Any, inputs: list[torch.Tensor], module: list[Any]) -> CallPlan:
    """The plan with everything but numbers on a GPU; `module` takes the code of its CPU kernels."""
    graph, constants = record(function, inputs)
    for node in graph.nodes:
        kind = node.meta.get("type")
        if isinstance(kind, TensorType) and kind.shape != ():
            node.meta["type"] = replace(kind, device=GPU)
    plan = with_memory(gpu.scheduled(lower(graph, constants), ScheduleOptions()), None)
    on_cpu, on_gpu = gpu.split(plan)
    compiled = compile_kernels(on_cpu)
    module.append(compiled)
    return build_call_plan(
        plan, {**compiled.codes, **generate(on_gpu, plan.buffers, Processor())}, available=launch.is_available
    )


def drops(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.rand([])
    aten._assert_async.msg(drawn < 2, "a number of chance")
    count.add_(1)
    return torch.softmax(x @ x, -1), count * 2, drawn


def test_the_parts_of_a_gpus_plan() -> None:
    module: list[Any] = []
    plan = gpus_plan(drops, [torch.randn(8, 8), torch.tensor(3.0)], module)
    assert "several devices" in unsafe_reason(plan)
    parts = apart(plan, graph_cache.on_host)
    assert parts is not None
    host, on_gpu = parts
    assert unsafe_reason(on_gpu) == "" and sorted([*host.steps, *on_gpu.steps], key=repr) == sorted(
        plan.steps, key=repr
    )
    assert (host.inputs, on_gpu.inputs) == ("xt", "tx")
    assert any(isinstance(step, LaunchCall) for step in on_gpu.steps)
    assert not any(isinstance(step, LaunchCall) for step in host.steps) and any(
        isinstance(step, KernelCall) for step in host.steps
    )
    for part, device in ((host, "cpu"), (on_gpu, "cuda")):
        slots = {slot for touched in touched_by(part.steps) for slot in touched}
        assert {part.slots[slot].device for slot in slots if not part.slots[slot].is_nobodys} == {device}
    assert [output.kind for output in host.outputs] == ["value", "buffer", "buffer"]
    assert [output.kind for output in on_gpu.outputs] == ["buffer", "value", "value"]
    # The host's part runs here.
    count = torch.tensor(3.0)
    run = launch.load_with_code(host, module[0].object)
    version = count._version
    torch.manual_seed(0)
    results = run(None, count)
    torch.manual_seed(0)
    assert results[0] is None and results[1] == 8 and results[2] == torch.rand([])
    assert count == 4 and count._version == version + 1
    assert together((1, None, None), results) == (1, *results[1:])


def test_what_touches_both_is_in_no_part() -> None:
    plan = gpus_plan(lambda x, factor: x * (factor + 1), [torch.randn(8), torch.tensor(3.0)], [])
    assert apart(plan, graph_cache.on_host) is None and "several devices" in unsafe_reason(plan)


def test_a_list_is_where_its_members_are() -> None:
    def stacked(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        torch._foreach_add_([a, b], 1)
        return torch.relu(x)

    numbers = [torch.tensor(1.0), torch.tensor(2.0)]
    parts = apart(gpus_plan(stacked, [torch.randn(8), *numbers], module := []), graph_cache.on_host)
    assert parts is not None and unsafe_reason(parts[1]) == ""
    launch.load_with_code(parts[0], module[0].object)(None, *numbers)
    assert numbers == [2, 3]


# --- whole models, in training ----------------------------------------------------------------------------------------


class Drops(nn.Module):
    """Leaves each layer out with some probability, and counts its calls; both on the CPU."""

    def __init__(self, probability: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)  # else two kernels, one in each part, would share a parallel region here
        self.probability = probability
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        for layer in self.layers:
            if not torch.rand([]) < self.probability:
                x = torch.nn.functional.dropout(torch.relu(layer(x)), 0.0)
        return self.last(x), self.calls * 0.5


def batches(model: Drops, n: int) -> list[torch.Tensor]:
    """All alive at once: each lies somewhere else, so that none is taken to stay in place."""
    return [machine.batch(k).to(model.last.weight.device) for k in range(n)]


def steps(run: Any, model: Drops, n: int = 30) -> list[Any]:
    """What a loop gives, the numbers that the generator draws after each call, and what is left of the model."""
    found: list[Any] = []
    torch.manual_seed(0)
    for x in batches(model, n):
        y, half = run(x)
        (y * half).square().sum().backward()
        found += [y.detach(), half, torch.rand(()), *copy.deepcopy([value.grad for value in model.parameters()])]
        model.zero_grad()
    return [*found, *model.buffers()]


def forwards(run: Any, model: Drops, n: int = 30) -> list[Any]:
    """The same without gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = [(*run(x), torch.rand(())) for x in batches(model, n)]
    return [*found, *model.buffers()]


@pytest.mark.parametrize("probability", [0.0, 0.05])
def test_a_training_loop(probability: float, made: list[TrainingGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails in the CPU's part leaves nothing behind: neither a count nor a draw."""
    monkeypatch.setattr(fusewright.config, "speculate", True)
    model = Drops(probability)
    eager = copy.deepcopy(model)
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        torch.testing.assert_close(
            steps(machine.compiled(model), model), steps(eager, eager), equal_nan=False, rtol=1e-4, atol=1e-5
        )
    assert any(isinstance(event, events.FellBack) for event in heard) == (probability > 0)
    first = made[0].halves["forward"].loaded
    assert first.host is not None and made[0].halves["backward"].loaded.host is None
    assert not made[0].without and replays(made[0]) == ([1, 1] if probability else [28, 28])
