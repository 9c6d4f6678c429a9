"""How calls of torch functions stand in a graph at torch level.

Takes a call with its traced arguments, or a symbolic size; gives nodes of the recorder's graph. Always holds: a node
stands behind everything that it reads; a size is computed once, from the size placeholders.
"""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from torch.fx.node import map_aggregate

from fusewright._native import isinstance
from fusewright.base.location import Location
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.graph.nodes import add_node
from fusewright.operators.data_dependent import GIVES
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.expressions import Dim, Expr, FloorDiv, Max, Min, Mod, Relation, Sum
from fusewright.sizes.symint import dim_of

AS_THEY_ARE = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Types of arguments that stand in a graph, at either level, as they are."""
# What a torch-level graph can hold as an argument besides tensors, sizes and containers of them.
NODE_ARGUMENTS = (
    int, float, complex, str, bytes, range, type(None), type(Ellipsis), type, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
    torch.Generator, enum.Enum, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.finfo, torch.iinfo, torch.nn.Module, torch.ScriptObject,
)  # fmt: skip


CHECK = "what the compiled program takes for granted does not hold for this call"
"""The message of the checks that capture puts into a torch-level graph (`torch._assert_async`, `torch._assert`): where
one fails, the call is repeated eagerly."""


_PLAIN: dict[type, Callable[[Any], object]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
}


def torch_target(fn: Callable[..., object], args: Sequence[object]) -> tuple[str, object, Sequence[object]]:
    """(node kind, target, arguments) for a torch-level call: methods of Tensor by name, so that a subclass would be
    honoured."""
    owner = getattr(fn, "__self__", None)
    if (
        isinstance(fn, types.MethodWrapperType)
        and fn.__name__ == "__get__"
        and isinstance(owner, types.GetSetDescriptorType)
    ):
        return "call_function", getattr, (args[0], owner.__name__)
    name = getattr(fn, "__name__", "")
    if isinstance(owner, TracedTensor):
        fn, args = getattr(torch._C.TensorBase, name), (owner, *args)
    if name and args and isinstance(args[0], TracedTensor) and getattr(torch.Tensor, name, None) is fn:
        return "call_method", name, args
    return "call_function", fn, args


_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)  # of one of NumPy's numbers they take the dtype


_SIZE_FUNCTIONS: dict[type, Callable[..., object]] = {
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    Min: min,
    Max: max,
}


class Recording(Protocol):
    """What is asked of the recorder (record/recorder.py)."""

    graph: torch.fx.Graph
    location: Callable[[], tuple[Location, ...]]
    here: tuple[Location, ...]

    def convert(self, value: object) -> tuple[object, object]: ...

    def lacks_form(self, code: str, detail: str) -> NoReturn: ...


class TorchLevel:
    """The nodes of one torch-level graph. `sizes` holds the placeholder, or the node, of each symbolic size."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.of_numpy = False  # whether the call is given one of NumPy's numbers
        self.sizes: dict[Dim, torch.fx.Node] = {}
        self.results: dict[Dim, tuple[torch.fx.Node, int]] = {}  # where sizes that depend on data are found

    def call(self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> torch.fx.Node:
        """The node of a call, at the end of the graph."""
        kind, target, args = torch_target(fn, args)
        self.of_numpy = False
        node_args = tuple(self.argument(value) for value in args)
        node_kwargs = {name: self.argument(value) for name, value in kwargs.items()}
        node = add_node(self.recorder.graph, kind, target, node_args, node_kwargs)
        node.meta["location"] = self.recorder.location()
        if self.of_numpy and target in _OF_DATA:
            node.meta["of_numpy"] = True
        return node

    def argument(self, value: object) -> object:
        if type(value) in AS_THEY_ARE:
            return value
        if isinstance(value, torch.Tensor):
            return self.recorder.convert(value)[0]
        if isinstance(value, torch.SymInt):
            return self.size(dim_of(value))
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return self.recorder.convert(value)[0]
        # As PyTorch's C++, which asks no subclass for what it holds.
        if isinstance(value, tuple):
            parts = map(self.argument, tuple.__iter__(value))
            named = type(getattr(type(value), "_fields", None)) is tuple
            return tuple.__new__(type(value) if named else tuple, parts)
        if isinstance(value, list):
            return [self.argument(item) for item in list.__iter__(value)]
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in dict.items(value)}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            # operators take it as the number, a bool as a float
            self.of_numpy = True
            return float(value) if value.dtype.kind == "b" else value.item()
        for base, plain in _PLAIN.items():  # fx writes a subclass's instance as that one says
            if isinstance(value, base):
                return plain(value)
        # a node: a higher-order operator's body
        if not isinstance(value, NODE_ARGUMENTS) and not isinstance(value, torch.fx.Node):
            self.recorder.lacks_form("operator-failed", f"a {type(value).__qualname__} as an argument of an operator")
        return value

    def adopt(self, result: object, node: torch.fx.Node, drew: bool = False, wrote: bool = False) -> None:
        """Give the traced tensors in a torch-level call's result their nodes. drew: the call drew random numbers;
        wrote: to a tensor."""
        node.meta["example_value"] = result
        if drew:
            node.meta["random"] = True
        if wrote:
            node.meta["writes"] = True
        if isinstance(result, TracedTensor):
            if result.recorder is not self.recorder:
                return  # a body gives back a tensor of the graph around it, which keeps its node there
            result.node = node
            node.meta["type"] = result.tensor_type
            if node.meta.get("of_numpy") and len(node.args) < 2 and node.kwargs.get("dtype") is None:
                node.kwargs = {**node.kwargs, "dtype": result.dtype}
            for dim, size in enumerate(result.tensor_type.shape):
                if isinstance(size, Expr):
                    self.results.setdefault(size, (node, dim))
        elif isinstance(result, torch.SymInt):
            self.sizes.setdefault(dim_of(result), node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                self._adopt_item(item, node, index)
        elif isinstance(result, dict):
            for key, item in result.items():
                self._adopt_item(item, node, key)

    def _adopt_item(self, item: object, node: torch.fx.Node, key: object) -> None:
        if not isinstance(item, (TracedTensor, torch.SymInt, list, tuple, dict)):
            return
        if isinstance(item, TracedTensor) and item.node is not None:
            return  # an argument that comes back
        found = self.recorder.graph.create_node("call_function", operator.getitem, (node, key))  # type: ignore
        found.meta["location"] = node.meta["location"]
        self.adopt(item, found)

    def check(self, relations: Sequence[Relation]) -> None:
        """Nodes that check what is taken for granted of sizes that depend on data."""
        add_checks(self.recorder.graph, relations, self.size, self.recorder.here)

    def record(self, fn: Callable[..., object], args: Sequence[object], made: tuple[object, ...]) -> None:
        """A call whose results are known."""
        self.adopt(made, self.call(fn, args, {}))

    def size(self, d: Dim) -> torch.fx.Node | int:
        """The torch-level node that computes a size from the size placeholders, or reads it from a result."""
        if isinstance(d, int):
            return d
        found = self.sizes.get(d)
        if found is None and d in self.results:
            node, dim = self.results[d]
            with self.recorder.graph.inserting_after(node):
                found = self.recorder.graph.call_method("size", (node, dim))
            found.meta["location"] = node.meta["location"]
            self.sizes[d] = found
        if found is None:
            found = self.sizes[d] = make_size(self.recorder.graph, d, self.size, self.recorder.here)
        return found


_COMPARISONS: dict[str, Callable[..., object]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
}


def checking(level: str, condition: object) -> tuple[object, ...]:
    """The arguments of torch._assert_async for what capture takes for granted of a tensor."""
    return (condition,) if level == "aten" else (condition, CHECK)


def make_size(
    graph: torch.fx.Graph, d: Expr, known: Callable[[Dim], torch.fx.Node | int], location: tuple[Location, ...]
) -> torch.fx.Node:
    """The node, where the graph now grows, that computes a size of what `known` gives for its parts."""

    def fold(fn: Callable[..., object], values: Sequence[object]) -> object:
        result = values[0]
        for value in values[1:]:
            result = graph.create_node("call_function", fn, (result, value))  # type: ignore[arg-type]
            result.meta["location"] = location
        return result

    if isinstance(d, Sum):
        parts: list[object] = []
        for monomial, count in d.terms:
            factors: list[object] = [known(atom) for atom in monomial]
            parts.append(fold(operator.mul, factors if count == 1 else [*factors, count]))
        return fold(operator.add, parts if not d.constant else [*parts, d.constant])  # type: ignore[return-value]
    function = _SIZE_FUNCTIONS.get(type(d))
    if function is None:
        raise GraphBreak("data-dependent-shape", f"the size {d} has no placeholder")
    return fold(function, [known(child) for child in d._children()])  # type: ignore[return-value]


def sizes_as_nodes(graph: torch.fx.Graph) -> None:
    """Makes nodes of the size expressions among the arguments of an ATen-level graph: computed from the sizes that are
    its inputs, and from those that its operators give. What is taken for granted of the latter is checked."""
    sizes: dict[Dim, torch.fx.Node] = {
        node.meta["type"]: node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["type"], Expr)
    }

    def node_of(d: Any) -> Any:
        if not isinstance(d, Expr):
            return d
        if d not in sizes:
            sizes[d] = make_size(graph, d, node_of, ())
        return sizes[d]

    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        with graph.inserting_before(node):
            env = node.meta.get("env") if node.op == "output" else None
            if env is not None and env.unbacked:
                add_checks(graph, env.assertions(), node_of, ())
            node.args = map_aggregate(node.args, node_of)
            node.kwargs = map_aggregate(node.kwargs, node_of)
        if GIVES in node.meta:
            symbol, dim, which = node.meta[GIVES]
            with graph.inserting_after(node):
                made = node if which is None else graph.call_function(operator.getitem, (node, which))
            with graph.inserting_after(made):
                sizes[symbol] = made if dim is None else graph.call_method("size", (made, dim))


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """What a torch-level graph calls where the program stores to `tensor.data`."""
    tensor.data = value


def add_checks(
    graph: torch.fx.Graph,
    relations: Sequence[Relation],
    node_of: Callable[[Dim], Any],
    location: tuple[Location, ...],
) -> None:
    """Nodes, where the graph now grows, that check what is taken for granted of sizes that depend on data."""
    for relation in relations:
        sides = tuple(node_of(side) for side in (relation.left, relation.right))
        holds = graph.create_node("call_function", _COMPARISONS[relation.op], sides)  # type: ignore[arg-type]
        made = graph.create_node("call_function", torch._assert, (holds, CHECK))
        holds.meta["location"] = made.meta["location"] = location
