"""A sample of random Python programs; `python -m tests.fuzz.run python` runs as many as one likes."""

from __future__ import annotations

import sys

import pytest

from fusewright.capture.border.world import World
from tests.fuzz import python, run, session

SAMPLE, SWEEP = 40, 4000
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check(seeds: range) -> None:
    for seed in seeds:
        text = python.program(seed)
        found = session.examine(text)
        assert found is None, f"seed {seed}: {found}\n{session.printed(text)}"


def test_sample() -> None:
    check(range(SAMPLE))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(SWEEP // 100))
def test_sweep(part: int) -> None:
    check(range(1000 + part * 100, 1100 + part * 100))


def test_a_planted_defect_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = World.guard

    def forgetful(self: World, kind: str, *rest: object) -> None:
        if kind != "EQUALS":
            guard(self, kind, *rest)

    monkeypatch.setattr(World, "guard", forgetful)
    texts = map(python.program, range(100))
    text, like = next((text, one.like) for text in texts if (one := session.examine(text)) is not None)
    small = run.shrunk(text, like, most=100)
    assert len(small.splitlines()) < 0.75 * len(text.splitlines())
    assert session.examine(small) is not None


ENDLESS = """begin()
def program(a):
    while True:
        try:
            raise ValueError(a)
        except ValueError as error:
            len({one for one in [1, 2]})
def step0(): program(1)
"""


def test_what_a_program_handled_that_was_too_long_is_over() -> None:
    for most in range(30):
        assert session.errors_of(ENDLESS, most) is None
        assert sys.exception() is None


def test_the_clock_stops_a_program_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SECONDS", (0.001, 0.00002))  # less than its handler takes
    output = sys.stdout
    for _ in range(300):
        assert session.errors_of("def step0():\n    while True: [0 for _ in range(2)]\n", 10**9) is None
        assert sys.stdout is output


@pytest.mark.parametrize("raised", ["Endless(1)", "ValueError(Endless(1))"])
def test_what_an_error_of_the_programs_says_is_not_asked(raised: str) -> None:
    text = f"""begin()
class Endless(Exception):
    def __str__(self): return str(self)
    def __repr__(self): return 'Endless'
def program(a):
    raise {raised}
def step0(): program(1)
"""
    assert session.examine(text) is None


def test_the_same_seed_gives_the_same_program() -> None:
    assert python.program(3) == python.program(3) != python.program(4)
