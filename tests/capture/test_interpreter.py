"""The interpreter against CPython, over a World that does everything natively."""

from __future__ import annotations

import pytest

from fusewright.capture.settings import CaptureOptions
from fusewright.capture.signals import GraphBreak, SkipFrame
from .fake_world import interpret, no_cut, tracer_for
from .programs import PROGRAMS


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_programs_give_what_cpython_gives(function):
    expected = function()
    assert interpret(function) == expected
    assert repr(interpret(function)) == repr(expected)
