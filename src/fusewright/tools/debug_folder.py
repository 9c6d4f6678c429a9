"""FUSEWRIGHT_DEBUG=1 (or options={"trace.enabled": True}): every stage of every compile as a text file.

Takes the event stream; gives `./fusewright_debug/<run>/<function>/<version>/NNN_stage.txt`, and an index page of the
run. Beside it lies NNN_stage.ir where a compile can start from the stage's result (backends/stage_texts.py). A run is
one process; each compile of a function is a version. Always holds: a stage whose text is that of the file before it is
left out, and the index says so.
"""

from __future__ import annotations

import functools
import html
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusewright.base import events
from fusewright.base.records import dataclass


class DebugFolder:
    """A subscriber that numbers the stages of each version in the order in which they end."""

    def __init__(self, root: Path, run: str) -> None:
        self.folder = root / run
        self._versions: dict[str, _Version] = {}
        self._lock = threading.Lock()

    def write(
        self, function: str, stage: str, text: str, note: str = "", complete: Callable[[], str] | None = None
    ) -> None:
        """Adds a stage to the latest version of `function`; `note` follows its text, what `complete` gives lies beside
        it."""
        name = _as_file_name(function)
        with self._lock:
            version = self._versions.setdefault(name, _Version(0))
            place = Path(name) / f"{version.number:02d}"
            unchanged, version.text = text == version.text, text
            if unchanged:
                self._list(f"<li>{html.escape(f'{place}: {stage}')}: unchanged")
                return
            file = place / f"{version.stages:03d}_{_as_file_name(stage)}.txt"
            version.stages += 1
            (self.folder / place).mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_text(text + note + "\n")
            if complete is not None:
                (self.folder / file).with_suffix(".ir").write_text(complete())
            self._list(f'<li><a href="{html.escape(str(file))}">{html.escape(str(file))}</a>')

    def _list(self, row: str) -> None:
        index = self.folder / "index.html"
        if not index.exists():
            index.parent.mkdir(parents=True, exist_ok=True)
            index.write_text('<!doctype html><meta charset="utf-8"><title>fusewright</title><h1>Stages</h1><ol>\n')
            print(f"fusewright writes the stages of compiles to {self.folder} (index.html)", file=sys.stderr)
        with index.open("a") as page:
            page.write(row + "\n")

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, _OPENING):
            name = _as_file_name(event.function)
            known = self._versions.get(name)
            if known is not None and known.complete:
                self._versions[name] = _Version(known.number + 1)
        for stage, text, *rest in WRITERS.get(type(event), lambda _: [])(event):
            self.write(event.function, stage, text, *rest)
        if isinstance(event, events.Compiled) and _as_file_name(event.function) in self._versions:
            self._versions[_as_file_name(event.function)].complete = True


@dataclass(slots=True)
class _Version:
    """number: of the compile; stages: written so far; text: the latest one's; complete: the next compile is another
    version."""

    number: int
    stages: int = 0
    text: str = ""
    complete: bool = False


_OPENING = (events.Recompiling, events.Broken, events.Skipped, events.Captured)
"""What the events of a compile begin with."""


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("_")


def _captured(event: events.Captured) -> list[tuple[Any, ...]]:
    return [("graph", str(event.graph)), ("guards", "\n".join(event.guards)), ("finish", event.finish_text)]


WRITERS: dict[type[events.Event], Callable[[Any], list[tuple[Any, ...]]]] = {
    events.Captured: _captured,
    events.StageDone: lambda event: [(event.stage, event.text(), "", event.complete)],
    events.PassDone: lambda event: [(f"pass_{event.name}", event.text, f"\n# {event.rewrites} rewrites")],
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
