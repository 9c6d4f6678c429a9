"""What lowering asks of a graph's nodes and of the values that they became.

Takes nodes, and trees of arguments; gives the node whose memory is meant, the tensors in a tree, lines of the program.
Always holds: nothing is changed, and nothing here knows how an operator is lowered.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from fusewright.base.location import Location, attributed
from fusewright.graph.nodes import written
from fusewright.loops.ir import Load, Operation
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.registry import Refuses
from fusewright.loops.lower.values import Value, axis_symbols, is_empty
from fusewright.operators.schema import facts, list_of_views
from fusewright.sizes.expressions import Expr, free_symbols
from fusewright.sizes.tensor_type import TensorType

CHEAP_WORK = 4
"""An expression with at most one load and this much work is recomputed by each of its readers."""


MAX_LOCATIONS = 8


def memory_of(node: Node) -> Node:
    """The node whose memory the node's is: itself, or what it is a view of."""
    while node.op == "call_function":
        if node.target is written:
            node = node.args[0]  # type: ignore[assignment]
            continue
        source = node.args[0] if node.target is operator.getitem else node
        target = source.target  # type: ignore[union-attr]
        if (
            not isinstance(target, torch._ops.OpOverload)
            or not source.args  # type: ignore[union-attr]
            or source.meta.get("lazy_view")  # type: ignore[union-attr]
        ):
            break
        place = (
            list_of_views(target)
            if source is not node
            else next((a[1] for a in facts(target).returned if a and a[0] == "view"), None)
        )
        if place != 0:
            break
        node = source.args[0]  # type: ignore[union-attr, assignment]
    return node


# Operators that PyTorch refuses, or computes by other means, for integers and bool.
_FOR_FLOATS = frozenset({
    "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "_softmax", "_safe_softmax", "softmax",
    "_log_softmax",
    "log_softmax", "logsumexp", "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm",
    "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "upsample_linear1d", "upsample_bilinear2d",
})  # fmt: skip


def for_floats(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call is left to the operator itself because its first argument holds no floats: it says what is
    wrong."""
    first = next(iter(tensors_in(args[:1])), None)
    if first is None or first.dtype.is_floating_point or not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.name.partition("::")[2] in _FOR_FLOATS


def is_refused(refuses: Refuses | None, tree: Any, made: list[Operation], node: str) -> bool:
    """Whether code generation has no code for what a row made of the node of that name (of none: of a view): the
    tensors in `tree`, and operations before them."""
    values = [value for value in tensors_in(tree) if not is_empty(value.shape)]
    if refuses is None or not values:
        return False
    return refuses(values[0].type.device, [*made, *(value.expression for value in values)], node)


def is_input_update(node: Node) -> bool:
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], Node)
        and node.args[0].op in ("placeholder", "get_attr")
    )


def is_cheap(price: ex.Cost) -> bool:
    return price.loads <= 1 and price.work <= CHEAP_WORK


def is_shifted(node: Node, value: Value) -> bool:
    """Whether a GPU recomputes the value for each reader: where one reads a part of it (halves that are rotated), no
    row of it stays in registers. It must cost one load an element, beside what is the same for a row or a column."""
    parts = [user for user in node.users if user.target is torch.ops.aten.slice.Tensor]
    if not parts or value.type.device.type != "cuda" or len(node.users) > MOST_READERS:
        return False
    axes = {one for one in axis_symbols(value.shape) if isinstance(one, Expr)}
    loads = [one for one in ex.walk(value.expression) if isinstance(one, Load)]
    whole = [one for one in loads if axes.issubset(free_symbols(one.index))]
    gathers = any(one.bindings for one in loads)
    return not gathers and len(whole) <= 1 and len(loads) <= MOST_LOADS and ex.cost(value.expression).work <= MOST_WORK


MOST_READERS, MOST_LOADS, MOST_WORK = 4, 4, 40
"""Of `is_shifted`."""


def flatten(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in flatten(item)]
    return [tree]


def tensors_in(tree: Any) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [value for item in tree for value in tensors_in(item)]
    if isinstance(tree, dict):
        return tensors_in(tuple(tree.values()))
    return []


def types_in(kind: Any) -> list[TensorType]:
    """The types of the tensors among an operator's results."""
    return [t for t in (kind if isinstance(kind, (tuple, list)) else (kind,)) if isinstance(t, TensorType)]


def locations_of(node: Node) -> tuple[Location, ...]:
    """To what the operator is put down; `node.meta["location"]` is one location or a stack, outermost first."""
    found = node.meta.get("location")
    if not found:
        return ()
    line = attributed((found,) if isinstance(found, Location) else found)
    return () if line is None else (line,)


def merge_locations(*groups: Iterable[Location]) -> tuple[Location, ...]:
    merged = dict.fromkeys(location for group in groups for location in group)
    return tuple(merged)[-MAX_LOCATIONS:]


def lazy_locations(tree: Any) -> tuple[Location, ...]:
    return merge_locations(*(value.locations for value in tensors_in(tree)))
