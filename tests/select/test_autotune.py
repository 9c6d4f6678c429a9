"""Autotuning and its records, with made-up times: no GPU is needed to decide who wins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusewright.base.errors import RuntimeFallback
from fusewright.base.records import replace
from fusewright.codegen.device_kernel import Processor
from fusewright.codegen.triton.gemm_tiles import Computing, ProductShape, ProductTile, product_tiles
from fusewright.graph import passes
from fusewright.loops.lower import lower
from fusewright.runtime import cuda_code
from fusewright.schedule import ScheduleOptions, schedule, with_memory
from fusewright.schedule.plan import Plan, RunKernel
from fusewright.schedule.verify import verify
from fusewright.select import autotune, measure
from fusewright.select.autotune import Tuned, tune
from fusewright.select.candidates import FEW, MANY, Budget, Candidate, Question, answer_all, quickest, record_key
from fusewright.select.measure import GpuAutotuner, disagreement
from tests.loops.tracing import lowered, record

CPU = torch.device("cpu")
LIBRARY = "library"


class FakeAutotuner:
    """Each candidate takes as long as `seconds` says for its name, by its first match; the clock goes on by what is measured."""

    machine = "fake"

    def __init__(
        self,
        seconds: dict[str, float],
        refused: Sequence[str] = (),
        short: Sequence[str] = (),
        noise: Sequence[float] = (1.0,),
        plan: Plan | None = None,
    ) -> None:
        self.plan = plan
        self.seconds, self.refused, self.short, self.noise = seconds, refused, short, noise
        self.now = 0.0
        self.requested: list[str] = []
        self.prepared: list[str] = []

    def request(self, candidates: Sequence[Candidate]) -> None:
        self.requested += [candidate.name for candidate in candidates]
        for candidate in candidates if self.plan is not None else ():
            assert self.plan is not None
            known = self.plan.buffers.keys() | {buffer.name for buffer in candidate.added}
            assert all(known >= set(kernel.buffers) for kernel in candidate.kernels.values()), candidate.name

    def refuses(self, candidate: Candidate) -> bool:
        return candidate.name in self.refused

    def prepare(self, question: Question) -> tuple[list[tuple[str, Any]], dict[str, str], bool]:
        self.prepared.append(question.title)
        refused = {c.name: "wrong" for c in question.candidates if c.name in self.refused}
        refused |= {c.name: "out of memory" for c in question.candidates if c.name in self.short}
        return [(c.name, c.name) for c in question.candidates if c.name not in refused], refused, bool(self.short)

    def measure(self, calls: Sequence[Any], rounds: int) -> list[list[float]]:
        found = []
        for name in calls:
            seconds = next(value for text, value in self.seconds.items() if text in name)
            found.append([seconds * self.noise[k % len(self.noise)] for k in range(rounds)])
        self.now += sum(map(sum, found))
        return found

    def clock(self) -> float:
        return self.now


class Memory(dict[str, bytes]):
    def put(self, key: str, label: str, body: bytes) -> None:
        self[key] = body


def question(title: str, names: Sequence[str] = (LIBRARY, "a", "b"), weight: float = 1.0) -> Question:
    return Question(
        title, f"key of {title}", weight, tuple(Candidate(name, (), {}, {}) for name in names), (), 1e-2, (title,)
    )


@pytest.mark.parametrize(
    "seconds, winner",
    [
        ({LIBRARY: 1.0, "a": 0.9, "b": 0.8}, "b"),
        ({LIBRARY: 1.0, "a": 0.98, "b": 1.5}, LIBRARY),  # not clearly quicker
        ({LIBRARY: 1.0, "a": 2.0, "b": 3.0}, LIBRARY),
        ({LIBRARY: 9.0, "a": 2.0, "b": 1.9}, "b"),
    ],
)
def test_the_first_keeps_its_place_unless_another_is_clearly_quicker(seconds: dict[str, float], winner: str) -> None:
    tuner = FakeAutotuner(seconds, noise=(1.0, 1.0, 7.0))  # one round in three is disturbed
    found, times = quickest([(name, name) for name in seconds], tuner.measure)
    assert found == winner
    assert times == pytest.approx(seconds)


def test_only_those_that_may_win_are_measured_again() -> None:
    rounds: list[tuple[tuple[str, ...], int]] = []
    tuner = FakeAutotuner({LIBRARY: 3.0, "a": 1.0, "b": 1.1, "c": 1.3})

    def measure(calls: Sequence[Any], count: int) -> list[list[float]]:
        rounds.append((tuple(calls), count))
        return tuner.measure(calls, count)

    assert quickest([(name, name) for name in tuner.seconds], measure)[0] == "a"
    assert rounds == [((LIBRARY, "a", "b", "c"), FEW), ((LIBRARY, "a", "b"), MANY)]


def test_answers_are_remembered_and_a_damaged_record_is_asked_again() -> None:
    records = Memory()
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.5, "b": 2.0})
    asked = [question("x")]
    answers, unasked = answer_all(asked, tuner, records, 100.0, tuner.clock)
    assert (answers["key of x"].winner, unasked) == ("a", 0) and not answers["key of x"].remembered
    again = FakeAutotuner({LIBRARY: 1.0, "a": 5.0, "b": 2.0})
    answers, _ = answer_all(asked, again, records, 100.0, again.clock)
    assert (
        answers["key of x"].winner == "a"
        and answers["key of x"].remembered
        and not again.prepared
        and not again.requested
    )
    (key,) = records
    assert key == record_key(tuner, asked[0].key)
    for body in (
        b"{",
        b"[]",
        json.dumps({"winner": "nobody", "times": {}}).encode(),
        b'{"winner": "a", "times": {"a": "long"}}',
    ):
        records[key] = body
        answers, _ = answer_all(asked, again, records, 100.0, again.clock)
        assert answers["key of x"].winner == LIBRARY and not answers["key of x"].remembered


@pytest.mark.parametrize(
    "before, asked", [({LIBRARY: 1.0, "a": 0.5, "b": 0.4}, "b"), ({LIBRARY: 1.0, "a": 1.5, "b": 2.0}, "a")]
)
def test_a_similar_size_asks_only_what_may_win(before: dict[str, float], asked: str) -> None:
    records = Memory()
    first, similar = (replace(question(name), shape_class="class of 64 rows") for name in ("60 rows", "50 rows"))
    answer_all([first], FakeAutotuner(before), records, 100.0)
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.7, "b": 0.8})
    answers, _ = answer_all([similar], tuner, records, 100.0)
    assert tuner.requested == [LIBRARY, asked] and answers[similar.key].winner == asked
    third = replace(similar, key="another", shape_class="class of 128 rows")
    answer_all([third], tuner, records, 100.0)
    assert tuner.requested[2:] == [LIBRARY, "a", "b"]  # another class asks everybody
    again = FakeAutotuner({LIBRARY: 1.0, "a": 3.0, "b": 3.0})
    answers, _ = answer_all([replace(first, key="55 rows")], again, records, 100.0)
    assert answers["55 rows"].winner == LIBRARY  # never slower than without tuning


def test_another_machine_asks_anew() -> None:
    records = Memory()
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.5, "b": 2.0})
    answer_all([question("x")], tuner, records, 100.0, tuner.clock)
    other = FakeAutotuner({LIBRARY: 1.0, "a": 2.0, "b": 0.5})
    other.machine = "another"
    answers, _ = answer_all([question("x")], other, records, 100.0, other.clock)
    assert answers["key of x"].winner == "b" and len(records) == 2


def test_the_heaviest_question_is_asked_first_and_the_budget_ends_the_search() -> None:
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.5, "b": 2.0})
    asked = [question(name, weight=weight) for name, weight in (("light", 1.0), ("heavy", 9.0), ("middle", 5.0))]
    each = 3.5 * FEW + 1.5 * MANY
    answers, unasked = answer_all(asked, tuner, None, 1.5 * each, tuner.clock)
    assert tuner.prepared == ["heavy", "middle"] and unasked == 1 and set(answers) == {"key of heavy", "key of middle"}
    assert answer_all(asked, tuner, None, 0.0, tuner.clock) == ({}, 3)


def test_a_candidate_that_is_wrong_does_not_take_part_and_is_told() -> None:
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.1, "b": 0.8}, refused=["a"])
    records = Memory()
    answers, _ = answer_all([question("x")], tuner, records, 100.0, tuner.clock)
    assert answers["key of x"].winner == "b" and answers["key of x"].refused == {"a": "wrong"}
    everybody = FakeAutotuner({}, refused=["library", "a", "b"])
    records.clear()
    answers, _ = answer_all([question("x")], everybody, records, 100.0, everybody.clock)
    assert answers["key of x"].winner == LIBRARY and not records  # nothing was measured, so nothing is remembered


def test_a_candidate_that_found_no_memory_is_asked_again() -> None:
    """What was measured beside it decides for now, and nothing of that is remembered."""
    records = Memory()
    tuner = FakeAutotuner({LIBRARY: 1.0, "a": 0.1, "b": 0.8}, short=["a"])
    answers, unasked = answer_all([question("x")], tuner, records, 100.0, tuner.clock)
    assert answers["key of x"].winner == "b" and not records and not unasked
    assert not Tuned(Plan(), {}, tuple(answers.values()), unasked).complete
    tuner.short = ()
    answers, unasked = answer_all([question("x")], tuner, records, 100.0, tuner.clock)
    assert answers["key of x"].winner == "a" and records
    assert Tuned(Plan(), {}, tuple(answers.values()), unasked).complete


def test_a_candidate_without_memory_is_tried_without_what_pytorch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan says so as native code does; what is wrong with another one says nothing of memory."""
    emptied: list[None] = []
    errors = {"a": "allocating a tensor: CUDA out of memory", "b": "launching a kernel: out of memory", "c": "no such thing"}

    def call(self: object, candidate: Candidate, *rest: object) -> Any:
        def run() -> tuple[torch.Tensor, ...]:
            if candidate.name in errors and not (candidate.name == "a" and emptied):
                raise RuntimeFallback(errors[candidate.name])
            return (torch.ones(3),)

        return run

    monkeypatch.setattr(GpuAutotuner, "_make_flush", lambda self: torch.empty(0))
    monkeypatch.setattr(GpuAutotuner, "_call", call)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    for names, left, short in (([LIBRARY, "a"], {}, False), (["a", "b"], {"b"}, True), (["a", "c"], {"c"}, False)):
        emptied.clear()
        candidates = tuple(Candidate(name, (), {}, {}) for name in names)
        tuner = GpuAutotuner(Plan(), torch.device("cpu"), Processor(), "fake")
        calls, refused, found = tuner.prepare(replace(question("x"), candidates=candidates))
        assert ([name for name, _ in calls], set(refused), found) == ([n for n in names if n not in left], set(left), short)
        assert len(emptied) == 1 + (short is True)


# --- plans ------------------------------------------------------------------------------------------------------------------


def layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.linear(F.gelu(F.linear(x, w, b)), v)
    return x


def plan_of_layers() -> Plan:
    inputs = [torch.randn(*shape) for shape in ((96, 128), (256, 128), (256,), (128, 256))]
    return schedule(lowered(layers, inputs), ScheduleOptions(min_parallel=528, lanes=64))


def test_equal_products_are_one_question_and_all_take_the_answer() -> None:
    plan = plan_of_layers()
    tuner = FakeAutotuner({LIBRARY: 1.0, "fused": 0.5, "plain": 2.0, "slices": 3.0, "warps": 1.0}, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    assert len(tuner.prepared) == 2 and tuned.unasked == 0
    assert [answer.places for answer in tuned.answers] == [3, 3]
    made = [kernel for kernel in tuned.plan.kernels.values() if kernel.product is not None]
    assert len(made) == 3 and all(kernel.name in tuned.tiles for kernel in made)
    assert len(tuned.plan.steps) == 6  # three fused, three by the library
    assert sum(isinstance(step, RunKernel) for step in tuned.plan.steps) == 3
    assert "fused" in tuned.text and "library" in tuned.text


def heads(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(2):
        x = (x @ q) * (x @ k).sigmoid() + x @ v
    return (x,)


@pytest.mark.parametrize("horizontal", [True, False])
def test_products_of_one_matrix_may_run_together(horizontal: bool) -> None:
    inputs = [torch.randn(*shape) for shape in ((96, 128), (128, 128), (128, 128), (128, 128))]
    plan = schedule(lowered(heads, inputs), ScheduleOptions(min_parallel=528, lanes=64))
    seconds = {"apart": 1.0, "horizontal": 0.5 if horizontal else 2.0, LIBRARY: 1.0, "fused": 0.5, "": 1.0}
    tuner = FakeAutotuner(seconds, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    (answer,) = [answer for answer in tuned.answers if "of one matrix" in answer.question]
    assert answer.places == 2 and ("horizontal" in answer.winner) is horizontal
    made = [kernel for kernel in tuned.plan.kernels.values() if kernel.product is not None]
    assert [len(kernel.product.chosen) for kernel in made] == ([2, 2] if horizontal else [0, 0])
    assert all(kernel.name in tuned.tiles for kernel in made)


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = (F.silu(x @ gate) * (x @ up)) @ down
    return x


@pytest.mark.parametrize("rows", [8, 96])
def test_products_that_meet_may_be_one_kernel(rows: int) -> None:
    """With what is made of them, where the rows are few."""
    inputs = [torch.randn(*shape) for shape in ((rows, 512), (512, 512), (512, 512), (512, 512))]
    plan = schedule(lowered(gated, inputs), ScheduleOptions(min_parallel=528, lanes=64))
    tuner = FakeAutotuner({"dual": 0.1, "apart": 1.0, "horizontal": 2.0, LIBRARY: 1.0, "fused": 0.5, "": 1.5}, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    made = [kernel.product for kernel in tuned.plan.kernels.values() if kernel.product is not None]
    pairs = [product for product in made if product.besides]
    assert len(pairs) == (2 if rows == 8 else 0)
    assert all(len({product.local, product.besides[0].local}) == 2 for product in pairs)
    assert rows > 8 or len(tuned.plan.steps) == 4


def test_a_kernel_that_another_product_took_is_no_part_of_a_dual_product() -> None:
    def meeting(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.silu(x @ w[0]) * (x @ w[1]) + y @ w[2]

    inputs = [torch.randn(*shape) for shape in ((8, 512), (8, 512), (512, 512), (512, 512), (512, 512))]
    plan = schedule(lowered(meeting, inputs), ScheduleOptions(min_parallel=528, lanes=64))
    tuner = FakeAutotuner({"dual": 0.1, "fused": 0.5, LIBRARY: 1.0, "": 1.5}, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    made = [kernel.product for kernel in tuned.plan.kernels.values() if kernel.product is not None]
    assert not any(product.besides for product in made) and any("fused" in one.winner for one in tuned.answers)


def test_a_kernel_that_adds_slices_may_be_tuned_in_turn() -> None:
    """It reads memory that the plan has only since the product was chosen."""
    inputs = [torch.randn(*shape) for shape in ((256, 384), (320, 256))]
    plan = schedule(lowered(lambda x, w: (x.t() @ w.t()) * 2, inputs), ScheduleOptions(min_parallel=528, lanes=64))
    tuner = FakeAutotuner({LIBRARY: 1.0, "slices": 0.5, "": 2.0}, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    assert any(name.endswith("_parts") for name in tuned.plan.buffers)
    assert (
        tuner.plan is tuned.plan
        and any("slices" in answer.winner for answer in tuned.answers)
        and len(tuned.answers) > 1
    )


def quantised(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Layers whose weights are int8, with an activation between them."""
    for w, s in zip(weights[::2], weights[1::2]):
        x = F.gelu(F.linear(x, w.to(torch.float32) * s[:, None]))
    return x


def plan_of_quantised_layers() -> Plan:
    inputs = [torch.randn(96, 128)]
    for _ in range(3):
        inputs += [torch.randint(-127, 128, (128, 128), dtype=torch.int8), torch.randn(128)]
    with torch.no_grad():
        graph, constants = record(quantised, inputs)
        return schedule(lower(passes.run(graph), constants), ScheduleOptions(min_parallel=528, lanes=64))


@pytest.mark.parametrize(
    "seconds, sides, kernels",
    [
        # activations are parts of products already; each takes its weight's kernel too
        ({"slices": 9.0, "computed": 0.2, LIBRARY: 1.0, "apart": 1.0, "fused": 0.5, "": 2.0}, [1, 1, 1], 3),
        # behind the library's products activations are kernels, which the next product computes
        ({"slices": 9.0, "left and right": 0.1, "computed": 0.2, LIBRARY: 1.0, "apart": 1.0, "": 2.0}, [1, 2, 2], 3),
        # that is too slow: the last one remains behind its product, the others might have been in front of the next
        ({"slices": 9.0, "left": 3.0, "computed": 0.2, LIBRARY: 1.0, "apart": 1.0, "": 2.0}, [1, 1, 1], 5),
        ({"slices": 9.0, "computed": 0.99, LIBRARY: 1.0, "apart": 1.0, "": 2.0}, [], 6),
    ],
)
def test_a_product_may_compute_what_it_reads(seconds: dict[str, float], sides: list[int], kernels: int) -> None:
    plan = plan_of_quantised_layers()
    tuner = FakeAutotuner(seconds, plan=plan)
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    verify(with_memory(tuned.plan, None))
    found = [kernel.product for kernel in tuned.plan.kernels.values() if kernel.product is not None]
    assert sorted(sum(side.value is not None for side in (p.left, p.right)) for p in found) == sides
    assert len(tuned.plan.kernels) == kernels and (tuned.plan is plan or bool(sides))
    assert all(kernel.name in tuned.tiles for kernel in tuned.plan.kernels.values() if kernel.product is not None)
    asked = [answer for answer in tuned.answers if " behind " in answer.question]
    assert asked and all(("computed" in answer.winner) is bool(sides) for answer in asked)


def test_what_would_be_computed_too_often_is_not_tried() -> None:
    """4096 rows and columns in blocks of 256: an operand would be computed 16 times, which costs more than storing it once."""

    def tiles(rows: int, columns: int, computing: Computing) -> list[ProductTile]:
        shape = ProductShape((1, rows, columns, 4096), torch.bfloat16, False, computing=computing)
        return [tile for tile, _ in product_tiles(shape, Processor(), 8)]

    of_left = Computing(12, 0, 4, 2, 1 << 26)
    assert not tiles(4096, 4096, of_left)
    narrow = tiles(4096, 512, of_left)
    assert narrow and all(tile.x >= 128 for tile in narrow)
    assert tiles(16, 4096, Computing(0, 8, 2, 1, 1 << 26))  # each weight is computed once


def test_without_a_quicker_candidate_the_plan_stays() -> None:
    plan = plan_of_layers()
    tuner = FakeAutotuner({LIBRARY: 1.0, "": 1.0})
    tuned = tune(plan, Processor(), CPU, Budget(tuner, None, 1e9, tuner.clock))
    assert tuned.plan is plan and not tuned.tiles


def test_products_on_another_device_are_no_question() -> None:
    assert not autotune.product_questions(plan_of_layers(), Processor(), torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_counts_as_the_same_result(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = (torch.randn(64, 64) * 4).to(dtype)
    assert not disagreement(expected.clone(), expected, 1e-2)
    wrong = expected.clone()
    wrong[:, :8] = torch.ones(8, dtype=dtype) if dtype is not torch.bool else ~wrong[:, :8]
    assert disagreement(wrong, expected, 1e-2)
    if dtype.is_floating_point:
        one = expected.clone()
        one[3, 3] += 3
        assert disagreement(one, expected, 1e-2)
        odd = expected.clone()
        odd[0] = float("nan")
        assert disagreement(odd, expected, 1e-2) and not disagreement(odd, odd, 1e-2)


class Short(FakeAutotuner):
    """Finds no memory in the measurements of these numbers (all of one turn: with the first, or once it is known who may win)."""

    def __init__(self, at: Sequence[int], error: BaseException) -> None:
        super().__init__({LIBRARY: 9.0, "a": 2.0, "b": 1.9})
        self.at, self.error, self.number = at, error, 0

    def measure(self, calls: Sequence[Any], rounds: int) -> list[list[float]]:
        self.number += 1
        if self.number - 1 in self.at:
            raise self.error
        return super().measure(calls, rounds)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("launching a kernel: out of memory")]
)
def test_no_memory_while_candidates_are_measured(at: int, error: BaseException) -> None:
    """What runs without tuning is kept for this question alone, and only until somebody asks again."""
    records, tuner = Memory(), Short([at], error)
    answers, unasked = answer_all([question("one", weight=2.0), question("two")], tuner, records, 1000.0, tuner.clock)
    one, two = answers["key of one"], answers["key of two"]
    assert (one.winner, one.short, unasked) == (LIBRARY, True, 0) and two.winner == "b" and not two.short
    assert set(one.refused) == {LIBRARY, "a", "b"} and "out of memory" in one.refused["a"]
    again = FakeAutotuner({LIBRARY: 9.0, "a": 2.0, "b": 1.9})
    answers, _ = answer_all([question("one"), question("two")], again, records, 1000.0, again.clock)
    assert answers["key of one"].winner == "b" and again.prepared == ["one"]


def test_a_launch_that_fails_while_it_is_measured_is_no_error_of_the_compile() -> None:
    tuner = Short([0], RuntimeError("fused_0: launching a kernel: too many resources requested for launch"))
    answers, _ = answer_all([question("one")], tuner, Memory(), 1000.0, tuner.clock)
    assert answers["key of one"].winner == LIBRARY and not answers["key of one"].short


def test_a_remembered_winner_without_code_is_not_taken() -> None:
    records, first = Memory(), FakeAutotuner({LIBRARY: 9.0, "a": 2.0, "b": 1.0})
    answer_all([question("one")], first, records, 1000.0, first.clock)
    again = FakeAutotuner({LIBRARY: 9.0, "a": 2.0, "b": 1.0}, refused=["b"])
    answers, _ = answer_all([question("one")], again, records, 1000.0, again.clock)
    assert answers["key of one"].winner == "a" and again.prepared == ["one"]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> measure.GpuAutotuner:
    """Without a GPU: calls give tensors of a CPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "plain_mode", nullcontext)
    monkeypatch.setattr(measure.GpuAutotuner, "_make_flush", lambda self: None)
    monkeypatch.setattr(measure.GpuAutotuner, "_tried", lambda self, *given: (lambda: None, (torch.ones(3),)))
    return measure.GpuAutotuner(Plan(), torch.device("cpu"), Processor(), "fake")


def test_no_memory_for_comparing_results(tuner: measure.GpuAutotuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagreement(*given: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "disagreement", disagreement)
    calls, refused, short = tuner.prepare(question("one"))
    assert [name for name, _ in calls] == [LIBRARY] and set(refused) == {"a", "b"} and short


def test_what_pytorch_keeps_is_given_back_for_a_measurement(
    tuner: measure.GpuAutotuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def measured(self: object, calls: object, rounds: int) -> list[list[float]]:
        tried.append(rounds)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [[1.0]]

    monkeypatch.setattr(measure.GpuAutotuner, "_measured", measured)
    assert tuner.measure([None], 5) == [[1.0]] and tried == [5, 5]


def test_a_kernel_that_may_come_later_is_asked_for_again(
    tuner: measure.GpuAutotuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiler was killed: that says nothing of the candidate."""
    one = question("one")
    tried = measure.GpuAutotuner._tried

    def failing(self: measure.GpuAutotuner, candidate: Candidate, *given: Any) -> Any:
        if candidate.name == "a":
            self.codes[id(candidate)] = {"k": SimpleNamespace(key="k")}
            raise cuda_code.CompileError({"k": "the compiler process ended with status -9"})
        return tried(self, candidate, *given)

    monkeypatch.setattr(measure.GpuAutotuner, "_tried", failing)
    for lasting in (False, True):
        monkeypatch.setattr(cuda_code, "_refused", {("k", 0): cuda_code.Refusal("", lasting)})
        _, refused, short = tuner.prepare(one)
        assert set(refused) == {"a"} and short is not lasting
