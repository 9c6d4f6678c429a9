"""Logs: a subscriber of the event stream that writes chosen artifacts through Python's `logging`.

Takes `set_logs(...)` or FUSEWRIGHT_LOGS; gives records on the loggers `fusewright.<artifact>`. Always holds: an
artifact that is off costs nothing
(its text is never built).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from fusewright.base import events
from fusewright.base.errors import OptionError, near_misses
from fusewright.base.location import Location
from fusewright.base.options import environment

ARTIFACTS: dict[str, str] = {
    "graph_breaks": "every graph break and skipped frame: cause, the user's stack, what to do",
    "recompiles": "every recompile: which guard failed, in the user's terms",
    "guards": "the guards of every captured frame",
    "graph": "the captured graph and the generated code that runs after it",
    "aot_graphs": "the ATen graph after the passes (the joint graph when gradients are wanted), then its forward and "
    "backward",
    "loops": "the loop program",
    "fusion": "the operators of every kernel, and the lines that they come from",
    "schedule": "kernels in order, with the memory plan",
    "bounds": "accesses to memory that were not shown to lie inside their buffers",
    "output_code": "the call plan",
    "kernel_code": "the generated kernels",
    "cache": "disk cache hits and misses",
    "autotuning": "what was measured and chosen",
    "perf_hints": "what keeps the program from being faster",
    "internal_errors": "defects of fusewright, with tracebacks",
    "timings": "seconds by stage",
}

_levels: dict[str, int] = {}


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _log(artifact: str, text: Callable[[], str] | str) -> None:
    level = _levels.get(artifact)
    if level is not None:
        logging.getLogger(f"fusewright.{artifact}").log(level, "%s", text if isinstance(text, str) else text())


def _captured(event: events.Captured) -> None:
    _log("guards", lambda: f"guards of {event.function}:\n" + _indented("\n".join(event.guards)))
    _log("graph", lambda: f"graph of {event.function}:\n{_indented(str(event.graph))}\n{_indented(event.finish_text)}")


def _recompiling(event: events.Recompiling) -> None:
    _log("recompiles", lambda: _recompile_line(event))


def _recompile_line(event: events.Recompiling) -> str:
    """One line: each guard that failed is told once, with the versions that it belongs to."""
    blamed: dict[str, list[int]] = {}
    for version, failure in zip(event.versions, event.failures):
        blamed.setdefault(failure, []).append(version)
    told = "; ".join(
        f"version{'s' * (len(versions) > 1)} {', '.join(map(str, sorted(versions)))}: {failure}"
        for failure, versions in blamed.items()
    )
    head = f"recompiling {event.function} (compile {event.compiles + 1}), called at {event.caller}: {told}"
    return f"{head}. {event.remedy}".rstrip()


def _limit(event: events.LimitReached) -> None:
    text = f"{event.function} reached recompile_limit={event.limit}:\n"
    _log("recompiles", lambda: text + _indented("\n".join(event.failures)))


def _stage_done(event: events.StageDone) -> None:
    if event.artifact:
        _log(event.artifact, lambda: f"{event.stage} of {event.function}:\n{_indented(event.text())}")
    _log("timings", lambda: f"{event.function}: {event.stage} {event.seconds * 1e3:.1f} ms")


def _kernel_made(event: events.KernelMade) -> None:
    _log(
        "fusion",
        lambda: (
            f"kernel {event.name} of {event.function}: {', '.join(event.origins)}\n"
            + _indented(_lines(event.locations))
        ),
    )
    _log("kernel_code", lambda: f"kernel {event.name} of {event.function}:\n{_indented(event.text())}")


def _lines(locations: tuple[Location, ...]) -> str:
    return "\n".join(f"from {location}" for location in locations)


HANDLERS: dict[type[events.Event], Callable[[Any], None]] = {
    events.Captured: _captured,
    events.Broken: lambda e: _log("graph_breaks", lambda: f"graph break in {e.function}: {e.report}"),
    events.Skipped: lambda e: _log("graph_breaks", lambda: f"{e.function} runs eagerly: {e.report}"),
    events.Recompiling: _recompiling,
    events.LimitReached: _limit,
    events.Reused: lambda e: _log("recompiles", lambda: f"{e.function} needs no new code: {e.reason}"),
    events.InternalError: lambda e: _log("internal_errors", lambda: f"{e.stage} of {e.function}:\n{e.trace}"),
    events.StageDone: _stage_done,
    events.KernelMade: _kernel_made,
    events.Compiled: lambda e: _log("timings", lambda: f"{e.function}: compiled in {e.seconds * 1e3:.1f} ms"),
    events.FellBack: lambda e: _log("graph_breaks", lambda: f"{e.function} was repeated eagerly: {e.reason}"),
    events.CacheUse: lambda e: _log(
        "cache", lambda: f"{e.function}: {'hit' if e.hit else 'miss'} {e.key[:16]} {e.reason}".rstrip()
    ),
    events.Hint: lambda e: _log("perf_hints", lambda: f"{e.function}: {e.text}"),
}


def _subscriber(event: events.Event) -> None:
    handler = HANDLERS.get(type(event))
    if handler is not None:
        handler(event)


def set_logs(**artifacts: Any) -> None:
    """Turns artifacts on (True or a logging level) or off (False or None); unmentioned ones stay as they are.

    Raises OptionError for an unknown artifact or a value that is neither a bool nor a level.
    """
    for artifact, value in artifacts.items():
        if artifact not in ARTIFACTS:
            raise OptionError(f"unknown log artifact {artifact!r}: {near_misses(artifact, ARTIFACTS)}")
        if value is not None and type(value) not in (bool, int):
            raise OptionError(f"log artifact {artifact!r} takes True, False or a logging level, got {value!r}")
        if value is None or value is False:
            _levels.pop(artifact, None)
            continue
        _levels[artifact] = logging.INFO if value is True else value
        logger = logging.getLogger(f"fusewright.{artifact}")
        if not logger.isEnabledFor(_levels[artifact]):
            logger.setLevel(_levels[artifact])
    root = logging.getLogger("fusewright")
    if _levels and not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)
    if _levels and _subscriber not in events.STREAM.subscribers:
        events.STREAM.subscribers.append(_subscriber)
    elif not _levels and _subscriber in events.STREAM.subscribers:
        events.STREAM.subscribers.remove(_subscriber)


def help_wanted() -> bool:
    """Whether FUSEWRIGHT_LOGS asks what it takes."""
    return "help" in _named()


def print_help() -> None:
    """Writes the names that FUSEWRIGHT_LOGS takes, with what each means, to standard error."""
    width = max(map(len, ARTIFACTS))
    rows = [f"  {name.ljust(width)}  {meaning}" for name, meaning in ARTIFACTS.items()]
    print("FUSEWRIGHT_LOGS takes these names, with commas between:", *rows, sep="\n", file=sys.stderr)


def set_logs_from_environment() -> None:
    """Applies FUSEWRIGHT_LOGS ("graph_breaks,recompiles"). Raises OptionError for an unknown artifact."""
    names = [name for name in _named() if name != "help"]
    if help_wanted():  # the program has set it after its import
        print_help()
    if names:
        set_logs(**dict.fromkeys(names, True))


def _named() -> list[str]:
    return [name.strip() for name in environment("FUSEWRIGHT_LOGS").split(",") if name.strip()]
