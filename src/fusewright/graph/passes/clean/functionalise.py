"""Functionalise: no operator writes to a tensor any more, except `copy_` into mutated inputs at the very end.

Takes a recorded graph with in-place operators, `out=`, and views of mutated tensors; gives an equivalent graph of pure
operators, followed by one epilogue `aten.copy_(input, new value)` for each mutated input (node.meta["epilogue"]). Its
meta["counted"] says how much the input's version grows: by one for each write, but for those of operators which say so
nowhere (running statistics), and those through what `data` gives (meta["data"]). An input whose placeholder has
meta["updated_outside"] gets none: an output that is this input then is its new value. An operator without a pure form
writes to private copies, and whoever reads a copy afterwards reads `written(copy, operator)`.
Always holds: what aliases an input in eager (an output that is an input, or a view of one) aliases it in the new graph;
outputs that shared storage still share it; operators that draw random numbers keep their order.

Every recorded tensor is a `Ref`: a chain of view steps from the root of its storage. A write makes a new value for the
storage's root, through the scatter row of each step on the way; a read re-applies the steps to the current value when
the cached one is out of date.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from torch._ops import OpOverload

from fusewright.base.errors import CannotFunctionalise
from fusewright.base.location import Location
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field, replace
from fusewright.base.signals import memory_was_short, raised_by_handler
from fusewright.graph.builder import Builder, env_of, is_surely_dense, marks_of
from fusewright.graph.nodes import add_call, ancestors, written
from fusewright.graph.passes.clean.views import PARTS, SCATTERS, ViewStep
from fusewright.graph.passes.context import PassContext
from fusewright.operators.data_dependent import GIVES, OF_UNKNOWN_SHAPE
from fusewright.operators.derive import derive
from fusewright.operators.schema import HIDDEN_WRITES, facts, functional_form, written_by
from fusewright.sizes.tensor_type import TensorType, same_strides, symbols_in, with_sizes

aten = torch.ops.aten
_STRIDED = aten.as_strided.default  # what it sees is not what its operand shows, but the memory below that


@dataclass(slots=True)
class _Storage:
    """One allocation of the eager program. `root` is the new graph's node of its first value; `current` of its value
    now."""

    root: torch.fx.Node
    current: torch.fx.Node
    version: int = 0
    counted: int = 0  # how much PyTorch's version of it has grown


@dataclass(slots=True)
class _Ref:
    """A recorded tensor: the root of its storage (parent None), or `step` applied to `parent`."""

    storage: _Storage
    type: TensorType
    location: tuple[Location, ...]
    parent: _Ref | None = None
    step: ViewStep | None = None
    value: torch.fx.Node | None = None  # valid when `version` is the storage's
    version: int = -1
    aliases: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    counted: bool = True  # whether the storage's version is its own


def functionalise(graph: torch.fx.Graph, context: PassContext | None = None) -> torch.fx.Graph:
    """See the head of this file. Raises CannotFunctionalise for a mutation that has no pure equivalent.

    It is all or nothing, so it counts no rewrites."""
    known = any(node.target is written for node in graph.nodes) or _is_functional(graph)
    return _copied_graph(graph) if known else _Functionaliser(graph).run()


def _is_functional(graph: torch.fx.Graph) -> bool:
    """Whether nothing is written to and every view is an ordinary one: each node then stands for itself."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload) or "lazy_view" in node.meta or not _is_plain(node.target):
            return False
    return True


@cache
def _is_plain(op: OpOverload) -> bool:
    return not (facts(op).written or op in HIDDEN_WRITES or op in PARTS or facts(op).recasts or op is _STRIDED)


_KEPT = ("type", GIVES, "private", "writes_private")


def _copied_graph(old: torch.fx.Graph) -> torch.fx.Graph:
    """The same nodes in a graph of their own."""
    new = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in old.nodes:
        if node.op != "call_function":
            copies[node] = new.node_copy(node, copies.__getitem__)
            continue
        meta = node.meta
        made = copies[node] = add_call(
            new, node.target, _moved(node.args, copies), _moved(node.kwargs, copies)
        )
        made.meta = {name: meta[name] for name in _KEPT if name in meta} | marks_of(node)
        made.meta["location"] = meta.get("location", ())
        if isinstance(node.target, OpOverload) and facts(node.target).random:
            made.meta["random"] = True
    return new


def _moved(value: Any, copies: dict[torch.fx.Node, torch.fx.Node]) -> Any:
    """An argument with each node replaced by its copy."""
    if isinstance(value, torch.fx.Node):
        return copies[value]
    if isinstance(value, (tuple, list)):
        moved = [_moved(item, copies) for item in value]
        return tuple(moved) if isinstance(value, tuple) else moved
    if isinstance(value, dict):
        return {name: _moved(item, copies) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(_moved(value.start, copies), _moved(value.stop, copies), _moved(value.step, copies))
    return value


class _Functionaliser:
    def __init__(self, old: torch.fx.Graph) -> None:
        self.old = old
        self.new = torch.fx.Graph()
        env = env_of(old)
        self.build = Builder(self.new, env)
        self.known = env if env is not None and env.has_equalities else None
        self.refs: dict[torch.fx.Node, _Ref] = {}  # recorded tensors
        self.plain: dict[torch.fx.Node, torch.fx.Node] = {}  # recorded tuples and sizes
        self.inputs: list[_Storage] = []

    def run(self) -> torch.fx.Graph:
        for node in self.old.nodes:
            self.build.location = node.meta.get("location", ())
            self.build.marks = marks_of(node)
            if node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif node.op == "output":
                self._finish(node)
            else:
                self._call(node)
        return self.new

    # --- nodes of the old graph

    def _input(self, node: torch.fx.Node) -> None:
        copied = self.new.node_copy(node)
        if isinstance(node.meta.get("type"), TensorType):
            storage = self._fresh(node, copied)
            self.inputs.append(storage)
        else:
            self.plain[node] = copied

    def _fresh(self, node: torch.fx.Node, value: torch.fx.Node) -> _Storage:
        storage = _Storage(value, value)
        self.refs[node] = _Ref(storage, value.meta["type"], self.build.location, value=value, version=0)
        return storage

    def _call(self, node: torch.fx.Node) -> None:
        op = node.target
        if op is operator.getitem:
            self._item(node)
            return
        assert isinstance(op, OpOverload), f"not an ATen operator: {node.format_node()}"
        known = facts(op)
        if op in HIDDEN_WRITES and written_by(op, node.args):
            self._write_copies(node, written_by(op, node.args), counted=False)
        elif known.written:
            self._mutation(node)
        elif op in PARTS and node.args[0] in self.refs:
            pass  # its items are views of their own
        elif node.meta.get("lazy_view"):
            self._view(node, self.refs[node.args[0]], ViewStep(op, ()))  # type: ignore[index]
        elif known.is_view and isinstance(node.meta["type"], TensorType) and known.returned[0] == ("view", 0):
            parent = self.refs[node.args[0]]  # type: ignore[index]
            self._view(node, parent, ViewStep(op, node.args[1:], dict(node.kwargs)))
        else:
            self._pure(node)

    def _item(self, node: torch.fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, torch.fx.Node) and isinstance(index, int)
        if source.target in PARTS and source.args[0] in self.refs:
            self._view(node, self.refs[source.args[0]], PARTS[source.target](source, index))  # type: ignore[index]
        elif (source, index) in self.refs:
            self.refs[node] = self.refs[source, index]  # type: ignore[index]
        else:
            made = self.build.item(self.plain[source], index)
            self._define(node, made)

    def _view(self, node: torch.fx.Node, parent: _Ref, step: ViewStep) -> None:
        ref = _Ref(parent.storage, node.meta["type"], self.build.location, parent, step)
        ref.counted = parent.counted and not node.meta.get("data", False)
        self.refs[node] = ref
        self._read(ref)  # in place: so the graph keeps the order of the program

    def _define(self, node: torch.fx.Node, made: torch.fx.Node) -> None:
        if isinstance(made.meta["type"], TensorType):
            self._fresh(node, self._in_order(made, node.meta["type"]))
        else:
            self.plain[node] = made

    def _pure(self, node: torch.fx.Node) -> None:
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        self._define(node, self._emit(node.target, args, kwargs, node))  # type: ignore[arg-type]

    def _emit(self, op: OpOverload, args: object, kwargs: object, like: torch.fx.Node | None = None) -> torch.fx.Node:
        """One pure operator; its type is that of the recorded node `like` when the arguments' types are the recorded
        ones."""
        if like is None:
            return self.build.call(op, *args, **kwargs)  # type: ignore[arg-type, misc]
        type_ = like.meta["type"]
        # A size that data decide is known to no meta kernel.
        of_data = GIVES in like.meta or (
            op in OF_UNKNOWN_SHAPE and not symbols_in(type_) <= symbols_in(_types((args, kwargs)))
        )
        if not of_data and (_types(args) != _types(like.args) or _types(kwargs) != _types(like.kwargs)):
            return self.build.call(op, *args, **kwargs)  # type: ignore[arg-type, misc]
        made = self.build.node(op, args, kwargs, type_)  # type: ignore[arg-type]
        if GIVES in like.meta:
            made.meta[GIVES] = like.meta[GIVES]
        return made

    # --- mutation

    def _mutation(self, node: torch.fx.Node) -> None:
        op: OpOverload = node.target  # type: ignore[assignment]
        special = _SPECIAL.get(op)
        if special is not None:
            target = self.refs[node.args[0]]  # type: ignore[index]
            self._write(target, special(self, node, target))
            self.refs[node] = target
            return
        form = functional_form(op)
        known = facts(op)
        if form is None:
            self._write_copies(node, known.written)
            return
        targets = [_argument(node, op, i) for i in known.written]
        if known.random:
            for target in _flat(targets):  # type: ignore[assignment]
                if not is_surely_dense(self.refs[target].type):  # type: ignore[index]
                    raise CannotFunctionalise(f"{op} on a tensor with gaps draws its numbers in another order")
        kwargs = {name: value for name, value in node.kwargs.items() if not _is_out(op, name)}
        kwargs |= _lost_defaults(node, op, form)  # type: ignore[arg-type]
        try:
            made = self.build.call(form, *self._arguments(node.args), **self._arguments(kwargs))  # type: ignore
        except Exception as error:  # a meta kernel refuses the arguments: eager says why in its own words
            if memory_was_short(error) or raised_by_handler(error):
                raise
            raise CannotFunctionalise(f"{form}: {error}") from error
        type_ = made.meta["type"]
        if known.random and not (
            isinstance(type_, TensorType) and same_strides(type_, self.refs[_flat(targets)[0]].type)
        ):
            self.new.erase_node(made)  # another layout would draw the numbers in another order
            self._write_copies(node, known.written)
            return
        if isinstance(type_, TensorType):
            values = [made]
        else:
            values = [self.build.item(made, i) for i in range(len(type_))]
        extra = len([r for r in known.returned if r is None or r[0] != "same"])  # results besides the written values
        written = _flat(targets)
        if any(a.is_out for a in op._schema.arguments):
            for target, value in zip(written, values[-len(written) :], strict=False):  # type: ignore[assignment]
                if self.refs[target].type.dtype != value.meta["type"].dtype:  # type: ignore[index]
                    raise CannotFunctionalise(
                        f"{op} into a tensor of another dtype, which may compute in that dtype or be refused"
                    )
        fresh, new_values = values[:extra], values[extra:]
        if len(new_values) != len(written):
            raise CannotFunctionalise(f"{op}: {len(new_values)} new values for {len(written)} arguments")
        for target, value in zip(written, new_values, strict=True):  # type: ignore[assignment]
            self._write(self.refs[target], self._conform(value, self.refs[target].type))  # type: ignore[index]
        self._returns(node, written, fresh)

    def _returns(self, node: torch.fx.Node, written: list[torch.fx.Node], fresh: list[torch.fx.Node]) -> None:
        """Say what the results of a mutating node are: the written tensors themselves, or fresh values."""
        known = facts(node.target)  # type: ignore[arg-type]
        if not isinstance(node.meta["type"], tuple):
            if written and known.returned and known.returned[0] is not None:
                self.refs[node] = self.refs[written[0]]
            elif fresh:
                self._define(node, fresh[0])
            return
        same, new = iter(written), iter(fresh)
        for index, result in enumerate(known.returned):
            if result is not None and result[0] == "same":
                self.refs[node, index] = self.refs[next(same)]  # type: ignore[index]
            else:
                self._fresh((node, index), next(new))  # type: ignore[arg-type]

    def _write_copies(self, node: torch.fx.Node, written: tuple[int, ...], counted: bool = True) -> None:
        """No pure form exists: the operator writes to private copies, which then are the new values."""
        op: OpOverload = node.target  # type: ignore[assignment]
        targets = _flat([_argument(node, op, i) for i in written])
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for target in targets:
            ref = self.refs[target]
            # The copy itself is written to, not a view of it, which a pass may take away.
            copy = self.build.call(aten.clone.default, self._conform(self._read(ref), ref.type))
            copy.meta["private"] = True
            copies[target] = copy
        args = self._arguments(node.args, copies)
        kwargs = self._arguments(node.kwargs, copies)
        made = self.build.write(op, args, kwargs, node.meta["type"])  # type: ignore[arg-type]
        for target in targets:
            self._write(self.refs[target], self.build.written(copies[target], made), counted)
        known = facts(op)
        if isinstance(node.meta["type"], tuple):
            same = iter(targets)
            for index, result in enumerate(known.returned):
                if result is not None and result[0] == "same":
                    self.refs[node, index] = self.refs[next(same)]  # type: ignore[index]
                elif isinstance(node.meta["type"][index], TensorType):
                    self._fresh((node, index), self.build.item(made, index))  # type: ignore[arg-type]
        elif known.returned and known.returned[0] is not None:
            self.refs[node] = self.refs[targets[0]]
        elif isinstance(node.meta["type"], TensorType):
            self._fresh(node, made)

    def _conform(self, value: torch.fx.Node, like: TensorType) -> torch.fx.Node:
        """`value` with the dtype, shape and (where a fresh tensor can have them) strides of the tensor that it is
        written to."""
        type_, like = self._known(value.meta["type"]), self._known(like)
        if not torch.can_cast(type_.dtype, like.dtype):
            # eager raises, mostly
            raise CannotFunctionalise(f"a result of {type_.dtype} is written to a tensor of {like.dtype}")
        if type_.dtype != like.dtype or type_.device != like.device:
            changes: dict[str, object] = {"dtype": like.dtype}
            if type_.device != like.device:
                changes["device"] = like.device
            value = self.build.call(aten._to_copy.default, value, **changes)
        if type_.shape != like.shape:
            if type_.ndim > like.ndim:  # of what eager refuses, as its meta function does not
                raise CannotFunctionalise(f"{type_.ndim} dimensions are written to {like.ndim}")
            value = self.build.call(aten.expand.default, value, list(like.shape))
        return self._laid_out(value, like)

    def _known(self, type_: TensorType) -> TensorType:
        """The type with what guards have told of its sizes: a cache's and those of what is written to it have symbols
        of their own."""
        return type_ if self.known is None else with_sizes(type_, self.known.simplify)  # type: ignore[return-value]

    def _laid_out(self, value: torch.fx.Node, like: TensorType) -> torch.fx.Node:
        """`value` with the strides of `like`, where a fresh tensor can have them."""
        if not is_surely_dense(like) or same_strides(self._known(value.meta["type"]), self._known(like)):
            return value
        return self.build.restride(value, like)

    def _in_order(self, value: torch.fx.Node, like: TensorType) -> torch.fx.Node:
        """`value` with the strides of a copy of `like`: eager lays out by their order what it computes of such a
        tensor."""
        type_, like = self._known(value.meta["type"]), self._known(like)
        if same_strides(type_, like) or is_surely_dense(like):
            return self._laid_out(value, like)
        return self._laid_out(value, derive(aten.clone.default, (like,), {}, self.build.env))  # type: ignore[arg-type]

    def _write(self, ref: _Ref, value: torch.fx.Node, counted: bool = True) -> None:
        storage = ref.storage
        storage.counted += counted and ref.counted
        if ref.parent is None:
            value = self._in_order(value, ref.type)
            storage.current = value
            storage.version += 1
        else:
            assert ref.step is not None
            scatter = SCATTERS.get(ref.step.op)
            if scatter is None:
                raise CannotFunctionalise(f"a write through {ref.step.op}")
            parent, step = self._taken(ref, ref.storage.current)
            if step.op is _STRIDED and not (parent.parent is None and is_surely_dense(self._known(parent.type))):
                raise CannotFunctionalise("a write through an as_strided view of a part of an input, or to its gaps")
            base = scatter(self.build, step, self._read(parent), value)
            self._write(parent, self._laid_out(base, parent.type), counted=False)
        # Else a later read takes the view, whose strides are the recorded ones.
        if same_strides(self._known(value.meta["type"]), self._known(ref.type)):
            ref.value, ref.version = value, storage.version

    # --- reading

    def _arguments(self, value: object, copies: dict[torch.fx.Node, torch.fx.Node] | None = None) -> object:
        def convert(node: torch.fx.Node) -> torch.fx.Node:
            if copies and node in copies:
                return copies[node]
            return self._read(self.refs[node]) if node in self.refs else self.plain[node]

        return torch.fx.node.map_arg(value, convert)  # type: ignore[type-var]

    def _read(self, ref: _Ref) -> torch.fx.Node:
        """The node that holds the tensor's value now."""
        storage = ref.storage
        if ref.version != storage.version or ref.value is None:
            if ref.parent is None:
                ref.value = storage.current
            else:
                parent, step = self._taken(ref, storage.current)
                ref.value = self._apply(ref, step, parent, self._read(parent))
            ref.version = storage.version
        return ref.value

    def _taken(self, ref: _Ref, root: torch.fx.Node) -> tuple[_Ref, ViewStep]:
        """What the view is taken of, and how. An as_strided view of a view is one of what has the memory: that has
        elements which the view between does not show. Of an input the chain stays: only the call knows where its memory
        begins."""
        assert ref.parent is not None and ref.step is not None
        if ref.step.op is not _STRIDED or root.op in ("placeholder", "get_attr"):
            return ref.parent, ref.step
        parent = ref.parent
        while parent.parent is not None:
            if parent.step is not None and (_is_lazy(parent.step.op) or facts(parent.step.op).recasts):
                raise CannotFunctionalise(f"an as_strided view of what {parent.step.op} gives")
            parent = parent.parent
        if not is_surely_dense(self._known(parent.type)):
            raise CannotFunctionalise("an as_strided view of a new value whose gaps are not those of the tensor")
        size, stride = ref.step.argument(1, "size"), ref.step.argument(2, "stride")
        step = ref.step if parent is ref.parent else ViewStep(_STRIDED, (size, stride, ref.type.offset))
        return parent, step

    def _apply(self, ref: _Ref, step: ViewStep, parent: _Ref, base: torch.fx.Node) -> torch.fx.Node:
        here, self.build.location = self.build.location, ref.location
        try:
            if _alike(self._known(base.meta["type"]), self._known(parent.type)):
                return step.apply(self.build, base, ref.type)
            if step.op is _STRIDED:
                raise CannotFunctionalise("an as_strided view of a tensor whose new value is laid out differently")
            if step.op in (aten.view.default, aten._reshape_alias.default):
                dense = self.build.call(aten.clone.default, base, memory_format=torch.contiguous_format)
                return self.build.call(aten.view.default, dense, step.args[0])
            if facts(step.op).recasts:  # to larger elements it asks for strides that are multiples
                base = self.build.call(aten.clone.default, base, memory_format=torch.contiguous_format)
            return step.apply(self.build, base)
        finally:
            self.build.location = here

    # --- outputs

    def _alias(self, ref: _Ref, root: torch.fx.Node) -> torch.fx.Node:
        """The tensor as a true view of `root`."""
        if ref.parent is None:
            return root
        found = ref.aliases.get(root)
        if found is None:
            parent, step = self._taken(ref, root)
            found = ref.aliases[root] = self._apply(ref, step, parent, self._alias(parent, root))
        return found

    def _finish(self, node: torch.fx.Node) -> None:
        mutated = [
            storage for storage in self.inputs if storage.version and not storage.root.meta.get("updated_outside")
        ]
        results = [self.refs[old] for old in _flat(list(node.args[0])) if old in self.refs]  # type: ignore[arg-type]
        returned = Counter([*(id(ref.storage) for ref in results), *map(id, self.inputs)])

        def convert(old: torch.fx.Node) -> torch.fx.Node:
            ref = self.refs.get(old)
            if ref is None:
                return self.plain[old]
            if any(ref.storage is storage for storage in self.inputs) and _passes(ref, _is_lazy):
                raise CannotFunctionalise("a result is a conjugate or negative view of an input")
            # gradients may share memory in eager; nobody relies on it
            if returned[id(ref.storage)] > 1 and _passes(ref, lambda op: facts(op).recasts) and not _is_gradient(old):
                raise CannotFunctionalise(
                    "a result shares the memory of an input or of another result under another dtype"
                )
            if ref.storage.version == 0:
                return self._read(ref)
            is_input = any(ref.storage is storage for storage in mutated)
            return self._alias(ref, ref.storage.root if is_input else ref.storage.current)

        outputs = torch.fx.node.map_arg(node.args[0], convert)
        for storage in mutated:
            copy = self.build.node(aten.copy_.default, (storage.root, storage.current), {}, storage.root.meta["type"])
            copy.meta["epilogue"] = True
            copy.meta["counted"] = storage.counted
        made = self.new.output(outputs)
        made.meta.update(node.meta)


# --- in-place operators whose new value does not depend on the old one


def _copied(self: _Functionaliser, source: torch.fx.Node, like: TensorType) -> torch.fx.Node:
    """A fresh tensor with the value of `source`, in the form of `like`."""
    type_: TensorType = source.meta["type"]
    if type_.shape != like.shape:
        source = self.build.call(aten.expand.default, source, list(like.shape))
    if type_.dtype == like.dtype and type_.device == like.device:
        source = self.build.call(aten.clone.default, source)
    elif not type_.dtype.is_complex and not torch.can_cast(type_.dtype, like.dtype):
        source = self.build.call(aten._to_copy.default, source, dtype=like.dtype)  # a copy cuts fractions off
    return self._conform(source, like)


def _copy(self: _Functionaliser, node: torch.fx.Node, target: _Ref) -> torch.fx.Node:
    return _copied(self, self._arguments(node.args[1]), target.type)  # type: ignore[arg-type]


def _full(self: _Functionaliser, target: _Ref, number: object) -> torch.fx.Node:
    type_ = target.type
    made = self.build.call(aten.full.default, list(type_.shape), number, dtype=type_.dtype, device=type_.device)
    return self._conform(made, type_)


_SPECIAL = {
    aten.copy_.default: _copy,
    aten.fill_.Tensor: _copy,
    aten.fill_.Scalar: lambda self, node, target: _full(self, target, node.args[1]),
    aten.zero_.default: lambda self, node, target: _full(self, target, 0),
}


def _is_gradient(node: torch.fx.Node) -> bool:
    return any(one.meta.get("tangent") for one in ancestors([node]))


def _passes(ref: _Ref, test: Callable[[OpOverload], bool]) -> bool:
    """Whether an operator on the way from the root to the tensor passes the test."""
    return ref.step is not None and ref.parent is not None and (test(ref.step.op) or _passes(ref.parent, test))


def _is_lazy(op: OpOverload) -> bool:
    """It computes, so that its result is no true view."""
    return not facts(op).is_view


def _argument(node: torch.fx.Node, op: OpOverload, index: int) -> object:
    return node.args[index] if index < len(node.args) else node.kwargs.get(facts(op).arguments[index])


def _is_out(op: OpOverload, name: str) -> bool:
    return any(a.is_out and a.name == name for a in op._schema.arguments)


def _lost_defaults(node: torch.fx.Node, op: OpOverload, form: OpOverload) -> dict[str, object]:
    """Arguments that the call leaves to a default of the in-place operator which the pure form does not have."""
    required = {a.name for a in form._schema.arguments if not a.has_default_value()}
    return {
        a.name: a.default_value
        for index, a in enumerate(op._schema.arguments)
        if index >= len(node.args) and a.name not in node.kwargs and a.name in required and a.has_default_value()
    }


def _flat(targets: list[object]) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    for target in targets:
        if isinstance(target, torch.fx.Node):
            found.append(target)
        elif isinstance(target, (list, tuple)):
            found.extend(target)
    return found


def _types(value: object) -> object:
    """The arguments with nodes replaced by the part of their type that results depend on."""
    if isinstance(value, torch.fx.Node):
        type_ = value.meta["type"]
        return replace(type_, requires_grad=False) if isinstance(type_, TensorType) else type_
    if isinstance(value, (list, tuple)):
        return tuple(_types(item) for item in value)
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    return None


def _alike(one: TensorType, other: TensorType) -> bool:
    """Whether a view of the one is as the same view of the other."""
    return (one.shape, one.offset, one.dtype) == (other.shape, other.offset, other.dtype) and same_strides(one, other)
