"""The autograd.Function that carries both compiled halves of a graph.

Takes the compiled forward and backward over flat tensors; gives a callable with the forward's signature whose outputs have a gradient
function that runs the compiled backward. Always holds: gradients of gradients (create_graph=True) are right too; they come from
PyTorch's own
autograd over the recorded operators, run again eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.errors import RuntimeFallback

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _layout(tensor: torch.Tensor) -> Layout:
    """How the tangent of an output is laid out: as the output, or as empty_like(output) when an expanded dimension shares memory
    (`Recorder.tangent` says the same)."""
    stride = tensor.stride()
    if 0 in stride and tensor.numel():
        stride = torch.empty_like(tensor, device="meta").stride()
    return tensor.shape, stride, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class Halves:
    """forward(*inputs) → (user outputs..., saved values...); backward(saved..., tangents...) → gradients.

    replay    runs the recorded forward operators with autograd alive: (*inputs) → user outputs
    outputs   number of user outputs; tangents: which of them have a tangent; gradients: which inputs get a gradient, in order
    saved_inputs  for each saved value the input position that it is, or -1 (the forward's extra outputs, in order)
    fell_back  is told why when the compiled backward could not finish and the recorded operators ran instead
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]
    replay: Callable[..., tuple[Any, ...]]
    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    fell_back: Callable[[str], None]


class _Compiled(torch.autograd.Function):
    """forward(ctx, halves, *inputs); gradients for `halves` and for inputs that need none are None."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Any) -> tuple[Any, ...]:
        results = halves.forward(*inputs)
        outputs, extra = results[: halves.outputs], results[halves.outputs :]
        computed = iter(extra)
        saved = [inputs[position] if position >= 0 else next(computed) for position in halves.saved_inputs]
        ctx.halves = halves
        ctx.saved_plain = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.count = len(saved)
        ctx.layouts = [_layout(outputs[position]) for position in halves.tangents]
        ctx.input_plain = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in (*saved, *inputs)))
        differentiable = set(halves.tangents)
        ctx.mark_non_differentiable(
            *(value for index, value in enumerate(outputs) if index not in differentiable and isinstance(value, torch.Tensor))
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        halves: Halves = ctx.halves
        tensors = ctx.saved_tensors
        gradients: list[Any] = [None] * (1 + len(ctx.input_plain))
        inputs = [tensor if plain is None else plain for tensor, plain in zip(tensors[ctx.count :], ctx.input_plain)]
        if torch.is_grad_enabled():
            results = _replayed_gradients(halves, inputs, tangents)
        else:
            saved = [tensor if plain is None else plain for tensor, plain in zip(tensors[: ctx.count], ctx.saved_plain)]
            given = [_tangent(tangents[position], layout) for position, layout in zip(halves.tangents, ctx.layouts)]
            try:
                results = halves.backward(*saved, *given)
            except RuntimeFallback as error:
                halves.fell_back(str(error))
                with torch.enable_grad():
                    results = _replayed_gradients(halves, inputs, tangents, create_graph=False)
        for position, gradient in zip(halves.gradients, results):
            if ctx.needs_input_grad[1 + position]:
                gradients[1 + position] = gradient
        return tuple(gradients)


def _tangent(given: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """The tangent in the output's own layout, which the backward was compiled for; zeros for an output that nothing depended on."""
    shape, stride, dtype, device = layout
    if given is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if given.stride() != stride or type(given) is not torch.Tensor or given.is_conj() or given.is_neg():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(given)
    return given


def _replayed_gradients(halves: Halves, inputs: list[Any], tangents: tuple[Any, ...], create_graph: bool = True) -> tuple[Any, ...]:
    """Gradients with a graph of their own: the recorded operators run once more under autograd."""
    outputs = halves.replay(*inputs)
    pairs = [(outputs[position], tangents[position]) for position in halves.tangents if tangents[position] is not None]
    wanted = [inputs[position] for position in halves.gradients]
    return torch.autograd.grad(
        [output for output, _ in pairs], wanted, [tangent for _, tangent in pairs], create_graph=create_graph, allow_unused=True
    )


def differentiable(halves: Halves) -> Callable[..., tuple[Any, ...]]:
    """The callable that the compiled entry runs: the forward, with the backward attached."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        return _Compiled.apply(halves, *inputs)

    return run
