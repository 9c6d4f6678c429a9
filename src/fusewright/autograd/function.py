"""The autograd.Function that carries both compiled halves of a graph, and what happens around it.

Takes the compiled forward and backward over flat tensors; gives a callable over the forward's inputs that returns the frame's outputs,
whose gradient function runs the compiled backward. Always holds: what shares memory with an input or with another output is made by view
operators outside of the function, as autograd demands; an input that the program writes to with its history kept is given its new value
there too; a gradient is None where nothing that it depends on has one; gradients of gradients are right (PyTorch's own autograd over the
recorded operators), or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from fusewright.autograd import buckets
from fusewright.autograd.rebuild import rebuilder
from fusewright.capture.frame import Backward
from fusewright.errors import RuntimeFallback
from fusewright.graph.generators import states_of
from fusewright.records import dataclass

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]

FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). Saved "
    "intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to "
    "backward through the graph a second time or if you need to access saved tensors after calling backward."
)


def _layout(tensor: torch.Tensor) -> Layout:
    """How the tangent of an output is laid out: as the output, or as empty_like(output) when an expanded dimension shares memory
    (`Recorder.tangent` says the same)."""
    stride = tensor.stride()
    if 0 in stride and tensor.numel():
        stride = torch.empty_like(tensor, device="meta").stride()
    return tensor.shape, stride, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class Halves:
    """forward(*inputs) → (graph outputs..., further saved values...); backward(saved..., tangents...) → gradients.

    replay    runs the recorded forward operators with autograd alive: (*inputs) → graph outputs; None when that would not give their
              gradients (a custom autograd function or a hook that cannot be run again)
    random    the devices whose random generators the forward draws from
    updates   some inputs take new values after the graph: they are not held then (they would hold themselves alive), and not replayed
    outputs   number of graph outputs; tangents: which of them have a tangent; gradients: which inputs get a gradient, in order
    saved     see autograd.joint.Split
    depends   for each gradient, the tangents that it depends on (all of them for a constant); constant: whether it reads none
    parts     the backward in several parts, instead of `backward` (see autograd.buckets); empty: in one
    graphs    what runs both halves instead of `forward` and `backward`, if anything does
    fell_back is told why when the compiled backward could not finish and the recorded operators ran instead
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]
    replay: Callable[..., tuple[Any, ...]] | None
    random: tuple[torch.device, ...]
    updates: bool
    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    saved: tuple[int, ...]
    depends: tuple[tuple[int, ...], ...]
    constant: tuple[bool, ...]
    fell_back: Callable[[str], None]
    parts: tuple[buckets.CompiledPart, ...] = ()
    graphs: Graphs | None = None


class Graphs(Protocol):
    """Both halves, replayed from recordings where that is possible (runtime/training_graphs.py). A lease stands for a forward that was."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]: ...

    def saved_by(self, lease: Any, values: Sequence[Any]) -> None: ...

    def backward(self, lease: Any, values: list[Any]) -> tuple[Any, ...]: ...

    def finished(self, lease: Any, kept: bool) -> None: ...


class _Compiled(torch.autograd.Function):
    """forward(ctx, halves, *inputs); gradients for `halves` and for inputs that need none are None."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Any) -> tuple[Any, ...]:
        ctx.random = states_of(halves.random) if halves.random and halves.replay is not None else None
        results, ctx.lease = (halves.forward(*inputs), None) if halves.graphs is None else halves.graphs.forward(inputs)
        outputs = results[: halves.outputs]
        saved = [inputs[place] if place >= 0 else results[~place] for place in halves.saved]
        ctx.halves = halves
        ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.layouts = [_layout(outputs[position]) for position in halves.tangents]
        ctx.inputs = None if halves.updates else inputs
        ctx.versions = [] if halves.updates else _versions(inputs)
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        if halves.graphs is not None and ctx.lease is not None:
            halves.graphs.saved_by(ctx.lease, saved)
        differentiable = set(halves.tangents)
        ctx.mark_non_differentiable(
            *(value for index, value in enumerate(outputs) if index not in differentiable and isinstance(value, torch.Tensor))
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        halves: Halves = ctx.halves
        given = [tangents[position] for position in halves.tangents]
        gradients: list[Any] = [None] * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            results = _replayed_gradients(ctx, given)
        else:
            values = [tensor if plain is None else plain for tensor, plain in zip(ctx.saved_tensors, ctx.plain)]
            ctx.maybe_clear_saved_tensors()  # unless the graph is kept, each saved tensor is freed after its last use in the backward
            values += [_tangent(tangent, layout) for tangent, layout in zip(given, ctx.layouts)]
            try:
                results = _run_backward(halves, ctx.lease, values)
            except RuntimeFallback as error:
                halves.fell_back(str(error))
                with torch.enable_grad():
                    results = _replayed_gradients(ctx, given, create_graph=False)
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            if not kept:
                ctx.inputs = None
            if halves.graphs is not None and ctx.lease is not None:
                halves.graphs.finished(ctx.lease, kept)
        for position, gradient, depends in zip(halves.gradients, results, halves.depends):
            if ctx.needs_input_grad[1 + position] and any(given[place] is not None for place in depends):
                gradients[1 + position] = gradient
        return tuple(gradients)


def _run_backward(halves: Halves, lease: Any, values: list[Any]) -> tuple[Any, ...]:
    if halves.graphs is not None:
        return halves.graphs.backward(lease, values)
    consume = getattr(halves.backward, "consume", None)
    return consume(values) if consume is not None else halves.backward(*values)  # type: ignore[no-any-return]


class _InParts(torch.autograd.Function):
    """forward(ctx, halves, progress, token, *inputs): as _Compiled, but its backward runs the first part; the token leads to the rest."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, progress: buckets.Progress, token: torch.Tensor, *inputs: Any) -> tuple[Any, ...]:
        ctx.progress = progress
        return _Compiled.forward(ctx, halves, *inputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        halves: Halves = ctx.halves
        progress: buckets.Progress = ctx.progress
        saved = ctx.saved_tensors
        given = [tangents[position] for position in halves.tangents]
        progress.wanted = [any(given[place] is not None for place in depends) for depends in halves.depends]
        progress.whole = _replayed_gradients(ctx, given) if torch.is_grad_enabled() else None
        progress.values = [tensor if plain is None else plain for tensor, plain in zip(saved, ctx.plain)]
        progress.values += [_tangent(tangent, layout) for tangent, layout in zip(given, ctx.layouts)]

        def replay(reason: str) -> tuple[Any, ...]:
            halves.fell_back(reason)
            with torch.enable_grad():
                return _replayed_gradients(ctx, given, create_graph=False)

        progress.replay = replay
        gradients: list[Any] = [None] * len(ctx.needs_input_grad)
        gradients[2] = torch.empty(0)
        for position, gradient in zip(progress.parts[0].gradients, progress.run(0)):
            place = 3 + halves.gradients[position]
            if ctx.needs_input_grad[place]:
                gradients[place] = gradient
        return tuple(gradients)


def _apply_in_parts(halves: Halves, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    progress = buckets.Progress(halves.parts)
    owners = [[inputs[halves.gradients[position]] for position in part.gradients] for part in halves.parts]
    return _InParts.apply(halves, progress, buckets.chain(progress, owners), *inputs)


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """How often each input tensor has been written to (inference tensors do not count)."""
    return [value._version for value in inputs if isinstance(value, torch.Tensor) and not value.is_inference()]


def _tangent(given: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """The tangent in the output's own layout, which the backward was compiled for; zeros for an output that nothing depended on."""
    shape, stride, dtype, device = layout
    if given is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if given.stride() != stride or type(given) is not torch.Tensor or given.is_conj() or given.is_neg():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(given)
    return given


def _replayed_gradients(ctx: Any, given: list[torch.Tensor | None], create_graph: bool = True) -> tuple[Any, ...]:
    """Gradients with a graph of their own: the recorded operators run once more under autograd."""
    halves: Halves = ctx.halves
    if halves.replay is None and not create_graph:
        raise RuntimeError(
            "fusewright: the compiled backward could not finish, and cannot be repeated eagerly because of a custom autograd.Function or a "
            "tensor hook in the compiled function that cannot be run again. Keep that out of the compiled function."
        )
    if halves.replay is None:
        raise RuntimeError(
            "fusewright: gradients of gradients (create_graph=True) need a custom autograd.Function or a tensor hook of the compiled "
            "function once more, and it cannot be run again: it has side effects, takes an argument that may change, or stands beside an "
            "in-place operation. Keep it out of the compiled function, or compile with fusewright.disable around it."
        )
    inputs = ctx.inputs
    if halves.updates or (inputs is not None and _versions(inputs) != ctx.versions):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a compiled "
            "function was written to before gradients of its gradients were asked for"
        )
    if inputs is None:
        raise RuntimeError(FREED)
    if halves.random and ctx.random is None:
        raise RuntimeError(
            "fusewright: the forward drew random numbers while the program recorded a CUDA graph; it cannot be repeated with them. "
            "Keep gradients of gradients (create_graph=True) of it out of the recording."
        )
    with nullcontext() if ctx.random is None else ctx.random.again():
        outputs = halves.replay(*inputs)
    pairs = [(outputs[position], tangent) for position, tangent in zip(halves.tangents, given) if tangent is not None]
    pairs = [(output, tangent) for output, tangent in pairs if output.requires_grad]
    wanted = [inputs[position] for position in halves.gradients]
    found: Sequence[Any] = [None] * len(wanted)
    if pairs and wanted:
        found = torch.autograd.grad(
            [output for output, _ in pairs], wanted, [tangent for _, tangent in pairs], create_graph=create_graph, allow_unused=True
        )
    if any(gradient is None and not constant for gradient, constant in zip(found, halves.constant)):
        raise RuntimeError(
            "fusewright: gradients of gradients (create_graph=True) of this compiled function cannot be computed: an operator inside hides "
            "its gradient from PyTorch's autograd. Keep it out of the compiled function, or compile with fusewright.disable around it."
        )
    # The capture's gradient is a constant, where the operators that run again lead nowhere: zeros.
    return tuple(torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(wanted, found))


class _Freed(torch.autograd.Function):
    """forward(ctx, anchor, *outputs) → outputs, as a graph that the program has freed already leaves them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *outputs: Any) -> tuple[Any, ...]:
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(FREED)


def differentiable(halves: Halves, plan: Backward, symbols: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """The callable that the compiled entry runs: the forward with the backward attached, then updates of inputs and rebuilt outputs.

    symbols   for each input the symbolic size that it is, or None"""
    outputs, updates, apply = halves.outputs, plan.updates, _Compiled.apply
    rebuild = None if plan.rebuilt is None else rebuilder(plan.rebuilt, symbols)

    def run(*inputs: Any) -> tuple[Any, ...]:
        if plan.freed:
            results = halves.forward(*inputs)[:outputs]
            anchor = torch.empty(0, requires_grad=True)
            wanted = iter(_Freed.apply(anchor, *(results[position] for position in plan.tangents)))
            results = tuple(next(wanted) if index in plan.tangents else value for index, value in enumerate(results))
        elif halves.tangents and torch.is_grad_enabled():
            results = _apply_in_parts(halves, inputs) if halves.parts else apply(halves, *inputs)
        elif halves.tangents:  # a resume function inside a no_grad block, which ends before the operators that need a gradient
            with torch.enable_grad():
                results = _apply_in_parts(halves, inputs) if halves.parts else apply(halves, *inputs)
        else:
            results = halves.forward(*inputs)[:outputs]
        for position, output in updates:
            inputs[position].copy_(results[output])
        return results if rebuild is None else rebuild(inputs, results)

    return run
