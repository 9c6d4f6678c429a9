"""Vectors, canonical axes, refinement and alignment on their own."""

from __future__ import annotations

import pytest

from fusewright.schedule.align import refine, window
from fusewright.schedule.axes import coalesced, decompose, make_nest, place_in_block, strides_of
from fusewright.schedule.dependencies import touch
from fusewright.schedule.names import kernel_name
from fusewright.schedule.stages import common_refinement
from fusewright.sizes.expressions import loop_symbol, symbol
from tests.schedule import programs as p
from tests.schedule.programs import Builder

I, J = loop_symbol("i0", 8), loop_symbol("i1", 12)


def test_decompose() -> None:
    s = symbol("s0", 2)
    assert decompose(I * 12 + J + 5, (I, J)) == (5, (12, 1))
    assert decompose(I * s + J, (I, J)) == (0, (s, 1))
    assert decompose(7, (I, J)) == (7, (0, 0))
    assert decompose((I * 12 + J) // 5, (I, J)) is None
    assert decompose(I * J, (I, J)) is None


def nest_of(build: object) -> object:
    b = Builder()
    build(b)  # type: ignore[operator]
    operation = b.program.operations[-1]
    return make_nest(0, operation, touch(operation, {}))


def test_contiguous_axes_merge_and_broadcasts_do_not() -> None:
    assert nest_of(lambda b: b.pointwise("add", p.add, b.input(4, 8, 16), b.input(4, 8, 16))).extents == (512,)
    assert nest_of(lambda b: b.pointwise("add", p.add, b.input(4, 8, 16), b.input(16))).extents == (32, 16)
    assert nest_of(lambda b: b.pointwise("add", p.add, b.input(4, 8, 16), b.input(1, 8, 1))).extents == (4, 8, 16)
    assert nest_of(lambda b: b.pointwise("one", p.relu, b.input(1, 1))).extents == ()


def test_axes_follow_the_store() -> None:
    nest = nest_of(lambda b: b.pointwise("t", p.relu, b.input(8, 16).permute(1, 0)))
    assert nest.extents == (16, 8)  # the store is contiguous in the axis that the load steps over
    reduction = nest_of(lambda b: b.reduce("sum", "sum", b.input(4, 8, 5, 5), [0, 2, 3]))
    assert reduction.extents == (8, 4, 25) and reduction.outer == 1
    rows = nest_of(lambda b: b.reduce("sum", "sum", b.input(4, 8, 5, 5), [2, 3]))
    assert rows.extents == (32, 25) and rows.outer == 1


def test_refine_splits_a_merged_axis() -> None:
    left, right, pairs = refine([(1, 96, 0)], [(1, 12, 1), (12, 8, 0)])
    assert left.parts == {0: [12, 8]} and right.parts == {1: [12], 0: [8]} and len(pairs) == 2


def test_refine_leaves_the_gap_of_a_part() -> None:
    left, right, pairs = refine([(1, 16, 1), (48, 64, 0)], [(1, 48 * 64, 0)])
    assert left.parts == {1: [16], 0: [64]} and right.parts == {0: [48, 64]}
    assert pairs == [((0, 0), (0, 1))]


def test_place_in_block() -> None:
    assert coalesced(strides_of((0, (400, 25, 1)), (4, 8, 25), 0)) == [(1, 200), (400, 4)]  # joined where dense
    assert place_in_block([(1, 5), (10, 4)], [(10, 4, 0), (1, 5, 1)], 0) == ([0, 0], {0: (1, 1), 1: (0, 1)})
    assert place_in_block([(1, 5), (10, 4)], [(1, 6, 0)], 0) is None  # runs out of its level
    assert place_in_block([(1, 8)], [(1, 4, 0)], 4) == ([4], {0: (0, 1)})
    assert place_in_block([(1, 8)], [(1, 4, 0)], 5) is None


def test_window() -> None:
    row = (48, 1)
    assert window([((0, row), (64, 16), 1), ((16, row), (64, 32), 1)]) == (0, 47)
    assert window([((0, row), (64, 16), 1), ((16, row), (64, 33), 1)]) is None  # reaches the next row
    assert window([((0, row), (64, 16), 1), ((0, (47, 1)), (64, 16), 1)]) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((768,), (12, 64), [12, 64]),
        ((6, 4), (3, 8), [3, 2, 4]),
        ((6,), (4,), None),
        ((2, 3), (6,), [2, 3]),
        ((), (6,), None),
    ],
)
def test_common_refinement(a: tuple[int, ...], b: tuple[int, ...], expected: list[int] | None) -> None:
    found = common_refinement(a, b)
    assert (None if found is None else found[0]) == expected


def test_names() -> None:
    assert kernel_name(["add"], 3) == "add_3"
    assert kernel_name(["aten._softmax.default", "add_12", "add_13"], 0) == "fused_softmax_add_0"
    long = kernel_name([f"operation{chr(97 + k)}" for k in range(20)], 12)
    assert len(long) <= 50 and long.startswith("fused_operationa") and long.endswith("operationt_12")
