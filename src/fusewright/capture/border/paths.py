"""The places below a module from which a call of it reads: sources that lead through it, as steps from one root.

Takes sources; gives the steps, each after the one that it starts from, how a step is read and how it is moved to
another root. Always holds: reading a step runs no code of the program's that its capture has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from fusewright._native import isinstance
from fusewright.base.records import dataclass, field
from fusewright.capture.guards.check import is_constant_key
from fusewright.capture.guards.sources import Attribute, InstanceDict, Item, Source
from fusewright.capture.guards.types import Guard

if TYPE_CHECKING:
    pass


class Refused(Exception):
    """This call cannot be an example, or cannot be replayed from it."""


@dataclass(slots=True)
class Path:
    """One step below the module, from the object at `parent`, and what is wanted of the object there (before anything
    is read from it)."""

    source: Source
    parent: int
    guards: list[Guard] = field(default_factory=list)
    tensor: torch.Tensor | None = None
    optional: bool = False


class Paths:
    """The distinct sources below a module's source, each after its parent; the first is the module."""

    def __init__(self, root: Source) -> None:
        self.root = root
        self.steps = [Path(root, 0)]
        self._places: dict[Source, int | None] = {root: 0}

    def find(self, source: Source) -> int | None:
        """The number of the path; None for a source that does not lead through the module. Raises Refused for one that
        cannot be followed."""
        if source in self._places:
            return self._places[source]
        base: Source | None = getattr(source, "base", None)
        parent = None if base is None else self.find(base)
        place = None
        if parent is not None:
            if type(source) not in READ or (type(source) is Item and not is_constant_key(source.key)):
                raise Refused
            place = len(self.steps)
            self.steps.append(Path(source, parent))
        self._places[source] = place
        return place


ABSENT = object()


def _item(base: Any, source: Any) -> object:
    if isinstance(base, dict):
        return dict.__getitem__(base, source.key)
    if isinstance(base, list):
        return list.__getitem__(base, source.key)
    if isinstance(base, tuple):
        return tuple.__getitem__(base, source.key)
    raise KeyError(source.key)


READ: dict[type, Callable[[Any, Any], object]] = {
    Item: _item,
    InstanceDict: lambda base, source: object.__getattribute__(base, "__dict__"),
    Attribute: lambda base, source: getattr(base, source.name),
}


REBASE: dict[type, Callable[[Any, Source], Source]] = {
    Item: lambda source, base: Item(base, source.key, source.owner),
    InstanceDict: lambda source, base: InstanceDict(base, source.hooked),
    Attribute: lambda source, base: Attribute(base, source.name),
}
