"""Candidates for one computation on a GPU, and which of them is quickest.

Takes questions ("which of these is quickest for this shape?") and what runs and measures candidates; gives the answers,
which the disk cache remembers for this GPU and these versions. Always holds: the first candidate is what runs without
tuning; another one takes its place only if its results are as good and it was quicker by `MARGIN`; a search ends with
its budget.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fusewright.base.records import dataclass, field, replace
from fusewright.base.signals import memory_was_short
from fusewright.base.thresholds import MARGIN, MAY_WIN
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.codegen.triton.tiles import Tile
from fusewright.loops.ir import Buffer
from fusewright.schedule.plan import Kernel, Plan, Step
from fusewright.select.variants import Variant

FEW, MANY = 5, 20
"""Measurements of every candidate, and then of those that may win."""
AHEAD = 4
"""Questions whose kernels are being compiled while one is measured."""
FORMAT = 1
"""Of records on disk."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """steps: what it runs; kernels and tiles: of those that are generated, by name; added: buffers that the plan does
    not have."""

    name: str
    steps: tuple[Step, ...]
    kernels: Mapping[str, Kernel]
    tiles: Mapping[str, Tile | ProductTile]
    variant: Variant | None = None
    added: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """title: for people; key: what decides the answer, hashed; weight: the work that depends on it; candidates: the
    first is what runs without tuning; places: sites, or names of kernels, that take the answer; shape_class: what it
    has in common with the same question about a similar number of rows (empty: nothing is known of such); delay:
    seconds by which the first candidate holds up the kernels around it, which no measurement of it alone shows."""

    title: str
    key: str
    weight: float
    candidates: tuple[Candidate, ...]
    results: tuple[str, ...]
    tolerance: float
    places: tuple[Any, ...]
    shape_class: str = ""
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """times: seconds by candidate, as far as they were measured; refused: why a candidate was not measured; remembered:
    it was on disk; short: a candidate found no memory, which says nothing of it: the question is asked again."""

    question: str
    winner: str
    times: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)
    remembered: bool = False
    places: int = 1
    short: bool = False

    @property
    def text(self) -> str:
        times = sorted(self.times.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in times[:4])
        first = next(iter(self.times), self.winner)
        gain = ""
        if self.winner != first and self.winner in self.times:
            gain = f" ({self.times[first] / self.times[self.winner]:.2f} times as quick as {first})"
        often = f", {self.places} times" if self.places > 1 else ""
        known = " (remembered)" if self.remembered else ""
        return f"{self.question}{often}: {self.winner}{gain}{known}: {shown}"


class Autotuner(Protocol):
    """What autotuning needs of a GPU. plan: whose kernels (or what stands in their place) are tried."""

    plan: Plan
    machine: str

    def request(self, candidates: Sequence[Candidate]) -> None:
        """Has the candidates' kernels compiled in the background."""

    def refuses(self, candidate: Candidate) -> bool:
        """Whether a kernel of the candidate is known to have no code."""

    def prepare(self, question: Question) -> tuple[list[tuple[str, Any]], dict[str, str], bool]:
        """(name and call of each candidate that runs and whose results agree with the first one's, why the others do
        not, whether one of these found no memory)."""

    def measure(self, calls: Sequence[Any], rounds: int) -> list[list[float]]:
        """Seconds of each call in each round; calls take turns. Raises RuntimeError where one fails."""


class Records(Protocol):
    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, label: str, body: bytes) -> object: ...


def quickest(
    calls: Sequence[tuple[str, Any]],
    measure: Callable[[Sequence[Any], int], list[list[float]]],
    delay: float = 0.0,
) -> tuple[str, dict[str, float]]:
    """(the winner's name, median seconds by name). The first call keeps its place unless another one is clearly
    quicker, beside its delay."""
    names = [name for name, _ in calls]
    times = dict(zip(names, map(statistics.median, measure([call for _, call in calls], FEW))))
    bound = MAY_WIN * min(times.values())
    left = [(name, call) for name, call in calls if name == names[0] or times[name] <= bound]
    if len(left) > 1:
        times.update(zip([name for name, _ in left], map(statistics.median, measure([call for _, call in left], MANY))))
    costs = {name: times[name] + (delay if name == names[0] else 0.0) for name, _ in left}
    best = min(costs, key=costs.__getitem__)
    winner = best if costs[best] < (1 - MARGIN) * costs[names[0]] else names[0]
    return winner, times


def answer_all(
    questions: Sequence[Question],
    tuner: Autotuner,
    records: Records | None,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Answer], int]:
    """(answers by question's key, number of questions for which there was no time)."""
    ends = clock() + seconds
    answers: dict[str, Answer] = {}
    open_: list[Question] = []
    for question in sorted(questions, key=lambda q: -q.weight):
        known = None if records is None else _remembered(records, tuner, question)
        if known is not None:
            answers[question.key] = known
        else:
            open_.append(question if records is None else _shortened(records, tuner, question))
    requested = 0
    for number, question in enumerate(open_):
        if clock() >= ends:
            return answers, len(open_) - number
        while requested < min(len(open_), number + AHEAD):
            tuner.request(open_[requested].candidates)
            requested += 1
        calls, refused, short = tuner.prepare(question)
        winner = question.candidates[0].name
        times: dict[str, float] = {}
        if len(calls) > 1:
            try:
                winner, times = quickest(calls, tuner.measure, question.delay)
            except RuntimeError as error:  # a call found no memory, say, or other processes have taken it meanwhile
                short = short or memory_was_short(error)
                why = f"failed while it was measured: {error}".splitlines()[0][:200]
                refused = {**refused, **{name: why for name, _ in calls}}
        places = len(question.places)
        answers[question.key] = Answer(question.title, winner, times, refused, places=places, short=short)
        if records is not None and times and not short:
            _remember(records, tuner, question, winner, times)
    return answers, 0


@dataclass(slots=True)
class Budget:
    """What questions are answered with. records: answers of earlier processes; ends: when, on the
    clock, nothing is asked any more."""

    tuner: Autotuner
    records: Records | None
    ends: float
    clock: Callable[[], float] = time.perf_counter
    answers: dict[str, Answer] = field(default_factory=dict)
    unasked: int = 0

    def ask(self, questions: Sequence[Question]) -> dict[str, Answer]:
        """The answers to these questions, as far as the time that is left allows."""
        found, unasked = answer_all(questions, self.tuner, self.records, self.ends - self.clock(), self.clock)
        self.answers |= found
        self.unasked += unasked
        return found


def record_key(tuner: Autotuner, question_key: str) -> str:
    """Where the disk cache has the answer to a question, or that of its shape class."""
    return hashlib.sha256(f"autotune {FORMAT}|{tuner.machine}|{question_key}".encode()).hexdigest()


def _remember(records: Records, tuner: Autotuner, question: Question, winner: str, times: Mapping[str, float]) -> None:
    body = json.dumps({"winner": winner, "times": times}).encode()
    for key in filter(None, (question.key, question.shape_class)):
        records.put(record_key(tuner, key), f"autotuning {question.title}", body)


def _read(records: Records, tuner: Autotuner, question: Question, key: str) -> tuple[str, dict[str, float]] | None:
    """(winner, times) of a record; None where there is none, or one that something else wrote: then it is asked, and
    written, anew."""
    body = records.get(record_key(tuner, key))
    if body is None:
        return None
    try:
        found = json.loads(body)
        winner, times = str(found["winner"]), {str(name): float(value) for name, value in found["times"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (winner, times) if any(candidate.name == winner for candidate in question.candidates) else None


def _remembered(records: Records, tuner: Autotuner, question: Question) -> Answer | None:
    found = _read(records, tuner, question, question.key)
    if found is None or any(tuner.refuses(one) for one in question.candidates if one.name == found[0]):
        return None
    return Answer(question.title, *found, remembered=True, places=len(question.places))


def _shortened(records: Records, tuner: Autotuner, question: Question) -> Question:
    """The question among what runs without tuning and what won for a similar size (or came next to the library
    there)."""
    found = _read(records, tuner, question, question.shape_class) if question.shape_class else None
    if found is None:
        return question
    winner, times = found
    first = question.candidates[0].name
    others = [name for name in times if name != first]
    likely = winner if winner != first or not others else min(others, key=times.__getitem__)
    left = tuple(candidate for candidate in question.candidates if candidate.name in (first, likely))
    return replace(question, candidates=left, shape_class="") if len(left) == 2 else question
