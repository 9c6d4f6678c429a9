"""The event stream: everything that a user can be told about a compile, as data.

Emitted by the driver and the backends; read by `explain`, the logs, the debug folder and tests. Always holds: emitting
costs next to nothing when nobody
listens, and a subscriber's exception is the subscriber's caller's problem (it propagates: nothing is swallowed).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fusewright.base.errors import BreakReport
from fusewright.base.location import Location
from fusewright.base.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """Base. `function` names the frame being compiled, e.g. `forward (model.py:12)`."""

    function: str


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A call has met no version that fits: a compile begins."""


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The compile that began last is over, whatever came of it."""


@dataclass(frozen=True, slots=True)
class Captured(Event):
    """A frame was captured: the graph (fx, or None), what gives its guards as text, inputs, the generated finish text,
    seconds, and the output calls that are made after the graph."""

    graph: Any
    guard_texts: Callable[[], tuple[str, ...]]  # a model of 48 layers has 12,000, and seldom does anybody read them
    inputs: tuple[str, ...]
    finish_text: str
    op_count: int
    seconds: float
    replayed: tuple[str, ...] = ()

    @property
    def guards(self) -> tuple[str, ...]:
        """The guards as text."""
        return self.guard_texts()


@dataclass(frozen=True, slots=True)
class Broken(Event):
    """A graph break inside a frame; what follows is captured as a frame of its own."""

    report: BreakReport


@dataclass(frozen=True, slots=True)
class Skipped(Event):
    """The whole frame runs eagerly."""

    report: BreakReport


@dataclass(frozen=True, slots=True)
class Recompiling(Event):
    """No version fits a call: `failures` says, for each version, which guard failed, in the user's terms; `versions`
    are their numbers (1 was made first). caller: the user's line. remedy: what a user can do."""

    failures: tuple[str, ...]
    compiles: int
    versions: tuple[int, ...] = ()
    caller: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Reused(Event):
    """A new case runs code that was compiled before, under guards of its own: why that is right."""

    reason: str


@dataclass(frozen=True, slots=True)
class Served(Event):
    """A call that `entry` serves because it was shown to (`reason`), not because it was captured for it: all that is
    needed to try both (tools/served_cases.py)."""

    reason: str
    entry: Any
    frame: Any  # the Python function
    values: tuple[Any, ...]
    options: Any  # the capture's


@dataclass(frozen=True, slots=True)
class LimitReached(Event):
    """recompile_limit was reached; this and further new cases run eagerly."""

    failures: tuple[str, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class InternalError(Event):
    """A defect of ours during a compile (`stage`): the frame runs eagerly. `trace` is the formatted traceback."""

    stage: str
    trace: str


@dataclass(frozen=True, slots=True)
class StageDone(Event):
    """One stage of a compile: its printed result (built only when somebody asks: a callable) and the seconds that it
    took. complete: a text that the result parses back from, where its kind has one (backends/stage_texts.py)."""

    stage: str
    text: Callable[[], str]
    seconds: float
    artifact: str = ""
    complete: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True)
class PassDone(Event):
    """One pass over a graph that changed it, told while stages are written to files: its name, the rewrites that it
    made, the graph after it."""

    name: str
    rewrites: int
    text: str


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """Option stop_after_rewrites took effect: the last rewrite that was done, and the pass that did it."""

    name: str
    rewrite: str


@dataclass(frozen=True, slots=True)
class Generating(Event):
    """Kernel `number` of `total` (from 1) is being made: on a CPU its code is written, and machine code is made of all
    of them after the last; on a GPU its machine code is waited for."""

    number: int
    total: int


@dataclass(frozen=True, slots=True)
class KernelMade(Event):
    """One generated kernel: its name, the user's source lines that it came from, and its text."""

    name: str
    locations: tuple[Location, ...]
    origins: tuple[str, ...]
    text: Callable[[], str]


@dataclass(frozen=True, slots=True)
class PlanLoaded(Event):
    """A call plan is ready to run: its description (codegen.call_plan_types.CallPlan), and the native object."""

    call_plan: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class Compiled(Event):
    """A frame is ready: seconds in all."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FellBack(Event):
    """A compiled call was repeated eagerly because native code could not finish it."""

    reason: str


@dataclass(frozen=True, slots=True)
class CacheUse(Event):
    """The disk cache was asked for a graph: whether it was found, its key, and why not when it was not."""

    hit: bool
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hint(Event):
    """A performance hint."""

    text: str


@dataclass(frozen=True, slots=True)
class Autotuned(Event):
    """Something was measured to find what is quickest: what, who won, seconds by candidate, why others were refused,
    and all of it as text. A candidate whose results were not as good as the first one's is among the refused."""

    question: str
    winner: str
    times: dict[str, float]
    refused: dict[str, str]
    text: str


Subscriber = Callable[[Event], None]


@dataclass(slots=True)
class Stream:
    """The subscribers, in the order in which they came."""

    subscribers: list[Subscriber] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        for subscriber in tuple(self.subscribers):
            subscriber(event)

    @contextlib.contextmanager
    def listening(self, subscriber: Subscriber) -> Iterator[None]:
        """Subscribes for the length of a with-block."""
        self.subscribers.append(subscriber)
        try:
            yield
        finally:
            self.subscribers.remove(subscriber)


STREAM = Stream()
