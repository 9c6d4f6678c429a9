"""The PEP 523 frame hook, from Python: who decides which frames inside an eager region are compiled.

Takes a policy, asked once a code object: policy(code, function) -> FrameCache (its entries answer the frame, its `miss`
captures) or None (never).
Always holds: the evaluator is replaced only while some thread is inside `call_eager` or `region`, and acts on that
thread alone (csrc/hook.c); capture, graphs and `finish` run with it off.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from fusewright import _native

FrameCache = _native.FrameCache
Policy = Callable[[types.CodeType, types.FunctionType], Any]

call_eager = _native.call_eager
"""call_eager(fn, /, *args, **kwargs): calls fn with the hook on for this thread."""

set_policy = _native.hook_set_policy
"""set_policy(policy or None). Without a policy an eager region is an ordinary call."""

reset = _native.hook_reset
"""Forgets what was decided and compiled for every code object."""


@contextlib.contextmanager
def region() -> Iterator[None]:
    """Frames that this thread starts within the block are offered to the policy."""
    _native.hook_region(True)
    try:
        yield
    finally:
        _native.hook_region(False)


@contextlib.contextmanager
def policy(decide: Policy) -> Iterator[None]:
    """`decide` is the policy within the block; what it compiled is forgotten at its end. For tests and tools."""
    set_policy(decide)
    try:
        yield
    finally:
        set_policy(None)
        reset()
