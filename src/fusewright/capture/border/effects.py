"""Effects: what a frame does to the outside world, held back during capture and replayed by `finish`.

Takes the stores that `World` diverts (instance dictionaries, globals, slots, cells) and the shadows of outside
containers; gives `finish` the final contents to write, in order. Always holds: nothing outside is touched while a frame
is captured.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.pytorch import methods
from fusewright.base.records import dataclass, field
from fusewright.capture.guards.sources import Source


class Deleted:
    """Marks a deleted entry in an overlay."""

    def __repr__(self) -> str:
        return "DELETED"


DELETED = Deleted()


@dataclass(slots=True)
class Shadow:
    """A real container that stands for an outside one. `items` and `attributes` are what it held when it was loaded.
    `appended`: a list that was not read, and holds only what was added to it."""

    real: object
    source: Source
    value: object
    items: tuple[object, ...]
    attributes: dict[str, object] | None = None
    appended: bool = False


@dataclass(slots=True)
class SlotStore:
    """`target.name = value` through a slot or a C descriptor of an outside object."""

    target: object
    name: str
    value: object


@dataclass(slots=True)
class CellStore:
    """A store to a closure cell that existed before capture."""

    cell: types.CellType
    value: object


@dataclass(slots=True)
class HookedResult:
    """A tensor made inside that was given a hook, or told to retain its gradient: where its gradient came to then (see
    border/hooked_results.py), and whether that is done after the graph, with the result."""

    tensor: Any
    edge: Any
    later: bool


@dataclass(slots=True)
class DeferredCall:
    """A call that may run after the graph (a print of constants, a warning), and the line that makes it, for
    reports. changes: what of the program it changes for good; empty for a call whose effect is elsewhere."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    where: str = ""
    changes: str = ""


def register_hook(tensor: torch.Tensor, hook: Callable[..., object]) -> RemovableHandle:
    """Tensor.register_hook, which crashes for a view that was written to since its gradient function was last asked
    for. In eager an operator between has asked; where nobody uses its result, it is not run."""
    _ = tensor.grad_fn
    return methods.register_hook(tensor, hook)  # type: ignore[no-any-return]


def registration(handle: RemovableHandle) -> tuple[Any, ...] | None:
    """The function and arguments that will make a handle; None for one that is what it seems."""
    return handle.__dict__.get("registration")


def keep(value: object) -> None:
    """As a deferred call: `value` is made, whoever needs it."""


@dataclass(slots=True)
class Effects:
    """Everything to replay, kept in the order in which it first happened (the final value of a place is what
    counts)."""

    shadows: list[Shadow] = field(default_factory=list)
    slots: dict[tuple[int, str], SlotStore] = field(default_factory=dict)
    cells: dict[int, CellStore] = field(default_factory=dict)
    calls: list[DeferredCall] = field(default_factory=list)
    filters: bool = False  # whether it says which warnings are shown
    data: list[tuple[Any, int]] = field(default_factory=list)  # whose `data` is replaced, and its version then
    hooked: dict[int, tuple[Any, int]] = field(default_factory=dict)  # outside tensors with new hooks; version then
    hooked_results: list[HookedResult] = field(default_factory=list)
    removed_inside: int = 0  # how many hooks that the graph has inside were removed
    handle_leaves: bool = False  # of a hook that the graph has inside: who gets it may remove the hook
    gradients_asked: int = 0  # how many of those there were when the engine was called last

    def store_slot(self, target: object, name: str, value: object) -> None:
        """Notes a store; keyed by the target's identity, which `World` keeps alive."""
        self.slots[id(target), name] = SlotStore(target, name, value)

    def read_slot(self, target: object, name: str) -> SlotStore | None:
        """The last store to this slot, if any."""
        return self.slots.get((id(target), name))

    def defer(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        where: str = "",
        changes: str = "",
    ) -> None:
        """Notes a call to make after the graph."""
        self.calls.append(DeferredCall(function, args, kwargs, where, changes))

    def register(self, register: Callable[..., object], tensor: object, hook: object) -> RemovableHandle:
        """Notes a hook to register after the graph; gives what its handle is until then."""
        handle = RemovableHandle.__new__(RemovableHandle)
        handle.__dict__["registration"] = (register, tensor, hook)
        self.defer(keep, (handle,), {}, changes="the hooks of a tensor")
        return handle

    def exchanged(self, container: object, stand_ins: dict[int, object]) -> None:
        """A container holds other stand-ins (by the identity of those before) of the same objects: that is no
        change."""
        for shadow in self.shadows:
            if shadow.value is container:
                shadow.items = tuple(stand_ins.get(id(item), item) for item in shadow.items)

    def store_cell(self, cell: types.CellType, value: object) -> None:
        """Notes a store to an outside cell."""
        self.cells[id(cell)] = CellStore(cell, value)


_ITERATE: dict[type, Callable[..., Any]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
    bytearray: bytearray.__iter__,
}


def contents(container: object) -> tuple[object, ...]:
    """What a builtin container holds, flat and in order, read without running user code: elements, or keys and values
    alternating."""
    if isinstance(container, dict):
        keys = OrderedDict.__iter__(container) if isinstance(container, OrderedDict) else dict.__iter__(container)
        return tuple(part for key in keys for part in (key, dict.__getitem__(container, key)))
    return tuple(_ITERATE[next(base for base in _ITERATE if isinstance(container, base))](container))


def changed(shadow: Shadow) -> bool:
    """Whether a shadow's content is no longer what was loaded (by identity, so that an equal but new element
    counts)."""
    value, real = shadow.value, shadow.real
    if isinstance(value, set) and isinstance(real, set) and _native.set_layout(value) != _native.set_layout(real):
        return True  # perhaps the same elements, among which the next one finds another place
    now = contents(value)
    return len(now) != len(shadow.items) or any(a is not b for a, b in zip(now, shadow.items, strict=False))


def let_go(effects: Effects, written: Iterable[Any]) -> Iterator[object]:
    """What places of outside objects held that hold something else now. written: lazy stand-ins of dicts that were
    stored to."""
    for shadow in effects.shadows:
        if changed(shadow):
            now = {id(item) for item in contents(shadow.value)}
            yield from (item for item in shadow.items if id(item) not in now)
        if attributes_changed(shadow):
            yield from (shadow.attributes or {}).values()
    for namespace in written:
        yield from map(namespace.real.get, namespace.stores)
    for slot in effects.slots.values():
        yield slot.target  # what a descriptor in C gives is not asked for
        kinds = type(slot.target).__mro__
        held = next((vars(kind)[slot.name] for kind in kinds if slot.name in vars(kind)), None)
        if type(held) is types.MemberDescriptorType:
            with contextlib.suppress(AttributeError):
                yield held.__get__(slot.target)
    for store in effects.cells.values():
        with contextlib.suppress(ValueError):
            yield store.cell.cell_contents


def stamp(effects: Effects) -> tuple[object, ...]:
    """What there is to replay, by identity: equal before and after some interpreted code ran if that had no effect."""
    written = []
    for shadow in effects.shadows:
        if changed(shadow) or attributes_changed(shadow):
            attributes = object.__getattribute__(shadow.value, "__dict__") if shadow.attributes is not None else {}
            written.append((id(shadow), tuple(map(id, contents(shadow.value))), tuple(map(id, attributes.values()))))
    slots = tuple((key, id(store.value)) for key, store in effects.slots.items())
    return (
        tuple(written),
        slots,
        tuple((key, id(store.value)) for key, store in effects.cells.items()),
        len(effects.calls),
    )


def attributes_changed(shadow: Shadow) -> bool:
    """Whether the attributes of a shadow that has some (a container's subclass) are no longer those that were
    loaded."""
    if shadow.attributes is None:
        return False
    now = object.__getattribute__(shadow.value, "__dict__")
    return now.keys() != shadow.attributes.keys() or any(
        now[name] is not value for name, value in shadow.attributes.items()
    )
