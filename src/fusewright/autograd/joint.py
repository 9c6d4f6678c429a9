"""The joint graph: forward and backward operators recorded into one graph, and its halves.

Takes what the recorder recorded when PyTorch's autograd engine was asked for the gradients of the captured outputs;
gives data for `partition`.
Always holds: forward nodes stand before backward nodes; a node is *backward* exactly when a tangent reaches it,
or an effect (random numbers, an assertion) that the backward had when it was recorded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch.fx
from torch._ops import OpOverload

from fusewright.autograd.halves import Branch
from fusewright.autograd.recompute import elements
from fusewright.base.records import dataclass
from fusewright.graph.builder import building_for
from fusewright.graph.passes.clean.dce import must_stay
from fusewright.operators.schema import ZEROS, facts
from fusewright.sizes.tensor_type import TensorType


@dataclass(slots=True)
class JointGraph:
    """Forward and backward in one FX graph.

    graph      placeholders: the forward's inputs, then one tangent for each differentiable output; the output node
               holds the forward's outputs, then the gradients (None where an input gets none)
    inputs     how many placeholders are the forward's inputs
    outputs    how many outputs are the forward's
    tangents   positions (among the forward's outputs) of the outputs that the tangents belong to
    gradients  positions (among the inputs) of the inputs that have a gradient, in the order of the gradient outputs
    """

    graph: torch.fx.Graph
    inputs: int
    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(slots=True)
class Split:
    """The halves of a joint graph.

    forward   inputs → (user outputs..., further saved values...)
    backward  (saved values..., tangents...) → gradients, in the order of JointGraph.gradients
    saved     for each saved value, in the backward's order: n >= 0, it is input n of the forward; ~n, it is result n of
        the forward
    """

    forward: torch.fx.Graph
    backward: torch.fx.Graph
    saved: tuple[int, ...]


def output_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The graph's output node."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def results_of(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """The graph's outputs: nodes, or constants."""
    return tuple(output_node(graph).args[0])  # type: ignore[arg-type]


def backward_nodes(graph: torch.fx.Graph, inputs: int) -> set[torch.fx.Node]:
    """The nodes that depend on a tangent, a placeholder after the first `inputs`, or on an effect of the backward."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    reached = set(placeholders[inputs:])
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            if any(argument in reached for argument in node.all_input_nodes) or (
                node.meta.get("backward") and must_stay(node)
            ):
                reached.add(node)
    return reached


def constant_gradients(joint: JointGraph) -> tuple[bool, ...]:
    """For each gradient, whether no tangent reaches it."""
    shaped = {*ZEROS, torch.ops.aten.full_like.default}  # they read a tangent's type alone
    reached = set([node for node in joint.graph.nodes if node.op == "placeholder"][joint.inputs :])
    for node in joint.graph.nodes:
        if (
            node.op == "call_function"
            and node.target not in shaped
            and any(argument in reached for argument in node.all_input_nodes)
        ):
            reached.add(node)
    return tuple(item not in reached for item in results_of(joint.graph)[joint.outputs :])


_KEEPS_ZERO = frozenset({
    "add", "sub", "neg", "clone", "_to_copy", "sum", "where", "masked_fill", "slice_backward", "select_backward",
    "cat", "stack", "index_put", "scatter", "scatter_add", "index_add", "gather", "index", "index_select", "flip",
    "constant_pad_nd", "threshold_backward", "embedding_dense_backward", "copy", "full_like",
    "conj_physical", "real", "imag", "complex", "diagonal_backward", "unfold_backward", "repeat", "roll",
})  # fmt: skip


_KEEPS_NAN = frozenset({
    "add", "sub", "neg", "mul", "div", "clone", "_to_copy", "alias", "detach", "sum", "mean", "mm", "bmm", "view",
    "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "cat", "stack",
    "slice_backward", "select_backward", "tanh_backward", "sigmoid_backward", "gelu_backward",
    "native_layer_norm_backward",
})  # fmt: skip
"""What is NaN somewhere in each of its results if a gradient that it reads is NaN anywhere."""


def unfinished_branches(joint: JointGraph, user_code: bool) -> tuple[Branch, ...]:
    """What is computed from some of the tangents alone, where those may be missing. `user_code`: whether the program's
    own code has a part in it: PyTorch's formulas give zeros for zeros."""
    tangents = [node for node in joint.graph.nodes if node.op == "placeholder"][joint.inputs :]
    gradients = results_of(joint.graph)[joint.outputs :]
    shown = _shown(joint.graph, gradients)
    found: dict[frozenset[int], set[int]] = {}
    reads = _read_tangents(joint.graph, tangents)
    own = {read for node, read in reads.items() if user_code and not _vanishes(node, reads)}
    for node, read in reads.items():
        if len(read) < len(tangents) and node.op == "call_function" and not _keeps_zero(node):
            parts = [user for user in node.users if user.target is operator.getitem] or [node]
            for part in parts:
                places = (shown[part],) if part in shown else _reached(part, gradients)
                found.setdefault(read, set()).update(places)
    kept = [Branch(read, tuple(sorted(places))) for read, places in found.items() if places]
    return (*kept, *(Branch(read, (), from_zeros=True) for read in own if len(read) < len(tangents)))


def _read_tangents(graph: torch.fx.Graph, tangents: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, frozenset[int]]:
    """The tangents (by place) from which each node is computed, in the graph's order; only nodes that read any."""
    reads = {node: frozenset((place,)) for place, node in enumerate(tangents)}
    for node in graph.nodes:
        read = frozenset().union(*(reads[one] for one in node.all_input_nodes if one in reads))
        if read and node.op == "call_function":
            reads[node] = read
    return reads


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy with all that is said of the nodes."""
    made, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    made.output(made.graph_copy(graph, copies)).meta = dict(output_node(graph).meta)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return made


def without_branches(backward: torch.fx.Graph, tangents: int, missing: frozenset[int]) -> torch.fx.Graph:
    """A copy of a backward graph (its last `tangents` placeholders are those) in which what is computed from the
    tangents of `missing` alone is zero, whatever it would have been multiplied by."""
    graph = copied(backward)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, read in _read_tangents(graph, placeholders[len(placeholders) - tangents :]).items():
        kind = node.meta.get("type")
        if node.op == "call_function" and read <= missing and isinstance(kind, TensorType) and not must_stay(node):
            build = building_for(graph, node)
            with graph.inserting_before(node):
                shape, options = list(kind.shape), {"dtype": kind.dtype, "device": kind.device}
                made = build.node(torch.ops.aten.empty_strided.default, (shape, list(kind.stride)), options, kind)
                node.replace_all_uses_with(build.node(torch.ops.aten.zeros_like.default, (made,), {}, kind))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not must_stay(node):
            graph.erase_node(node)
    return graph


def _shown(graph: torch.fx.Graph, gradients: Sequence[Any]) -> dict[torch.fx.Node, int]:
    """For each node whose NaNs some gradient has, the smallest of such gradients (by place)."""
    found: dict[torch.fx.Node, tuple[int, int]] = {}
    for place, node in enumerate(gradients):
        if isinstance(node, torch.fx.Node):
            size = elements(node.meta["type"])
            found[node] = min(found.get(node, (size, place)), (size, place))
    for node in reversed(graph.nodes):
        if node in found and (name_of(node) in _KEEPS_NAN or node.target is operator.getitem):
            for read in node.all_input_nodes:
                if node.target is not operator.getitem or name_of(read) in _KEEPS_NAN:
                    found[read] = min(found.get(read, found[node]), found[node])
    return {node: place for node, (_, place) in found.items()}


def _reached(node: torch.fx.Node, gradients: Sequence[Any]) -> list[int]:
    """The gradients (by place) that depend on `node`."""
    reached, waiting = {node}, [node]
    while waiting:
        new = waiting.pop().users.keys() - reached
        reached |= new
        waiting += new
    return [place for place, one in enumerate(gradients) if one in reached]


def name_of(node: torch.fx.Node) -> str:
    """Of the operator, without its overload; empty for what is none."""
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.removeprefix("aten::").rstrip("_")


def _keeps_zero(node: torch.fx.Node) -> bool:
    """Whether zeros in the place of what is read give zeros, whatever else is read."""
    if not isinstance(node.target, OpOverload):
        return True  # an element of several results
    name = name_of(node)
    if name in ("mul", "div"):  # by a finite number
        number = node.args[1]
        return isinstance(number, (int, float)) and math.isfinite(number) and (name == "mul" or number != 0)
    return name in _KEEPS_ZERO or node.target in ZEROS or facts(node.target).is_view


_ADDED = frozenset({"add", "sub", "masked_fill", "full_like", "constant_pad_nd"})
_OF_ZERO = frozenset({"mean", "expand", "cumsum", "abs", "sgn", "sign", "tanh", "sin", "relu", "matmul"})


def _vanishes(node: torch.fx.Node, reads: dict[torch.fx.Node, frozenset[int]]) -> bool:
    """Whether zeros in the place of the tangents surely give zeros, whatever finite values are read besides."""
    if not isinstance(node.target, OpOverload):
        return True
    name, numbers = name_of(node), [one for one in node.args[1:] if isinstance(one, (int, float))]
    if name in ("mul", "mm", "bmm", "mv", "dot") or name.endswith(("backward", "backward_data")):
        return True
    if name == "div":
        return node.args[0] in reads
    if name == "clamp":
        low, high = [0 if one is None else one for one in (*node.args[1:], None, None)[:2]]
        return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= 0 <= high
    if name in _ADDED and any(numbers[:1] if name in ("add", "sub") else numbers[-1:]):
        return False
    others = [one for one in node.all_input_nodes if one not in reads and one.target not in ZEROS]
    dtypes = [one.meta["type"].dtype for one in others if isinstance(one.meta["type"], TensorType)]
    added = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return not added and (name in _OF_ZERO or _keeps_zero(node))


def not_kept(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The placeholders that the backward cannot have as they are. Their memory changes: by the graph itself, at its
    end, or right after it. Or they are inference tensors, which autograd saves for no backward."""
    changed = {node.args[0] for node in graph.nodes if node.meta.get("epilogue")}
    inputs = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    marked = {node for node in inputs if node.meta.get("updated_outside") or node.meta.get("inference")}
    return marked | changed  # type: ignore[return-value]
