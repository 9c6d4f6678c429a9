"""Which line of the forward an operator of the backward differentiates.

Takes the numbers that autograd gives its nodes, and the user's stack at each call of the forward; gives the stack of
the call that made the node which the engine is running. Always holds: outside of the engine nothing is said.
"""

from __future__ import annotations

import bisect

from fusewright.base.location import Location
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field


@dataclass(slots=True)
class ForwardLines:
    """active: the backward is being recorded."""

    active: bool = False
    numbers: list[int] = field(default_factory=list)  # the next node's, when a call began
    stacks: list[tuple[Location, ...]] = field(default_factory=list)

    def note(self, stack: tuple[Location, ...]) -> None:
        """A call of the forward begins."""
        if not self.active:
            self.numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self.stacks.append(stack)

    def stack(self, otherwise: tuple[Location, ...]) -> tuple[Location, ...]:
        """Of the call that made the node that runs now."""
        node = torch._C._current_autograd_node()
        place = -1 if node is None else bisect.bisect_right(self.numbers, node._sequence_nr()) - 1
        return self.stacks[place] if place >= 0 else otherwise
