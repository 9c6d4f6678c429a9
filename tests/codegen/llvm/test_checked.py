"""Kernels with checks: they compute what the others do, and no access outside a buffer gets past them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright import OutOfBoundsError
from fusewright.backends import pipeline
from fusewright.base import events
from fusewright.base.records import replace
from fusewright.schedule import bounds
from fusewright.schedule.plan import Plan

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda x: x * 2 + 1, ((37, 51),)),
    "one": (lambda x: x + 1, ((),)),
    "reversed": (lambda x: x.flip(1) + 1, ((5, 19),)),
    "strided": (lambda x: x[:, 1::3] * 2, ((7, 32),)),
    "columns": (lambda x: x.sum(0), ((33, 21),)),
    "transposed": (lambda x: x.t().contiguous() + 1, ((70, 40),)),
    "softmax": (lambda x: x.softmax(-1), ((5, 77),)),
    "cumulative": (lambda x: x.cumsum(1), ((3, 29),)),
    "gathered": (lambda x, y: x[(y.abs() * 2).long().clamp(0, 4)] + 1, ((5, 9), (6,))),
    "scattered": (lambda x, y: x.index_add(0, (y.abs() * 2).long().clamp(0, 4), y[:, None] + x[:1]), ((5, 9), (6,))),
    "halves": (lambda x: x.bfloat16() * 2, ((3, 37),)),
    "bools": (lambda x: (x > 0).logical_not(), ((3, 37),)),
    "padded": (lambda x: torch.nn.functional.pad(x, (2, 3)) + 1, ((4, 13),)),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    function, shapes = PROGRAMS[request.param]
    return function, [torch.randn(shape) for shape in shapes]


def shrink(monkeypatch: pytest.MonkeyPatch, buffer: int, told: bool) -> list[Plan]:
    """The first kernel's buffer of this number seems to be one element shorter than it is."""
    plans, of = [], pipeline._checks

    def shrunk(to_compile: Any, plan: Plan, shown: Any) -> Any:
        plans.append(plan)
        if not told:
            some = next(iter(plan.kernels))
            shown = bounds.Shown(1, (bounds.Unproved(some, "any", 0, 0, 0),))
        checks = of(to_compile, plan, shown)
        first = next(iter(checks))
        rooms = tuple(room - (k == buffer) for k, room in enumerate(checks[first].rooms))
        return checks | {first: replace(checks[first], rooms=rooms)}

    monkeypatch.setattr(pipeline, "_checks", shrunk)
    return plans


def test_checked_code_computes_the_same(program: tuple[Callable[..., Any], list[torch.Tensor]]) -> None:
    function, inputs = program
    torch.testing.assert_close(fusewright.compile(function, options={"checked": True})(*inputs), function(*inputs))


@pytest.mark.parametrize("buffer", [0, 1])
def test_an_access_outside_is_an_error(
    program: tuple[Callable[..., Any], list[torch.Tensor]], buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs = program
    plans = shrink(monkeypatch, buffer, told=True)
    with pytest.raises(OutOfBoundsError) as error:
        fusewright.compile(function, options={"checked": True})(*inputs)
    kernel = next(iter(plans[0].kernels.values()))
    room = plans[0].buffers[kernel.buffers[buffer]].span()
    does = "write" if kernel.buffers[buffer] in kernel.written else "read"
    assert f"{kernel.name} would {does} element {room - 1} of buffer {buffer} of {room - 1} elements" in str(
        error.value
    )
    assert "test_checked.py" in str(error.value)


def test_what_could_not_be_shown_before_runs_eagerly_if_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 0, told=False)
    x = torch.randn(5, 7)
    compiled = fusewright.compile(lambda x: x * 2)
    heard: list[events.Event] = []
    with events.STREAM.listening(heard.append):
        assert torch.equal(compiled(x), x * 2)
    assert any(isinstance(event, events.FellBack) and "would read element 34" in event.reason for event in heard)
