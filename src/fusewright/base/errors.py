"""Every error that a user can meet, and the catalogue of graph breaks.

Takes the code and the detail of a break (base/signals.py carries them); gives a message that says what happened, where
in the user's code, and what to do. Always holds: a code raised anywhere in capture is a row of `BREAKS` (a test checks
it).
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterable, Sequence

from fusewright.base.break_catalogue import BREAKS
from fusewright.base.location import Location, users_level
from fusewright.base.records import dataclass


class FusewrightError(RuntimeError):
    """Base of fusewright's own errors. What the user's code raises is never wrapped in one."""


class OptionError(FusewrightError, ValueError):
    """A wrong argument of `compile`: an unknown option, mode or backend, or a value of the wrong type."""


class GraphBreakError(FusewrightError):
    """`fullgraph=True` was asked for and the function cannot be captured whole. `code` is the break's row in the
    catalogue."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BackendError(FusewrightError):
    """A backend failed on a captured graph. The backend's own exception is the cause."""


class ServedCaseError(FusewrightError):
    """FUSEWRIGHT_DEBUG found a call that an existing compile serves, and that a compile of its own does otherwise: a
    defect of ours."""


class RecompileError(FusewrightError):
    """A recompile was needed under the stance "fail_on_recompile"."""


class DynamicMarkError(FusewrightError):
    """A size was marked with mark_dynamic, and the program fixes it to one value."""


class ExportError(FusewrightError):
    """`export` cannot make a program of a model: a size that must not vary, an effect that a program cannot hold."""


class ProgramInputError(FusewrightError, ValueError):
    """An exported program was called with arguments that it does not hold for."""


class ProgramFileError(FusewrightError, ValueError):
    """A file is no exported program, or a damaged one; the message names the part."""


class OutOfBoundsError(FusewrightError):
    """A generated kernel was about to touch memory outside its buffers: a defect of ours, found under the option
    `checked`. Nothing outside was read or written."""


class RuntimeFallback(FusewrightError):
    """Raised by native code when a compiled graph cannot finish (an index out of range, a library operator's error):
    the call is repeated eagerly, so users never see it."""


class CannotFunctionalise(FusewrightError):
    """Raised by the graph passes for a mutation that has no pure equivalent: the graph runs eagerly, so users never see
    it."""


class RecompileLimitWarning(UserWarning):
    """A function was compiled as often as `recompile_limit` allows; new cases now run eagerly."""


class CollectiveMismatch(FusewrightError):
    """The processes of a group have compiled different collectives: running them would hang."""


class OptionWarning(UserWarning):
    """An option has no effect here: it is for another kind of device, or another compiler's."""


def warn(text: str, category: type[Warning]) -> None:
    """A warning about the user's line that is running."""
    warnings.warn(text, category, stacklevel=users_level())


@functools.cache
def warn_once(text: str) -> None:
    """An OptionWarning, the first time that its text is met."""
    warn(text, OptionWarning)


class CacheWarning(UserWarning):
    """The disk cache cannot be used, or an entry of it was damaged; what it would have given is compiled again."""


class InternalErrorWarning(UserWarning):
    """A defect of fusewright itself, or of a compiler that it uses, was met; the function, or the operators of one
    kernel, run eagerly instead, with the right result."""


@dataclass(frozen=True, slots=True)
class BreakReport:
    """A graph break as a user reads it: what, where (innermost last), and what to change."""

    code: str
    reason: str
    stack: tuple[Location, ...]
    hint: str

    def __str__(self) -> str:
        where = f"\n  at {self.stack[-1]}" if self.stack else ""
        called = "".join(f"\n  called from {level}" for level in reversed(self.stack[:-1]))
        return f"{self.reason} [{self.code}]{where}{called}\n  what to do: {self.hint}"


def describe_break(code: str, detail: str, stack: Sequence[Location]) -> BreakReport:
    """The report of a break with catalogue row `code`; `detail` completes its cause."""
    cause, hint = BREAKS[code]
    return BreakReport(code, f"{cause}: {detail}" if detail else cause, tuple(stack), hint)


def near_misses(value: str, choices: Iterable[str]) -> str:
    """A phrase that names the choices, the closest ones first: for messages about a misspelt name."""
    known = sorted(choices)
    close = difflib.get_close_matches(value, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}choices: {', '.join(map(repr, known))}"
