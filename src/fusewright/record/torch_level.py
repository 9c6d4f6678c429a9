"""How calls of torch functions stand in a graph at torch level.

Takes a call with its traced arguments, or a symbolic size; gives nodes of the recorder's graph. Always holds: a node
stands behind everything that it reads; a size is computed once, from the size placeholders.
"""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.fx

from fusewright.base.location import Location
from fusewright.base.signals import GraphBreak
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.expressions import Dim, Expr, FloorDiv, Max, Min, Mod, Sum
from fusewright.sizes.symint import dim_of

# What a torch-level graph can hold as an argument besides tensors, sizes and containers of them.
NODE_ARGUMENTS = (
    int, float, complex, str, bytes, range, type(None), type(Ellipsis), type, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
    torch.Generator, enum.Enum, types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.finfo, torch.iinfo, torch.nn.Module, torch.ScriptObject,
)  # fmt: skip


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
    if isinstance(owner, TracedTensor):
        return "call_method", fn.__name__, (owner, *args)
    name = getattr(fn, "__name__", "")
    if name and args and isinstance(args[0], TracedTensor) and getattr(torch.Tensor, name, None) is fn:
        return "call_method", name, args
    return "call_function", fn, args


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


class TorchLevel:
    """The nodes of one torch-level graph. `sizes` holds the placeholder, or the node, of each symbolic size."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.sizes: dict[Dim, torch.fx.Node] = {}

    def call(self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> torch.fx.Node:
        """The node of a call, at the end of the graph."""
        kind, target, args = torch_target(fn, args)
        node_args = tuple(self.argument(value) for value in args)
        node_kwargs = {name: self.argument(value) for name, value in kwargs.items()}
        node = self.recorder.graph.create_node(kind, target, node_args, node_kwargs)  # type: ignore[arg-type]
        node.meta["location"] = self.recorder.location()
        return node

    def argument(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self.recorder.convert(value)[0]
        if isinstance(value, torch.SymInt):
            return self.size(dim_of(value))
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return self.recorder.convert(value)[0]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.argument(item) for item in value))  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            made = [self.argument(item) for item in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":  # operators take it as the number
            return value.item()
        # a node: a higher-order operator's body
        if not isinstance(value, NODE_ARGUMENTS) and not isinstance(value, torch.fx.Node):
            raise GraphBreak("operator-failed", f"a {type(value).__qualname__} as an argument of an operator")
        return value

    def adopt(self, result: object, node: torch.fx.Node) -> None:
        """Give the traced tensors in a torch-level call's result their nodes."""
        if isinstance(result, TracedTensor):
            result.node = node
            node.meta["type"] = result.tensor_type
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                self._adopt_item(item, node, index)
        elif isinstance(result, dict):
            for key, item in result.items():
                self._adopt_item(item, node, key)

    def _adopt_item(self, item: object, node: torch.fx.Node, key: object) -> None:
        if not isinstance(item, (TracedTensor, list, tuple, dict)):
            return
        if isinstance(item, TracedTensor) and item.node is not None:
            return  # an argument that comes back
        found = self.recorder.graph.create_node("call_function", operator.getitem, (node, key))  # type: ignore
        found.meta.update(example_value=item, location=node.meta["location"])
        self.adopt(item, found)

    def size(self, d: Dim) -> torch.fx.Node | int:
        """The torch-level node that computes a size from the size placeholders."""
        if isinstance(d, int):
            return d
        found = self.sizes.get(d)
        if found is None:
            found = self.sizes[d] = self._makesize(d)
        return found

    def _makesize(self, d: Expr) -> torch.fx.Node:
        if isinstance(d, Sum):
            parts: list[object] = []
            for monomial, count in d.terms:
                factors: list[object] = [self.size(atom) for atom in monomial]
                parts.append(self._fold(operator.mul, factors if count == 1 else [*factors, count]))
            return self._fold(operator.add, parts if not d.constant else [*parts, d.constant])  # type: ignore
        fold = _SIZE_FUNCTIONS.get(type(d))
        if fold is None:
            raise GraphBreak("data-dependent-shape", f"the size {d} has no placeholder")
        return self._fold(fold, [self.size(child) for child in d._children()])  # type: ignore[return-value]

    def _fold(self, fn: Callable[..., object], values: list[object]) -> object:
        result = values[0]
        for value in values[1:]:
            result = self.recorder.graph.create_node("call_function", fn, (result, value))  # type: ignore[arg-type]
            result.meta["location"] = self.recorder.here
        return result
