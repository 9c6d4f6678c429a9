"""Candidates, each alone, under Triton's interpreter: what autotuning compares is what the library computes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusewright.codegen.device_kernel import Processor
from fusewright.codegen.triton.gemm import takes_copies
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.graph import passes
from fusewright.loops.ir import Buffer
from fusewright.loops.lower import lower
from fusewright.schedule import schedule
from fusewright.schedule.plan import Plan
from fusewright.select.autotune import (
    Candidate,
    Question,
    _at_places,
    group_questions,
    product_questions,
    prologue_questions,
    tile_questions,
)
from fusewright.select.measure import disagreement, factors, isolated, made_up, positions
from tests.loops.tracing import record
from tests.select.product_programs import GPU

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("compiles for a GPU", allow_module_level=True)
from tests.codegen.triton.harness import run_plan

CPU = torch.device("cpu")
Half = torch.float16  # the interpreter multiplies the bits of bfloat16 numbers


def planned(function: Callable[..., object], inputs: list[torch.Tensor]) -> Plan:
    with torch.no_grad():
        graph, constants = record(function, inputs)
        return schedule(
            lower(passes.run_passes(passes.run(graph), passes.LAYOUT, passes.PassContext()), constants), GPU
        )


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=Half)


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = F.relu(F.batch_norm(F.conv2d(x, w), b, s, s, b))
    return F.relu(F.batch_norm(F.conv2d(y, v, padding=1), b, s, s, b) + x)


def strided(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.conv2d(F.conv2d(x, w, b, stride=2, padding=2, dilation=2), v, stride=(1, 2)))


CONVOLUTIONS: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "a residual block": (block, lambda: [r(2, 64, 7, 6), r(64, 64, 1, 1), r(64, 64, 3, 3), r(64), r(64).abs() + 0.5]),
    "strides, dilation, windows that are not square": (
        strided,
        lambda: [r(1, 64, 29, 18), r(64, 64, 3, 2), r(48, 64, 1, 3), r(64)],
    ),
}


def check(plan: Plan, question: Question, candidates: list[Candidate], processor: Processor) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    expected: list[torch.Tensor] = []
    for candidate in candidates:
        alone = isolated(plan, candidate, question.results)
        for name in alone.inputs:
            tensors.setdefault(
                name, made_up(alone.buffers[name], generator, name in factors(question), name in positions(question))
            )
        actual = run_plan(alone, [tensors[name] for name in alone.inputs], processor, candidate.tiles)
        expected = expected or actual
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            assert not disagreement(a, b, 3 * question.tolerance), candidate.name


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_as_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, make = CONVOLUTIONS[name]
    torch.manual_seed(0)
    plan = planned(function, make())
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    processor = Processor(90, 2)
    questions = product_questions(plan, processor, CPU)
    assert len(questions) == 2
    for question in questions:
        smallest = sorted(question.candidates[1:], key=lambda c: max(t.x * t.y for t in c.tiles.values()))[:2]
        assert smallest and all("fused" in c.name or "plain" in c.name for c in smallest)
        check(plan, question, [question.candidates[0], *smallest], processor)
    assert any("fused" in candidate.name for question in questions for candidate in question.candidates)


def test_a_skinny_product_is_cut_into_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    torch.manual_seed(0)
    plan = planned(lambda x, w, y: F.rms_norm(y + F.linear(x, w), (64,)), [r(3, 512), r(64, 512), r(3, 64)])
    (question,) = product_questions(plan, Processor(), CPU)
    sliced = [candidate for candidate in question.candidates if "slices" in candidate.name]
    assert sliced and len({candidate.name for candidate in question.candidates}) == len(question.candidates)
    check(plan, question, [question.candidates[0], *sliced[:2]], Processor())


COPIED: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "rows and rows": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: [r(150, 72), r(40, 72), r(40)]),
    "rows and columns": (lambda x, w: torch.relu(x @ w), lambda: [r(70, 40), r(40, 88)]),
    "columns and rows": (lambda x, w: torch.tanh(x.t() @ w.t()), lambda: [r(40, 72), r(24, 40)]),
}


@pytest.mark.parametrize("name", COPIED)
def test_products_by_the_copy_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    function, make = COPIED[name]
    torch.manual_seed(0)
    plan = planned(function, make())
    (question,) = product_questions(plan, Processor(), CPU)
    library, plain = question.candidates[:2]
    assert plain.variant is not None and takes_copies(plain.variant.product)
    for tile in (ProductTile(32, 64, 16, 4, 3, 2, programs=3), ProductTile(16, 32, 32, 4, 3, programs=2)):
        bulk = Candidate(tile.text, plain.steps, plain.kernels, {plain.variant.product.name: tile}, plain.variant)
        check(plan, question, [library, bulk], Processor())


def test_what_the_copy_engine_cannot_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    programs: list[tuple[Callable[..., object], list[torch.Tensor]]] = [
        (lambda x, w: x @ w, [r(80, 33), r(33, 64)]),  # rows that start anywhere
        (lambda x, w: x @ w, [r(3, 80, 64), r(3, 64, 64)]),  # a batch
        (lambda x, w: x @ w, [torch.randn(80, 64), torch.randn(64, 64)]),  # float32
        (lambda x, w: x[:, 1:65] @ w, [r(80, 72), r(64, 64)]),  # an offset
    ]
    for function, inputs in programs:
        (question,) = product_questions(planned(function, inputs), Processor(), CPU)
        variant = question.candidates[1].variant
        assert variant is not None and not takes_copies(variant.product)


def side_by_side(
    x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    one, two, three = F.linear(x, q, b), F.linear(x, k, b), F.linear(x, v, b)
    return one * torch.sigmoid(two), three


@pytest.mark.parametrize("chosen", ["library", "fused", "slices"])
def test_products_of_one_matrix_together(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    torch.manual_seed(0)
    plan = planned(side_by_side, [r(5, 512), r(96, 512), r(96, 512), r(96, 512), r(96)])
    choices = []
    for question in product_questions(plan, Processor(), CPU):
        candidate = next((c for c in question.candidates if chosen in c.name), question.candidates[0])
        choices += _at_places(plan, question, candidate)
    assert len(choices) == 3
    (question,) = group_questions(plan, choices, Processor())
    assert {candidate.name.split()[0] for candidate in question.candidates} == {"apart", "horizontal"}
    check(plan, question, list(question.candidates[:3]), Processor())


COMPUTED: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "int8 weights of a few rows": (
        lambda x, w, s: F.gelu(F.linear(x, w.to(Half) * s[:, None])), lambda: [r(5, 270), torch.ones(70, 270, dtype=torch.int8), r(70)],
    ),
    "a gated unit": (lambda g, u, w: F.linear(F.silu(g) * u, w), lambda: [r(70, 72), r(70, 72), r(40, 72)]),
    "both": (lambda x, w: torch.exp(x) @ w.to(Half), lambda: [r(70, 72), torch.randn(72, 40)]),
}  # fmt: skip


@pytest.mark.parametrize("chosen", ["library", "fused"])
@pytest.mark.parametrize("name", COMPUTED)
def test_products_that_compute_their_operands(name: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_WORK", 0)
    monkeypatch.setattr("fusewright.codegen.triton.gemm_tiles.MOST_RECOMPUTED", 1e9)
    function, make = COMPUTED[name]
    torch.manual_seed(0)
    plan = planned(function, make())
    choices = []
    for question in product_questions(plan, Processor(), CPU):
        candidate = next((c for c in question.candidates if chosen in c.name), question.candidates[0])
        choices += _at_places(plan, question, candidate)
    (question,) = prologue_questions(plan, choices, Processor())
    assert question.candidates[0].name == "apart" and all("computed" in c.name for c in question.candidates[1:])
    assert len({candidate.name for candidate in question.candidates}) == len(question.candidates)
    check(plan, question, [question.candidates[0], *question.candidates[1::2]], Processor())


def test_made_up_bytes_are_numbers_unless_they_are_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_BYTES", 0)
    table, codes = r(256, 40), torch.zeros(70, dtype=torch.uint8)
    (question,) = tile_questions(planned(lambda t, c: t[c.long()] * c[:, None], [table, codes]), Processor(), CPU)
    (places,) = positions(question)
    (question,) = tile_questions(planned(lambda t, c: t * c[:, None], [r(70, 40), codes]), Processor(), CPU)
    assert places and not positions(question)
    buffer = Buffer("x", (70,), (1,), torch.uint8, CPU, "input")
    generator = torch.Generator().manual_seed(0)
    assert (
        not made_up(buffer, generator, False, True).any()
        and made_up(buffer, generator, False, False).unique().numel() > 9
    )


def test_neighbours_of_a_tile_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.select.autotune.LEAST_TUNED_BYTES", 0)
    torch.manual_seed(0)
    inputs = [r(20, 70), r(20, 70), r(70)]
    plan = planned(
        lambda x, y, w: (torch.softmax(x, -1) * w, F.gelu(x) * y, (x + y).t().contiguous() + 1, (x * y).sum(0)), inputs
    )
    processor = Processor(90, 2)
    questions = tile_questions(plan, processor, CPU)
    assert questions and all(len(question.candidates) > 1 for question in questions)
    for question in questions:
        check(plan, question, list(question.candidates), processor)
