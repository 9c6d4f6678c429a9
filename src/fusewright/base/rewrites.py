"""A budget of rewrites, which a compile shares between all its lists of passes: a wrong answer is bisected to one
rewrite."""

from __future__ import annotations


class Rewrites:
    """Counts rewrites, and refuses them once `limit` are done (-1: never)."""

    __slots__ = ("done", "last", "limit", "stopped_in")

    def __init__(self, limit: int = -1) -> None:
        self.limit = limit
        self.done = 0
        self.last = ""
        self.stopped_in = ""  # the pass that did the last one allowed

    def allow(self, what: str) -> bool:
        """Whether one more rewrite may be done; `what` describes it."""
        if 0 <= self.limit <= self.done:
            return False
        self.done += 1
        self.last = what
        return True
