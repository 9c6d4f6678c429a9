"""`fusewright.report`: records what is compiled, and writes it as one HTML page.

Takes a path; gives a `Recording`, which listens to the event stream until it is closed. Always holds: while it listens
it only keeps the events; texts are made, and plans measured, when the page is.
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from types import TracebackType

from fusewright.base import events
from fusewright.tools import page


class Recording:
    """Everything that is compiled from its making until `close`, or the end of a with-block, as an HTML page."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.record: list[tuple[float, events.Event]] = []
        events.STREAM.subscribers.append(self._listen)

    def _listen(self, event: events.Event) -> None:
        self.record.append((time.perf_counter(), event))

    def close(self) -> None:
        """Stops listening, and writes the page if a path was given."""
        if self._listen in events.STREAM.subscribers:
            events.STREAM.subscribers.remove(self._listen)
            if self.path is not None:
                self.save(self.path)

    def save(self, path: str | Path) -> None:
        """Writes the page of what was recorded so far."""
        Path(path).write_text(self.html, encoding="utf-8")

    @property
    def html(self) -> str:
        """The page."""
        return page.render(tuple(self.record))

    def _repr_html_(self) -> str:
        return framed(self.html)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def framed(html: str) -> str:
    """A page as a part of another one (a notebook), which keeps its styles apart."""
    return f'<iframe srcdoc="{escape(html)}" style="width:100%;height:640px;border:0" sandbox></iframe>'


def report(path: str | Path | None = None) -> Recording:
    """Records everything that is compiled from now on. `with fusewright.report("report.html"): ...` writes the page at
    the end; `save(path)` writes it at any time; a notebook shows it.

    The page stands alone: no network, no script. Kernels on a CPU with fixed sizes are timed on zeros when it is
    written.
    """
    return Recording(path)
