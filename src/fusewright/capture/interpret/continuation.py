"""What a captured frame does after its graph: the data that the interpreter hands to `finish.build`.

`finish` first rebuilds `values` (inside objects: traced tensors become graph outputs, containers and instances are made
anew, outside objects are read from their sources, cells keep their identity) into Python variables called `names`, then
replays the effects, then runs `lines`. A frame captured to its end has one value and the line `return`; a frame cut at
a graph break performs the one instruction eagerly and calls the resume function.

Always holds: `lines` ends every path in a `return`, and mentions only `names`, the keys of `constants`, `__function`
(the function object whose frame runs) and names that it assigns itself, which all begin with two underscores. Before
and behind the instruction that breaks stands `LET_GO`: what is not needed any more dies there, as it does in the frame.
"""

from __future__ import annotations

from fusewright.base.records import dataclass, field

RESULT = "__result"
LET_GO = "# what nothing below mentions dies here"


@dataclass(frozen=True, slots=True)
class Continuation:
    """See the module's docstring; `values` and `names` have the same length."""

    values: tuple[object, ...]
    names: tuple[str, ...]
    lines: tuple[str, ...]
    constants: dict[str, object] = field(default_factory=dict)


def returning(value: object) -> Continuation:
    """The frame ran to its end and returns `value`."""
    return Continuation((value,), (RESULT,), (f"return {RESULT}",))
