"""Neighbouring kernels that do not depend on one another run in one parallel region; others never do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, StageDone
from fusewright.schedule.horizontal_fusion import regions
from fusewright.schedule.plan import RunKernel
from fusewright.schedule.verify import PlanError, verify
from tests.schedule import programs as p
from tests.schedule.programs import Builder
from tests.schedule.reference import schedule


def independent(count: int) -> tuple[Builder, list]:  # type: ignore[type-arg]
    b = Builder()
    return b, [b.pointwise(f"add_{k}", lambda v: p.add(v, 1.0), b.input(7 + k, 3)) for k in range(count)]


def test_independent_kernels_share_a_region() -> None:
    b, results = independent(5)
    plan = schedule(b.done(*results))
    verify(plan)
    assert [isinstance(step, RunKernel) and step.horizontal for step in plan.steps] == [
        False,
        *[True] * (len(plan.steps) - 1),
    ]
    assert len(plan.steps) > 1 and set(regions(plan.steps)) == {0}


def test_a_kernel_never_joins_what_it_reads() -> None:
    b = Builder()
    x = b.input(64, 32)
    total = b.pointwise("add", p.add, x, p.softmax(b, x))
    other = b.extern("sigmoid", torch.ops.aten.sigmoid.default, total, shape=(64, 32))
    plan = schedule(b.done(b.pointwise("twice", p.add, other, other)))
    verify(plan)
    assert not any(isinstance(step, RunKernel) and step.horizontal for step in plan.steps)


def test_the_verifier_refuses_dependent_kernels_in_one_region() -> None:
    b = Builder()
    x = b.input(64, 32)
    middle = b.extern("sigmoid", torch.ops.aten.sigmoid.default, b.pointwise("add", p.add, x, x), shape=(64, 32))
    plan = schedule(b.done(b.pointwise("again", p.add, middle, middle)))
    kernels = [step for step in plan.steps if isinstance(step, RunKernel)]
    plan.steps = (*(step for step in plan.steps if step is not kernels[-1]), replace(kernels[-1], horizontal=True))
    with pytest.raises(PlanError, match="same time"):
        verify(plan)


def test_kernels_of_many_sizes_give_the_same_numbers_in_one_region() -> None:
    sizes = [1, 2, 3, 5, 17, 64, 100, 4097, 70_001, 0, 300_000, 9]
    texts: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, StageDone) and event.stage == "call_plan":
            texts.append(event.text())

    def update(values: list[torch.Tensor]) -> None:
        for value in values:
            value.mul_(2.0).add_(1.0)

    values = [torch.randn(size) for size in sizes]
    expected = [value * 2.0 + 1.0 for value in values]
    with STREAM.listening(listen):
        fusewright.compile(update)(values)
    assert all(torch.allclose(value, wanted) for value, wanted in zip(values, expected))
    assert any("parallel  " in text for text in texts)


def test_an_index_out_of_range_in_a_region_is_an_error_as_in_eager() -> None:
    def pick(table: torch.Tensor, rows: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table[rows] + 1, other.exp()

    compiled = fusewright.compile(pick)
    table, other = torch.randn(4, 3), torch.randn(500)
    good = compiled(table, torch.tensor([0, 3]), other)
    assert torch.equal(good[0], table[[0, 3]] + 1)
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([0, 9]), other)


def test_the_memory_of_a_region_is_judged_by_the_example() -> None:
    """Copies of four-dimensional windows, any size of which may come, side by side as for the sizes of the call."""
    texts: list[str] = []
    tensors = [torch.randn(2, 3, 4, 5) for _ in range(4)]

    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.transpose(1, 2).contiguous() + 1 for tensor in tensors]

    def listen(event: object) -> None:
        if isinstance(event, StageDone) and event.stage == "memory":
            texts.append(event.text())

    with STREAM.listening(listen):
        found = fusewright.compile(program, dynamic=True, options={"disk_cache": False})(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, program(*tensors)))
    assert "at the same time as the step before" in texts[0]
