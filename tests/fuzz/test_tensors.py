"""A sample of random tensor programs; `python -m tests.fuzz.run tensors` runs as many as one likes."""

from __future__ import annotations

import math

import pytest
import torch

from fusewright.base.records import replace
from fusewright.loops.lower import registry
from tests.fuzz import compare, run, session, tensors

SAMPLE, SWEEP = 60, 5000


def check(seeds: range) -> None:
    for seed in seeds:
        text = tensors.program(seed)
        found = session.examine(text)
        assert found is None, f"seed {seed}: {found}\n{session.printed(text)}"


@pytest.mark.parametrize("part", range(SAMPLE // 20))
def test_sample(part: int) -> None:
    check(range(part * 20, part * 20 + 20))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(SWEEP // 100))
def test_sweep(part: int) -> None:
    check(range(1000 + part * 100, 1100 + part * 100))


def test_a_planted_defect_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    flip, relu = torch.ops.aten.flip.default, registry.find(torch.ops.aten.relu.default)
    assert relu is not None
    wrong = replace(relu, function=lambda call, self, dims: relu.function(call, self))
    monkeypatch.setitem(registry._ROWS, flip, wrong)
    seeds = (seed for seed in range(400) if ".flip(" in tensors.program(seed))
    text, like = next((text, one.like) for text in map(tensors.program, seeds) if (one := session.examine(text)))
    small = run.shrunk(text, like, seconds=60)
    assert len(small.splitlines()) <= 8
    assert ".flip(" in small


def test_the_same_seed_gives_the_same_program() -> None:
    assert tensors.program(3) == tensors.program(3) != tensors.program(4)


def test_what_one_elements_rounding_allows_says_nothing_of_its_neighbours() -> None:
    eager, nudged = torch.tensor([100.0, 1.0]), [torch.tensor([101.0, 1.001]), torch.tensor([100.0, 1.0])]
    assert compare._as_near(torch.tensor([100.5, 1.002]), eager, nudged)
    assert not compare._as_near(torch.tensor([100.0, 1.5]), eager, nudged)
    assert not compare._as_near(torch.tensor([102.0, 1.0]), eager, nudged)
    assert compare._as_near(torch.tensor([100.5, 1 + 1e-7]), eager, [torch.tensor([101.0, 1.0])])
    assert not compare._as_near(torch.tensor([100.5, 1 + 5e-7]), eager, [torch.tensor([101.0, 1.0])])


def test_what_is_not_finite_may_differ_only_where_eager_is_not_as_float64_is() -> None:
    inf, nan = math.inf, math.nan
    cases = [  # ours, eager, float64, near
        ([inf, 2.0], [nan, 2.0], [inf, 2.0], True),  # eager's epsilon was rounded to 0
        ([3.0, 2.0], [inf, 2.0], [3.0, 2.0], True),
        ([inf, 2.0], [nan, 2.0], [nan, 2.0], False),
        ([nan, 2.0], [inf, 3.0], [inf, 2.0], False),
        ([3.0, inf], [inf, 2.0], [3.0, 2.0], False),
        ([3.0, 4.0], [inf, 2.0], [3.0, 2.0], False),
        ([-inf, 2.0], [inf, 2.0], [inf, 2.0], False),
        ([complex(inf, nan), 2 + 1e-7j], [complex(inf, nan), 2], [complex(inf, nan), 2], True),
        ([complex(inf, nan), 2], [complex(-inf, nan), 2], [complex(inf, nan), 2], False),
    ]
    for *values, near in cases:
        ours, eager, precise = (torch.tensor(one, dtype=torch.complex128) for one in values)
        assert compare._near(ours, eager, precise, 1e-5) is near


CANCELS = """
def program(x):
    return (x.exp().log() * x.exp() - x * x.exp()).sum(), x * 2 + 0.25, x + 0.1

def step0():
    return program(made((33,), f32, 5))
"""


def test_results_that_cancel_are_judged_by_what_cancels() -> None:
    world = session.World(CANCELS)
    world.run("step0")
    others = [{compare.path_of(leaf): leaf[3] for leaf in leaves} for leaves in session._nudged(world, ["step0"])]
    sums, exact, rounded = (
        lambda off, place=place: compare._as_near(  # type: ignore[misc]
            world.seen["result"][place] + off, world.seen["result"][place], [one[f"result[{place}]"] for one in others]
        )
        for place in range(3)
    )
    assert sums(3e-4) and not sums(3e-2)
    assert not exact(1e-6) and exact(0.0)
    third = world.seen["result"][2]
    assert rounded(third * 1e-7) and not rounded(third * 1e-5)
    eager = torch.tensor([1.0, 2.0])
    for moved, decides in ((0.01, False), (0.2, True), (math.nan, True)):
        assert compare._as_near(eager * 9, eager, [eager + 1e-6, eager + moved]) is decides
