"""When compiling a function further cannot pay: too many versions of it, or parts behind its graph breaks, for what
they are called.

Takes each compile of a function's code with the seconds that it took; says when new cases of that code shall run
eagerly. Always holds: versions and parts that there are go on serving their calls; below `cost_limit` compiles nothing
is asked; what compiled code may have saved is estimated from above, by the calls that it has served.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter
from typing import Any

import torch.fx

from fusewright.base.records import dataclass, field
from fusewright.capture.bytecode.resume import CannotCut, origin_of
from fusewright.capture.frame import CapturedFrame
from fusewright.graph.nodes import leaves
from fusewright.sizes.estimate import estimate
from fusewright.sizes.tensor_type import TensorType

OPERATOR_SECONDS = 20e-6
"""More than eager takes to dispatch an operator (about 5 us on a CPU of 2023 and on a GPU)."""
BYTE_SECONDS = 1e-10
"""More than a byte takes to be written and read again by one core."""
PER_CALL_SECONDS = 20e-6
"""What leaving Python may save beside, at each call of a version."""


@dataclass(slots=True)
class Cost:
    """What was spent on one code of the program, the parts behind its breaks included, and what that may have saved.

    code     the original code object, kept so that its identity stays its own
    ends     at which breaks the compiled parts end: (location, code of the catalogue)
    refused  how many new cases have run eagerly for its sake
    warned   that was said
    """

    code: types.CodeType
    compiles: int = 0
    seconds: float = 0.0
    refused: int = 0
    warned: bool = False
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    frames: dict[int, tuple[Any, dict[int, float]]] = field(default_factory=dict)

    def note(self, compiled: Any, entry: Any, frame: CapturedFrame, seconds: float) -> None:
        """A version was made: `entry` of `compiled`."""
        self.compiles += 1
        self.seconds += seconds
        for one in frame.breaks:
            self.ends[str(one.stack[0]) if one.stack else "", one.code] += 1
        _, saves = self.frames.setdefault(id(compiled), (weakref.ref(compiled), {}))
        if entry is not None:
            saves[id(entry)] = PER_CALL_SECONDS if frame.graph is None else PER_CALL_SECONDS + _saves(frame.graph)

    def saved(self) -> tuple[int, float]:
        """(calls served, what they may have saved at most in seconds) by the versions that there are."""
        calls, seconds = 0, 0.0
        for compiled, saves in self.frames.values():
            entries = getattr(compiled(), "entries", ())
            for entry in entries:
                calls += entry.calls
                seconds += entry.calls * saves.get(id(entry), PER_CALL_SECONDS)
        return calls, seconds

    def told(self) -> str | None:
        """Why no more of it shall be compiled, or None."""
        calls, seconds = self.saved()
        if seconds >= self.seconds:
            return None
        text = (
            f"{self.compiles} versions of it and of the parts behind its breaks took {self.seconds:.2f} s to compile; "
            f"they have served {calls} calls, which can have saved {seconds:.2g} s at most"
        )
        if self.ends:
            ((where, code), count), *_ = self.ends.most_common(1)
            text += f"; {count} of them end at {where} [{code}]"
        return text


def _saves(graph: torch.fx.Graph) -> float:
    """What eager may spend more than compiled code on one call of the graph."""
    seconds = 0.0
    for node in graph.nodes:
        if node.op == "call_function":
            kinds = [kind for kind in leaves(node.meta.get("type")) if isinstance(kind, TensorType)]
            written = sum(kind.dtype.itemsize * _elements(kind) for kind in kinds)
            seconds += OPERATOR_SECONDS + BYTE_SECONDS * written
    return seconds


def _elements(kind: TensorType) -> int:
    count = 1
    for size in kind.shape:
        count *= estimate(size)
    return count


class Costs:
    """The costs of all codes that one compiler has met, by the original code of each."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.known: dict[int, Cost] = {}

    def of(self, code: types.CodeType) -> Cost:
        """What is known of the code that `code` is, or was cut from."""
        try:
            original = origin_of(code).info.code
        except CannotCut:
            original = code
        found = self.known.get(id(original))
        if found is None:
            found = self.known[id(original)] = Cost(original)
        return found

    def refusal(self, code: types.CodeType) -> str | None:
        """Why this code is compiled no further, the first time that this is so; "" from then on; None: it is."""
        cost = self.of(code)
        if self.limit == 0 or cost.compiles < self.limit:
            return None
        if cost.refused:
            cost.refused += 1
            if cost.refused & (cost.refused - 1):  # asked again at twice as many: there may be calls that paid for it
                return ""
        told = cost.told()
        if told is None:
            return None
        cost.refused = cost.refused or 1
        told = "" if cost.warned else told
        cost.warned = True
        return told

    def clear(self) -> None:
        self.known.clear()
