"""One line on a terminal while a compile takes long: function, the stage that ended last or the kernel, seconds.

Takes the event stream; writes to standard error, and takes the line away when the compile ends. Always holds: nothing
is written before `PATIENCE` seconds, nor where standard error is no terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from fusewright.base import events

PATIENCE, PERIOD = 3.0, 0.5
"""Seconds until the line is shown, and between two changes of it."""


class Progress:
    """A subscriber; `listen` is told of events, a timer of its own shows the line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._shown = False
        self._function, self._stage, self._started = "", "capture", 0.0

    def listen(self, event: events.Event) -> None:
        """Takes in one event."""
        with self._lock:
            if isinstance(event, events.Started):
                self._end()
                self._function, self._stage = event.function, "capture"
                self._started = time.monotonic()
                self._wait(PATIENCE)
            elif isinstance(event, events.StageDone):
                self._stage = event.stage
            elif isinstance(event, events.Generating):
                last = event.number == event.total
                self._stage = f"{'machine code, ' if last else ''}kernel {event.number} of {event.total}"
            elif isinstance(event, events.Ended):
                self._end()

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # the compile has ended since
            seconds = time.monotonic() - self._started
            self._write(f"fusewright compiles {self._function}: {self._stage}, {seconds:.0f} s")
            self._shown = True
            self._wait(PERIOD)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._shown:
            self._write("")
        self._shown = False

    def _write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[2K{text}")
        self.stream.flush()


def start() -> None:
    """Subscribes, where standard error is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        events.STREAM.subscribers.append(Progress(sys.stderr).listen)
