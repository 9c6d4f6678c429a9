"""Whether a graph over symbolic sizes does, for some sizes, what a graph that was captured for just these sizes does.

Takes two functional graphs and what stands for the inputs and size symbols of the first in the second. Both are
numbered by value: operators with equal arguments get one number, and what only moves data (a copy, a view, a
permutation that moves sizes of 1) gets a number that depends on where the elements go, not on how they got there. An
input's number depends on its strides: code for one layout reads another memory than its own of a tensor that has
another. Equal numbers of everything that leaves the graphs are a proof.
Always holds: an operator, an argument or a type that is not understood makes the answer False. Used for sizes of 0 and
1: capture takes a symbolic size to be 2 or more, and that is right for smaller ones too unless something broadcasts,
vanishes or branches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.base.records import dataclass, field
from fusewright.graph.fingerprint import NoFingerprint, tensor_text
from fusewright.graph.nodes import written
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Dim, Expr, substitute
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

_COPIES = frozenset({
    aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
    aten._to_copy.default, aten.contiguous.default,
})  # fmt: skip
_RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unflatten.int,
})  # fmt: skip
_PERMUTATIONS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})


def same_for(
    general: torch.fx.Graph,
    special: torch.fx.Graph,
    inputs: Mapping[str, str],
    sizes: Mapping[Expr, Dim],
    constants: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
) -> bool:
    """Whether `general`, with `sizes` for its symbols, computes what `special` does. `inputs`: the tensor placeholder
    of `special` that stands for each of `general`; `constants`: the tensors of the get_attr nodes of both."""
    table: dict[Any, int] = {}
    types: dict[int, Any] = {}
    names = {node.name: number for number, node in enumerate(special.nodes) if node.op == "placeholder"}
    try:
        given = {name: names[other] for name, other in inputs.items()}
        first = Numbering(table, lambda d: substitute(d, sizes), constants[0], given, types)
        second = Numbering(table, lambda d: d, constants[1], names, types)
        return first.run(general) == second.run(special)
    except (NoFingerprint, KeyError):
        return False


@dataclass(slots=True)
class Numbering:
    """One graph's numbers, in a table that both graphs share. `write`: sizes as both graphs have them."""

    table: dict[Any, int]
    write: Callable[[Dim], Dim]
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, int]
    types: dict[int, Any]  # (shape, dtype, device) of each number
    numbers: dict[Node, Any] = field(default_factory=dict)
    # the number of a reshaped value -> of what it is a reshape of
    reshaped: dict[int, int] = field(default_factory=dict)
    # what was drawn, took effect or wrote, in order: used or not, the generator moves on by as much
    effects: list[int] = field(default_factory=list)

    def run(self, graph: torch.fx.Graph) -> Any:
        """What leaves the graph: outputs with the inputs that they are views of, and the new values of inputs."""
        epilogue: list[Any] = []
        outputs: Any = None
        for node in graph.nodes:
            if node.op == "output":
                values = _flat(node.args[0])
                roots = [_root(value) if isinstance(value, Node) else None for value in values]
                outputs = [
                    (self.result(value), None if root is None else roots.index(root))
                    for value, root in zip(values, roots)
                ]
                outputs.append([self.layout(kind, whole=True) for kind in node.meta.get("type") or ()])
            elif node.meta.get("epilogue"):
                target, value = node.args[0], node.args[1]
                epilogue.append((self.numbers[target], self.numbers[value]))  # type: ignore[index]
            else:
                self.numbers[node] = self.number(node)
        return outputs, sorted(epilogue), self.effects

    def result(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return self.argument(value)
        type_ = value.meta["type"]
        if not isinstance(type_, TensorType):
            return self.numbers[value]
        root = _root(value)
        return (
            self.numbers[value],
            self.type(type_),
            self.layout(type_),
            self.numbers[root] if root.op == "placeholder" else None,
        )

    def layout(self, type_: Any, whole: bool = False) -> Any:
        """The strides that tell where elements lie; `whole`: with those of single elements, which a program sees."""
        if not isinstance(type_, TensorType):
            return None
        shape = tuple(map(self.dim, type_.shape))
        wanted = [stride for size, stride in zip(shape, type_.stride) if whole or size != 1]
        return () if 0 in shape else tuple(map(self.dim, wanted))

    def dim(self, d: Dim) -> Dim:
        return self.write(d)

    def type(self, type_: TensorType) -> Any:
        return tuple(map(self.dim, type_.shape)), type_.dtype, type_.device, type_.requires_grad

    def key(self, key: Any, type_: Any = None) -> int:
        """The number of a value. Raises NoFingerprint when the two graphs disagree about its type."""
        number = self.table.setdefault(key, len(self.table))
        if isinstance(type_, TensorType):
            described = self.type(type_)[:3]
            if self.types.setdefault(number, described) != described:
                raise NoFingerprint("one value with two types")
        return number

    def argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return ("value", self.numbers[value])
        if isinstance(value, bool) or value is None:
            return (type(value).__name__, value)
        if isinstance(value, int | Expr):
            return ("size", self.dim(value))
        if isinstance(value, float):
            return ("float", value.hex())
        if isinstance(value, complex):
            return ("complex", value.real.hex(), value.imag.hex())
        if isinstance(value, list | tuple):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, str | torch.dtype | torch.device | torch.layout | torch.memory_format):
            return (type(value).__name__, str(value))
        raise NoFingerprint(type(value).__name__)

    def number(self, node: Node) -> Any:
        type_ = node.meta.get("type")
        if isinstance(type_, int | Expr):
            return self.key(("size", self.dim(type_)))
        if node.op == "placeholder":
            laid_out = self.layout(type_) if isinstance(type_, TensorType) else None
            return self.key(("input", self.inputs[node.name], laid_out), type_)
        if node.op == "get_attr":
            return self.key(("constant", tensor_text(self.constants[str(node.target)])), type_)
        if node.target is operator.getitem:
            return self.key(("item", self.numbers[node.args[0]], node.args[1]), type_)  # type: ignore[index]
        if node.target is written:
            return self.key(("written", *(self.numbers[one] for one in node.args)), type_)  # type: ignore[index]
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise NoFingerprint(str(node.target))
        if isinstance(type_, TensorType):
            known = self.movement(node, type_)
            if known is None:
                known = self.biased(node, type_)
            if known is not None:
                return known
        key: tuple[Any, ...] = (
            node.target,
            self.argument(node.args),
            self.argument(tuple(sorted(node.kwargs.items()))),
        )
        if node.meta.get("random") or facts(node.target).effect or facts(node.target).written:
            number = self.key((*key, "occurrence", len(self.effects)), type_)
            self.effects.append(number)
            return number
        return self.key(key, type_)

    # --- data movement -----------------------------------------------------------------------------------------------

    def movement(self, node: Node, type_: TensorType) -> int | None:
        """The number of a copy, reshape, permutation or expansion; None for everything else."""
        target = node.target
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not isinstance(source.meta["type"], TensorType):
            return None
        before = self.type(source.meta["type"])
        after = self.type(type_)
        if target in _COPIES:
            return self.numbers[source] if before[1:3] == after[1:3] else None
        if target in _RESHAPES:
            return self.reshape(self.numbers[source], after[0], type_)
        if target is aten.sum.dim_IntList and after[1:3] == before[1:3] and _only_ones_go(node, before[0], after[0]):
            # autograd sums gradients over what was broadcast
            return self.reshape(self.numbers[source], after[0], type_)
        if target is aten.expand.default:
            return (
                self.reshape(self.numbers[source], after[0], type_)
                if _without_ones(before[0]) == _without_ones(after[0])
                else None
            )
        if target in _PERMUTATIONS:
            order = _order(node, len(before[0]))
            long = [axis for axis in order if before[0][axis] != 1]
            if long == sorted(long):
                return self.reshape(self.numbers[source], after[0], type_)
            return self.key(("permute", self.numbers[source], tuple(order)), type_)
        return None

    def biased(self, node: Node, type_: TensorType) -> int | None:
        """The number of a matrix product plus a vector, which PyTorch computes in one operator or in two, by the layout
        of the matrix."""
        bias: Any
        if node.kwargs:
            return None
        if node.target is aten.addmm.default:
            bias, *matrices = node.args
            product = self.key((aten.mm.default, self.argument(matrices), ()), type_)
        elif node.target is aten.add.Tensor:
            left, bias = node.args
            if not isinstance(left, Node) or not isinstance(left.meta["type"], TensorType):
                return None
            number = self.numbers[left]
            product = self.reshaped.get(number, number)
        else:
            return None
        vector: Any = bias.meta["type"] if isinstance(bias, Node) else None
        matrix = self.types[product]
        last = self.dim(vector.shape[0]) if isinstance(vector, TensorType) and vector.ndim == 1 else None
        if (
            last is None
            or last == 1
            or matrix[1:] != (vector.dtype, vector.device)
            or len(matrix[0]) != 2
            or matrix[0][1] != last
        ):
            return None
        if self.dim(type_.shape[-1]) != last:
            return None
        made = ("biased", product, self.numbers[bias])
        sum_ = self.table.setdefault(made, len(self.table))
        self.types.setdefault(sum_, matrix)
        return self.reshape(sum_, self.type(type_)[0], type_)

    def reshape(self, number: int, shape: Any, type_: TensorType) -> int:
        base = self.reshaped.get(number, number)
        if self.types[base][0] == shape:
            return base
        made = self.key(("reshape", base, shape), type_)
        self.reshaped[made] = base
        return made


def _root(node: Node) -> Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and isinstance(node.target, OpOverload) and facts(node.target).is_view:
        node = node.all_input_nodes[0]
    return node


def _without_ones(shape: Sequence[Dim]) -> list[Dim]:
    return [size for size in shape if size != 1]


def _only_ones_go(node: Node, before: Sequence[Dim], after: Sequence[Dim]) -> bool:
    """Whether a sum is over dimensions of size 1 alone."""
    axes: Any = node.args[1] if len(node.args) > 1 else None
    return bool(axes) and all(before[axis] == 1 for axis in axes) and _without_ones(before) == _without_ones(after)


def _order(node: Node, rank: int) -> list[int]:
    """The axes of the argument in the order of the result."""
    if node.target is aten.permute.default:
        axes: Any = node.args[1]
        return [axis % rank for axis in axes]
    order = list(range(rank))
    pair: Any = (0, 1) if node.target is aten.t.default else node.args[1:3]
    if rank > 1:
        first, second = pair
        order[first], order[second] = order[second], order[first]
    return order


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in _flat(part)]
    return [value]
