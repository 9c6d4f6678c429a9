"""The verifier notices each broken rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusewright.loops.ir import Store
from fusewright.schedule.plan import Kernel, Plan, Stage
from fusewright.schedule.verify import PlanError, verify
from tests.schedule import programs as p
from tests.schedule.programs import Builder
from tests.schedule.reference import schedule


def plan_and_kernel() -> tuple[Plan, Kernel]:
    b = Builder()
    x = b.input(64, 32)
    plan = schedule(b.done(p.softmax(b, b.pointwise("add", p.add, x, x))))
    (kernel,) = plan.kernels.values()
    verify(plan)
    return plan, kernel


def broken(plan: Plan, kernel: Kernel) -> Plan:
    plan.kernels = {kernel.name: kernel}
    return plan


def test_undefined_local() -> None:
    plan, kernel = plan_and_kernel()
    with pytest.raises(PlanError, match="undefined locals"):
        verify(broken(plan, replace(kernel, stages=kernel.stages[1:])))


def test_stages_out_of_order() -> None:
    plan, kernel = plan_and_kernel()
    with pytest.raises(PlanError):
        verify(broken(plan, replace(kernel, stages=tuple(reversed(kernel.stages)))))


def test_load_after_store_in_one_stage() -> None:
    plan, kernel = plan_and_kernel()
    number, stage, row = next(
        (k, stage, s) for k, stage in enumerate(kernel.stages) for s in stage.statements if isinstance(s, Store)
    )
    again = Store(
        row.buffer, row.index, p.add(p.op("add")(p.ir.load(row.buffer, row.index, row.value.dtype), 1.0), 1.0)
    )
    stages = list(kernel.stages)
    stages[number] = Stage(stage.axes, (*stage.statements, again))
    with pytest.raises(PlanError, match="after storing it"):
        verify(broken(plan, replace(kernel, stages=tuple(stages))))


def test_unknown_parameter() -> None:
    plan, kernel = plan_and_kernel()
    with pytest.raises(PlanError, match="is no parameter"):
        verify(broken(plan, replace(kernel, buffers=kernel.buffers[1:], dtypes=kernel.dtypes[1:])))


def test_steps_out_of_order() -> None:
    b = Builder()
    x = b.input(64, 32)
    y = b.extern("sigmoid", p.torch.ops.aten.sigmoid.default, b.pointwise("add", p.add, x, x), shape=(64, 32))
    plan = schedule(b.done(y))
    plan.steps = tuple(reversed(plan.steps))
    with pytest.raises(PlanError, match="before anything wrote it"):
        verify(plan)


def test_missing_output() -> None:
    plan, _ = plan_and_kernel()
    plan.steps = ()
    with pytest.raises(PlanError, match="never written"):
        verify(plan)
