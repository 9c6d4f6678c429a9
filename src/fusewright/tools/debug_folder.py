"""FUSEWRIGHT_DEBUG=1 (or options={"trace.enabled": True}): every stage of every compile as a text file.

Takes the event stream; gives `./fusewright_debug/<run>/<function>/NN_stage.txt`. A run is one process.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from pathlib import Path

from fusewright import events


class DebugFolder:
    """A subscriber that numbers the stages of each function in the order in which they end."""

    def __init__(self, root: Path | None = None, process: int = 0) -> None:
        self.folder = (root or Path("fusewright_debug")) / time.strftime(f"%Y%m%d-%H%M%S-{process}")
        self._numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)

    def _write(self, function: str, stage: str, text: str) -> None:
        name = re.sub(r"[^\w.-]+", "_", function).strip("_")
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{next(self._numbers[name]):02d}_{stage}.txt").write_text(text + "\n")

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Captured):
            self._write(event.function, "guards", "\n".join(event.guards))
            self._write(event.function, "graph", str(event.graph))
            self._write(event.function, "finish", event.finish_text)
        elif isinstance(event, events.StageDone):
            self._write(event.function, event.stage, event.text())
        elif isinstance(event, events.Broken | events.Skipped):
            self._write(event.function, "break", str(event.report))
        elif isinstance(event, events.InternalError):
            self._write(event.function, "internal_error", event.trace)
        elif isinstance(event, events.Recompiling):
            self._write(event.function, "recompile", "\n".join(event.failures))
