"""Recording the backward: PyTorch's autograd engine is asked for the gradients of the captured outputs, and what it does is recorded.

Takes a recorder at the end of a capture and the graph's outputs; gives the gradients as traced tensors, appended to the same graph. No
formula is
written here and nothing is traced twice. Always holds: what cannot be differentiated so that autograd's semantics are kept (an input
that requires a gradient and was written to, say) gives a reason instead, and the call runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusewright.capture.frame import Backward
from fusewright.capture.signals import GraphBreak
from fusewright.graph.recorder import Recorder
from fusewright.graph.traced_tensor import TracedTensor


class CannotDifferentiate(Exception):
    """The graph's gradients cannot be compiled; the message says why."""


def record_backward(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward | None, tuple[object, ...], str]:
    """Records the gradients of `outputs`. Gives (the backward half, the gradients in its order, ""), or (None, (), why not)."""
    try:
        return _record(recorder, outputs)
    except CannotDifferentiate as error:
        return None, (), str(error)
    except GraphBreak as signal:
        return None, (), f"the backward cannot be traced: {signal.detail}"


def _record(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward, tuple[object, ...], str]:
    inputs = len(recorder.inputs)
    wanted = [
        (position, value)
        for position, value in enumerate(outputs)
        if isinstance(value, TracedTensor) and value.requires_grad and value.grad_fn is not None
    ]
    leaves = [
        (position, node.meta["example_value"])
        for position, (node, _) in enumerate(recorder.inputs)
        if isinstance(node.meta.get("example_value"), TracedTensor) and node.meta["example_value"].requires_grad
    ]
    for position, leaf in leaves:
        if leaf._version:
            raise CannotDifferentiate(f"input {position}, which requires a gradient, is written to")
    if any(value is leaf for _, value in wanted for _, leaf in leaves):
        raise CannotDifferentiate("an input that requires a gradient is returned as it is")
    seen: set[int] = set()
    for _, value in wanted:
        if id(value) in seen:
            raise CannotDifferentiate("one tensor is returned twice")
        seen.add(id(value))
    tangents = [recorder.tangent(value, f"tangent_{position}") for position, value in wanted]
    gradients = recorder.call(
        torch.autograd.grad, ([value for _, value in wanted], [leaf for _, leaf in leaves], tangents), {"allow_unused": True}
    )
    pairs = [(position, gradient) for (position, _), gradient in zip(leaves, gradients) if gradient is not None]  # type: ignore[call-overload]
    backward = Backward(inputs, len(outputs), tuple(position for position, _ in wanted), tuple(position for position, _ in pairs))
    return backward, tuple(gradient for _, gradient in pairs), ""
