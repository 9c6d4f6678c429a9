"""A function whose versions and parts cost more than they can bring is left to eager, once and with a message; results
are eager's on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.errors import RecompileLimitWarning
from fusewright.base.events import STREAM, Compiled, Event, Skipped

LIMIT = 10


def exploding(x: torch.Tensor, turns: int) -> torch.Tensor:
    for turn in range(turns):
        x = x + 1
        fusewright.graph_break()
        x = x * (turn + 2)
    return x


def run(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> tuple[list[Event], list[str]]:
    """What was told and warned of while calls were made, each of which gave what eager gives."""
    events: list[Event] = []
    with STREAM.listening(events.append), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            assert torch.equal(function(*args), exploding(*args))
    return events, [str(one.message) for one in caught if one.category is RecompileLimitWarning]


def compiles(events: list[Event]) -> int:
    return sum(isinstance(event, Compiled) for event in events)


CALLS = [(torch.ones(3), turns % 7) for turns in range(30)]


def test_it_is_left_to_eager_once_and_with_a_message() -> None:
    fusewright.reset()
    compiled = fusewright.compile(exploding, options={"cost_limit": LIMIT})
    events, said = run(compiled, CALLS)
    assert compiles(events) == LIMIT
    (text,) = said
    assert "test_compile_cost.py" in text and "graph_break" not in text
    assert "[explicit-graph-break]" in text and "cost_limit" in text and "fusewright.disable" in text
    reports = [event.report for event in events if isinstance(event, Skipped)]
    assert [report.code for report in reports] == ["compile-cost"]
    events, said = run(compiled, CALLS)
    assert not compiles(events) and not said


def test_what_pays_is_compiled_on() -> None:
    fusewright.reset()
    compiled = fusewright.compile(exploding, options={"cost_limit": LIMIT})
    first, _ = run(compiled, CALLS[:2])
    for entry in compiled.entries:
        entry.calls = 10**9
    events, said = run(compiled, CALLS)
    assert not said and compiles(first) + compiles(events) > LIMIT


def test_what_comes_to_pay_is_compiled_again() -> None:
    fusewright.reset()
    compiled = fusewright.compile(exploding, options={"cost_limit": LIMIT})
    assert run(compiled, CALLS)[1]
    for entry in compiled.entries:
        entry.calls = 10**9
    events, said = run(compiled, CALLS * 4)
    assert compiles(events) and not said


@pytest.mark.parametrize("options", [{"cost_limit": 0}, {}])
def test_few_compiles_are_never_asked(options: dict[str, int]) -> None:
    fusewright.reset()
    compiled = fusewright.compile(exploding, options=options)
    _, said = run(compiled, CALLS[:5])
    assert not [text for text in said if "cost_limit" in text]


def test_a_reset_forgets_the_cost() -> None:
    fusewright.reset()
    compiled = fusewright.compile(exploding, options={"cost_limit": LIMIT})
    assert run(compiled, CALLS)[1]
    fusewright.reset()
    events, said = run(compiled, CALLS)
    assert compiles(events) == LIMIT and len(said) == 1


def test_a_limit_of_versions_that_the_user_raised_is_kept() -> None:
    def versions(x: torch.Tensor, flag: str) -> torch.Tensor:
        return x + len(flag)

    fusewright.reset()
    compiled = fusewright.compile(versions, recompile_limit=20, options={"cost_limit": 2})
    events: list[Event] = []
    with STREAM.listening(events.append):
        for count in range(20):
            assert torch.equal(compiled(torch.ones(2), "a" * count), versions(torch.ones(2), "a" * count))
    assert compiles(events) == 20
