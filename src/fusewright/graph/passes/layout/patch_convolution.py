"""Convolutions over patches that do not overlap (a kernel as large as its stride) and their gradients become matrix
products.

Takes and gives a functional graph on a CPU. Such a layer (the first of a vision transformer) multiplies each patch by
one matrix. In training the library's gradient of its weight, made for small kernels that overlap, takes many times as
long as the product; in inference the convolution itself takes 2 to 4 times as long in bfloat16.
Always holds: results have the types that they had; the sums are those of the convolution, in another order.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder, replacing
from fusewright.graph.passes.context import PassContext
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node


def patch_convolution(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for target, first, rewrite in (
        (aten.convolution.default, 0, _forward),
        (aten.convolution_backward.default, 1, _backward),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            if _by_patches(node, first) and context.allow(f"patches: {node.name}"):
                with replacing(graph, node) as build:
                    rewrite(build, node)
    return graph


def patches_in_inference(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    """The same for a graph without gradients; those of training are rewritten when forward and backward are."""
    if graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        return graph
    return patch_convolution(graph, context)


def _by_patches(node: Node, first: int) -> bool:
    """Whether the convolution of the arguments from `first` on (input, weight, _, stride, padding, ...) is one of
    patches."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = node.args[first : first + 9]
    kinds: list[TensorType] = [one.meta["type"] for one in (x, weight)]  # type: ignore[union-attr]
    if transposed or groups != 1 or kinds[0].ndim != 4 or kinds[0].device.type != "cpu":
        return False
    if set(padding) != {0} or set(dilation) != {1}:  # type: ignore[arg-type]
        return False
    if (
        not all(isinstance(size, int) and size > 0 for kind in kinds for size in kind.shape)
        or kinds[0].dtype is not kinds[1].dtype
    ):
        return False
    steps, kernel, image = _pair(stride), kinds[1].shape[2:], kinds[0].shape[2:]
    whole = all(size % step == 0 for size, step in zip(image, steps))  # type: ignore[operator]
    return kinds[0].dtype in (torch.float32, torch.bfloat16) and steps == tuple(kernel) and steps != (1, 1) and whole


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) * 2 if len(value) == 1 else tuple(value)  # type: ignore[return-value]


def _split(kind: TensorType, kernel: Any) -> list[int]:
    """The input's shape with each image dimension as (patches, elements of one)."""
    batch, channels, height, width = kind.shape
    return [batch, channels, height // kernel[0], kernel[0], width // kernel[1], kernel[1]]  # type: ignore


def _patches(build: Builder, x: Any, kernel: Any) -> Node:
    """One patch a row: its elements in the order of the weight's."""
    batch, channels, rows, high, columns, wide = _split(x.meta["type"], kernel)
    parts = build.call(aten.reshape.default, x, [batch, channels, rows, high, columns, wide])
    turned = build.call(aten.permute.default, parts, [0, 2, 4, 1, 3, 5])
    return build.call(aten.reshape.default, turned, [batch * rows * columns, channels * high * wide])


def _matrix(build: Builder, weight: Any) -> Node:
    return build.call(aten.reshape.default, weight, [weight.meta["type"].shape[0], -1])


def _forward(build: Builder, node: Node) -> None:
    x, weight, bias = node.args[:3]
    kind: TensorType = node.meta["type"]
    batch, channels, rows, columns = kind.shape
    patches = _patches(build, x, weight.meta["type"].shape[2:])  # type: ignore[union-attr]
    turned = build.call(aten.t.default, _matrix(build, weight))
    flat = (
        build.call(aten.mm.default, patches, turned)
        if bias is None
        else build.call(aten.addmm.default, bias, patches, turned)
    )
    image = build.call(aten.view.default, flat, [batch, rows, columns, channels])
    node.replace_all_uses_with(build.restride(build.call(aten.permute.default, image, [0, 3, 1, 2]), kind))


def _backward(build: Builder, node: Node) -> None:
    gradient, x, weight = node.args[:3]
    build.marks = {"recompute": True}  # the patches depend on no tangent: without this the forward would save them
    wanted: Any = node.args[10]
    shape = weight.meta["type"].shape  # type: ignore[union-attr]
    turned = build.call(aten.permute.default, gradient, [0, 2, 3, 1])
    flat = build.call(aten.reshape.default, turned, [-1, shape[0]])
    found: list[Node | None] = [None, None, None]
    if wanted[0]:
        batch, channels, rows, high, columns, wide = _split(x.meta["type"], shape[2:])  # type: ignore[union-attr]
        product = build.call(aten.mm.default, flat, _matrix(build, weight))
        parts = build.call(aten.view.default, product, [batch, rows, columns, channels, high, wide])
        order = build.call(aten.permute.default, parts, [0, 3, 1, 4, 2, 5])
        found[0] = build.call(aten.reshape.default, order, [batch, channels, rows * high, columns * wide])
    if wanted[1]:
        product = build.call(aten.mm.default, build.call(aten.t.default, flat), _patches(build, x, shape[2:]))
        found[1] = build.call(aten.view.default, product, list(shape))
    if wanted[2]:
        found[2] = build.call(aten.sum.dim_IntList, flat, [0])
    for reader in list(node.users):
        assert reader.target is operator.getitem
        value = found[reader.args[1]]  # type: ignore[index]
        if value is not None:
            reader.replace_all_uses_with(build.restride(value, reader.meta["type"]))
        build.graph.erase_node(reader)
