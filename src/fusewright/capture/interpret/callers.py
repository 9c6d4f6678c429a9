"""Functions that look at the frames of their callers.

Takes a frame that a graph break leaves; lets it pass, or raises SkipFrame. Always holds: no function that asks for its
callers by a name in its code, or in that of a function which it names, is called by a finish function, whose frame
would stand in the place of the program's. But for those of the standard library (`logging`, which looks for a file and
a line: a finish function has the program's).
"""

from __future__ import annotations

import os
import types

from fusewright.base.signals import READS_OF_DATA, GraphBreak, SkipFrame
from fusewright.capture.border.interfaces import Frame

_STANDARD = os.path.dirname(os.__file__) + os.sep
_ASKS = frozenset({"_getframe", "f_back", "walk_stack", "extract_stack"})


def left(frame: Frame, signal: GraphBreak | SkipFrame) -> None:
    """Notes that `signal` leaves this frame. Raises SkipFrame where what runs then would see a finish function."""
    if type(signal) is not GraphBreak:
        return
    if looks_at_callers(frame.function):
        reason = f"{frame.function.__qualname__} looks at the frames of its callers"
        raise SkipFrame(signal.code, f"{signal.detail}; the frame cannot be split there: {reason}", signal.stack)
    if frame.back is not None and signal.code in READS_OF_DATA:
        signal.passed.append((frame.info.code, frame.pc, frame.begun))


def looks_at_callers(function: types.FunctionType) -> bool:
    """Whether the code of `function`, or of a function of its module or around it that it calls, asks for callers."""
    code, cells = function.__code__, function.__closure__ or ()
    named = [function.__globals__.get(name) for name in code.co_names]
    named += [cell.cell_contents for cell in cells if cell != types.CellType()]
    return _asks(code) or any(type(one) is types.FunctionType and _asks(one.__code__) for one in named)


def _asks(code: types.CodeType) -> bool:
    if code.co_filename.startswith(_STANDARD) and "site-packages" not in code.co_filename:
        return False
    return not _ASKS.isdisjoint(code.co_names) or {"inspect", "stack"} <= {*code.co_names}
