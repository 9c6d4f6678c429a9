"""What stands for a traceback inside: interpreted frames have none.

Always holds: there is one, it is true and no None, and whatever looks into it runs the whole frame eagerly, where tracebacks are genuine.
No torch.
"""

from __future__ import annotations

import types
from typing import NoReturn

from fusewright.capture.signals import SkipFrame


class AbsentTraceback:
    """See the module's docstring; `isinstance(it, types.TracebackType)` holds."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return types.TracebackType

    def __getattr__(self, name: str) -> NoReturn:
        raise SkipFrame("frame-access", f"{name} of a traceback: interpreted frames leave none")

    def __repr__(self) -> NoReturn:
        raise SkipFrame("frame-access", "the text of a traceback: interpreted frames leave none")


TRACEBACK = AbsentTraceback()
