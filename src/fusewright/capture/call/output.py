"""`print` and `warnings.warn` inside a frame.

Takes real values; what they show is shown after the graph, in its place among the frame's effects.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border.native import native
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.call.torch import defer_output

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

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
    recorded = bool(tracer.world.recordings)
    if not recorded:
        _refuse_if_read(tracer)
    given = dict(zip(("message", "category", "stacklevel"), args)) | kwargs
    message, category, level = given.get("message"), given.get("category"), given.get("stacklevel", 1)
    category = UserWarning if category is None else category
    if not hasattr(type(level), "__index__"):
        native(warnings.warn, "", UserWarning, level)  # its complaint
    if not isinstance(message, Warning) and not (isinstance(category, type) and issubclass(category, Warning)):
        native(warnings.warn, "", category)  # its complaint
    frame = tracer.frame
    for _ in range(max(level, 1) - 1 if type(level) is int else 0):
        frame = None if frame is None else frame.back
    simple = (
        type(message) is str and isinstance(category, type) and given.keys() <= {"message", "category", "stacklevel"}
    )
    error = not recorded and _may_be_error(tracer, type(message) if isinstance(message, Warning) else category)
    if (recorded or error) and (frame is None or not simple):
        what = "that the function records" if recorded else "that may be an error"
        raise GraphBreak("untraceable-call", f"a warning {what}, of a line that it is called from")
    if frame is None or not simple or type(level) is not int:
        defer_output(tracer, warnings.warn, args, kwargs)
        return
    place = frame.stack_here()[-1]
    module = frame.function.__globals__.get("__name__") or "<string>"
    if recorded:
        _recorded(tracer, message, category, place, module)
        return
    if error and _action(warnings.filters, message, category, place, module) == "error":
        raise UserException(category(message))
    defer_output(tracer, warn_at, (message, category, place.file, place.line, module), {})


_DECIDE = ("filters", "showwarning", "_showwarnmsg_impl")


def check_filters(world: World) -> None:
    """Warnings, and what sets their filters, wait until behind the graph: who looks at the filters, or changes them by
    hand, must find it done."""
    if not world.effects.filters and all(call.function not in (warn_at, warnings.warn) for call in world.effects.calls):
        return
    held = world.known_stand_in(vars(warnings))
    looked = {*held.loaded, *held.stores} if type(held) is OutsideDict else set(held or ())
    if world.known_stand_in(warnings.filters) is not None or not looked.isdisjoint(_DECIDE):
        raise SkipFrame("untraceable-call", "filters of warnings are looked at in between")


def _may_be_error(tracer: Tracer, category: type[Warning]) -> bool:
    """Whether a filter may make an error of such a warning, which is raised where it is given then."""
    found = _filters_for_errors()
    tracer.world.guard_answer(_filters_for_errors, (), found)
    may_be = any(one[0] == "error" and issubclass(category, one[2]) for one in found)
    if may_be and any(call.function in _WARNING_CALLS for call in tracer.world.effects.calls):
        raise GraphBreak("untraceable-call", "a warning that may be an error, after filters were set")
    return may_be


def _filters_for_errors() -> tuple[Any, ...]:
    return tuple(warnings.filters) if any(one[0] == "error" for one in warnings.filters) else ()


def _refuse_if_read(tracer: Tracer) -> None:
    """The list that `warnings.catch_warnings(record=True)` fills must hold a warning as soon as it is given."""
    seen = getattr(warnings._showwarnmsg_impl, "__self__", None)  # type: ignore[attr-defined]
    if type(seen) is list and (
        tracer.world.known_stand_in(seen) is not None or any(value is seen for value in tracer.locals)
    ):
        raise GraphBreak("untraceable-call", "a warning that the function records")


@dataclass(slots=True)
class _Recording:
    """An open `warnings.catch_warnings` of a function that records warnings: the filters there, and the list that is
    given to the program (None for a context inside of another that records none)."""

    context: Any
    filters: list[Any]
    log: list[Any] | None


def _filters() -> tuple[Any, ...]:
    return tuple(warnings.filters)


def _enter(tracer: Tracer, context: Any) -> list[Any] | None:
    """With a list for warnings, what they meet is decided while the call is captured."""
    world = tracer.world
    if any(call.function in _WARNING_CALLS for call in world.effects.calls):
        raise GraphBreak("untraceable-call", "warnings are recorded after filters were set")
    if not world.recordings:
        world.guard_answer(_filters, (), _filters())
    filters = list(world.recordings[-1].filters if world.recordings else warnings.filters)
    log: list[Any] | None = [] if world.getattr(context, "_record") else None
    world.recordings.append(_Recording(context, filters, log))
    first = world.getattr(context, "_filter")
    if first is not None:
        _set_filter(filters, "simplefilter", first, {})
    return log


def _set_filter(filters: list[Any], name: str, args: Args, kwargs: Kwargs) -> None:
    given = native(inspect.signature(getattr(warnings, name)).bind, *args, **kwargs)
    given.apply_defaults()
    text, module = (given.arguments.get(part, "") for part in ("message", "module"))
    item = (
        given.arguments["action"],
        re.compile(text, re.IGNORECASE) if text else None,
        given.arguments["category"],
        re.compile(module) if module else None,
        given.arguments["lineno"],
    )
    if item in filters:
        if given.arguments["append"]:
            return
        filters.remove(item)
    filters.insert(len(filters) if given.arguments["append"] else 0, item)


def _recorded(tracer: Tracer, message: Any, category: Any, place: Any, module: str) -> None:
    """A warning that a list of the function's may take."""
    recordings: list[_Recording] = tracer.world.recordings
    if type(message) is not str or not issubclass(category, Warning):
        raise GraphBreak("untraceable-call", "a warning that the function records, and that is no text")
    action = _action(recordings[-1].filters, message, category, place, module)
    if action == "error":
        raise UserException(category(message))
    if action not in ("always", "all", "ignore"):
        raise GraphBreak("untraceable-call", f"a warning that the function records, where the filter is {action!r}")
    if action != "ignore":
        log: Any = next(one.log for one in reversed(recordings) if one.log is not None)
        log.append(warnings.WarningMessage(category(message), category, place.file, place.line))


def _action(filters: Any, message: Any, category: type[Warning], place: Any, module: str) -> str:
    """What the filters say of a warning."""
    return next((
        action for action, text, kind, origin, line in filters
        if (text is None or text.match(message)) and issubclass(category, kind)
        and (origin is None or origin.match(module)) and line in (0, place.line)
    ), "default")  # fmt: skip


def _later(function: Any) -> Any:
    """A row: the call takes its place among warnings, after the graph; at once where the function records them."""

    def row(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        world, name = tracer.world, function.__name__
        if name in ("__enter__", "__exit__") and not isinstance(args[0], warnings.catch_warnings):
            return tracer.inline(function, args, kwargs)
        world.effects.filters = True
        if name in ("simplefilter", "filterwarnings"):
            with warnings.catch_warnings():
                native(function, *args, **kwargs)  # its complaint, if there is one
        if name in ("__enter__", "__exit__"):
            if world.outside(args[0]) is not None:
                raise GraphBreak("untraceable-call", "a warnings.catch_warnings that was made outside")
            if name == "__enter__" and (world.recordings or world.getattr(args[0], "_record")):
                return _enter(tracer, args[0])
            if world.recordings:
                if world.recordings.pop().context is not args[0]:
                    raise GraphBreak("untraceable-call", "a warnings.catch_warnings that is left out of turn")
                return None
        elif world.recordings:
            filters = world.recordings[-1].filters
            return filters.clear() if name == "resetwarnings" else _set_filter(filters, name, args, kwargs)
        first = world.getattr(args[0], "_filter") if name == "__enter__" else None
        if "error" in (*args, *kwargs.values(), *(first or ())):
            raise GraphBreak("untraceable-call", "a filter that makes errors of warnings")
        world.effects.defer(function, args, kwargs)
        return None

    return row


_WARNING_CALLS = (
    warnings.catch_warnings.__enter__,
    warnings.catch_warnings.__exit__,
    warnings.simplefilter,
    warnings.filterwarnings,
    warnings.resetwarnings,
)
# What warnings are shown is decided when they are, so filters wait for their turn as warnings do.
WARNING_ROWS = [(function, _later(function)) for function in _WARNING_CALLS]
