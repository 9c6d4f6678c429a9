"""Every program of tests/capture/interpret/language: compiled, it cannot be told from eager."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest

from tests.capture.interpret import language
from tests.capture.interpret.language.support import PROGRAMS, Program, check

SYNTAX_SINCE = {"type_parameters": (3, 12), "type_defaults": (3, 13), "since_3_14": (3, 14)}
for module in sorted(one.name for one in pkgutil.iter_modules(language.__path__)):
    if sys.version_info >= SYNTAX_SINCE.get(module, (3, 11)):
        importlib.import_module(f"{language.__name__}.{module}")


# Themes that meet the native backend in the quick run: those in which tensors, their memory and their gradients matter most.
NATIVE = ("containers", "contexts", "effects", "exceptions", "modules", "numbers", "tensors")
RUNS = [
    pytest.param(
        one,
        backend,
        id=f"{one.name}-{backend}",
        marks=() if backend == "eager" or one.name.startswith(NATIVE) else pytest.mark.sweep,
    )
    for one in PROGRAMS
    for backend in ("eager", "native")
]


@pytest.mark.parametrize("one, backend", RUNS)
def test_a_program_runs_compiled_as_eagerly(one: Program, backend: str) -> None:
    outcome = check(one, backend)
    unexpected = [
        report
        for code, report in zip(outcome.codes, outcome.reports)
        if code not in one.codes and code != "exception-escapes"
    ]
    assert not unexpected, "\n".join(unexpected)


def test_there_are_many_programs() -> None:
    assert len(PROGRAMS) >= 300
    assert len({one.name for one in PROGRAMS}) == len(PROGRAMS)
