"""Recording the backward: PyTorch's autograd engine is asked for the gradients of the captured outputs, and what it does is recorded.

Takes a recorder at the end of a capture and the frame's outputs; gives the graph's results: its outputs, then the gradients, as traced
tensors in the same graph. No formula is written here and nothing is traced twice. Always holds: outputs of the graph share no memory with
each other or with an input (what does is rebuilt by view operators outside, see `Rebuilt`); what cannot be differentiated so that
autograd's semantics are kept gives a reason instead, and the call runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.capture.frame import Backward, Rebuilt
from fusewright.capture.signals import GraphBreak, SkipFrame, UserException
from fusewright.graph.recorder import Recorder
from fusewright.graph.traced_tensor import TracedTensor, memory_root
from fusewright.records import dataclass, field


class CannotDifferentiate(Exception):
    """The graph's gradients cannot be compiled; the message says why."""


def record_backward(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward | None, tuple[object, ...], str]:
    """Records the gradients of `outputs`. Gives (the backward half, the graph's outputs and gradients, ""), or (None, outputs, why not)."""
    try:
        return _record(recorder, outputs)
    except CannotDifferentiate as error:
        return None, tuple(outputs), str(error)
    except (GraphBreak, SkipFrame) as signal:
        return None, tuple(outputs), f"the backward cannot be traced: {signal.detail}"
    except UserException as signal:
        return None, tuple(outputs), f"the backward raises {type(signal.exception).__name__}: {signal.exception}"


@dataclass(slots=True)
class _Results:
    """The graph's outputs under construction."""

    values: list[object] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)

    def add(self, value: object) -> int:
        """The position of `value` among the outputs; one tensor is returned once."""
        known = self.positions.get(id(value)) if isinstance(value, torch.Tensor) else None
        if known is None:
            known = len(self.values)
            self.values.append(value)
            if isinstance(value, torch.Tensor):
                self.positions[id(value)] = known
        return known


def _record(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward, tuple[object, ...], str]:
    inputs = {id(node.meta["example_value"]): position for position, (node, _) in enumerate(recorder.inputs)}
    results = _Results()
    rebuilt = tuple(_rebuilding(outputs, inputs, results))
    updates = tuple((position, results.add(node.meta["example_value"])) for position, node in _updated(recorder))
    plain = len(results.values) == len(outputs) and all(one == Rebuilt(("output", index)) for index, one in enumerate(rebuilt))
    wanted = [
        (position, value)
        for position, value in enumerate(results.values)
        if isinstance(value, TracedTensor) and value.requires_grad and value.grad_fn is not None
    ]
    if wanted and any(one.leaf for one in rebuilt):
        raise CannotDifferentiate("a tensor that was made to require a gradient inside is returned")
    leaves = [
        (position, node.meta["leaf"])
        for position, (node, _) in enumerate(recorder.inputs)
        if isinstance(node.meta.get("leaf"), TracedTensor) and node.meta["leaf"].requires_grad
    ]
    known = len(recorder.inputs)
    tangents = [recorder.tangent(value, f"tangent_{position}") for position, value in wanted]
    gradients: Any = ()
    freed = False
    if wanted and not leaves:
        raise CannotDifferentiate("an output requires a gradient, and no input does")
    if wanted:
        with torch.autograd.set_detect_anomaly(False):  # its check for NaN would read traced gradients; the engine checks the real ones
            try:
                gradients = recorder.call(
                    torch.autograd.grad, ([value for _, value in wanted], [leaf for _, leaf in leaves], tangents), {"allow_unused": True}
                )
            except GraphBreak as signal:
                if not (recorder.freed and "second time" in signal.detail):
                    raise
                freed = True
    if len(recorder.inputs) != known + len(tangents):
        raise CannotDifferentiate("the backward reads a tensor that the forward has not seen")
    pairs = [(position, gradient) for (position, _), gradient in zip(leaves, gradients, strict=False) if gradient is not None]
    backward = Backward(
        inputs=known,
        outputs=len(results.values),
        tangents=tuple(position for position, _ in wanted),
        gradients=tuple(position for position, _ in pairs),
        updates=updates,
        rebuilt=None if plain else rebuilt,
        user_code=None if recorder.user_gradients is None else tuple(recorder.user_gradients),
        freed=freed,
    )
    return backward, (*results.values, *(gradient for _, gradient in pairs)), ""


def _updated(recorder: Recorder) -> list[tuple[int, torch.fx.Node]]:
    """The inputs that were written to with autograd alive: they take their new value outside of the graph."""
    found = []
    for position, (node, _) in enumerate(recorder.inputs):
        if recorder.history_changed(node):
            traced = node.meta["example_value"]
            if traced.reshaped:
                raise CannotDifferentiate(f"input {position} is written to and changes its shape")
            node.meta["updated_outside"] = True
            found.append((position, node))
    return found


def _rebuilding(outputs: Sequence[object], inputs: dict[int, int], results: _Results) -> list[Rebuilt]:
    """How each output is made; adds what the graph must return to `results`."""
    roots = [memory_root(value) if isinstance(value, TracedTensor) else None for value in outputs]
    sharing: dict[int, set[int]] = {}
    for value, root in zip(outputs, roots, strict=True):
        sharing.setdefault(id(root), set()).add(id(value))
    rebuilt = []
    for value, root in zip(outputs, roots, strict=True):
        leaf = isinstance(value, TracedTensor) and value.requires_grad and value.grad_fn is None
        if root is None or value is root:
            is_input = id(value) in inputs
            base = ("input", inputs[id(value)]) if is_input else ("output", results.add(value))
            rebuilt.append(Rebuilt(base, leaf=leaf and not is_input))
            continue
        assert isinstance(value, TracedTensor)
        if id(root) in inputs:
            base = ("input", inputs[id(root)])
        elif len(sharing[id(root)]) == 1:
            rebuilt.append(Rebuilt(("output", results.add(value)), leaf=leaf))
            continue
        else:
            base = ("output", results.add(root))
        steps = _steps(value, root)
        rebuilt.append(Rebuilt(base, steps, no_grad=not value.requires_grad or leaf, leaf=leaf))
    return rebuilt


def _steps(value: TracedTensor, root: TracedTensor) -> tuple[Any, ...]:
    """The recorded view operators from `root` to `value`."""
    steps = []
    while value is not root:
        assert value.viewed is not None
        node, element = value.node, None
        if value.viewed.reshaped:
            raise CannotDifferentiate("a tensor is returned together with a view from before it was reshaped in place")
        if not isinstance(node.target, torch._ops.OpOverload):  # getitem of a list of views
            node, element = node.args[0], node.args[1]  # type: ignore[assignment]
        if not isinstance(node.args[0], torch.fx.Node) or any(isinstance(one, torch.fx.Node) for one in node.args[1:]):
            raise CannotDifferentiate(f"a view made by {node.target} is returned together with what it is a view of")
        steps.append((node.target, tuple(node.args[1:]), dict(node.kwargs), element))
        value = value.viewed
    return tuple(reversed(steps))
