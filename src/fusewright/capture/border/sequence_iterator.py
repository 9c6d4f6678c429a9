"""Iterators over an object of the program's that has a `__getitem__` and no `__iter__`.

Takes the world and the object; gives an iterator that native code and interpreted code may advance. Always holds: a
program sees CPython's own types in their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.absent import LOOK_LIKE, STAND_FOR
from fusewright.capture.border.native import give_back

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


class SequenceIterator:
    """Iterates over an object by its `__getitem__`, as CPython's own sequence iterators do, upwards from `index`."""

    __slots__ = ("index", "sequence", "world")
    step = 1

    def __init__(self, world: World, sequence: Any, index: int = 0) -> None:
        self.world = world
        self.sequence = sequence
        self.index = index

    def __repr__(self) -> NoReturn:
        raise GraphBreak("cannot-rebuild", "the text of an iterator, which says where it lies in memory")

    def __iter__(self) -> SequenceIterator:
        return self

    def __next__(self) -> Any:
        if self.index < 0:
            raise StopIteration
        try:
            value = self.world.getitem(self.sequence, self.index)
        except UserException as signal:
            held = [signal.exception]
        else:
            self.index += self.step
            return value
        if not isinstance(held[0], (IndexError, StopIteration)):
            give_back(held)
        self.index = -1  # it has ended for good
        raise StopIteration


class ReversedSequence(SequenceIterator):
    """The same down to 0."""

    __slots__ = ()
    step = -1


class _Indexed:
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError


STAND_FOR[SequenceIterator], STAND_FOR[ReversedSequence] = type(iter(_Indexed())), reversed
LOOK_LIKE[SequenceIterator] = lambda iterator: iter(_Indexed())
LOOK_LIKE[ReversedSequence] = lambda iterator: reversed(_Indexed())
