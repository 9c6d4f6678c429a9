"""Adding well-typed nodes to a graph: what passes and decompositions use instead of `graph.call_function`.

Takes a graph (and the sizes' ShapeEnv, if any); gives nodes whose meta["type"] follows from the operator and its
arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.base.location import Location
from fusewright.graph.nodes import add_call, written
from fusewright.operators.derive import derive
from fusewright.operators.schema import facts
from fusewright.sizes.proofs import Given
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.strides import dense_order
from fusewright.sizes.tensor_type import TensorType, same_strides

aten = torch.ops.aten


def argument_types(value: object) -> object:
    """A node argument with each node replaced by its type."""
    if isinstance(value, torch.fx.Node):
        return value.meta["type"]
    if isinstance(value, (list, tuple)):
        return [argument_types(item) for item in value]
    return value


def env_of(graph: torch.fx.Graph) -> ShapeEnv | None:
    """The ShapeEnv of a recorded graph: the recorder leaves it on the output node, and passes keep it there."""
    last = next(iter(reversed(graph.nodes)), None)
    return last.meta.get("env") if last is not None and last.op == "output" else None


def given_of(graph: torch.fx.Graph) -> Given:
    """What is known of the graph's sizes. The halves of a joint graph have this alone: their guards may be in use
    already."""
    env = env_of(graph)
    if env is None:
        return next(iter(reversed(graph.nodes))).meta.get("given", Given())  # type: ignore[no-any-return]
    above_one = (env.simplify(size) - 2 for size in sorted(env.assumed, key=str))
    return Given((*env.not_negative(), *above_one), tuple(env.as_multiples().items()))


class Builder:
    """Adds nodes at the graph's insertion point. `location` and `marks` (meta["no_grad"]: the program ran it without
    autograd; meta["recompute"]: the backward computes it again; meta["backward"]: it has an effect, and the backward
    ran it) are given to every node until they are changed.

    `env` is needed for symbolic sizes when the graph has no output yet (see `env_of`)."""

    def __init__(self, graph: torch.fx.Graph, env: ShapeEnv | None = None) -> None:
        self.graph = graph
        self.env = env or env_of(graph)
        self.location: tuple[Location, ...] = ()
        self.marks: dict[str, object] = {}

    def call(self, op: OpOverload, *args: object, **kwargs: object) -> torch.fx.Node:
        """One operator, typed."""
        type_ = derive(
            op, [argument_types(a) for a in args], {k: argument_types(v) for k, v in kwargs.items()}, self.env
        )
        return self.node(op, args, kwargs, type_)

    def node(self, op: object, args: Sequence[object], kwargs: dict[str, object], type_: object) -> torch.fx.Node:
        """One operator whose type is known already."""
        made = add_call(self.graph, op, tuple(args), kwargs)  # type: ignore[arg-type]
        made.meta["type"] = type_
        made.meta["location"] = self.location
        made.meta.update(self.marks)
        if isinstance(op, OpOverload) and facts(op).random:
            made.meta["random"] = True
        return made

    def item(self, node: torch.fx.Node, index: int) -> torch.fx.Node:
        """Result `index` of a node with several results."""
        return self.node(operator.getitem, (node, index), {}, node.meta["type"][index])

    def write(self, op: OpOverload, args: Sequence[object], kwargs: dict[str, object], type_: object) -> torch.fx.Node:
        """One operator that writes to the private copies among its arguments; `written` gives their values after it."""
        made = self.node(op, args, kwargs, type_)
        made.meta["writes_private"] = True
        return made

    def written(self, copy: torch.fx.Node, by: torch.fx.Node) -> torch.fx.Node:
        """The private `copy` after the operator `by`."""
        made = self.node(written, (copy, by), {}, copy.meta["type"])
        made.meta["private"] = True
        return made

    def restride(self, node: torch.fx.Node, like: TensorType) -> torch.fx.Node:
        """A copy of `node` laid out with the strides of `like` (same shape, dense and non-overlapping), if it is not
        already."""
        type_: TensorType = node.meta["type"]
        if same_strides(type_, like):
            return node
        order = dense_order(like.shape, like.stride)
        if is_surely_dense(type_) and dense_order(type_.shape, type_.stride) == order:
            return node  # a guard has made a number of a product of sizes
        return self.densely(node, order)

    def densely(self, node: torch.fx.Node, order: Sequence[int]) -> torch.fx.Node:
        """A copy of `node` without gaps, its dimensions in `order`, the innermost first."""
        outer = list(reversed(order))
        back = [outer.index(axis) for axis in range(len(outer))]
        moved = self.call(aten.permute.default, node, outer)
        dense = self.call(aten.clone.default, moved, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, dense, back)


MARKS = ("no_grad", "recompute", "backward")
"""What a node's meta says of autograd, which holds for what stands in its place, too."""


def building_for(graph: torch.fx.Graph, node: torch.fx.Node, env: ShapeEnv | None = None) -> Builder:
    """A builder of what `node` becomes: with its place in the user's program and its marks."""
    build = Builder(graph, env)
    build.location = node.meta.get("location", ())
    build.marks = marks_of(node)
    return build


def marks_of(node: torch.fx.Node) -> dict[str, object]:
    """Those of MARKS that the node has."""
    return {mark: node.meta[mark] for mark in MARKS if node.meta.get(mark)}


def is_surely_dense(type_: TensorType, env: ShapeEnv | None = None) -> bool:
    """Whether sizes show that every element has its own place and there are no gaps (PyTorch's non-overlapping and
    dense). Asks no guard. env: knows of which products of sizes a guard has made numbers."""
    expected: Any = 1
    for axis in dense_order(type_.shape, type_.stride):
        if type_.shape[axis] == 1:
            continue
        step = type_.stride[axis]
        if step != expected and (env is None or env.simplify(step) != env.simplify(expected)):
            return False
        expected = expected * type_.shape[axis]
    return True


@contextmanager
def replacing(graph: torch.fx.Graph, node: torch.fx.Node) -> Iterator[Builder]:
    """A builder of what stands for `node`, in front of it and with its place in the user's program. Inside, all uses of
    the node must go to something else: it is erased at the end."""
    build = Builder(graph)
    build.location = node.meta.get("location", ())
    with graph.inserting_before(node):
        yield build
    graph.erase_node(node)
