"""Each pass between loops and memory as text: a loop program, what the pass makes of it (`## pass: what it shows`).

`python -m tests.schedule.test_pass_goldens` writes the results anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusewright.backends import stage_texts
from fusewright.base.records import replace
from fusewright.loops.ir import LoopProgram
from fusewright.loops.parser import parse_program
from fusewright.loops.printer import print_program
from fusewright.schedule import ScheduleOptions, schedule, with_memory
from fusewright.schedule.in_place import write_in_place
from fusewright.schedule.plan import Plan, RunKernel
from fusewright.schedule.printer import plan_text
from fusewright.schedule.split import split_reductions
from tests import goldens

FOLDER = Path(__file__).parent / "pass_golden"
OPTIONS = ScheduleOptions()


def apart(plan: Plan) -> Plan:
    """The plan without horizontal fusion."""
    steps = (replace(step, horizontal=False) if isinstance(step, RunKernel) else step for step in plan.steps)
    return replace(plan, steps=tuple(steps))


PASSES: dict[str, Callable[[LoopProgram], str]] = {
    "write_in_place": lambda program: print_program(write_in_place(program), complete=True),
    "split_reductions": lambda program: print_program(split_reductions(program, OPTIONS), complete=True),
    "fuse": lambda program: plan_text(apart(schedule(program))),
    "fuse_horizontally": lambda program: plan_text(schedule(program)),
    "with_memory": lambda program: plan_text(with_memory(schedule(program), None)),
}
SCENARIOS = goldens.scenarios(FOLDER)


def result(heading: str, before: str) -> str:
    return PASSES[heading.split(":")[0]](parse_program(before + "\n")).strip()


@pytest.mark.parametrize("heading", SCENARIOS)
def test_golden(heading: str) -> None:
    before, after = SCENARIOS[heading]
    assert result(heading, before) == after


def test_every_pass_has_one() -> None:
    assert {heading.split(":")[0] for heading in SCENARIOS} == {*PASSES}


@pytest.mark.parametrize("heading", SCENARIOS)
def test_the_plan_parses_back(heading: str) -> None:
    plan = with_memory(schedule(parse_program(SCENARIOS[heading][0] + "\n")), None)
    assert stage_texts.parse(stage_texts.complete_text(plan)) == plan


if __name__ == "__main__":
    goldens.write(FOLDER, result)
