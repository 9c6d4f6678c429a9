"""Aliasing guards: which outside objects must stay distinct for a capture to be reused.

Takes the outside objects of a finished attempt, what was written to, and the recorded graph; gives DIFFERENT and
NO_OVERLAP guards.
Always holds: an object that was written to is guarded to be no other object of its type that was read, and a tensor
that an ATen-level graph writes to shares no memory with another input. A torch-level graph replays the program's own
calls in order: overlap does not matter.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.exception_fields import has_no_dict
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import attributes_changed
from fusewright.capture.border.values import cls as classes, function as functions
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.guards import Guard
from fusewright.capture.guards.check import storages_are_apart
from fusewright.capture.guards.sources import Constant, InstanceDict, Item, Local, Source
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import HIDDEN_WRITES, facts, list_of_views, written_by
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Outside, World

aten = torch.ops.aten


def alias_guards(world: World) -> list[Guard]:
    """All of them."""
    return [*_distinct_objects(world), *_apart_in_memory(world)]


def _namespace(real: object) -> object:
    """The instance dictionary, if there is one, without running a `__getattribute__` of the user's."""
    if isinstance(real, BaseException) and has_no_dict(real):
        return None
    if isinstance(real, functools.partial):
        return functions.attributes_of_partial(real)
    try:
        return object.__getattribute__(real, "__dict__")
    except AttributeError:
        return None


def _distinct_objects(world: World) -> list[Guard]:
    """DIFFERENT within each type: identity decides `is`, equality and hashes of objects, and who else sees a store.

    Tensors that are no arguments (parameters) are left out until one was written to, compared by identity or hashed.
    """
    written = world.written_objects()
    written_types: set[object] = {torch.Tensor} if world.recorder.identity_asked else set()
    groups: dict[object, list[Outside]] = {}
    for record in world.outside_objects():
        real = record.real
        known_by_identity = issubclass(type(real), (types.FunctionType, types.ModuleType, type)) or is_constant(real)
        if known_by_identity or isinstance(record.source, InstanceDict):
            continue
        kind: object = torch.Tensor if issubclass(type(real), torch.Tensor) else type(real)
        groups.setdefault(kind, []).append(record)
        if id(real) in written or (classes.has_dict(type(real)) and id(_namespace(real)) in written):
            written_types.add(kind)
    guards = _distinct_dicts(world, written)
    for kind, records in groups.items():
        whole = kind is not torch.Tensor or kind in written_types
        chosen = records if whole else [record for record in records if _is_argument(record.source)]
        if all(isinstance(record.source, Constant) for record in chosen):
            continue
        sources = tuple(dict.fromkeys(record.source for record in chosen))
        if len(sources) > 1:
            guards.append(
                Guard("DIFFERENT", sources[0], sources, f"distinct objects ({getattr(kind, '__name__', kind)})")
            )
    return guards


def _distinct_dicts(world: World, written: set[int]) -> list[Guard]:
    """DIFFERENT for instance dictionaries, and the dicts that are arguments, once one was written to or handed out: a
    program may give one to several objects, or beside its object."""
    records = [record for record in world.outside_objects() if isinstance(record.source, InstanceDict)]
    given = [one for one in world.outside_objects() if type(one.real) is dict and _is_argument(one.source)]
    shadows = (shadow for shadow in world.effects.shadows if attributes_changed(shadow))
    written = written | {id(_namespace(shadow.real)) for shadow in shadows}
    if not any(id(record.real) in written for record in records):
        of_arguments = any(id(one.real) in written for one in given)
        records = [
            one
            for one in records
            if id(one.value) in world.owners
            or (of_arguments and _is_argument(one.source.base))  # type: ignore[attr-defined]
        ]
    if not records or len(records) + len(given) < 2:
        return []
    sources = tuple(record.source for record in (*records, *given))
    return [Guard("DIFFERENT", sources[0], sources, "distinct instance dictionaries")]


def _is_argument(source: Source) -> bool:
    return isinstance(source, Local) or (isinstance(source, Item) and isinstance(source.base, Local))


def _apart_in_memory(world: World) -> list[Guard]:
    if world.recorder.level != "aten":
        return []
    if world.arrays:
        return _arrays_apart(world)
    nodes = {id(node.meta["example_value"]): id(node) for node, _ in world.recorder.inputs}
    by_node = {nodes[id(traced)]: (real, source) for real, source, traced in world.inputs}
    written = [by_node[key] for key in written_placeholders(world.recorder.graph) if key in by_node]
    if not written or len(by_node) < 2:
        return []
    storages = [(real.untyped_storage()._cdata if real.numel() else None, source) for real, source in by_node.values()]
    shared = [storage for storage, _ in storages if storage is not None]
    why = "the graph writes to a tensor in place"
    if len(set(shared)) == len(shared):
        places = tuple(source for _, source in storages)
        return [Guard("NO_OVERLAP", places[0], places, why)]
    guards = []
    for real, source in written:
        mine = real.untyped_storage()._cdata
        for storage, other in storages:
            if other == source:
                continue
            if storage == mine and real.numel():
                detail = f"{source.text()} is written to and shares memory with {other.text()}"
                raise GraphBreak("overlapping-inputs", detail)
            guards.append(Guard("NO_OVERLAP", source, (source, other), why))
    return guards


def _arrays_apart(world: World) -> list[Guard]:
    """With NumPy arrays among the inputs, all of them are apart if one is written to: an array does not say what it is
    a view of."""
    if not written_placeholders(world.recorder.graph):
        return []
    known: dict[Source, Any] = {source: real for real, source, _ in (*world.inputs, *world.arrays)}
    if not storages_are_apart(tuple(known.values())):
        raise GraphBreak("overlapping-inputs", "an array or tensor is written to, and shares memory with another")
    places = tuple(known)
    return [Guard("NO_OVERLAP", places[0], places, "the graph writes to an array or tensor")] if places[1:] else []


def written_placeholders(graph: torch.fx.Graph) -> list[int]:
    """The ids of the placeholder nodes of an ATen-level graph whose memory some operator writes to, directly or through
    views."""
    if not any(_may_write(node.target) for node in graph.nodes if node.op == "call_function"):
        return []
    origin: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    written: dict[int, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            origin[node] = [node]
        elif node.op == "call_function":
            origin[node] = _memory_of(node, origin)
            for argument in written_arguments(node):
                written.update((id(base), None) for one in _nodes(argument) for base in origin.get(one, ()))
    return list(written)


def is_older(value: Any) -> bool:
    """Whether a tensor is a view that must say that its argument was written to since: if that is told to require a
    gradient, its views have a history from then on. The graph makes a view when it has written."""
    if not _may_get_a_history(value):
        return False
    view, root = value.node, root_of(value)
    if root is view:
        return False
    return root in written_since(view)


def written_since(first: torch.fx.Node) -> set[torch.fx.Node]:
    """What is written to, or laid out anew, from a node on: the nodes whose memory it is."""
    return {view_chain(one)[0] for node in _back_to(first) for one in _nodes(_counted(node))}


def _may_get_a_history(value: Any) -> bool:
    """Whether a view that requires no gradient does so once what it views is told to: not at torch level, where views
    are made when the program makes them."""
    if value.recorder.level != "aten" or value.requires_grad or value.is_inference():
        return False
    return bool(value.dtype.is_floating_point or value.dtype.is_complex)


def to_autograd(value: Any, made_here: bool, grad_enabled: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes of an output what it is to autograd, where the graph's own views would follow an input; None where
    nothing need be done: `detach` for what was detached (it has no base, and no history that a write to it could
    change) and for a view of an input that requires a gradient, which requires none itself; `detached_view` for a view
    of what was detached; `hidden` for a view that was made under `no_grad`, while gradients are on. made_here: ask also
    for views of what the graph has made, which may be another output."""
    if value.recorder.level != "aten" or value.requires_grad:
        return None
    root, *views = view_chain(value.node)
    if not made_here and root.op == "call_function":
        return None
    detached = [node for node in views if node.target is aten.detach.default]
    if detached:
        return torch.detach if detached[-1] is value.node else detached_view
    example = root.meta.get("example_value") if root.op == "placeholder" else None
    if isinstance(example, torch.Tensor) and example.requires_grad:
        return torch.detach
    no_grad = grad_enabled and any(node.meta.get("no_grad") for node in views)
    return hidden if no_grad and _may_get_a_history(value) else None


def detached_view(output: torch.Tensor) -> torch.Tensor:
    return torch.detach(output)[...]


DETACHES = (torch.detach, detached_view)


_NO_VERSION = (1 << 31) - 1
"""No tensor is written to so often."""


def older(view: torch.Tensor) -> torch.Tensor:
    """The view as one that was made before the last write to what it shows: at another version."""
    version, counted = view._version, (view,)
    torch._C._autograd._unsafe_set_version_counter(counted, (_NO_VERSION,))
    try:
        return aten.alias.default(view)  # type: ignore[no-any-return]
    finally:
        torch._C._autograd._unsafe_set_version_counter(counted, (version,))


def hidden(view: torch.Tensor) -> torch.Tensor:
    """A view that is an error to use where it would need a history, as one that was made under `no_grad` is."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # `no_grad` would take longer than the rest of a call
    try:
        return aten.alias.default(view)  # type: ignore[no-any-return]
    finally:
        torch._C._set_grad_enabled(before)


def whole_of(view: Any, others: Iterable[object]) -> TracedTensor | None:
    """Which of `others` the program has detached, if `view` shows elements of it: a history that either gets by a
    write, the other has too."""
    detached = next((node for node in reversed(view_chain(view.node)) if node.target is aten.detach.default), None)
    for one in others:
        if one is view or not isinstance(one, TracedTensor) or detached is None or one.node is not detached:
            continue
        if one.dtype == view.dtype and one.is_conj() == view.is_conj() and one.is_neg() == view.is_neg():
            return one
    return None


def part(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`view` as what autograd knows to be a part of `whole`."""
    return torch.as_strided(whole, view.shape, view.stride(), view.storage_offset())


def root_of(value: Any) -> torch.fx.Node:
    """The node whose memory a traced tensor shows."""
    return view_chain(value.node)[0]


def _back_to(first: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The graph's nodes from its end to this one."""
    for node in reversed(first.graph.nodes):
        yield node
        if node is first:
            return


def _counted(node: torch.fx.Node) -> list[Any]:
    """What a node changes so that its version counts it."""
    return [node] if node.meta.get("in_place_view") else written_arguments(node)


def _memory_of(node: torch.fx.Node, origin: dict[torch.fx.Node, list[torch.fx.Node]]) -> list[torch.fx.Node]:
    """The placeholders that a node's result may share memory with."""
    if not isinstance(node.target, OpOverload):  # getitem: an element of what its operand is
        return [base for one in _nodes(node.args) for base in origin.get(one, ())]
    sources = {alias[1] for alias in facts(node.target).returned if alias is not None}
    views = list_of_views(node.target)
    if views is not None:
        sources.add(views)
    return [base for place in sources for one in _nodes(_argument(node, place)) for base in origin.get(one, ())]


def _may_write(target: object) -> bool:
    return isinstance(target, OpOverload) and bool(facts(target).written or target in HIDDEN_WRITES)


def written_arguments(node: torch.fx.Node) -> list[Any]:
    """What an operator writes to: argument values of its node."""
    if not isinstance(node.target, OpOverload):
        return []
    return [_argument(node, place) for place in written_by(node.target, node.args)]


def _argument(node: torch.fx.Node, place: int) -> Any:
    assert isinstance(node.target, OpOverload)
    return node.args[place] if place < len(node.args) else node.kwargs.get(facts(node.target).arguments[place])


def _nodes(value: Any) -> list[torch.fx.Node]:
    if isinstance(value, torch.fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [node for element in value for node in _nodes(element)]
    return []
