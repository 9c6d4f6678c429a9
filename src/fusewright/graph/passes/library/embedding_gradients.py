"""Gradients of embeddings are added, row by row, to what the same weight has got elsewhere.

Takes and gives a functional backward graph. `embedding_dense_backward` fills a matrix as large as the vocabulary for
the few rows that were read, and a weight that is tied (an output layer, a second embedding) adds it to another such
matrix. Here the rows go into that matrix, or into zeros, in place. On a GPU halves are summed as float32: in as many
rows as were read, not in a matrix as large as the vocabulary that is rounded afterwards.
Always holds: the matrix that is written to is made by this graph and read by nothing before; sums are taken in the
order of the rows on a CPU.
"""

from __future__ import annotations

import math
import operator

from fusewright.base.pytorch import torch
from fusewright.graph.builder import Builder
from fusewright.graph.passes.clean.escape import shares_memory
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

aten = torch.ops.aten
Node = torch.fx.Node
DEVICES = ("cuda",)
MOST_READ = 16384
"""Rows that are read: the first of equal ones is found by comparing each with each."""
LEAST_LARGER = 4
"""Times as many rows as are read that a vocabulary must have."""


def embedding_gradients(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    build = Builder(graph)
    for node in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        if _is_sparse(node) and context.allow(f"rows of an embedding's gradient: {node.name}"):
            build.location = node.meta.get("location", ())
            with graph.inserting_before(node):
                node.replace_all_uses_with(_summed_rows(build, node))
            graph.erase_node(node)
            continue
        if not _is_plain(node) or not context.allow(f"embedding gradient: {node.name}"):
            continue
        build.location = node.meta.get("location", ())
        total = next(iter(node.users)) if len(node.users) == 1 else None
        other = None if total is None else _other_term(total, node)
        place = node if other is None or total is None else total
        with graph.inserting_before(place):
            if other is None:
                kind: TensorType = node.meta["type"]
                other = build.call(aten.full.default, list(kind.shape), 0.0, dtype=kind.dtype, device=kind.device)
            other.meta["private"] = True
            place.replace_all_uses_with(_add_rows(build, other, node))
        graph.erase_node(place)
        if place is not node:
            graph.erase_node(node)
    return graph


def _is_sparse(node: Node) -> bool:
    """Of halves on a GPU, and few for the vocabulary."""
    _, index, vocabulary, _, by_frequency = node.args
    kind, of_index = node.meta["type"], index.meta["type"]  # type: ignore[union-attr]
    if by_frequency or kind.device.type not in DEVICES or kind.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.are_deterministic_algorithms_enabled() or of_index.ndim == 0:
        return False  # atomics add the rows
    if not all(isinstance(size, int) for size in (*of_index.shape, *kind.shape)):
        return False
    read = math.prod(of_index.shape)
    return 0 < read <= MOST_READ and vocabulary >= LEAST_LARGER * read  # type: ignore[operator]


def _summed_rows(build: Builder, node: Node) -> Node:
    """The gradient: each row that was read is summed where it was read first, and goes from there to its place."""
    gradient, index, _, padding, _ = node.args
    kind: TensorType = node.meta["type"]
    rows = build.call(aten.reshape.default, gradient, [-1, kind.shape[-1]])
    positions = build.call(aten.reshape.default, index, [-1])
    down, across = (build.call(aten.unsqueeze.default, positions, dim) for dim in (1, 0))
    equal = build.call(aten.eq.Tensor, down, across)
    first = build.call(aten.argmax.default, build.call(aten._to_copy.default, equal, dtype=torch.int32), 1)
    wide = build.call(aten._to_copy.default, rows, dtype=torch.float32)
    sums = build.call(aten.index_add.default, build.call(aten.full_like.default, wide, 0.0), 0, first, wide)
    made = build.call(aten._to_copy.default, build.call(aten.index_select.default, sums, 0, first), dtype=kind.dtype)
    if padding >= 0:  # type: ignore[operator]
        skipped = build.call(aten.unsqueeze.default, build.call(aten.eq.Scalar, positions, padding), -1)
        made = build.call(aten.masked_fill.Scalar, made, skipped, 0)
    options = {"dtype": kind.dtype, "device": kind.device}
    matrix = build.node(aten.full.default, (list(kind.shape), 0.0), options, kind)
    return build.call(aten.index_put.default, matrix, [positions], made)


def _is_plain(node: Node) -> bool:
    gradient, index, _, _, by_frequency = node.args
    kinds = [one.meta["type"] for one in (gradient, index, node)]  # type: ignore[union-attr]
    static = all(isinstance(size, int) and size > 0 for kind in kinds for size in kind.shape)
    return (
        not by_frequency
        and static
        and kinds[2].device.type == "cpu"
        and kinds[2].dtype in (torch.float32, torch.float64)
    )


def _other_term(total: Node, gradient: Node) -> Node | None:
    """What `total` adds to the gradient, if that is a matrix of the graph's own making that nothing else reads."""
    if total.target is not aten.add.Tensor or total.kwargs.get("alpha", 1) != 1 or len(total.args) != 2:
        return None
    left, right = total.args
    other = right if left is gradient else left
    if not isinstance(other, Node) or other.op != "call_function" or other is gradient or shares_memory(other):
        return None
    kinds: list[TensorType] = [one.meta["type"] for one in (other, gradient, total)]
    same = all(
        isinstance(kind, TensorType) and (kind.shape, kind.dtype) == (kinds[2].shape, kinds[2].dtype) for kind in kinds
    )
    if not same or kinds[0].stride != contiguous_strides(kinds[0].shape) or other.target is operator.getitem:
        return None
    return other if len(other.users) == 1 else None


def _add_rows(build: Builder, into: Node, node: Node) -> Node:
    """`into` with the rows of the gradient `node` added."""
    gradient, index, _, padding, _ = node.args
    kind: TensorType = gradient.meta["type"]  # type: ignore[union-attr]
    if padding >= 0:  # type: ignore[operator]
        skipped = build.call(aten.unsqueeze.default, build.call(aten.eq.Scalar, index, padding), -1)
        gradient = build.call(aten.masked_fill.Scalar, gradient, skipped, 0)
    rows = build.call(aten.reshape.default, gradient, [-1, kind.shape[-1]])
    positions = build.call(aten.reshape.default, index, [-1])
    made = build.write(aten.index_add_.default, (into, 0, positions, rows), {}, into.meta["type"])
    return build.written(into, made)
