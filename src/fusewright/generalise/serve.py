"""Which code serves a call that no entry accepts: code that exists, or what is compiled for this call and more.

Takes the entries that exist and the call, with what the driver does for it (capture, compile); gives the entry for it,
and another that was made on the way. Always holds: code serves a case that it was not captured for only where that was
shown (capture/batch_of_one.py: batches of 1, from the log of one capture; widening.py: sizes of 0 and 1, by comparing
two captures). What the driver's functions raise passes through.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from fusewright.base.errors import DynamicMarkError
from fusewright.base.records import dataclass, replace
from fusewright.base.signals import Signal
from fusewright.capture.frame import CapturedFrame
from fusewright.generalise.widening import General, is_general, ones_of, serves, widened


@dataclass(frozen=True, slots=True)
class Call:
    """A call that no entry accepts.

    function, values  the frame
    capture   capture(several) gives its capture; `several`: batches of 1 are taken to be larger ones
    announce  is told the capture that says what this call does
    compile   compile(frame) gives the entry of a capture, or None when there is none (yet)
    clean     the graph passes
    several   whether batches of 1 may be taken to be larger ones at all
    """

    function: types.FunctionType
    values: tuple[Any, ...]
    capture: Callable[[bool], CapturedFrame]
    announce: Callable[[CapturedFrame], None]
    compile: Callable[[CapturedFrame], Any]
    clean: Callable[[torch.fx.Graph], torch.fx.Graph]
    several: bool


@dataclass(frozen=True, slots=True)
class Served:
    """entry   for the call at hand; None: it runs eagerly
    other   an entry for other calls that was made on the way
    reused  `entry` runs code that existed before
    proof   why `entry` serves a call that its code was not captured for; empty where it was
    """

    entry: Any
    other: Any = None
    reused: bool = False
    proof: str = ""


WIDENED = "the compiled code for larger sizes does the same for these"
SHOWN = "shown to serve a batch of 1"


def serve(existing: Sequence[Any], call: Call) -> Served:
    """What serves `call`, which no entry of `existing` accepts."""
    known = [entry for entry in existing if isinstance(entry.tag, General)]
    several = None if known else _taken_larger(call, first=True)
    frame = several if several is not None and several.shown is not False else call.capture(False)
    call.announce(frame)
    for larger in known:
        entry = widened(larger, frame, call.clean, call.values, call.function)
        if entry is not None:
            return Served(entry, reused=True, proof=WIDENED)
    if frame.shown:
        return _compiled_once(call, frame)
    if several is None and known and ones_of(frame, [entry.tag for entry in known]):
        several = _taken_larger(call)
    larger = None
    if several is not None and several is not frame:
        entry, larger = _compiled_for_larger(call, several, frame)
        if entry is not None:
            return Served(entry, larger, proof=WIDENED)
    return Served(call.compile(frame), larger)


def remembered(frame: CapturedFrame) -> General | None:
    """What an entry's tag is to hold, noted before the graph is compiled; None where its code serves no other cases."""
    if frame.graph is None or not is_general(frame):
        return None
    return General(replace(frame, example_inputs=()), frame.graph)  # the caller's tensors live no longer for it


def _taken_larger(call: Call, first: bool = False) -> CapturedFrame | None:
    """The capture of a call whose batches of 1 are taken to be larger; the plain one where there are none. None where
    it cannot be: with several the program does something else. `first`: no capture was tried before, so what ends one
    in which no size was taken to be larger ends it."""
    if not call.several:
        return None
    try:
        return call.capture(True)
    except (Signal, DynamicMarkError) as signal:
        if first and isinstance(signal, Signal) and not signal.takes_larger:
            raise
        return None


def _compiled_once(call: Call, frame: CapturedFrame) -> Served:
    """Compiles a frame that was captured for larger batches, and shown to be right for the 1 of this call."""
    entry = call.compile(frame)
    if entry is None:
        return Served(None)
    if entry.program.check(call.values, call.function):
        return Served(entry, proof=SHOWN)
    return Served(call.compile(call.capture(False)), entry)  # compiling has made guards that this call does not pass


def _compiled_for_larger(call: Call, general: CapturedFrame, frame: CapturedFrame) -> tuple[Any, Any]:
    """Compiles a call with a batch of 1 for batches of any size, by the capture `general`, if that is shown to be
    `frame` for 1: gives the entry for this call, None if there is none, and the one for larger batches."""
    if general.graph is None or general.eager_reason or general.breaks or not is_general(general):
        return None, None
    fixed = serves(General(general, general.graph), frame, call.clean)
    larger = None if fixed is None else call.compile(general)
    if larger is None or larger.tag is None:
        return None, larger
    return widened(larger, frame, call.clean, call.values, call.function, fixed), larger
