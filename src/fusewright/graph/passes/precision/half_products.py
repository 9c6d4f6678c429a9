"""Products of halves run in float32 where the processor has no instructions that multiply them.

Takes and gives a functional graph, of inference or joint. Such a processor's library widens each element on the way,
again and again: on two cores with AVX-512 alone 512x768x768 took 11.8 ms in bfloat16, 32 in float16 and 2.4 in float32,
a convolution by 3x3 8.2, 24.9 and 2.0. Widened beforehand, parameters once for all calls, an operand is as exact as it
was; sums are made in float32, as the library makes them, and the result is rounded once, as there. Always holds:
results have the types that they had.
"""

from __future__ import annotations

import math
import operator
import platform
from collections.abc import Callable, Set
from functools import cache
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.thresholds import CONVERSION, HALVES
from fusewright.graph.builder import Builder, building_for, env_of
from fusewright.graph.passes.context import PassContext
from fusewright.graph.passes.library.linear_paths import Linear
from fusewright.graph.passes.parameters.freeze import may_be_kept
from fusewright.graph.passes.parameters.stable import stable_nodes
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim
from fusewright.sizes.shape_env import ShapeEnv, examples_of
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node

_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Where the left factor is among the arguments."""
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of that type, or may have: other families than x86 are not
    asked."""
    if platform.machine() not in ("x86_64", "AMD64", "i686", "x86"):
        return True
    if dtype is torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def may_widen(graph: torch.fx.Graph) -> bool:
    """Whether products of the graph may be widened on this processor."""
    return any(
        _half(node)
        for target in (*_PRODUCTS, *_CONVOLUTIONS)
        for node in graph.find_nodes(op="call_function", target=target)
    )


def half_products(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    """See the head of this file."""
    costs = _Costs(env_of(graph), stable_nodes(graph) if context.keeps_parameters else set(), context.takes_generated)
    for target in (*_PRODUCTS, *_CONVOLUTIONS):
        for node in graph.find_nodes(op="call_function", target=target):
            if _half(node) and costs.gains(node) and context.allow(f"in float32: {node.name}"):
                _rewrite(graph, node)
    return graph


def _kind(value: object) -> Any:
    return value.meta.get("type") if isinstance(value, Node) else None


def _half(node: Node) -> bool:
    """Whether all tensors that the product reads and gives are halves of one type on a CPU that cannot multiply
    them."""
    kinds = [kind for kind in map(_kind, node.all_input_nodes) if isinstance(kind, TensorType)] + _results(node)
    dtype = kinds[0].dtype
    if dtype not in HALVES or any(kind.dtype is not dtype or kind.device.type != "cpu" for kind in kinds):
        return False
    return not multiplies(dtype)


def _results(node: Node) -> list[TensorType]:
    made = node.meta["type"]
    return [kind for kind in (made if isinstance(made, tuple) else (made,)) if kind is not None]


class _Costs:
    """What conversions take, and what the products gain by them, in seconds. `stable`: nodes that are computed
    beforehand."""

    def __init__(self, env: ShapeEnv | None, stable: Set[Node], takes_generated: Callable[[Linear], bool]) -> None:
        self.env = env
        self.stable = stable
        self.takes_generated = takes_generated

    def gains(self, node: Node) -> bool:
        if self.is_own(node):
            return False
        factors, work = self.factors(node)
        moved = sum(map(self.count, _results(node)))
        moved += sum(self.count(_kind(one)) for one in factors if not (one in self.stable and may_be_kept(one)))
        return work * HALVES[_kind(factors[0]).dtype] > moved * CONVERSION

    def is_own(self, node: Node) -> bool:
        """Whether a kernel of ours is to multiply the halves as they are: it wants each output's weights side by
        side."""
        if node.target not in (aten.mm.default, aten.addmm.default):
            return False
        arguments: Any = node.args
        left, right = arguments[_PRODUCTS[node.target] :][:2]
        (rows, inner), columns = _kind(left).shape, _kind(right).shape[1]
        if not all(isinstance(size, int) for size in (rows, inner, columns)):
            return False
        by_rows = _kind(right).stride == (1, inner)
        linear = Linear(_kind(left).dtype, rows, inner, columns, node.target is aten.addmm.default, by_rows)
        return (by_rows or right in self.stable) and _kind(left).stride[1] == 1 and self.takes_generated(linear)

    def factors(self, node: Node) -> tuple[list[Node], float]:
        """The factors, and how many multiplications there are."""
        arguments: Any = node.args
        if node.target is aten.convolution.default:
            x, weight = arguments[:2]
            return [x, weight], self.window_products(x, weight, node, arguments[6])
        if node.target is aten.convolution_backward.default:
            gradient, x, weight = arguments[:3]
            return [gradient, x, weight], self.window_products(x, weight, gradient, arguments[7]) * sum(
                map(bool, arguments[10][:2])
            )
        left, right = arguments[_PRODUCTS[node.target] :][:2]
        rows, columns = self.size(_kind(left).shape[-2]), self.size(_kind(right).shape[-1])
        # With one row, reading the other factor is what takes time: halves are read in half of it.
        return [left, right], self.count(_kind(left)) * columns if min(rows, columns) > 1 else 0.0

    def window_products(self, x: Node, weight: Node, result: Node, transposed: bool) -> float:
        return self.count(_kind(x if transposed else result)) * math.prod(map(self.size, _kind(weight).shape[1:]))

    def count(self, kind: TensorType) -> float:
        return math.prod(map(self.size, kind.shape))

    def size(self, size: Dim) -> int:
        return estimate(size, examples_of(self.env))


def _rewrite(graph: torch.fx.Graph, node: Node) -> None:
    build = building_for(graph, node)
    target: Any = node.target
    with graph.inserting_before(node):
        operands = [_wide(build, one) for one in node.args]
        made = build.call(target, *operands, **node.kwargs)
        if isinstance(node.meta["type"], tuple):
            for reader in list(node.users):
                assert reader.target is operator.getitem
                position: Any = reader.args[1]
                kind = node.meta["type"][position]
                reader.replace_all_uses_with(_narrow(build, build.item(made, position), kind))
                graph.erase_node(reader)
        else:
            node.replace_all_uses_with(_narrow(build, made, node.meta["type"]))
    graph.erase_node(node)


def _wide(build: Builder, value: object) -> object:
    if isinstance(_kind(value), TensorType):
        return build.call(aten._to_copy.default, value, dtype=torch.float32)
    return value


def _narrow(build: Builder, value: Node, kind: TensorType) -> Node:
    return build.restride(build.call(aten._to_copy.default, value, dtype=kind.dtype), kind)
