"""Loop programs parse back from their complete text."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import pipeline
from fusewright.base.records import replace
from fusewright.loops.ir import LoopProgram
from fusewright.loops.parser import ParseError, parse_program
from fusewright.loops.printer import print_program
from tests.loops import tracing
from tests.replay_programs import PROGRAMS

SAMPLE = [name for index, name in enumerate(sorted(PROGRAMS)) if index % 40 == 0]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoopProgram]]:
    """The loop programs of what is compiled in the test."""
    found: list[LoopProgram] = []
    lower = pipeline.lower

    def keep(*args: Any) -> LoopProgram:
        found.append(lower(*args))
        return found[-1]

    monkeypatch.setattr(pipeline, "lower", keep)
    yield found


def without_locations(program: LoopProgram) -> LoopProgram:
    operations = [replace(operation, locations=()) for operation in program.operations]
    return replace(program, operations=operations)


def check(program: LoopProgram) -> None:
    text = print_program(program, complete=True)
    parsed = parse_program(text, program.constants)
    known = without_locations(program)
    assert print_program(parsed, complete=True) == print_program(known, complete=True)
    for field in ("buffers", "inputs", "outputs", "size_symbols", "makers"):
        assert getattr(parsed, field) == getattr(known, field), field
    for ours, theirs in zip(parsed.operations, known.operations, strict=True):
        assert ours == theirs, text


def round_trip(name: str, programs: list[LoopProgram]) -> None:
    torch.manual_seed(0)
    PROGRAMS[name](lambda function, **settings: fusewright.compile(function, **no_cache(settings)))
    for program in programs:
        check(program)


def no_cache(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "options": {**(settings.get("options") or {}), "disk_cache": False}}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str, programs: list[LoopProgram]) -> None:
    round_trip(name, programs)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_golden_set(name: str, programs: list[LoopProgram]) -> None:
    round_trip(name, programs)


TEXT = print_program(tracing.lowered(lambda x: (x + 1).sum(), [torch.randn(4, 6)]), complete=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sum(acc", "sum(bcc", "line *, column *: expected *acc*"),
        ("f32", "load", "line *, column *: expected a dtype, found 'load*"),
        ("in0[", "__import__[", "line *, column *: expected the name of a buffer*"),
        ("in0[", "os(", "line *, column *: expected *"),
        ("return", "retrun", "line *, column *: expected *"),
        ("cpu", "cpu(", "line *, column *: expected *"),
    ],
)
def test_error_names_the_place(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ParseError) as error:
        parse_program(TEXT.replace(old, new))
    assert fnmatch.fnmatch(str(error.value), message), error.value
