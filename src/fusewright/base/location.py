"""A place in the user's program: what errors, events and the nodes of graphs name."""

from __future__ import annotations

from fusewright.base.records import KeepsHash, dataclass


@dataclass(frozen=True, slots=True)
class Location(KeepsHash):
    """One level of the user's stack: where an operator, a break or a kernel came from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"
