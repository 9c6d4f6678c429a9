"""Cutting functions at every instruction, and running what the cut gives with CPython itself.

`results(function)` stops the interpreter (over a fake World) in front of each step in turn, builds the continuation, and runs its source:
the step eagerly, the rest in a resume function. `chained` cuts each resume function again, after a few more steps.
Run as a script it checks all programs, for versions of CPython that have neither pytest nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusewright.base.signals import SkipFrame
from fusewright.capture.border.arguments import bind
from fusewright.capture.breaks.cut_state import State
from fusewright.capture.breaks.cutting import _Cut, cut
from fusewright.capture.bytecode.resume import CannotCut, origin_of
from fusewright.capture.interpret.continuation import Continuation
from fusewright.capture.interpret.pending import Pending
from fusewright.capture.settings import CaptureOptions
from tests.capture.border.fake_world import no_cut, tracer_for


def run(continuation: Continuation, function: Any) -> object:
    """What `finish` does, without reconstruction and effects."""
    body = "\n".join(f"    {line}" for line in continuation.lines)
    scope = dict(continuation.constants)
    exec(f"def finish(__function, {', '.join(continuation.names)}):\n{body}", scope)
    return scope["finish"](
        function, *(value.real if type(value) is Pending else value for value in continuation.values)
    )


def resume_here(frame: Any) -> Continuation:
    """Goes on at the very instruction, without performing it first: legal at almost every one."""
    builder = _Cut(frame)
    stack = builder.source.stack
    variables = {slot: f"__local{slot}" for slot in builder.held if slot not in builder.info.cells}
    line = f"return {builder._resume(State(builder.index, stack, variables, frozenset()))}"
    return Continuation(tuple(builder.values.values()), tuple(builder.values), (line,), dict(builder.source.constants))


def steps(function: Any, arguments: tuple[Any, ...] = ()) -> int:
    tracer = tracer_for(function, arguments)
    tracer.run(lambda real, slot, name: real, no_cut)
    return tracer.step


def results(function: Any, cut: Callable[[Any], Continuation] = cut) -> Iterator[tuple[int, object]]:
    """(step, result of the run that was cut there), for each step at which a cut is legal."""
    for step in range(steps(function)):
        tracer = tracer_for(function, (), step)
        try:
            continuation = tracer.run(lambda real, slot, name: real, cut)
        except (CannotCut, SkipFrame):
            continue
        yield step, run(continuation, function)


class _Stop:
    """Equal to the first step, from `first` on, at which the frame can be cut; keeps the continuation."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.tracer: Any = None
        self.continuation: Continuation | None = None

    def __eq__(self, step: object) -> bool:
        if step < self.first:  # type: ignore[operator]
            return False
        try:
            self.continuation = cut(self.tracer.root)
        except CannotCut:
            return False
        return True


def chained(function: Any, distance: int) -> tuple[object, int]:
    """The result of a run that is cut again and again, at least `distance` steps on from the last cut; and the number of cuts."""
    cuts = 0

    def wrap(resumed: Any) -> Callable[..., object]:
        def go_on(*values: object) -> object:
            nonlocal cuts
            arguments = tuple(bind(resumed, values, {}, no_cut))  # type: ignore[arg-type]
            prefix = next((place for place, index in enumerate(origin_of(resumed.__code__).indices) if index >= 0), 0)
            stop = _Stop(distance + (prefix if prefix else 0))
            stop.tracer = tracer_for(resumed, arguments, stop, CaptureOptions(wrap_resume=wrap))  # type: ignore[arg-type]
            continuation = stop.tracer.run(lambda real, slot, name: real, lambda frame: stop.continuation)
            if continuation is not stop.continuation:
                return continuation.values[0]
            cuts += 1
            return run(continuation, resumed)

        return go_on

    return wrap(function)(), cuts


if __name__ == "__main__":
    from tests.capture.interpret.programs import PROGRAMS

    for function in PROGRAMS:
        expected = repr(function())
        cuts = 0
        for method in (cut, resume_here):
            for step, result in results(function, method):
                cuts += 1
                assert repr(result) == expected, (function.__name__, step, expected, result)
        print(function.__name__, cuts)
