"""The bodies of higher-order operators: recorded over fresh placeholders, closed, and differentiated.

Takes a body (a callable of the program's) and the tensors that it is called with; gives a functional graph whose
placeholders stand for these and for each tensor of the outer recording that it reads. Always holds: what a body does
besides computing tensors is the graph break "higher-order-operator".
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils import _pytree as pytree

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, replace
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.effects import changed
from fusewright.capture.border.native_ready import elements_of
from fusewright.capture.border.values.cls import own_attributes
from fusewright.operators.schema import facts
from fusewright.record.recorder import GRAD, Recorder
from fusewright.record.traced_tensor import TracedTensor, make_traced, version_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]


def refuse(reason: str) -> NoReturn:
    raise GraphBreak("higher-order-operator", reason)


class SubRecorder(Recorder):
    """Records a body. Tensors of the outer recording become placeholders when they are first used (`lifted`, in
    order). follows: autograd runs inside, from the placeholders, which are leaves there. unfollowed: an operator met
    an outer tensor besides, so that its history goes past them."""

    def __init__(self, outer: Recorder) -> None:
        super().__init__(outer.level, outer.env, outer.location)
        self.outer = outer
        self.follows, self.unfollowed = outer.level == "aten" and torch.is_grad_enabled(), False
        self.lifted: list[TracedTensor] = []
        self.places: dict[int, torch.fx.Node] = {}
        self._inner: dict[int, TracedTensor] = {}
        self._outer: dict[int, TracedTensor] = {}  # by placeholder

    def lift(self, value: TracedTensor) -> TracedTensor:
        """The placeholder for a tensor of the outer recording."""
        given = value
        if value.recorder is not self.outer and isinstance(self.outer, SubRecorder):
            value = self.outer.lift(value)
        found = self._inner.get(id(value))
        if found is None:
            found = self._inner[id(value)] = self.operand(value, requires_grad=self.follows and value.requires_grad)
            self.places[id(value)] = found.node
            self.lifted.append(value)
            self._outer[id(found)] = given
        return found

    def operand(self, value: TracedTensor, kind: TensorType | None = None, requires_grad: bool = False) -> TracedTensor:
        """A fresh placeholder of the type of `value`, or of `kind`."""
        kind = replace(value.tensor_type if kind is None else kind, requires_grad=False, offset=0)
        node = self._placeholder(f"operand_{len(self.inputs)}", value)
        node.meta["type"] = kind
        inner = make_traced(self, node, kind, requires_grad=requires_grad)
        inner.input_storage = True
        return inner

    def input(self, *args: Any, **kwargs: Any) -> TracedTensor:
        return self.outer.input(*args, **kwargs)

    def size_input(self, *args: Any, **kwargs: Any) -> torch.SymInt:
        return self.outer.size_input(*args, **kwargs)

    def constant(self, tensor: torch.Tensor) -> TracedTensor:
        return self.lift(self.outer.constant(tensor))

    def convert(self, value: object) -> tuple[object, object]:
        if isinstance(value, TracedTensor) and self._is_outer(value.recorder):
            self.unfollowed = self.unfollowed or value.requires_grad
            value = self.lift(value)
        return super().convert(value)

    def call(
        self, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if not self.follows:
            return super().call(fn, args, kwargs)
        return self.outside(super().call(fn, self.inside(tuple(args)), self.inside(dict(kwargs or {}))))

    def inside(self, value: Any) -> Any:
        """An argument with placeholders for the outer tensors."""
        if isinstance(value, TracedTensor):
            return self.lift(value) if self._is_outer(value.recorder) else value
        if type(value) in (tuple, list):
            return type(value)(map(self.inside, value))
        if type(value) is dict:
            return {key: self.inside(part) for key, part in value.items()}
        return value

    def outside(self, value: Any) -> Any:
        """A result with the outer tensors for their placeholders: what a call gives back is the argument itself."""
        if type(value) in (tuple, list):
            return type(value)(map(self.outside, value))
        return self._outer.get(id(value), value)

    def leaf(self, value: TracedTensor) -> TracedTensor | None:
        """The placeholder for an outer tensor, if there is one."""
        return self._inner.get(id(value))

    def _is_outer(self, recorder: object) -> bool:
        outer: Recorder = self.outer
        while recorder is not outer:
            if not isinstance(outer, SubRecorder):
                return False
            outer = outer.outer
        return True


@dataclass(frozen=True, slots=True)
class Body:
    """What running a body over fresh placeholders has recorded.

    own      the placeholders that are its alone: what a loop carries, then the rows of what it passes over
    spec     the structure of what it returns, and `results`, its tensors
    """

    recorder: SubRecorder
    own: list[TracedTensor]
    spec: Any
    results: list[TracedTensor]

    @property
    def random(self) -> bool:
        return any(node.meta.get("random") for node in self.recorder.graph.nodes)


def differentiable(values: list[Any]) -> list[int]:
    return [place for place, value in enumerate(values) if value.dtype.is_floating_point or value.dtype.is_complex]


def here(tracer: Tracer, values: list[Any]) -> list[Any]:
    """The same tensors as the present recording has them: those from around a body are its placeholders inside."""
    recorder = tracer.recorder
    return recorder.inside(values) if isinstance(recorder, SubRecorder) else values


def record_body(
    tracer: Tracer,
    function: Any,
    operands: list[Any],
    carried: list[Any] | None = None,
    rows: list[Any] | None = None,
    roots: Any = None,
) -> Body:
    """A body's recording over `operands`, and fresh placeholders for what a loop carries and for a row of `rows`.
    roots: what leads to the objects that the body may reach, where `function` is ours."""
    outer = tracer.recorder
    reachable = (function if roots is None else roots, *operands, *(carried or ()))
    before = traces(tracer, reachable)
    tracer.recorder = recorder = SubRecorder(outer)
    follows = recorder.follows
    own = [recorder.operand(one, requires_grad=follows and one.is_floating_point()) for one in carried or ()]
    for one in rows or ():
        kind = replace(one.tensor_type, shape=one.tensor_type.shape[1:], stride=one.tensor_type.stride[1:])
        own.append(recorder.operand(one, kind, follows and one.is_floating_point()))
    try:
        values = (*operands, *own)
        result = tracer.call(function, values) if roots is None else function(*values)
    except UserException as signal:
        refuse(f"a body raises {type(signal.exception).__name__}: {signal.exception}")
    finally:
        tracer.recorder = outer
        outer.identity_asked = outer.identity_asked or recorder.identity_asked
    if traces(tracer, reachable) != before:
        refuse("a body that has effects besides its result")
    leaves, spec = pytree.tree_flatten(tracer.world.materialise(result))
    if not all(isinstance(leaf, TracedTensor) for leaf in leaves):
        refuse("a body that returns something besides tensors")
    return Body(recorder, own, spec, _as_values(recorder, leaves))


def _as_values(recorder: SubRecorder, tensors: list[Any]) -> list[TracedTensor]:
    """A body's results as its own recording has them. A view by conjugation is no value of a graph: it is copied."""
    made = [value if value.recorder is recorder else recorder.lift(value) for value in tensors]
    copying = {"memory_format": torch.contiguous_format}

    def copied(value: TracedTensor) -> Any:
        return recorder.call(torch.clone, (value,), copying) if value.is_complex() else value

    return list(map(copied, made))


def record_gradient(
    tracer: Tracer, body: Body, inputs: list[TracedTensor], asked: list[TracedTensor]
) -> torch.fx.Graph:
    """The graph of a body's gradients of `asked`, over its own placeholders, `inputs`, and tangents of its results."""
    outer, recorder = tracer.recorder, body.recorder
    if recorder.unfollowed:
        refuse("a gradient through native code that reads a tensor from around a body")
    floats = [body.results[place] for place in differentiable(body.results)]
    tangents = [recorder.operand(value, replace(value.tensor_type, stride=_row_major(value))) for value in floats]
    roots = [(value, tangent) for value, tangent in zip(floats, tangents) if value.requires_grad]
    leaves = [value if value.recorder is recorder else recorder.leaf(value) for value in asked]
    present = [leaf for leaf in leaves if leaf is not None]
    tracer.recorder = recorder
    try:
        found: Any = [None] * len(present)
        if roots and present:
            outputs, given = zip(*roots, strict=True)
            found = recorder.call(GRAD, (outputs, present, given), {"allow_unused": True})
        reached = {id(leaf): gradient for leaf, gradient in zip(present, found) if gradient is not None}
        made: list[Any] = []
        for leaf, value in zip(leaves, asked):
            made.append(reached.get(id(leaf)))
            if made[-1] is None:
                made[-1] = recorder.call(torch.zeros, (value.shape,), {"dtype": value.dtype, "device": value.device})
    finally:
        tracer.recorder = outer
    made = _as_values(recorder, made)
    if any(id(value) not in {id(one) for one in inputs} for value in recorder.lifted):
        refuse("a gradient that reads a tensor which the body has not seen")
    return closed(recorder, made, [*placeholders_of(body, inputs), *((one.node, kind_of(one)) for one in tangents)])


def _row_major(value: TracedTensor) -> Any:
    return contiguous_strides(value.tensor_type.shape)


def traces(tracer: Tracer, roots: Args) -> Any:
    """What a body must leave as it is: effects held back, and objects of this capture that it can reach."""
    world = tracer.world
    effects = world.effects
    outside = (
        len(effects.calls),
        [(key, id(store.value)) for key, store in effects.slots.items()],
        [(key, id(store.value)) for key, store in effects.cells.items()],
        [changed(shadow) for shadow in effects.shadows if changed(shadow)],
        [[(id(key), id(value)) for key, value in namespace.stores.items()] for namespace in world.written_dicts()],
        torch.is_grad_enabled(),
    )
    seen: dict[int, Any] = {}
    for root in roots:
        _reach(world, root, seen)
    return outside, seen


def _reach(world: Any, value: Any, seen: dict[int, Any]) -> None:
    """Notes the content of `value` and of everything made inside that it leads to."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, types.ModuleType, type)):
        return
    if isinstance(value, torch.Tensor):
        seen[id(value)] = version_of(value)
        return
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        parts = [cell.cell_contents for cell in value.__closure__ or () if _is_bound(cell)]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, dict):
        parts = [part for pair in dict.items(value) for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(elements_of(value))
    elif world.outside(value) is None:
        parts = list(own_attributes(value).values())
    if parts:
        seen[id(value)] = [id(part) for part in parts]
        for part in parts:
            _reach(world, part, seen)


def _is_bound(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def kind_of(value: Any) -> TensorType:
    return replace(value.tensor_type, requires_grad=False, offset=0)


Placeholders = list[tuple[torch.fx.Node | None, TensorType]]


def placeholders_of(body: Body, inputs: list[TracedTensor]) -> Placeholders:
    """The body's own placeholders, then one for each of `inputs`, which it may not use (None)."""
    own: Placeholders = [(value.node, kind_of(value)) for value in body.own]
    return own + [(body.recorder.places.get(id(value)), kind_of(value)) for value in inputs]


def closed(recorder: SubRecorder, outputs: list[TracedTensor], placeholders: Placeholders) -> torch.fx.Graph:
    """A functional graph of what is recorded so far, with these placeholders and outputs."""
    closed = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, (node, kind) in enumerate(placeholders):
        made = add_placeholder_of(closed, f"operand_{index}", {"type": kind})
        if node is not None:
            values[node] = made
    for node in recorder.graph.nodes:
        if node not in values and node.op == "placeholder":  # of something that the gradient alone reads
            continue
        if node not in values and node.op != "output":
            values[node] = closed.node_copy(node, values.__getitem__)
    output = closed.output(tuple(values[value.node] for value in outputs))
    output.meta.update(
        type=tuple(value.tensor_type for value in outputs), location=recorder.location(), env=recorder.env
    )
    if recorder.level == "aten":
        # Imported late: a process that finds all its graphs in the disk cache needs no passes.
        passes = importlib.import_module("fusewright.graph.passes")
        try:
            closed = passes.run(closed)
        except passes.CannotFunctionalise as error:
            refuse(f"a body that writes to a part of a tensor: {error}")
        for node in closed.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and facts(node.target).written:
                refuse("a body that writes into its operands")
    return closed


def add_placeholder_of(graph: torch.fx.Graph, name: str, meta: dict[str, Any]) -> torch.fx.Node:
    node = graph.placeholder(name)
    node.meta.update(meta)
    return node
