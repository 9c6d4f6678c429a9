"""What one attempt to capture a frame takes for granted.

Always holds: an attempt never changes its assumptions. One that does not hold raises `Retry`, and the next attempt is
made without it.
"""

from __future__ import annotations

import types
from typing import Any

from fusewright.base.records import dataclass, replace
from fusewright.base.signals import GraphBreak, Retry

MOST_REFUSALS = 2
"""Functions whose branches turn out not to be joined, before a capture stops trying (each costs another attempt)."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """custom_gradients  the backward of custom autograd functions, and hooks, have no effects, so they may be captured
    gradient_refused  why that does not hold
    later_hooks       the hooks of tensors made inside, by their places among all, that are registered after the graph;
        None: none may be
    replays           a call of a module may be replayed where a call of another module of its class did the same
    unknown_shapes    nobody asks for a shape that depends on data, so the operators that give one may be recorded
    data_sizes        no gradient is taken through a size that depends on data, so such sizes may be symbols
    changes_level     a frame with something that has no form at the backend's level is captured at the other one
    lacks_form        the step that has none (-1: none was met)
    inference         inference mode that is entered inside is left inside, and no other tensor escapes than its own
    no_gradients      a frame that begins without gradients turns them on nowhere, so that what wraps tensors needs no
        history
    loops             a long scan or map is an operator: its body does nothing besides computing tensors
    caches            a function that keeps its results is interpreted where it does not know its arguments
    works             what begins asynchronously is waited for before the graph ends, and nothing else is asked of it
    carries           nobody looks at immutable values that come with the call (a date): they are only handed on
    foresees          draws from Python's generators decide what happens, so their outcomes are guarded
    guarded           functions whose comparisons of sizes become guards: their branches cannot be joined
    broken, stop_at   the graph break that an earlier attempt met, and the step in front of which this one stops (-1:
        none)
    """

    custom_gradients: bool = True
    gradient_refused: str = ""
    later_hooks: frozenset[int] | None = frozenset()
    replays: bool = True
    unknown_shapes: bool = True
    data_sizes: bool = True
    changes_level: bool = True
    lacks_form: int = -1
    inference: bool = True
    no_gradients: bool = True
    loops: bool = True
    caches: bool = True
    works: bool = True
    carries: bool = True
    foresees: bool = False
    guarded: frozenset[types.CodeType] = frozenset()
    broken: GraphBreak | None = None
    stop_at: int = -1

    @property
    def joins(self) -> bool:
        """Whether branches on sizes are joined."""
        return len(self.guarded) < MOST_REFUSALS

    def after(self, signal: Retry, step: int) -> Assumptions:
        """The assumptions of the next attempt; the last one ended at `step`."""
        changes: dict[str, Any] = dict(signal.changes)
        if not changes:  # more is known of the sizes: the frame may break elsewhere now, or nowhere
            return replace(self, broken=None, stop_at=-1)
        if "guarded" in changes:
            changes["guarded"] = self.guarded | changes["guarded"]
        if changes.get("lacks_form") is True:
            changes["lacks_form"] = step
        return replace(self, **changes)
