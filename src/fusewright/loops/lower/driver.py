"""The walk over the graph: every node becomes an expression, a realised buffer, or an extern call.

Takes a functionalised `torch.fx.Graph` of ATen calls whose nodes carry `meta["type"]` (a TensorType, a Dim, or a tuple
of them for several results) and gives a `LoopProgram`. Pointwise operators and views compose lazily; a value is
*realised* (stored into a buffer by a loop of its own) when memory must hold it: it is returned, a library operator
reads it, or recomputing it for each of its readers costs more than a store and a load. The scheduler fuses the loops
again and drops the buffers that turn out to be local.

Always holds: nothing fails for want of a row: such a call becomes an `Extern` with eager's semantics.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright.base.location import Location
from fusewright.base.records import dataclass, replace
from fusewright.graph.nodes import written
from fusewright.loops import ir
from fusewright.loops.ir import (
    Buffer,
    BufferRef,
    Constant,
    Expression,
    Extern,
    LoopProgram,
    Operation,
    Output,
    Pointwise,
    Reduction,
    Store,
)
from fusewright.loops.lower import expressions as ex, registry
from fusewright.loops.lower.extern import call_extern
from fusewright.loops.lower.liveness import drop_dead_operations
from fusewright.loops.lower.promotion import COMPUTABLE, computable_dtypes
from fusewright.loops.lower.questions import (
    flatten,
    for_floats,
    is_cheap,
    is_input_update,
    is_refused,
    is_shifted,
    lazy_locations,
    locations_of,
    merge_locations,
    tensors_in,
    types_in,
)
from fusewright.loops.lower.registry import Fallback, Refuses
from fusewright.loops.lower.results import as_recorded, check_aliases, empty_view, recorded_types, with_owners
from fusewright.loops.lower.values import (
    Shape,
    Value,
    axes_of,
    axis_symbols,
    flat_index,
    is_empty,
    is_one,
    lie_apart,
    own_strides,
    strided_load,
    window,
)
from fusewright.sizes.expressions import Dim, Expr, Symbol, known_le, known_lt
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

MAX_NODES = 160
MAX_LOADS = 24


@dataclass(frozen=True, slots=True)
class Call:
    """What a row knows about the call that it lowers: the lowering, the operator, the type of the result(s), and
    whether memory must hold the (single) result anyway. `written`: arguments that the operator updates in place
    (private copies): the row gives them their new expression."""

    lowering: Lowering
    target: Any
    type: Any
    in_memory: bool = True
    written: tuple[Value, ...] = ()

    @property
    def axes(self) -> tuple[Dim, ...]:
        """The canonical loop variables of the (single, tensor) result."""
        return axis_symbols(self.type.shape)

    def argument(self, number: int) -> Dim:
        """A number that kernels are given as an argument, so that those which differ in it alone share their code."""
        symbol = ir.argument_symbol(number)
        self.lowering.program.size_symbols[symbol] = (-1, number)
        return symbol

    def result(self, expression: Expression) -> Value:
        """The result whose element at `axes` is `expression`; half results keep a float32 expression."""
        return self.lowering.value(self.type, expression)


class Lowering:
    """The state of one lowering: buffers, operations so far, and what each node stands for."""

    def __init__(
        self, graph: Graph, constants: Mapping[str, torch.Tensor], fusion: bool = True, refuses: Refuses | None = None
    ) -> None:
        self.graph, self.constants, self.fusion, self.refuses = graph, constants, fusion, refuses
        self.program = LoopProgram()
        self.binder = ex.Binder()
        self.environment: dict[Node, Any] = {}
        self.locations: tuple[Location, ...] = ()
        self._names: dict[str, int] = {}
        self._node_name = ""
        self._memory_readers: dict[Node, bool] = {}
        self._constants: list[torch.Tensor] = []
        self._created: set[str] = set()  # buffers made by the current node
        self._inputs: list[str] = []
        self._returned: dict[str, Node] = {}  # the node that is returned as the buffer's own tensor

    # --- the walk ----------------------------------------------------------------------------------------------------

    def run(self) -> LoopProgram:
        epilogue = [node for node in self.graph.nodes if is_input_update(node)]
        updates = frozenset(epilogue)
        for node in self.graph.nodes:
            if node in updates:
                continue
            if node.op == "output":
                outputs = self.output_values(node)  # which are read before the inputs change under them
                self.update_inputs(epilogue)
                nodes = flatten(node.args)
                results = tuple(map(self.output, nodes, outputs, recorded_types(node, len(nodes))))
                self.program.outputs = with_owners(self.program, results, nodes, node.meta.get("own", ()))
            else:
                self.environment[node] = self.lower_node(node)
        self.program.inputs = tuple(self._inputs)
        self.program.constants = tuple(self._constants)
        drop_dead_operations(self.program)
        return self.program

    def lower_node(self, node: Node) -> Any:
        self._node_name = node.name
        self._created = set()
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "get_attr":
            return self.constant_tensor(self.constants[str(node.target)], node.meta.get("type"))
        if node.op != "call_function":
            raise TypeError(f"not a node of an ATen graph: {node.format_node()}")
        kind = node.meta.get("type")
        if isinstance(kind, (int, Expr)):  # arithmetic on sizes; the type is the value
            return kind
        if node.target is operator.getitem:
            return self.environment[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.target is written:
            return self.environment[node.args[0]]  # type: ignore[index]
        args, kwargs = self.resolve(node.args), self.resolve(dict(node.kwargs))
        self.locations = merge_locations(lazy_locations((args, kwargs)), locations_of(node))
        in_memory = self.needs_memory(node) or len(node.users) > 1
        private = self.private_arguments(node)
        result = self.call(node.target, args, kwargs, kind, in_memory, private)
        if self._created:  # an argument that was put into memory on the way is not the result
            own = {id(value) for value in private}
            read = (window(value) for value in tensors_in((args, kwargs)) if id(value) not in own)
            self._created -= {ref.buffer for ref in read if ref is not None}
        self.place(node, result)
        return result

    def private_arguments(self, node: Node) -> tuple[Value, ...]:
        """The arguments that the call writes to: copies which the functionalise pass made for it."""
        if not node.meta.get("writes_private"):
            return ()
        return tuple(self.environment[arg] for arg in node.all_input_nodes if arg.meta.get("private"))

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any, in_memory: bool = True,
        written: tuple[Value, ...] = (),
    ) -> Any:  # fmt: skip
        """The result of an operator on resolved arguments: by its row, or else by the operator itself."""
        row = registry.find(target)
        if row is not None and (row.view or self.computed_here(target, args, kwargs, kind)):
            first, before = len(self.program.operations), [value.expression for value in written]
            try:
                result = row.function(Call(self, target, kind, in_memory, written), *args, **kwargs)
            except Fallback:
                pass
            else:
                computed = not row.view or all(
                    value.dtype in COMPUTABLE or window(value) is not None for value in tensors_in(result)
                )
                made, node = self.program.operations[first:], "" if row.view else self._node_name
                if computed and not is_refused(self.refuses, (result, written), made, node):
                    return result
                for value, expression in zip(written, before):
                    value.expression = expression
        return call_extern(self, target, args, kwargs, kind, tuple(self.owned(value) for value in written))

    def owned(self, value: Value) -> Value:
        """`value`, made to own its buffer."""
        ref = window(value)
        if ref is None or self.program.buffers[ref.buffer].role != "temporary":
            self.realize(value)
        return value

    def computable(
        self, args: Any, kwargs: Any, kind: Any, pointwise: bool = False, dtypes: frozenset[torch.dtype] = COMPUTABLE
    ) -> bool:
        """Whether loops can express the call at all: known dtypes, one device, no tensor that is certainly empty. A
        pointwise operator on a GPU may take numbers in tensors on the CPU."""
        results = types_in(kind)
        arguments = [value.type for value in tensors_in((args, kwargs))]
        if not results or any(is_empty(t.shape) for t in (results[0], *arguments)):
            return False
        here = [t for t in arguments if not (pointwise and t.ndim == 0 and t.device.type == "cpu")]
        known = all(t.dtype in dtypes for t in (*results, *arguments))
        return known and all(t.device == results[0].device for t in (*results, *here))

    def computed_here(self, target: Any, args: Any, kwargs: Any, kind: Any) -> bool:
        """Whether loops compute the operator. A number on the CPU that is not known gets memory, for a GPU's kernel."""
        dtypes = computable_dtypes(target, kind.device) if isinstance(kind, TensorType) else COMPUTABLE
        pointwise = torch.Tag.pointwise in target.tags
        if not self.computable(args, kwargs, kind, pointwise, dtypes) or for_floats(target, args):
            return False
        home = types_in(kind)[0].device
        for value in () if home.type == "cpu" else tensors_in((args, kwargs)):
            if value.type.device != home and not isinstance(value.expression, Constant):
                ref = window(value)
                if ref is None or any(size != 1 for size in self.program.buffers[ref.buffer].shape):
                    self.realize(value)
        return True

    def resolve(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self.environment[arg]
        if isinstance(arg, (list, tuple)):
            return tuple(self.resolve(item) for item in arg)
        if isinstance(arg, dict):
            return {key: self.resolve(item) for key, item in arg.items()}
        return arg

    # --- placement ---------------------------------------------------------------------------------------------------

    def place(self, node: Node, result: Any) -> None:
        """Realises the results of `node` that memory must hold. "rounded" is set by autograd/partition.py."""
        if isinstance(result, Value):
            if node.meta.get("rounded"):
                result.expression = ex.rounded(result.expression, result.dtype)
            if self.must_realize(node, result):
                self.realize(result)
        elif isinstance(result, (tuple, list)):
            readers: dict[Any, list[Node]] = {}
            for user in node.users:
                if user.target is operator.getitem:
                    readers.setdefault(user.args[1], []).append(user)
            for position, item in enumerate(result):
                if isinstance(item, Value) and any(self.must_realize(user, item) for user in readers.get(position, ())):
                    self.realize(item)

    def must_realize(self, node: Node, value: Value) -> bool:
        source = node.args[0] if node.target is operator.getitem else node
        row = registry.find(source.target)  # type: ignore[union-attr]
        aliases = row is not None and row.view
        ref = window(value)
        if ref is not None and (aliases or ref.buffer in self._created):
            return False
        if self.needs_memory(node):
            return True
        if isinstance(value.expression, ir.Load) and not value.expression.bindings:
            return False
        if not self.fusion:
            return True
        price = ex.cost(value.expression)
        if price.nodes > MAX_NODES or price.loads > MAX_LOADS:
            return True
        return len(node.users) > 1 and not is_cheap(price) and not is_shifted(node, value)

    def needs_memory(self, node: Node) -> bool:
        """Whether the node's elements are read from memory: by the caller or by a library operator, directly or through
        views."""
        found = self._memory_readers.get(node)
        if found is None:
            self._memory_readers[node] = False
            found = any(
                self._reads_memory(user) for user in node.users if user.target is not written or user.args[0] is node
            )
            self._memory_readers[node] = found
        return found

    def _reads_memory(self, user: Node) -> bool:
        if user.op == "output":
            return True
        if is_input_update(user):
            return False
        if user.target in (operator.getitem, written):
            return self.needs_memory(user)
        row = registry.find(user.target)
        if row is None or (row.accepts is not None and not row.accepts(user)):
            return not isinstance(user.meta.get("type"), (int, Expr))
        return row.view and self.needs_memory(user)

    # --- values ------------------------------------------------------------------------------------------------------

    def value(self, type_: TensorType, expression: Expression) -> Value:
        """A lazy value of this type. The expression is over `axis_symbols(type_.shape)`, in the type's dtype or its
        compute dtype."""
        if is_empty(type_.shape):
            expression = ir.constant(0, ex.compute_dtype(type_.dtype))
        elif expression.dtype != type_.dtype and expression.dtype != ex.compute_dtype(type_.dtype):
            expression = ir.cast(expression, type_.dtype)
        return Value(type_, expression, self.locations)

    def make(self, shape: Shape, expression: Expression, like: TensorType, dtype: torch.dtype | None = None) -> Value:
        """A lazy intermediate of a row's own making, row-major, in the expression's dtype unless given."""
        type_ = TensorType(tuple(shape), contiguous_strides(tuple(shape)), dtype or expression.dtype, like.device)
        return self.value(type_, expression)

    def at(self, value: Value, indices: Sequence[Dim]) -> Expression:
        """The element at `indices`, one for each dimension, as stored (half types are not widened)."""
        mapping = {
            sym: index
            for sym, index in zip(axis_symbols(value.shape), indices, strict=True)
            if isinstance(sym, Expr) and sym is not index
        }
        return ex.substitute_expression(value.expression, mapping, self.binder)

    def read(self, value: Value, indices: Sequence[Dim], dtype: torch.dtype | None = None) -> Expression:
        """The element at `indices` for computing: widened, or cast to `dtype`."""
        found = self.at(value, indices)
        return ex.widen(found) if dtype is None else ir.cast(ex.widen(found), dtype)

    def broadcast(self, value: Value, shape: Shape, symbols: Sequence[Dim]) -> tuple[Dim, ...]:
        """The indices into `value` at the point `symbols` of an iteration space of `shape`, by PyTorch's broadcasting
        rules. A value that is dear to compute is realised first if it would be computed several times."""
        skipped = len(shape) - value.ndim
        repeated = any(not is_one(size) for size in shape[:skipped])
        indices: list[Dim] = []
        for size, target, sym in zip(value.shape, shape[skipped:], symbols[skipped:]):
            if is_one(size):
                repeated = repeated or not is_one(target)
                indices.append(0)
            else:
                indices.append(sym)
        if repeated:
            self.keep_if_expensive(value)
        return tuple(indices)

    def keep_if_expensive(self, value: Value) -> None:
        """For a value whose elements are about to be read more than once each."""
        if not isinstance(value.expression, ir.Load) and ex.cost(value.expression).expensive:
            self.realize(value)

    def shared(self, value: Value) -> Value:
        """`value`, realised unless several loops may as well recompute it."""
        found = value.expression
        if not isinstance(found, ir.Load) and not is_cheap(ex.cost(found)) and ex.marked(found) is None:
            self.realize(value)
        return value

    # --- buffers and operations --------------------------------------------------------------------------------------

    def new_name(self, stem: str) -> str:
        count = self._names.get(stem, 0)
        self._names[stem] = count + 1
        return stem if count == 0 else f"{stem}_{count}"

    def new_buffer(self, type_: TensorType, role: Any = "temporary", exact: bool = False) -> Buffer:
        """A buffer laid out as the type says; densely where that would make elements share memory, unless an operator
        does so (`exact`)."""
        name = f"buf{len(self.program.buffers)}"
        stride = type_.stride if exact else own_strides(type_, self.graph)
        buffer = Buffer(name, type_.shape, stride, type_.dtype, type_.device, role)
        self.program.buffers[name] = buffer
        self.program.makers[name] = self._node_name
        self._created.add(name)
        return buffer

    def emit(self, operation: Operation) -> None:
        self.program.operations.append(operation)

    def operation_name(self) -> str:
        return self.new_name(self._node_name)

    def realize(self, value: Value) -> str:
        """Stores the value into a buffer of its own, with its type's strides; `value` is a load from now on. Returns
        the buffer."""
        buffer = self.new_buffer(value.type)
        symbols = axis_symbols(value.shape)
        index = flat_index(symbols, buffer.stride)
        if not is_empty(value.shape):
            stored = Store(buffer.name, index, ir.cast(value.expression, value.dtype))
            locations = value.locations or self.locations
            self.emit(Pointwise(self.operation_name(), axes_of(symbols, value.shape), (stored,), locations))
        value.expression = ir.load(buffer.name, index, value.dtype)
        value.locations = ()
        return buffer.name

    def reference(self, value: Value) -> BufferRef:
        """The value as a window on a buffer, realised if it is not one yet."""
        found = window(value)
        if found is None:
            buffer = self.program.buffers[self.realize(value)]
            found = BufferRef(buffer.name, value.shape, buffer.stride, 0, value.dtype)
        return found

    def buffer_value(self, type_: TensorType, buffer: Buffer) -> Value:
        """The whole of `buffer` as a value."""
        return Value(type_, strided_load(buffer.name, type_.shape, buffer.stride, 0, type_.dtype))

    def reduce(
        self,
        kind: ir.ReductionKind,
        type_: TensorType,
        axes: Sequence[Dim],
        reduced: Sequence[ir.Axis],
        expression: Expression,
        finish: Expression | None = None,
    ) -> Value:
        """A realised reduction. `axes`: the loop variable of each dimension of the result (0 where its size is 1);
        `expression`: the value to accumulate, over `axes` and the symbols of `reduced`; `finish`: over
        `ex.accumulator(...)`, the identity if not given."""
        result_dtype = torch.int64 if kind in ("argmax", "argmin") else expression.dtype
        final = ex.accumulator(result_dtype) if finish is None else finish
        only = ex.without_loop(kind, expression, reduced, self.binder if type_.device.type == "cuda" else None)
        if only is not None:
            mapping = {
                sym: new
                for sym, new in zip(axes, axis_symbols(type_.shape))
                if isinstance(sym, Expr) and sym is not new
            }
            return self.value(
                type_, ex.substitute_expression(ex.replace_accumulator(final, only), mapping, self.binder)
            )
        buffer = self.new_buffer(type_)
        final = ir.cast(final, type_.dtype)
        loops = axes_of(axes, type_.shape)
        self.emit(
            Reduction(
                self.operation_name(), loops, tuple(reduced), kind, expression, buffer.name,
                flat_index(axes, buffer.stride), final,
                self.locations,
            )
        )  # fmt: skip
        return self.buffer_value(type_, buffer)

    def scatter(self, target: Value, axes: tuple[ir.Axis, ...], store: Any) -> Value:
        """A realised copy of `target`, then one more loop over `axes` that stores into it. `store(buffer) -> Store`."""
        result = Value(target.type, target.expression, self.locations)
        name = self.realize(result)
        self.emit(Pointwise(self.operation_name(), axes, (store(self.program.buffers[name]),), self.locations))
        return result

    def checked(self, value: Expression, extent: Dim, wrap: bool = True) -> Expression:
        """`value` as an index into a dimension of size `extent`, checked at run time unless it is known to fit."""
        value = ir.cast(value, torch.int64)
        index = ex.index_of(value)
        if index is not None and known_lt(index, extent):
            if known_le(0, index):
                return value
            if wrap and known_lt(index, 0) and known_le(-extent, index):
                return ir.index_value(index + extent)
        return ir.checked_index(value, extent, wrap)

    def bind(self, value: Expression, extent: Dim | None) -> tuple[Dim, ex.Bindings]:
        """(index, bindings) for an int64 expression known to lie in 0 .. extent - 1: a plain index if it is one, else a
        bound symbol."""
        index = ex.index_of(value)
        if index is not None:
            return index, ()
        symbol = self.binder.bind(value, extent)
        return symbol, ((symbol, value),)

    # --- inputs, constants, outputs ----------------------------------------------------------------------------------

    def placeholder(self, node: Node) -> Any:
        kind = node.meta.get("type")
        position = len(self._inputs)
        if not isinstance(kind, TensorType):
            self._inputs.append("")
            if isinstance(kind, Symbol):
                self.program.size_symbols[kind] = (position, -1)
            return kind
        name = f"in{position}"
        self._inputs.append(name)
        for dim, size in enumerate(kind.shape):
            if isinstance(size, Symbol):
                self.program.size_symbols.setdefault(size, (position, dim))
        counted = next((user.meta["counted"] for user in node.users if "counted" in user.meta), 1)
        buffer = Buffer(name, kind.shape, kind.stride, kind.dtype, kind.device, "input", position, kind.offset, counted)
        if not node.users:  # a weight that is packed, say: nobody asks for its elements
            self.program.buffers[name] = buffer
            return None
        return self.outside_tensor(buffer, kind)

    def constant_tensor(self, tensor: torch.Tensor, kind: TensorType | None) -> Value:
        if kind is None:
            kind = TensorType(
                tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, offset=int(tensor.storage_offset())
            )
        position = len(self._constants)
        self._constants.append(tensor)
        name = f"const{position}"
        return self.outside_tensor(
            Buffer(name, kind.shape, kind.stride, kind.dtype, kind.device, "constant", position, kind.offset), kind
        )

    def outside_tensor(self, buffer: Buffer, kind: TensorType) -> Value:
        self.program.buffers[buffer.name] = buffer
        return Value(kind, strided_load(buffer.name, kind.shape, kind.stride, 0, kind.dtype))

    def output_values(self, node: Node) -> list[Any]:
        """What is returned, flat. A value that is computed is realised; a view is a window already, unless its base is
        not in memory."""
        self._node_name = "output"
        nodes, values = flatten(node.args), flatten(self.resolve(node.args))
        values = [
            empty_view(self.environment, node, value, self.reference) or value
            for node, value in zip(nodes, values, strict=True)
        ]
        for value in values:
            if isinstance(value, Value) and window(value) is None:
                self.realize(value)
        check_aliases(self.environment, nodes, values, self.reference)
        return values

    def output(self, node: Any, value: Any, recorded: object) -> Output:
        """A node is one tensor object, however often it is returned; other nodes on its memory are views of it."""
        if not isinstance(value, Value):
            return Output("size", value=value) if isinstance(value, Expr) else Output("value", value=value)
        ref = self.reference(value)
        ref = ref if node.op == "placeholder" else as_recorded(self.program, recorded, ref)
        buffer = self.program.buffers[ref.buffer]
        if buffer.role == "temporary":
            buffer = self.program.buffers[ref.buffer] = replace(buffer, role="output")
        own = buffer.shape, buffer.stride, 0, buffer.dtype
        whole = (ref.shape, ref.stride, ref.offset, ref.dtype) == own
        if node.op == "placeholder" or (buffer.role == "output" and whole):
            if self._returned.setdefault(ref.buffer, node) is node:
                return Output("buffer", ref.buffer)
        return Output("view", ref.buffer, ref)

    # --- updates of inputs -------------------------------------------------------------------------------------------

    def update_inputs(self, updates: Sequence[Node]) -> None:
        """The epilogue `copy_(input, value)`: every source is brought out of reach of the updates first, then the
        inputs are written."""
        pairs: list[tuple[Node, Value, Value]] = []
        for node in updates:
            target, source = self.resolve(node.args[0]), self.resolve(node.args[1])
            pairs.append((node, target, source))
        changed = {name for _, target, _ in pairs for name in ex.loaded_buffers(target.expression)}
        for node, target, source in pairs:
            self.locations = merge_locations(source.locations, locations_of(node))
            self._node_name = node.name
            if ex.loaded_buffers(source.expression) & changed:
                source = Value(source.type, source.expression, self.locations)
                self.realize(source)
            self.environment[node] = (target, source)
        for node, target, _ in pairs:
            _, source = self.environment[node]
            self._node_name = node.name
            self.locations = merge_locations(source.locations, locations_of(node))
            self.store_into(target, source)
            self.environment[node] = target

    def store_into(self, target: Value, source: Value) -> None:
        ref = window(target)
        computable = self.computable((target, source), {}, target.type)
        refused = not computable or is_refused(self.refuses, source, [], self._node_name)
        if ref is None or refused or not lie_apart(ref, self.graph):
            self.emit(
                Extern(
                    self.operation_name(), torch.ops.aten.copy_.default,
                    (self.reference(target), self.reference(source)), (), (None,),
                    mutates=tuple(sorted(ex.loaded_buffers(target.expression))), ordered=True, locations=self.locations,
                )
            )  # fmt: skip
            return
        if is_empty(target.shape):
            return
        symbols = axis_symbols(target.shape)
        read = self.at(source, self.broadcast(source, target.shape, symbols))
        stored = Store(ref.buffer, flat_index(symbols, ref.stride, ref.offset), ir.cast(read, target.dtype))
        self.emit(Pointwise(self.operation_name(), axes_of(symbols, target.shape), (stored,), self.locations))


# --- helpers ---------------------------------------------------------------------------------------------------------


def lower(
    graph: Graph, constants: Mapping[str, torch.Tensor], fusion: bool = True, refuses: Refuses | None = None
) -> LoopProgram:
    """The loops of `graph`. `constants`: the tensor of each get_attr node's target. `fusion`: False puts the result of
    each operator into memory. Raises TypeError for a node that is no ATen call."""
    return Lowering(graph, constants, fusion, refuses).run()
