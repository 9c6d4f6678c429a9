"""Guards: what must still hold for a captured frame to be reused; the public names of this part of capture.

Data is in guard_types.py, the compilation to a native program in guard_program.py, Python's own evaluation (for
messages and as the reference in tests) in guard_check.py, PyTorch's global state in torch_state.py.
"""

from __future__ import annotations

from fusewright.capture.guards.check import evaluate, guard_holds, guard_text, readable, recompile_advice
from fusewright.capture.guards.program import GuardProgram, build_program
from fusewright.capture.guards.torch_state import capture_global_state
from fusewright.capture.guards.types import (
    MISSING,
    MOST_GUARDS,
    AnswersAgain,
    GlobalState,
    Guard,
    GuardKind,
    Missing,
    TensorGuard,
)

__all__ = [
    "MISSING",
    "MOST_GUARDS",
    "AnswersAgain",
    "GlobalState",
    "Guard",
    "GuardKind",
    "GuardProgram",
    "Missing",
    "TensorGuard",
    "build_program",
    "capture_global_state",
    "evaluate",
    "guard_holds",
    "guard_text",
    "readable",
    "recompile_advice",
]
