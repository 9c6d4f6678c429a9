"""A stale answer is the worst defect there is: programs that read all kinds of state, which changes between calls, equal eager each time.

The kinds are in mutable_state.py, the random programs in mutated_programs.py. A failing seed is run again by `run_case(seed, backend)`.
"""

from __future__ import annotations

import pytest

from tests.capture.guards.mutable_state import KINDS
from tests.capture.guards.mutated_programs import run_case


def failures(seeds: range, backend: str) -> tuple[list[str], list[str], int]:
    """(differences from eager, captures on equal calls, captures in all)."""
    wrong: list[str] = []
    needless: list[str] = []
    captures = 0
    for seed in seeds:
        outcome = run_case(seed, backend)
        wrong += [outcome.difference] if outcome.difference else []
        needless += [outcome.needless] if outcome.needless else []
        captures += outcome.captures
    return wrong, needless, captures


@pytest.mark.parametrize("backend, seeds", [("eager", range(250)), ("native", range(100_000, 100_020))])
def test_random_programs(backend: str, seeds: range) -> None:
    wrong, needless, captures = failures(seeds, backend)
    assert not wrong, "\n\n".join(wrong[:3])
    assert not needless, "\n\n".join(needless[:3])
    assert captures > len(seeds)


# What the sweep has found once: exceptions that kept frames alive, strides in another order, hashes of numbers that change, random numbers,
# dispatch modes, ints of more than 64 bits, subclasses of constants, proxies of dicts, inference tensors
# that require a gradient.
FOUND = ((1003009, "eager"), (2000412, "eager"), (3008666, "eager"), (1005488, "native"), (1018987, "native"), (1015985, "native"), (1013990, "native"), (1003955, "native"), (1001096, "eager"), (1004963, "eager"))  # fmt: skip


@pytest.mark.parametrize("seed, backend", FOUND)
def test_programs_that_once_differed(seed: int, backend: str) -> None:
    outcome = run_case(seed, backend)
    assert not outcome.difference, outcome.difference
    assert not outcome.needless, outcome.needless


def test_the_check_can_fail() -> None:
    """A program whose compiled twin looks at nothing but its first answer is found out."""
    import fusewright

    kind = next(kind for kind in KINDS if kind.name == "list length")
    first: list[object] = []

    def stale(function, **settings):
        def call(*args, **kwargs):
            first.append(function(*args, **kwargs)) if not first else None
            return first[0]

        return call

    original, fusewright.compile = fusewright.compile, stale
    try:
        assert any(run_case(seed, "eager", [kind]).difference for seed in range(3) if not first.clear())
    finally:
        fusewright.compile = original


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind(kind) -> None:
    for backend in kind.backends:
        for seed in range(6 if backend == "eager" else 2):
            outcome = run_case(seed, backend, [kind], steps=8)
            assert not outcome.difference, outcome.difference


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(1_000_000, 1_020_000, 1000))
def test_twenty_thousand_programs(start: int) -> None:
    wrong, needless, _ = failures(range(start, start + 950), "eager")
    more, _, _ = failures(range(start + 950, start + 1000), "native")
    assert not wrong + more, "\n\n".join((wrong + more)[:3])
    assert not needless, "\n\n".join(needless[:3])
