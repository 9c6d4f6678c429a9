"""How a graph is padded: inputs, results, and what each value's dimensions are made of.

Takes a graph, the size that is padded, and a rule for each operator (`bucket.py`); gives the padded graph. Always
holds: an operator without a rule ends it with NotExact.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fusewright.graph.builder import Builder
from fusewright.graph.generators import draws
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols, substitute
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Layout = tuple[tuple[Dim, ...], ...]
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class NotExact(Exception):
    """Padding could change a result, or could not be shown not to."""


class Rules(NamedTuple):
    """handlers: by operator; pointwise: for those without one that are pointwise; apart: for those that make a value of
    no bucketed one."""

    handlers: Mapping[Any, Handler]
    pointwise: Handler
    apart: Handler


class Bucketing:
    def __init__(self, graph: Graph, size: Symbol, bucket: int, env: ShapeEnv, rules: Rules) -> None:
        self.rules = rules
        self.graph, self.size, self.bucket = graph, size, bucket
        self.made = Graph()
        self.build = Builder(self.made, env)
        self.new: dict[Node, Any] = {}
        self.layouts: dict[Node, Any] = {}
        self.originals: dict[Node, Node] = {}  # placeholders as they arrive
        self.inside: Node | None = None

    def run(self) -> Graph:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self.new[node] = self.originals[node] = self.made.node_copy(node)
        for node in placeholders:
            if isinstance(node.meta["type"], TensorType):
                self._pad(node)
        for node in self.graph.nodes:
            self.build.location = node.meta.get("location", ())
            if node.op == "get_attr":
                self.new[node] = self.made.node_copy(node)
                self.layouts[node] = self.plain(node.meta["type"])
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        return self.made

    # --- borders

    def _pad(self, node: Any) -> None:
        type_: TensorType = node.meta["type"]
        layout = self.layouts[node] = self.plain(type_)
        widths: list[Dim] = []
        for factors in reversed(layout):
            widths += [0, self.bucket - self.size if factors == (self.size,) else 0]
        if any(width != 0 for width in widths):
            if not type_.dtype.is_floating_point and type_.dtype not in (torch.int64, torch.int32, torch.bool):
                raise NotExact(f"an input of dtype {type_.dtype} is not padded")
            value: Any = False if type_.dtype is torch.bool else 0
            self.new[node] = self.build.call(aten.constant_pad_nd.default, self.new[node], widths, value)

    def _output(self, node: Any) -> None:
        bases = Counter(_base(value) for value in set(node.all_input_nodes))
        for value in node.all_input_nodes:
            if isinstance(value.meta["type"], TensorType) and self._concerned(value):
                base = _base(value)
                if bases[base] > 1 or (base.op == "placeholder" and base is not value):
                    raise NotExact("a result shares memory with an input or with another result")

        def result(value: Any) -> Any:
            if isinstance(value, Node) and value.op == "placeholder":
                return self.originals[value]
            return (
                self._cut(value)
                if isinstance(value, Node) and isinstance(value.meta["type"], TensorType)
                else self.mapped(value, False)
            )

        made = self.made.output(tuple(map(result, node.args[0])))
        made.meta.update(node.meta)

    def _cut(self, old: Node) -> Node:
        """A result without the padding, laid out as it was."""
        layout, type_, value = self.layouts[old], old.meta["type"], self.new[old]
        if not any(self.size in factors for factors in layout):
            return value
        factors = [factor for dim in layout for factor in dim]
        value = self.build.call(aten.reshape.default, value, [self.becomes(factor) for factor in factors])
        for axis, factor in enumerate(factors):
            if factor == self.size:
                value = self.build.call(aten.slice.Tensor, value, axis, 0, self.size)
        value = self.build.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        value = self.build.call(aten.reshape.default, value, list(type_.shape))
        return self.build.restride(value, type_)

    # --- one operator

    def _call(self, node: Any) -> None:
        if node.meta.get("epilogue"):
            raise NotExact(f"{name_of(node)} writes to an input")
        if node.target is operator.getitem:
            source, index = node.args
            self.layouts[node] = self.layouts[source][index]
            self.new[node] = self.build.item(self.new[source], index)
            return
        if not isinstance(node.target, OpOverload):
            raise NotExact(f"{node.target} is not known")
        known = facts(node.target)
        if draws(node) or known.effect or known.written:
            raise NotExact(f"{name_of(node)} draws random numbers, or has an effect")
        handler = self.rules.handlers.get(node.target)
        if handler is None:
            operands = [value for value in node.all_input_nodes if self._concerned(value)]
            if torch.Tag.pointwise in node.target.tags:
                handler = self.rules.pointwise
            elif not operands and not any(self._made_from(value) for value in _flat((node.args, node.kwargs))):
                handler = self.rules.apart
            else:
                raise NotExact(f"{name_of(node)} is not known to keep positions apart")
        handler(self, node)

    def finish(self, node: Any, layout: Any, made: Node) -> None:
        """Notes a node's successor. Its type must be the old one with the bucket for the size."""
        types = node.meta["type"], made.meta["type"]
        if any(not isinstance(t, tuple) for t in types):
            types = (types[0],), (types[1],)
        for old, new in zip(*types, strict=True):
            if isinstance(old, TensorType) and tuple(map(self.becomes, old.shape)) != new.shape:
                raise NotExact(
                    f"{name_of(node)} has the shape {new.shape}, not {old.shape} with the bucket for {self.size}"
                )
        self.layouts[node], self.new[node] = layout, made

    def again(self, node: Any, layout: Any, args: Sequence[Any] | None = None, shapes: bool = False) -> None:
        """The same operator on the new operands. `shapes`: sizes among its arguments are shapes, and so the
        bucket's."""
        given = self.mapped(node.args, shapes) if args is None else args
        self.finish(node, layout, self.build.call(node.target, *given, **self.mapped(node.kwargs, shapes)))

    def mapped(self, value: Any, shapes: bool) -> Any:
        if isinstance(value, Node):
            return self.new[value]
        if isinstance(value, (list, tuple)):
            return [self.mapped(item, shapes) for item in value]
        if isinstance(value, dict):
            return {name: self.mapped(item, shapes) for name, item in value.items()}
        return self.becomes(value) if shapes and isinstance(value, Expr) else value

    # --- layouts

    def becomes(self, d: Dim) -> Dim:
        return substitute(d, {self.size: self.bucket})

    def _made_from(self, value: Any) -> bool:
        return isinstance(value, Expr) and self.size in free_symbols(value)

    def _concerned(self, node: Any) -> bool:
        layout = self.layouts.get(node, ())
        return any(self.size in factors for factors in layout if isinstance(factors, tuple)) or any(
            self.size in factors for part in layout for factors in part if isinstance(factors, tuple)
        )

    def plain(self, type_: TensorType) -> Layout:
        """The layout of a value that no view has made: a size is the bucketed one, or has nothing to do with it."""
        return tuple(map(self.whole, type_.shape))

    def whole(self, d: Dim) -> tuple[Dim, ...]:
        if d != self.size and self._made_from(d):
            raise NotExact(f"the size {d} is computed from it")
        return () if d == 1 else (d,)

    def of(self, node: Any) -> Layout:
        return self.layouts[node] if isinstance(node, Node) else ()

    def broadcast(self, node: Any, *layouts: Layout) -> Layout:
        rank = max(map(len, layouts))
        result: list[tuple[Dim, ...]] = [()] * rank
        for layout in layouts:
            for axis, factors in enumerate(layout, rank - len(layout)):
                known = result[axis]
                if not known:
                    result[axis] = factors
                elif factors and factors != known and (self.size in factors or self.size in known):
                    raise NotExact(f"{name_of(node)} combines dimensions that are made of different sizes")
        return tuple(result)

    def apart(self, node: Any, layout: Layout, axes: Sequence[int]) -> None:
        """Raises NotExact when one of these dimensions holds the size."""
        if any(self.size in layout[axis] for axis in axes):
            raise NotExact(f"{name_of(node)} combines positions")

    def masked(self, node: Any, operand: Node, axis: int, neutral: Any, value: Any = None) -> Node:
        """The new operand with `neutral` in place of the padding along `axis`."""
        if self.layouts[operand][axis] != (self.size,):
            raise NotExact(f"{name_of(node)} combines positions of a flattened dimension")
        value = self.new[operand] if value is None else value
        type_: TensorType = value.meta["type"]
        if self.inside is None:
            positions = self.build.call(aten.arange.default, self.bucket, device=type_.device)
            self.inside = self.build.call(aten.lt.Scalar, positions, self.size)
        inside = self.build.call(aten.view.default, self.inside, [self.bucket] + [1] * (type_.ndim - axis - 1))
        other = self.build.call(aten.full.default, [], neutral, dtype=type_.dtype, device=type_.device)
        return self.build.call(aten.where.self, inside, value, other)


def name_of(node: Any) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _base(node: Node) -> Node:
    """What a node is a view of, itself if of nothing."""
    while node.op == "call_function" and isinstance(node.target, OpOverload) and facts(node.target).is_view:
        node = node.all_input_nodes[0]
    return node


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in _flat(part)] if isinstance(value, (list, tuple)) else [value]


Handler = Callable[[Bucketing, Node], None]
