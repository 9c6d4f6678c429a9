"""Hooks that the program registers on tensors which it has made, and returns.

Takes the hooks on tensors made inside, in the order of their registration, and the frame's outputs; gives those which
are to be registered on the results, after the graph. A tensor whose hook has an effect becomes a result for that.
Always holds: all of a result's gradient comes from outside of the graph then, as a hook inside would be left out by who
asks for the gradient of the result itself. What comes from another result that is computed from this one does so too,
where our own backward ends at it (autograd/record.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import Retry
from fusewright.capture.border.effects import HookedResult
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


def registers_later(world: World, tensor: Any) -> bool:
    """Notes that a tensor made inside is given a hook; gives whether that is to be done after the graph."""
    hooked = world.effects.hooked_results
    later = len(hooked) in (world.tracer.assumptions.later_hooks or ())
    hooked.append(HookedResult(tensor, _edge(tensor), later))
    return later


def check_hooked_results(world: World, outputs: Sequence[object]) -> None:
    """Retries where other hooks than the attempt took for such are to be registered after the graph. Marks the results
    that get some."""
    known, hooked = world.tracer.assumptions.later_hooks, world.effects.hooked_results
    if known is None or not hooked:
        return
    returned = {id(value) for value in outputs}
    found = {
        place: one
        for place, one in enumerate(hooked)
        if id(one.tensor) in returned and (one.later or one.tensor._backward_hooks or one.tensor.retains_grad)
    }
    written = (node.meta["example_value"] for node, _ in world.recorder.inputs if world.recorder.history_changed(node))
    others = [value for value in (*outputs, *written) if isinstance(value, TracedTensor) and value.requires_grad]
    others = [] if _backward_is_ours(world) else others
    asked = world.effects.gradients_asked
    right = all(place >= asked and _fed_from_outside(one, others) for place, one in found.items())
    if right and found.keys() > known:
        raise Retry(later_hooks=frozenset(found))
    if known and not (right and found.keys() == known):
        raise Retry(later_hooks=None)
    for place in known:
        hooked[place].tensor.node.meta["hooked"] = True


def register_all_later(world: World) -> None:
    """Retries with all hooks registered after the graph, whose tensors it gives as well, unless that was tried: one has
    an effect, which each backward is to have, or somebody gets its handle."""
    known, effects = world.tracer.assumptions.later_hooks, world.effects
    every = frozenset(range(effects.gradients_asked, len(effects.hooked_results)))
    if known is not None and known < every and _backward_is_ours(world):
        raise Retry(later_hooks=every)


def _backward_is_ours(world: World) -> bool:
    return world.recorder.level == "aten" and not world.tracer.options.follows_autograd


def _edge(tensor: Any) -> Any:
    """Where the gradient comes to: a node (a leaf stands for its own) and which of its results. None for a view
    that was made under no_grad and whose base was written to since: nobody may ask."""
    try:
        return (tensor, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
    except RuntimeError:
        return None


def _fed_from_outside(one: HookedResult, others: Sequence[TracedTensor]) -> bool:
    """Whether the result is what was given the hook, and nothing else that leaves the graph is computed from it."""
    if not _same(_edge(one.tensor), one.edge):
        return False
    edges = itertools.chain.from_iterable(_edges_from(other) for other in others if other is not one.tensor)
    return not any(_same(edge, one.edge) for edge in edges)


def _same(edge: Any, other: Any) -> bool:
    return None not in (edge, other) and edge[0] is other[0] and edge[1] == other[1]


def _edges_from(root: TracedTensor) -> Iterator[Any]:
    pending, seen = [_edge(root)], set()
    while pending:
        if (edge := pending.pop()) is None:
            continue
        node, place = edge
        if isinstance(node, torch.Tensor):
            yield edge
            continue
        yield getattr(node, "variable", node), place
        if node not in seen:
            seen.add(node)
            pending += [following for following in node.next_functions if following[0] is not None]
