"""The autograd functions that carry the compiled halves of a graph, and what happens around them.

Takes the compiled forward and backward over flat tensors; gives a callable over the forward's inputs that returns the
frame's outputs, whose gradient function runs the compiled backward. Always holds: what shares memory with an input or
with another output is made by view operators outside of the function, as autograd demands; an input that the program
writes to with its history kept is given its new value there too; an output leads, in autograd's graph, to exactly the
inputs that eager's leads to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fusewright import _native
from fusewright.autograd import buckets, visits
from fusewright.autograd.halves import (
    FREED,
    Call,
    Group,
    Halves,
    Reach,
    gradients,
    laid_out,
    made_of_zeros,
    multiplied_zeros,
    remember,
    repeated,
    replayed_gradients,
    restore,
    values_for,
)
from fusewright.autograd.rebuild import rebuilder
from fusewright.base.errors import RuntimeFallback
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.capture.frame import Backward
from fusewright.graph.generators import states_of


class _Compiled(torch.autograd.Function):
    """forward(ctx, halves, group, call, *inputs) → the outputs of a group; `inputs` are those of its reaches."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, group: Group, call: Call, *inputs: Any) -> tuple[Any, ...]:
        remember(ctx, halves, group, call)
        return tuple([call.results[position] for position in group.tangents])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        reaches: tuple[Reach, ...] = ctx.group.reaches
        if not reaches or all(tangent is None for tangent in tangents):
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, None, *_by_reach(ctx.group, tangents, gradients(ctx, list(tangents))))


def _by_reach(group: Group, tangents: tuple[Any, ...], found: Sequence[Any]) -> list[Any]:
    """Of the group's gradients, each input's own, reach by reach."""
    places = (place for reach in group.reaches for place in reach.gradients)
    return [found[place] if group.gives(place, tangents) else None for place in places]


class _CompiledNatively(torch.autograd.Function):
    """As _Compiled, by native code (csrc/differentiable.cpp); what that leaves to Python comes to `_natively`."""

    forward = staticmethod(_native.attach)
    backward = staticmethod(_native.backward)


class _InParts(torch.autograd.Function):
    """forward(ctx, halves, progress, token, call, *inputs): as _Compiled, but its backward runs the first part.

    The token leads to the rest."""

    @staticmethod
    def forward(
        ctx: Any, halves: Halves, progress: buckets.Progress, token: Any, call: Call, *inputs: Any
    ) -> tuple[Any, ...]:
        ctx.progress = progress
        group = halves.groups[0]
        remember(ctx, halves, group, call)
        return tuple([call.results[position] for position in group.tangents])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        progress: buckets.Progress = ctx.progress
        given = list(tangents)
        values = values_for(ctx, given)
        progress.wanted = [ctx.group.gives(place, given) for place in range(len(ctx.group.gradients))]
        progress.values, missing = values, frozenset(place for place, one in enumerate(given) if one is None)
        if torch.is_grad_enabled():
            progress.whole = replayed_gradients(ctx, given)
        elif ctx.halves.as_read is not None and not ctx.halves.as_read():
            with torch.enable_grad():
                progress.whole = replayed_gradients(ctx, given, create_graph=False)
        elif missing and (multiplied_zeros(ctx, missing) or made_of_zeros(ctx, missing)):
            # a part's gradients are gone before all could be looked at
            progress.whole = ctx.group.without(missing)(*values)

        def replay(reason: str) -> tuple[Any, ...]:
            ctx.halves.fell_back(reason)
            with torch.enable_grad():
                return replayed_gradients(ctx, given, create_graph=False)

        progress.replay = replay
        found = progress.run(0)
        rest = [None] * (len(ctx.needs_input_grad) - 4 - len(found))
        return (None, None, torch.empty(0, device=progress.device), None, *found, *rest)


def _apply_in_parts(halves: Halves, call: Call) -> Any:
    (group,) = halves.groups
    progress = buckets.Progress(halves.parts, call.results[group.tangents[0]].device)
    inputs = call.inputs
    owners = [[inputs[group.gradients[place]] for place in part.gradients] for part in halves.parts]
    undefined = [
        inputs[input] for reach in group.reaches for input, place in zip(reach.inputs, reach.gradients) if place < 0
    ]
    return _InParts.apply(halves, progress, buckets.chain(progress, owners), call, *owners[0], *undefined)


def _unwatched(group: Group, inputs: tuple[Any, ...]) -> bool:
    """Whether nobody sees which of the group's inputs, all of them leaves, a backward visits."""
    positions = [position for reach in group.reaches for position in reach.inputs]
    return all(not inputs[position]._backward_hooks for position in positions)


_PLAIN_APPLY = super(torch.autograd.Function, _Compiled).apply  # type: ignore[misc]
"""What Function.apply comes to outside of torch.func's transforms: that takes as long as all the rest of a small call.
(Its other purpose, tensors of transforms that have ended, have no memory that the forward could have read.)"""


def _native_apply() -> Callable[..., tuple[Any, ...]]:
    """The same of _CompiledNatively. PyTorch looks for names in the class, at each call and at each of its bases, and
    in its metaclass: here it finds all in one class with one base. The node keeps its ForwardCall in a slot, and needs
    no dict."""
    names: dict[str, Any] = {}
    for base in reversed(_CompiledNatively.__mro__):
        names |= {} if base in (torch._C._FunctionBase, object) else vars(base)
    for name in ("apply", "__dict__", "__weakref__"):
        names.pop(name, None)
    node = names["_backward_cls"]
    # The engine calls `apply` of the node: the backward itself, instead of two Python functions that look for it (a
    # twentieth of a small training step).
    own = {"__slots__": ("call",), "__module__": node.__module__, "apply": _native.as_method(_native.backward)}
    names["_backward_cls"] = type(node.__name__, (node,), own)
    flat: Any = type(_CompiledNatively.__name__, (torch._C._FunctionBase,), names)
    return flat.apply  # type: ignore[no-any-return]


_NATIVE_APPLY = _native_apply()

_native.configure_differentiable(
    torch._C._are_functorch_transforms_active,
    torch._C._autograd._top_saved_tensors_default_hooks,
    torch._C._autograd._get_current_graph_task_keep_graph,
    laid_out,
    torch.Tensor,
    torch.nn.Parameter,
)


@dataclass(frozen=True, slots=True)
class _Route:
    """How the outputs of a group get their gradient functions: by one node, wherever it stands; or where nobody sees
    the inputs visited. positions: of the group's inputs, reach by reach."""

    group: Group
    single: bool
    many: bool
    positions: tuple[int, ...]


def _route(group: Group) -> _Route:
    positions = tuple(position for reach in group.reaches for position in reach.inputs)
    return _Route(group, group.single, group.many, positions)


def _apply(halves: Halves, routes: tuple[_Route, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """The graph's outputs, with their gradient functions. Gradients are enabled."""
    try:  # a signal's handler may raise as soon as gradients are off
        torch._C._set_grad_enabled(False)
        call = Call(halves, inputs)
    finally:
        torch._C._set_grad_enabled(True)
    outputs = list(call.results[: halves.outputs])
    for route in routes:
        group = route.group
        if halves.parts:
            made: Any = _apply_in_parts(halves, call)
        elif route.single or (route.many and _unwatched(group, inputs)):
            wanted = [call.value(position) for position in route.positions] or [visits.anchor()]
            if torch._C._are_functorch_transforms_active():
                made = _Compiled.apply(halves, group, call, *wanted)
            else:
                made = _PLAIN_APPLY(halves, group, call, *wanted)
        else:
            made = visits.apply(halves, group, call)
        for position, output in zip(group.tangents, made):
            outputs[position] = output
        if len(routes) > 1:  # whose outputs may be inputs of the next one
            call.results = (*outputs, *call.results[halves.outputs :])
    return outputs


class _Freed(torch.autograd.Function):
    """forward(ctx, outputs, *inputs) → outputs, as a graph that the program has freed already leaves them."""

    @staticmethod
    def forward(ctx: Any, outputs: tuple[Any, ...], *inputs: Any) -> tuple[Any, ...]:
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(FREED)


def differentiable(halves: Halves, plan: Backward, symbols: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """The callable that the compiled entry runs: the forward with the backward attached, then updates of inputs and
    rebuilt outputs.

    symbols   for each input the symbolic size that it is, or None"""
    outputs, updates = halves.outputs, plan.updates
    routes = tuple(map(_route, halves.groups))
    rebuild = None if plan.rebuilt is None else rebuilder(plan.rebuilt, symbols)

    def run(*inputs: Any) -> tuple[Any, ...]:
        results: Any
        if updates and not torch.is_grad_enabled():  # which the program leaves before it writes
            if any(_refuses_writes(inputs[position]) for position, *_ in updates):
                raise RuntimeFallback("autograd refuses a write to an argument")
        for position, *_ in updates:
            if inputs[position]._backward_hooks and inputs[position]._is_view():
                raise RuntimeFallback("a write to a view with hooks, which has another history then")
        if plan.freed:
            results = Call(halves, inputs).results[:outputs]
            reached = [inputs[position] for position, _ in plan.undefined] or [visits.anchor()]
            with torch.enable_grad():  # as where the program took the gradient
                wanted = iter(_Freed.apply(tuple([results[position] for position in plan.tangents]), *reached))
            results = tuple(next(wanted) if index in plan.tangents else value for index, value in enumerate(results))
        elif plan.tangents and torch.is_grad_enabled():
            results = _apply(halves, routes, inputs)
        elif (
            plan.tangents
        ):  # a resume function inside a no_grad block, which ends before the operators that need a gradient
            with torch.enable_grad():
                results = _apply(halves, routes, inputs)
        else:
            results = Call(halves, inputs).results[:outputs]
        if updates:
            with torch.enable_grad():  # autograd took note of them, wherever the call begins
                for position, output, writes in updates:
                    inputs[position].copy_(results[output])
                    torch.autograd.graph.increment_version([inputs[position]] * (writes - 1))
        return results if rebuild is None else rebuild(inputs, results)

    return _natively(halves, plan, run) or run


def _refuses_writes(tensor: torch.Tensor) -> bool:
    """Whether a write to a tensor that requires a gradient is an error while gradients are recorded."""
    if not tensor._is_view():
        return tensor.is_leaf
    base, made = tensor._base, torch._C._autograd._get_creation_meta(tensor)  # type: ignore[attr-defined]
    return (base is not None and base.is_leaf) or made != torch._C._autograd.CreationMeta.DEFAULT  # type: ignore


def _natively(halves: Halves, plan: Backward, run: Callable[..., Any]) -> Callable[..., Any] | None:
    """`run`, without Python in between where nothing needs it; None where it always does."""
    around = plan.freed or plan.updates or plan.rebuilt
    if len(halves.groups) != 1 or halves.parts or halves.graphs or around:
        return None
    (group,) = halves.groups
    plain = group.single and group.reaches and not group.foreign
    if not plain or type(halves.forward) is not _native.Plan or type(group.backward) is not _native.Plan:
        return None
    (reach,) = group.reaches

    def repeat(ctx: Any, call: Any, tangents: tuple[Any, ...], error: BaseException | None) -> tuple[Any, ...]:
        restore(ctx, halves, group, call)
        found = gradients(ctx, list(tangents)) if error is None else repeated(ctx, list(tangents), error)
        call.inputs = ctx.inputs  # a backward that came to its end has let go of them
        return (None, *_by_reach(group, tangents, found))

    try:
        return _native.Differentiable(  # type: ignore[no-any-return]
            halves.forward,
            group.backward,
            _NATIVE_APPLY,
            run,
            repeat,
            functools.partial(states_of, halves.random) if halves.random and halves.replay is not None else None,
            (
                group.saved, group.tangents, group.row_major, reach.inputs, reach.gradients,
                tuple(result for _, result in halves.before),
            ),
            halves.outputs,
            not halves.updates,
            halves.as_read,
        )
    except NotImplementedError:  # a PyTorch whose tensors native code cannot read
        return None
