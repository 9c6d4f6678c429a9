"""Whether a torch-level graph over symbolic sizes makes, for some sizes, the calls of a graph captured for just these.

Takes both graphs and what stands for the inputs and size symbols of the first in the second. Always holds: nothing but
the arithmetic of sizes may differ. A torch-level graph is a list of calls that PyTorch decides about at run time, so
that equal calls on inputs of one layout are a proof; a call or an argument that is not understood makes the answer
False.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.fx
from torch.fx.node import map_aggregate

from fusewright.graph.fingerprint import NoFingerprint, tensor_text
from fusewright.sizes.expressions import Dim, Expr, floor_div, maximum, minimum, modulo, substitute
from fusewright.sizes.symint import dim_of
from fusewright.sizes.tensor_type import TensorType, with_sizes

Node = torch.fx.Node
_ARITHMETIC: dict[Any, Callable[[Any, Any], Dim]] = {
    operator.add: operator.add,
    operator.mul: operator.mul,
    operator.floordiv: floor_div,
    operator.mod: modulo,
    min: minimum,
    max: maximum,
}
"""What computes a size from others (record/torch_level.py writes it)."""


def same_calls(
    general: torch.fx.Graph,
    special: torch.fx.Graph,
    inputs: Mapping[str, str],
    sizes: Mapping[Expr, Dim],
    constants: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> bool:
    """As graph.translation_validation.same_for, for torch-level graphs."""
    try:
        first = _Written(dict(inputs), sizes, constants[0]).run(general)
        return first == _Written({name: name for name in inputs.values()}, {}, constants[1]).run(special)
    except NoFingerprint:
        return False


class _Written:
    """One graph's calls, in order: a value is written as the number of its call, a size as a number or an expression.
    `sizes`: what stands for the symbols; `inputs`: the name of each tensor placeholder."""

    def __init__(self, inputs: Mapping[str, str], sizes: Mapping[Expr, Dim], constants: Mapping[str, Any]) -> None:
        self.inputs, self.sizes, self.constants = inputs, sizes, constants
        self.values: dict[Node, Any] = {}
        self.calls: list[Any] = []

    def run(self, graph: torch.fx.Graph) -> Any:
        given: dict[str, Any] = {}
        for node in graph.nodes:
            type_ = node.meta.get("type")
            if node.op == "placeholder":
                if isinstance(type_, Expr):
                    self.values[node] = self.dim(type_)
                else:
                    name = self.inputs[node.name]
                    given[name] = with_sizes(type_, self.dim) if isinstance(type_, TensorType) else type_
                    self.values[node] = ("input", name)
            elif node.op == "get_attr":
                self.values[node] = ("constant", tensor_text(self.constants[str(node.target)]))
            elif (size := self.size(node)) is not None:
                self.values[node] = size
            else:
                shapes = map_aggregate(node.meta.get("example_value"), self.shape)
                self.calls.append((node.op, node.target, self.argument(node.args), self.argument(node.kwargs), shapes))
                self.values[node] = ("value", len(self.calls))
        return given, self.calls

    def dim(self, d: Dim) -> Dim:
        return substitute(d, self.sizes)

    def shape(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(self.dim(size) for size in value.tensor_type.shape)  # type: ignore[attr-defined]
        return self.dim(dim_of(value)) if isinstance(value, torch.SymInt) else None

    def size(self, node: Node) -> Dim | None:
        """The size that a node gives; None for every other node."""
        target: Any = node.target
        if node.op == "call_method" and target == "size" and isinstance(node.args[0], Node):
            tensor, place = node.args[0].meta.get("type"), cast(int, node.args[1])
            return self.dim(tensor.shape[place]) if isinstance(tensor, TensorType) else None
        if node.op != "call_function" or target not in _ARITHMETIC:
            return None
        operands = [self.values[one] if isinstance(one, Node) else one for one in node.args]
        sizes = len(operands) == 2 and all(isinstance(one, Expr) or type(one) is int for one in operands)
        return _ARITHMETIC[target](*operands) if sizes else None

    def argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            found = self.values[value]
            return found if isinstance(found, tuple) else ("size", found)
        kind = type(value)
        if kind is int:
            return "size", value
        if kind is float:
            return kind, value.hex()
        if kind is complex:
            return kind, value.real.hex(), value.imag.hex()
        if isinstance(value, tuple | list):
            return kind, tuple(map(self.argument, value))
        if isinstance(value, dict):
            return kind, tuple((name, self.argument(item)) for name, item in value.items())
        if kind is slice:
            return kind, self.argument((value.start, value.stop, value.step))
        return kind, value
