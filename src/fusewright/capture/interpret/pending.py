"""Arguments of a resume function that have not been read yet.

Much of what a resume function is given it only hands on to the next one. So an argument is brought inside, and guarded,
when it is read.
Always holds: one that never was is known by its slot alone, and stands in a continuation for whatever the caller
    passed. No torch.
"""

from __future__ import annotations


class Pending:
    """An argument of the root frame that has not been read yet."""

    __slots__ = ("name", "real", "slot")

    def __init__(self, real: object, slot: int, name: str) -> None:
        self.real = real
        self.slot = slot
        self.name = name
