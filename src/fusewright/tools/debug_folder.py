"""FUSEWRIGHT_DEBUG=1 (or options={"trace.enabled": True}): every stage of every compile as a text file.

Takes the event stream; gives `./fusewright_debug/<run>/<function>/NN_stage.txt`. A run is one process.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusewright.base import events


class DebugFolder:
    """A subscriber that numbers the stages of each function in the order in which they end."""

    def __init__(self, root: Path, run: str) -> None:
        self.folder = root / run
        self._numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()

    def write(self, function: str, stage: str, text: str) -> None:
        """Adds a stage to the folder of `function`."""
        name = _as_file_name(function)
        folder = self.folder / name
        with self._lock:
            number = next(self._numbers[name])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}_{_as_file_name(stage)}.txt").write_text(text + "\n")

    def __call__(self, event: events.Event) -> None:
        for stage, text in WRITERS.get(type(event), lambda _: [])(event):
            self.write(event.function, stage, text)


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def _captured(event: events.Captured) -> list[tuple[str, str]]:
    return [("graph", str(event.graph)), ("guards", "\n".join(event.guards)), ("finish", event.finish_text)]


WRITERS: dict[type[events.Event], Callable[[Any], list[tuple[str, str]]]] = {
    events.Captured: _captured,
    events.StageDone: lambda event: [(event.stage, event.text())],
    events.PassDone: lambda event: [(f"pass_{event.name}", f"{event.text}\n# {event.rewrites} rewrites")],
    events.KernelMade: lambda event: [(f"kernel_{event.name}", event.text())],
    events.Broken: lambda event: [("break", str(event.report))],
    events.Skipped: lambda event: [("break", str(event.report))],
    events.Recompiling: lambda event: [("recompile", "\n".join(event.failures))],
    events.LimitReached: lambda event: [("limit", "\n".join(event.failures))],
    events.FellBack: lambda event: [("repeated_eagerly", event.reason)],
    events.InternalError: lambda event: [("internal_error", event.trace)],
    events.Hint: lambda event: [("hint", event.text)],
}


@functools.cache
def of_process() -> DebugFolder:
    """The folder of this process, in the directory that is current now."""
    return DebugFolder(Path("fusewright_debug").absolute(), time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"))
