"""The line that a long compile shows on a terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch

import fusewright
from fusewright.base import events
from fusewright.tools import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stages(listen: events.Subscriber, seconds: float) -> None:
    listen(events.Started("f (a.py:1)"))
    listen(events.StageDone("f (a.py:1)", "schedule", str, 0.0))
    listen(events.Generating("f (a.py:1)", 1, 2))
    time.sleep(seconds)
    listen(events.Ended("f (a.py:1)"))


def test_a_long_compile_shows_a_line_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    monkeypatch.setattr(progress, "PERIOD", 0.1)
    terminal = Terminal()
    stages(progress.Progress(terminal).listen, 1.0)
    lines = terminal.getvalue().split("\r\x1b[2K")
    assert "fusewright compiles f (a.py:1): kernel 1 of 2, 0 s" in lines
    assert lines[-1] == "" and len(lines) > 3
    time.sleep(0.3)
    assert terminal.getvalue().split("\r\x1b[2K") == lines


def test_a_short_compile_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.5)
    terminal = Terminal()
    stages(progress.Progress(terminal).listen, 0.0)
    time.sleep(0.7)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO(), None])
def test_only_a_terminal_has_it(terminal: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribers: list[events.Subscriber] = []
    monkeypatch.setattr(events.STREAM, "subscribers", subscribers)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.start()
    assert len(subscribers) == isinstance(terminal, Terminal)


def test_a_compile_tells_its_kernels() -> None:
    told: list[events.Event] = []
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 5), torch.nn.Softmax(1))
    compiled = fusewright.compile(net, options={"disk_cache": False})
    with events.STREAM.listening(told.append), torch.no_grad():
        compiled(torch.randn(3, 4))
    numbers = [(event.number, event.total) for event in told if isinstance(event, events.Generating)]
    made = sum(isinstance(event, events.KernelMade) for event in told)
    assert numbers == [(number, made) for number in range(1, made + 1)] and made > 1
