"""Draws from Python's and NumPy's generators whose outcomes decide what a call does: they are guarded.

Takes the draws of one capture, in order; gives what each is going to give, and a guard that later calls draw to the
same effect. Always holds: the generators do not move: the draws themselves stay operators of the graph; where the
outcomes would ask for more than MOST versions, the graph breaks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fusewright.base.records import dataclass, field
from fusewright.base.signals import GraphBreak
from fusewright.capture.guards.sources import FunctionSource
from fusewright.operators.host_draws import Call, drawn_from, foreseen
from fusewright.sizes.symfloat import OutsideFloat

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

MOST = 8
"""Versions of one function that its draws may ask for."""


def _generator(call: Call) -> tuple[str, str]:
    """What a draw is from."""
    return drawn_from(call[0]), call[0].partition(".")[0]


@dataclass(slots=True, eq=False)
class _DrawnFloat(OutsideFloat):
    """A float that is drawn: comparisons are guarded, its value cannot be."""

    def fix(self) -> None:
        raise GraphBreak("host-random", "the value of a number that is drawn decides what happens next")


class _Tests(list[Any]):
    """What was asked about a draw; each answer has two outcomes."""

    def __init__(self, spend: Callable[[int], None]) -> None:
        self.spend = spend

    def append(self, test: Any) -> None:
        self.spend(2)
        super().append(test)


@dataclass(slots=True, eq=False)
class Foreseen:
    """The draws of one capture. As a CALL guard's callable: they answer again what was asked about them."""

    world: World | None
    calls: list[Call] = field(default_factory=list)
    questions: list[tuple[int, Callable[[Any], bool]]] = field(default_factory=list)
    versions: int = 1

    def note(self, name: str, parameters: Sequence[Any], size: Sequence[int] | None) -> int:
        """The number of a draw."""
        self.calls.append((name, parameters, size))
        return len(self.calls) - 1

    def _spend(self, outcomes: int) -> None:
        self.versions *= outcomes
        if self.versions > MOST:
            raise GraphBreak("host-random", f"draws decide between more than {MOST} ways through the function")

    def _value(self, index: int) -> Any:
        kind = _generator(self.calls[index])
        return foreseen([one for one in self.calls[: index + 1] if _generator(one) == kind])

    def _ask(self, index: int, test: Callable[[Any], bool]) -> None:
        if not self.questions and self.world is not None:
            self.world.guard("CALL", FunctionSource(), self)
        self.questions.append((index, test))

    def float(self, index: int) -> OutsideFloat:
        """A drawn float, of which comparisons may be asked."""
        origin = _DrawnFloat(FunctionSource(), self._value(index))
        origin.tests = _Tests(self._spend)
        self._ask(index, origin)
        return origin

    def int(self, index: int, limits: tuple[int | None, int | None]) -> int | None:
        """A drawn int of few possible values; None where there are many."""
        least, most = limits
        if least is None or most is None or most - least >= MOST:
            return None
        self._spend(most - least + 1)
        value = self._value(index)
        self._ask(index, value.__eq__)
        return value  # type: ignore[no-any-return]

    def __call__(self, function: Any) -> bool:
        return all(test(self._value(index)) for index, test in self.questions)

    def __repr__(self) -> str:
        return "random numbers are drawn to the same effect"
