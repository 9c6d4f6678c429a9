"""Every program of tests/capture/language: compiled, it cannot be told from eager."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from . import language
from .language.support import PROGRAMS, Program, check

for module in sorted(one.name for one in pkgutil.iter_modules(language.__path__)):
    importlib.import_module(f"{language.__name__}.{module}")


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("one", PROGRAMS, ids=lambda one: one.name)
def test_a_program_runs_compiled_as_eagerly(one: Program, backend: str) -> None:
    outcome = check(one, backend)
    unexpected = [report for code, report in zip(outcome.codes, outcome.reports) if code not in one.codes and code != "exception-escapes"]
    assert not unexpected, "\n".join(unexpected)


def test_there_are_many_programs() -> None:
    assert len(PROGRAMS) >= 300
    assert len({one.name for one in PROGRAMS}) == len(PROGRAMS)
