"""`print` and `warnings.warn` inside a frame.

Takes real values; what they show is shown after the graph, in its place among the frame's effects.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from fusewright.base.signals import GraphBreak
from fusewright.capture.call.torch import defer_output

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def print_row(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    if kwargs.get("file") is not None:
        raise GraphBreak("untraceable-call", "print to a file")
    defer_output(tracer, print, args, kwargs)


def warn_at(message: str, category: type[Warning], file: str, line: int, module: str) -> None:
    """`warnings.warn` as if it were called at that line of that module."""
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    warnings.warn_explicit(message, category, file, line, module, namespace.setdefault("__warningregistry__", {}))


def warn_row(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
    """Held back as output is, with the place that `stacklevel` means; beyond the captured frames the caller's frames
    tell it."""
    _refuse_if_read(tracer)
    given = dict(zip(("message", "category", "stacklevel"), args)) | kwargs
    message, category, level = given.get("message"), given.get("category") or UserWarning, given.get("stacklevel", 1)
    frame = tracer.frame
    for _ in range(max(level, 1) - 1 if type(level) is int else 0):
        frame = None if frame is None else frame.back
    simple = (
        type(message) is str and isinstance(category, type) and given.keys() <= {"message", "category", "stacklevel"}
    )
    if frame is None or not simple or type(level) is not int:
        defer_output(tracer, warnings.warn, args, kwargs)
        return
    place = frame.stack_here()[-1]
    module = frame.function.__globals__.get("__name__") or "<string>"
    defer_output(tracer, warn_at, (message, category, place.file, place.line, module), {})


def _refuse_if_read(tracer: Tracer) -> None:
    """The list that `warnings.catch_warnings(record=True)` fills must hold a warning as soon as it is given."""
    seen = getattr(warnings._showwarnmsg_impl, "__self__", None)  # type: ignore[attr-defined]
    if type(seen) is list and (
        tracer.world.known_stand_in(seen) is not None or any(value is seen for value in tracer.locals)
    ):
        raise GraphBreak("untraceable-call", "a warning that the function records")


def _later(function: Any) -> Any:
    """A row: the call takes its place among warnings, after the graph."""

    def row(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
        if args and issubclass(type(args[0]), warnings.catch_warnings):
            if tracer.world.outside(args[0]) is not None or tracer.world.getattr(args[0], "_record"):
                raise GraphBreak("untraceable-call", "warnings.catch_warnings that records, or was made outside")
        tracer.world.effects.defer(function, args, kwargs)

    return row


# What warnings are shown is decided when they are, so filters wait for their turn as warnings do.
WARNING_ROWS = [
    (function, _later(function))
    for function in (
        warnings.catch_warnings.__enter__,
        warnings.catch_warnings.__exit__,
        warnings.simplefilter,
        warnings.filterwarnings,
        warnings.resetwarnings,
    )
]
