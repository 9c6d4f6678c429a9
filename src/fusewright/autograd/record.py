"""Recording the backward: PyTorch's autograd engine is asked for the gradients of the captured outputs, and what it
does is recorded.

Takes a recorder at the end of a capture and the frame's outputs; gives the graph's results: its outputs, then the
gradients, as traced tensors in the same graph. No formula is written here and nothing is traced twice. Always holds:
outputs of the graph share no memory with each other or with an input (what does is rebuilt by view operators outside,
see `Rebuilt`); what cannot be differentiated so that autograd's semantics are kept gives a reason instead, and the call
runs eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload

from fusewright.autograd.joint import name_of
from fusewright.autograd.reach import apart, in_order, readable
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border.aliasing import written_arguments
from fusewright.capture.frame import Backward, Rebuilt, ViewCall
from fusewright.graph.nodes import leaves as leaves_of
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import ZEROS, facts
from fusewright.record.applications import content
from fusewright.record.recorder import GRAD, Recorder
from fusewright.record.traced_tensor import TracedTensor, memory_root
from fusewright.sizes.strides import shares_elements


class CannotDifferentiate(Exception):
    """The graph's gradients cannot be compiled; the message says why."""


def record_backward(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward | None, tuple[object, ...], str]:
    """Records the gradients of `outputs`. Gives (the backward half, the graph's outputs and gradients, ""), or (None,
    outputs, why not)."""
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

    def roots(self) -> set[torch.fx.Node]:
        """The nodes whose memory the outputs lie in."""
        return {view_chain(value.node)[0] for value in self.values if isinstance(value, TracedTensor)}


def _record(recorder: Recorder, outputs: Sequence[object]) -> tuple[Backward, tuple[object, ...], str]:
    inputs = {id(node.meta["example_value"]): position for position, (node, _) in enumerate(recorder.inputs)}
    results = _Results()
    rebuilt = tuple(_rebuilding(recorder, outputs, inputs, results))
    updated = [(position, node.meta["example_value"]) for position, node in _updated(recorder)]
    updates = tuple((position, results.add(value), value._version) for position, value in updated)
    plain = len(results.values) == len(outputs) and all(
        one == Rebuilt(("output", index)) for index, one in enumerate(rebuilt)
    )
    wanted = [
        (position, value)
        for position, value in enumerate(results.values)
        if isinstance(value, TracedTensor) and value.requires_grad and _history(value) is not None
    ]
    if wanted and any(one.leaf for one in rebuilt):
        raise CannotDifferentiate("a tensor that was made to require a gradient inside is returned")
    if wanted and any(_retains(value) for value in outputs):
        raise CannotDifferentiate("a tensor that retains its gradient is returned")
    if any(isinstance(value, TracedTensor) and _hooks(value) for value in outputs):
        # who asks for the gradient of the result itself is given what its hook makes of it
        raise CannotDifferentiate("a tensor with a hook is returned")
    leaves: dict[int, TracedTensor] = {
        position: node.meta["leaf"]
        for position, (node, _) in enumerate(recorder.inputs)
        if isinstance(node.meta.get("leaf"), TracedTensor) and node.meta["leaf"].requires_grad
    }
    known = len(recorder.inputs)
    for node in recorder.graph.nodes:
        if node.op in ("placeholder", "get_attr") and _is_inference(node.meta["example_value"]):
            node.meta["inference"] = True
    tangents = [recorder.tangent(value, f"tangent_{position}") for position, value in wanted]
    if wanted and not leaves:
        raise CannotDifferentiate("an output requires a gradient, and no input does")
    ends = _ends(recorder, leaves) | _hooked_edges(outputs, results)
    groups, lost, uneven = apart([value for _, value in wanted], ends) if wanted else ([], [], [])
    ordered = in_order(groups, [position for position, _ in wanted])
    if len(ordered) < len(groups):
        raise CannotDifferentiate("a tensor with a hook is returned, and an operator has one before and behind it")
    groups = ordered
    crossed = {key for group in groups for key, _ in group.inputs if key < 0}
    for key in crossed:
        _check_crossed(recorder, results.values[~key])
    if uneven:
        raise CannotDifferentiate(f"{uneven[0].name()} depends on which of its results have a gradient")
    if lost and (recorder.custom_gradients or not all(map(_computes, lost))):
        raise CannotDifferentiate("a part of the backward that may raise leads to no input")
    gradients: list[tuple[int, tuple[int, ...], Any]] = []
    freed, last = False, next(iter(reversed(recorder.graph.nodes)), None)
    # its check for NaN would read traced gradients; the engine checks the real ones
    with _no_anomaly():
        for index, group in enumerate(groups, 1):
            roots, given = [wanted[place][1] for place in group.places], [tangents[place] for place in group.places]
            begins = next(iter(reversed(recorder.graph.nodes)), None)
            try:
                found: Any = ()
                if group.inputs:
                    asked = [leaves[key] if key >= 0 else results.values[~key] for key, _ in group.inputs]
                    recorder.lines.active = True
                    inner = [results.values[~key] for key, _ in group.inputs if key < 0]
                    # The engine runs what lies behind these on no gradient, where another group's may have freed it.
                    kept = {"retain_graph": True} if crossed else {}
                    with _ending_at(inner):
                        found = recorder.call(GRAD, (roots, asked, given), {"allow_unused": True, **kept})
            except GraphBreak as signal:
                if not (recorder.freed and "second time" in signal.detail):
                    raise
                freed = True
                break
            finally:
                recorder.lines.active = False
            for value in found:
                if value is not None and not recorder.owns(value):
                    raise CannotDifferentiate(f"the gradient of a plain tensor is a {type(value).__qualname__}")
            gradients += [(*reached, value) for reached, value in zip(group.inputs, found, strict=True)]
            returned = results.roots() if len(groups) == 1 else None
            if _note_effects(recorder.graph, begins, index, returned) and len(group.places) > 1:
                raise CannotDifferentiate("the backward has effects, and some of its outputs may have no part in it")
    if len(recorder.inputs) != known + len(tangents):
        raise CannotDifferentiate("the backward reads a tensor that the forward has not seen")
    if freed:  # whoever asks for the gradient of one of these comes to what is freed
        gradients = [(*reached, None) for group in groups for reached in group.inputs]
    defined = [one for one in gradients if one[2] is not None]
    parts: Any = None
    # What code of the program's gives of no gradient is not known, nor which sums zeros without memory were part of.
    if len(tangents) > 1 and not recorder.custom_gradients:
        if not any("zeros" in node.meta for node in recorder.graph.nodes):
            parts = _tangents_read(recorder.graph, tangents, last)
    repeatable = not recorder.wrapped and all(content(cell) is held for cell, held in recorder.user_cells)
    backward = Backward(
        inputs=known,
        outputs=len(results.values),
        tangents=tuple(position for position, _ in wanted),
        row_major=tuple(
            one.tensor_type.stride != value.tensor_type.stride for one, (_, value) in zip(tangents, wanted, strict=True)
        ),
        gradients=tuple(position for position, _, _ in defined),
        depends=tuple(depends for _, depends, _ in defined),
        reads=tuple(
            depends if parts is None else tuple(place for place in depends if place in parts(value.node)) or depends
            for _, depends, value in defined
        ),
        groups=tuple((group.exits, group.frees) for group in groups),
        histories=frozenset(
            position
            for position, _, _ in gradients
            if position < 0 or recorder.inputs[position][0].meta["history"] is not None
        ),
        undefined=tuple((position, depends) for position, depends, value in gradients if value is None),
        updates=updates,
        rebuilt=None if plain else rebuilt,
        user_code=None if recorder.user_gradients is None or not repeatable else tuple(recorder.user_gradients),
        user_reads=tuple(recorder.user_reads),
        hooked=any(map(_hooked_later, outputs)),
        freed=freed,
    )
    return backward, (*results.values, *(gradient for _, _, gradient in defined)), ""


@contextmanager
def _no_anomaly() -> Iterator[None]:
    """PyTorch's own context looks up by name what it calls."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(*before)


def _tangents_read(
    graph: torch.fx.Graph, tangents: Sequence[TracedTensor], last: torch.fx.Node | None
) -> Callable[[torch.fx.Node], frozenset[int]]:
    """Gives for a node the tangents (by place) that it is computed from. Zeros that the backward (what follows `last`)
    makes of none of them may stand for the part of any, unless a formula puts such a part into them. PyTorch's formulas
    are linear: of what is not read, there are no others."""
    reads = {one.node: frozenset((place,)) for place, one in enumerate(tangents)}
    written: dict[torch.fx.Node, frozenset[int]] = {}  # by what has the memory
    any_of, every = frozenset((-1,)), frozenset(range(len(tangents)))

    def read(node: torch.fx.Node) -> frozenset[int]:
        own = reads.get(node, frozenset())
        return own | written.get(view_chain(node)[0], frozenset()) if written else own

    backward = False
    for node in graph.nodes:
        backward = backward or node.prev is last
        if node.op != "call_function":
            continue
        operands, filled = [read(one) for one in node.all_input_nodes], name_of(node) in _FILLED
        if filled and any(map(every.intersection, operands)):
            operands = [one for one in operands if one != any_of]
        zeros = backward and node.target in ZEROS and not any(operands)
        reads[node] = found = any_of if zeros else frozenset().union(*operands)
        for one in leaves_of(written_arguments(node)):
            if isinstance(one, torch.fx.Node):
                root = view_chain(one)[0]
                if filled and read(root) == any_of and found & every:
                    reads[root] = written[root] = frozenset()
                written[root] = written.get(root, frozenset()) | found
    return lambda node: every if -1 in read(node) else read(node)


_FILLED = frozenset({
    "cat", "stack", "copy", "scatter", "scatter_add", "index_add", "index_put", "index_copy", "masked_scatter",
    "slice_scatter", "select_scatter", "diagonal_scatter",
})  # fmt: skip
"""What formulas put together of zeros and of what the other operands hold."""


def _ends(recorder: Recorder, leaves: dict[int, TracedTensor]) -> dict[Any, int]:
    """Where the autograd graph of the capture ends: the positions of the inputs by their own node, or by their leaf."""
    found: dict[Any, int] = {id(leaf): position for position, leaf in leaves.items()}
    for position in leaves:
        history = recorder.inputs[position][0].meta["history"]
        if history is not None:
            found[history] = position
    return found


def _hooked_later(value: object) -> bool:
    """Whether the output is given hooks after the graph."""
    return isinstance(value, TracedTensor) and bool(value.node.meta.get("hooked"))


def _hooked_edges(outputs: Sequence[object], results: _Results) -> dict[Any, int]:
    """Where the gradients of other outputs end as well: outputs that are given hooks, as ~position; of one that is
    rebuilt outside, that of no output."""
    none = len(results.values)
    hooked = [value for value in outputs if _hooked_later(value) and _history(value) is not None]  # type: ignore
    return {(value.grad_fn, value.output_nr): ~results.positions.get(id(value), none) for value in hooked}  # type: ignore


@contextmanager
def _ending_at(outputs: Sequence[Any]) -> Iterator[None]:
    """The engine gives the gradients that arrive at these, and goes on from none of them."""
    handles = [one.grad_fn.register_prehook(functools.partial(_without, one.output_nr)) for one in outputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without(place: int, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given[:place], None, *given[place + 1 :])


def _check_crossed(recorder: Recorder, output: Any) -> None:
    """An output with hooks from which others are computed: their gradients, and gradients of gradients, take it for an
    input."""
    if recorder.custom_gradients:  # of which the engine would run some on no gradient
        raise CannotDifferentiate("a tensor with a hook is returned, and other code of the program has a gradient")
    root = view_chain(output.node)[0]
    for node in recorder.graph.nodes:
        written = leaves_of(written_arguments(node)) if node.op == "call_function" else ()
        if any(isinstance(one, torch.fx.Node) and view_chain(one)[0] is root for one in written):
            raise CannotDifferentiate("a tensor with a hook is returned, and written to")


def _computes(node: Any) -> bool:
    """Whether the engine can run the node."""
    return readable(node) and not node.name().endswith("NotImplemented")


def _note_effects(
    graph: torch.fx.Graph, before: torch.fx.Node | None, group: int, returned: set[torch.fx.Node] | None
) -> bool:
    """Marks what the backward of `group` (recorded after the node `before`) does besides computing: it is done when the
    backward runs. Gives whether there is anything but writes to tensors that nobody else sees; raises
    CannotDifferentiate for writes to others. `returned`: what the outputs' memory begins at, None if other groups may
    read what the forward has made."""
    found = False
    recorded: dict[torch.fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node is before:
            break
        recorded[node] = None
    for node in recorded:
        if not isinstance(node.target, OpOverload):
            continue
        known = facts(node.target)
        for one in leaves_of(written_arguments(node)):
            root = view_chain(one)[0] if isinstance(one, torch.fx.Node) else None
            unseen = returned is not None and root is not None and root.op == "call_function" and root not in returned
            if root is not None and root not in recorded and not unseen:
                raise CannotDifferentiate(f"{node.target} writes in the backward to a tensor that was made before it")
        if known.written or known.effect or known.random:
            node.meta["backward"] = group
            found = found or known.effect or known.random
    return found


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


def _rebuilding(
    recorder: Recorder, outputs: Sequence[object], inputs: dict[int, int], results: _Results
) -> list[Rebuilt]:
    """How each output is made; adds what the graph must return to `results`."""
    roots = [memory_root(value) if isinstance(value, TracedTensor) else None for value in outputs]
    sharing: dict[int, set[int]] = {}
    for value, root in zip(outputs, roots, strict=True):
        sharing.setdefault(id(root), set()).add(id(value))
    rebuilt = []
    calls: dict[torch.fx.Node, int] = {}
    for value, root in zip(outputs, roots, strict=True):
        leaf = isinstance(value, TracedTensor) and value.requires_grad and _history(value) is None
        from_base = leaf and _requires_for_its_base(value, root)
        if root is None or value is root:
            is_input = id(value) in inputs
            if not is_input and isinstance(value, TracedTensor) and value.reshaped:
                _check_memory(recorder, value, outputs)
            base = ("input", inputs[id(value)]) if is_input else ("output", results.add(value))
            rebuilt.append(Rebuilt(base, leaf=leaf and not is_input))
            continue
        assert isinstance(value, TracedTensor)
        if id(root) in inputs:
            if leaf and value.made_leaf and sum(isinstance(other, TracedTensor) for other in outputs) > 1:
                # what was computed from it, or views that are older, would be views of the input
                raise CannotDifferentiate("a view of an input that was made to require a gradient inside is returned")
            base = ("input", inputs[id(root)])
        elif len(sharing[id(root)]) == 1 and not from_base and not _must_be_view(recorder, value):
            if leaf and root.made_leaf and not value.made_leaf:  # alone it would get the gradient that its base gets
                raise CannotDifferentiate("a view of a tensor that was made to require a gradient inside is returned")
            rebuilt.append(Rebuilt(("output", results.add(value)), leaf=leaf))
            continue
        else:
            base = ("output", results.add(root))
        steps = _steps(value, root, calls)
        _check_hooks(value, root)
        if base[0] == "output":
            older = leaf and not all(step.no_grad for step in steps)
            if root.requires_grad and _history(root) is None and (older or _history(value) is not None):
                raise CannotDifferentiate("a view of a tensor that was made to require a gradient inside is returned")
        if base[0] == "input" or from_base:
            leaf = False  # whether a view that was made under no_grad requires a gradient, its operators know
        rebuilt.append(Rebuilt(base, steps, no_grad=not value.requires_grad, leaf=leaf))
    return rebuilt


def _check_memory(recorder: Recorder, value: TracedTensor, outputs: Sequence[object]) -> None:
    """A view that was reshaped in place cannot be made outside of what it shares memory with: an input that is written
    to, or another output."""
    first = view_chain(value.node)[0]
    if first.op == "placeholder" and recorder.history_changed(first):
        raise CannotDifferentiate("a view that was reshaped in place is returned, of an input that is written to")
    others = (one for one in outputs if isinstance(one, TracedTensor) and one is not value)
    if any(view_chain(one.node)[0] is first for one in others):
        raise CannotDifferentiate("a view that was reshaped in place is returned together with what it is a view of")


def _is_inference(value: object) -> bool:
    return isinstance(value, TracedTensor) and value.is_inference()


def _must_be_view(recorder: Recorder, value: TracedTensor) -> bool:
    """Whether elements share memory: a later write to such a tensor counts once for each of them, unless autograd knows
    what it is a view of. Or it is given hooks: a view loses those that it had before a write."""
    if value.node.meta.get("hooked"):
        return True
    return shares_elements(value.tensor_type, {} if recorder.env is None else recorder.env.examples)


def _requires_for_its_base(value: Any, root: Any) -> bool:
    """Whether a view without a history says that it requires a gradient because its base does: it was made under
    no_grad, and no gradient ever comes to it."""
    if value is root or not root.requires_grad or _history(root) is None:
        return False
    while value is not root and not value.made_leaf:
        value = value.viewed
    return value is root


def _retains(value: object) -> bool:
    """Whether a backward outside would have to leave its gradient in a tensor that the graph has made."""
    return isinstance(value, TracedTensor) and any(one.retains_grad for one in (value, memory_root(value)))


def _hooks(value: TracedTensor) -> Any:
    return value._backward_hooks  # type: ignore[attr-defined]


def _history(value: TracedTensor) -> object:
    """The tensor's grad_fn; of a view made under no_grad whose base was written to since, nobody may ask."""
    try:
        return value.grad_fn
    except RuntimeError as error:
        raise CannotDifferentiate(str(error)) from None


def _check_hooks(value: TracedTensor, root: TracedTensor) -> None:
    """The gradient of a view that is made outside never enters the graph: hooks inside would not see it."""
    while value is not root:
        history = _history(value)
        if _hooks(value) or "hooked" in getattr(history, "metadata", ()):
            raise CannotDifferentiate("a view with a hook is returned together with what it is a view of")
        assert value.viewed is not None
        value = value.viewed


def _steps(value: TracedTensor, root: TracedTensor, calls: dict[torch.fx.Node, int]) -> tuple[ViewCall, ...]:
    """The recorded view operators from `root` to `value`. `calls`: their numbers."""
    steps = []
    while value is not root:
        assert value.viewed is not None
        node, element = value.node, None  # type: torch.fx.Node, Any
        if value.viewed.reshaped:
            raise CannotDifferentiate("a tensor is returned together with a view from before it was reshaped in place")
        if not isinstance(node.target, torch._ops.OpOverload):  # getitem of a list of views
            node, element = node.args[0], node.args[1]  # type: ignore[assignment]
        if not isinstance(node.args[0], torch.fx.Node) or any(isinstance(one, torch.fx.Node) for one in node.args[1:]):
            raise CannotDifferentiate(f"a view made by {node.target} is returned together with what it is a view of")
        no_grad = "no_grad" in node.meta
        # A view that an autograd function gives of what it takes, or a detached tensor that was written to since.
        if (no_grad or node.target is torch.ops.aten.detach.default) and _history(value) is not None:
            raise CannotDifferentiate("a view is returned whose history is not that of the operators that make it")
        steps.append(
            ViewCall(
                node.target,
                tuple(node.args[1:]),
                dict(node.kwargs),
                element,
                calls.setdefault(node, len(calls)),
                no_grad,
                value.made_leaf,
            )
        )
        value = value.viewed
    return tuple(reversed(steps))
