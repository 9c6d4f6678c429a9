"""What messages say of a program's values.

Takes any value; gives a short text. Always holds: no code of the program's runs for it (a message is no part of the
program), and no tensor is read.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from typing import Any

import torch

from fusewright._native import isinstance
from fusewright.base.exception_fields import args_of


def text_of(value: object, depth: int = 0) -> str:
    """A value in a message. The program's code is not run for it: where that would say, the class is named."""
    kind: Any = type(value)
    held: Any = value
    if issubclass(kind, torch.Tensor):  # its own text would show, and copy, its elements
        return f"<{kind.__name__} of shape {tuple(held.shape)}>"
    if kind in (tuple, list):
        shown = held[:3] if len(held) > 8 else held
        rest = f", ... {len(held)} in all" if len(held) > 8 else ""
        text = ", ".join([text_of(one, depth + 1) for one in shown]) if depth < 4 else "..."  # it may hold itself
        return f"({text}{rest})"
    if kind in (dict, set, frozenset) and depth < 4:
        pairs = itertools.islice(held.items() if kind is dict else zip(held), 8)
        text = ", ".join(": ".join(text_of(part, depth + 1) for part in pair) for pair in pairs)
        text = f"{{{text}{', ...' if len(held) > 8 else ''}}}"
        return text if kind is not frozenset else f"frozenset({text})"
    written = next(base.__dict__["__repr__"] for base in kind.__mro__ if "__repr__" in base.__dict__)
    if issubclass(kind, _HOLDERS) or (isinstance(written, types.FunctionType) and not _is_known(written)):
        return f"<{kind.__qualname__}>"
    try:
        text = repr(value)
    except Exception:  # that of a library, over something of the program's
        text = f"<{kind.__qualname__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def text_of_error(error: BaseException) -> str:
    """The line in which a traceback ends, likewise."""
    written = next(base.__dict__["__str__"] for base in type(error).__mro__ if "__str__" in base.__dict__)
    plain = not isinstance(written, types.FunctionType) and all(type(part) in _PLAIN for part in args_of(error))
    return f"{type(error).__name__}: {error}" if plain else type(error).__name__


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_HOLDERS = (list, dict, set, frozenset, deque)


def _is_known(function: types.FunctionType) -> bool:
    origin = (function.__globals__.get("__name__") or "").partition(".")[0]
    return origin in sys.stdlib_module_names or origin in ("torch", "numpy", "fusewright")
