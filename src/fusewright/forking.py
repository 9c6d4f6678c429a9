"""Forks: the child has no thread but the one that forked, and must find the compiler free.

Takes nothing; `register` has the process run what is needed before and after a fork. Always holds: a fork waits a while
for a compile of another thread, and never for ever.
"""

from __future__ import annotations

import os
import threading

from fusewright.background import WORKER
from fusewright.process import PROCESS

FORK_PATIENCE = 2.0
"""Seconds that a fork waits for a compile of another thread: the child has the compiler as it is then, better not in
the middle of one."""


_forking: set[int] = set()
"""Threads that hold the lock because they fork."""


def _before_fork() -> None:
    if PROCESS.lock.acquire(timeout=FORK_PATIENCE):
        _forking.add(threading.get_ident())


def _after_fork_in_parent() -> None:
    if threading.get_ident() in _forking:
        _forking.remove(threading.get_ident())
        PROCESS.lock.release()


def _after_fork_in_child() -> None:
    """The thread that held the lock is not in the child, nor is the one that compiles in the background."""
    PROCESS.lock = threading.RLock()
    _forking.clear()
    WORKER.start_anew()
    for state in PROCESS.states.values():
        state.pending.clear()


def register() -> None:
    """Called once, when the compiler is imported."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
        )
