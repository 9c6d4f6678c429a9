"""What the passes of one compile share."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx

from fusewright.base.records import dataclass, field
from fusewright.base.rewrites import Rewrites
from fusewright.graph.passes.library.linear_paths import Choose, Linear, SkinnyRows, likely, no_rows


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did. `before` and `after` are printed graphs; `seconds` is the pass alone; `last` describes the
    last rewrite."""

    name: str
    sentence: str
    before: str
    after: str
    rewrites: int
    seconds: float
    last: str


Observer = Callable[[PassReport], None]


@dataclass(slots=True)
class PassContext:
    """rewrites: one budget over all lists of passes. observer: hears of each pass. keeps_parameters: what depends on
    parameters alone is computed once, beforehand. choose: which of the library's candidates computes a linear layer.
    skinny_rows: for how many rows a generated kernel stands beside it (0: none does). takes_generated: whether a
    generated kernel, which multiplies halves as they are, computes a product. has_quick_onednn: whether oneDNN's
    products in float32 are much quicker than eager's. pieces: that a product beside a collective is cut into."""

    rewrites: Rewrites = field(default_factory=Rewrites)
    observer: Observer | None = None
    keeps_parameters: bool = False
    choose: Choose = likely
    skinny_rows: SkinnyRows = no_rows
    takes_generated: Callable[[Linear], bool] = lambda linear: False
    has_quick_onednn: Callable[[], bool] = lambda: False
    pieces: int = 2

    def allow(self, what: str) -> bool:
        """Whether one more rewrite may be done; `what` describes it. A pass asks before each change that it makes."""
        return self.rewrites.allow(what)


Pass = Callable[[torch.fx.Graph, PassContext], torch.fx.Graph]
