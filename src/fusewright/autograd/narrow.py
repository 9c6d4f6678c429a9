"""In which smaller type a value may be saved between forward and backward without losing anything.

Takes a node of a joint graph; gives the type, or None where it is saved as it is. Always holds: converting there and
back gives the value.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from fusewright.sizes.expressions import Dim, bounds, product
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node
aten = torch.ops.aten

_DRAWS = frozenset({aten.bernoulli.p, aten.bernoulli.default})

_POSITIONS_IN_WINDOWS = {
    aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}  # fmt: skip
"""Operators whose second result counts through so many trailing dimensions of the input."""

_POSITIONS_ALONG = frozenset({
    aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default,
    aten.median.dim,
    aten.mode.default,
})  # fmt: skip
"""Operators whose second result counts along one dimension of the input."""


def narrow_type(node: Node) -> torch.dtype | None:
    """bool for what is 0 or 1 (a dropout's mask), the smallest signed integers for positions."""
    kind = node.meta.get("type")
    if not isinstance(kind, TensorType):
        return None
    if node.target in _DRAWS and kind.dtype.is_floating_point:
        return torch.bool
    return _integers_up_to(_positions(node)) if kind.dtype is torch.int64 else None


def _positions(node: Node) -> Dim | None:
    """How many positions the value may name."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    source = node.args[0]
    of = source.args[0].meta.get("type") if isinstance(source, Node) and isinstance(source.args[0], Node) else None
    if not isinstance(of, TensorType) or not isinstance(source, Node):
        return None
    if source.target in _POSITIONS_IN_WINDOWS:
        return product(of.shape[of.ndim - _POSITIONS_IN_WINDOWS[source.target] :])
    if source.target in _POSITIONS_ALONG:
        return max((bounds(size)[1] or 0 for size in of.shape), default=1) if _all_bounded(of) else None
    return None


def _all_bounded(of: TensorType) -> bool:
    return all(bounds(size)[1] is not None for size in of.shape)


def _integers_up_to(count: Dim | None) -> torch.dtype | None:
    most = None if count is None else bounds(count)[1]
    if most is None or most > 1 << 31:
        return None
    return torch.int8 if most <= 1 << 7 else torch.int16 if most <= 1 << 15 else torch.int32
