"""What the tests of graph breaks share: a table of programs with the graphs that they must give, and the check of one.

A program is a maker as in language/support.py; `graphs` is how many graphs its calls give at least, `skips` the codes of whole frames that
may run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.capture.interpret.language.support import Program, check


def adder(cases: list[Any]) -> Callable[..., Any]:
    """The decorator `case(graphs, *skips)` that adds a program to `cases`."""

    def case(graphs: int, *skips: str) -> Any:
        def enter(make: Any) -> Any:
            cases.append(pytest.param(Program(make, frozenset()), graphs, skips, id=make.__name__))
            return make

        return enter

    return case


def check_case(one: Program, graphs: int, skips: tuple[str, ...], backend: str) -> None:
    """Compiled equals eager, in so many graphs, and no other frame is left to run eagerly but one that an exception leaves."""
    outcome = check(one, backend)
    assert outcome.graphs >= graphs, (outcome.graphs, outcome.reports)
    unexpected = [code for code in outcome.skips if code not in skips and code != "exception-escapes"]
    assert not unexpected, list(outcome.reports)
