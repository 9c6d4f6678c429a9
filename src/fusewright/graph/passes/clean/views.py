"""The view operators as data: how a new value of a view changes the tensor that it is a view of.

Takes a view step (operator and arguments) with the base's value and the view's new value; gives the base's new value,
as pure nodes.
Always holds: an operator without a row here may be read through, but writing through it is refused
(`CannotFunctionalise`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.base.errors import CannotFunctionalise
from fusewright.base.records import dataclass, field
from fusewright.graph.builder import Builder
from fusewright.sizes.expressions import Dim, minimum
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operator applied to its first argument; `args` are the others."""

    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    def apply(self, build: Builder, base: torch.fx.Node, type_: TensorType | None = None) -> torch.fx.Node:
        """The view of `base`; `type_` when it is known already."""
        if type_ is not None:
            return build.node(self.op, (base, *self.args), self.kwargs, type_)
        return build.call(self.op, base, *self.args, **self.kwargs)

    def argument(self, index: int, name: str, default: object = None) -> object:
        """Schema argument `index` (0 is the tensor)."""
        return self.args[index - 1] if index <= len(self.args) else self.kwargs.get(name, default)


Scatter = Callable[[Builder, ViewStep, torch.fx.Node, torch.fx.Node], torch.fx.Node]


def _shape(build: Builder, node: torch.fx.Node) -> list[Dim]:
    """With what guards have told of its sizes: what was squeezed may be 1 by a guard."""
    shape = node.meta["type"].shape
    return list(shape if build.env is None else map(build.env.simplify, shape))


def _identity(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    return value


def _reshape_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    dense = build.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return build.call(aten.view.default, dense, _shape(build, base))


def _same_op(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    """Operators that are their own inverse: t, transpose, conjugation, negation."""
    return build.call(step.op, value, *step.args, **step.kwargs)


def _permute_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    rank = len(_shape(build, base))
    order = [axis % rank for axis in step.argument(1, "dims")]  # type: ignore[attr-defined]
    return build.call(aten.permute.default, value, [order.index(axis) for axis in range(rank)])


def _unsqueeze_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    rank = len(_shape(build, value))
    return build.call(aten.squeeze.dim, value, step.argument(1, "dim") % rank)  # type: ignore[operator]


def _squeeze_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    shape = _shape(build, base)
    asked = step.argument(1, "dim")
    axes = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    for axis in sorted(axis % len(shape) for axis in axes if shape):  # type: ignore[attr-defined]
        if shape[axis] == 1:
            value = build.call(aten.unsqueeze.default, value, axis)
    return value


def _expand_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    if _shape(build, base) != _shape(build, value):
        raise CannotFunctionalise("a write to an expanded tensor")
    return value


def _scatter_with(op: OpOverload) -> Scatter:
    def scatter(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
        return build.call(op, base, value, *step.args, **step.kwargs)

    return scatter


def _as_strided_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    size, stride = step.argument(1, "size"), step.argument(2, "stride")
    if any(s == 0 and n != 1 for s, n in zip(stride, _shape(build, value), strict=True)):  # type: ignore[call-overload]
        raise CannotFunctionalise("a write to an overlapping as_strided view")
    return build.call(aten.as_strided_scatter.default, base, value, size, stride, step.argument(3, "storage_offset"))


def _dtype_back(build: Builder, step: ViewStep, base: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    return build.call(aten.view.dtype, value, base.meta["type"].dtype)


SCATTERS: dict[OpOverload, Scatter] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.view.default: _reshape_back,
    aten._reshape_alias.default: _reshape_back,
    aten._unsafe_view.default: _reshape_back,
    aten.view.dtype: _dtype_back,
    aten.t.default: _same_op,
    aten.transpose.int: _same_op,
    aten._conj_physical.default: _same_op,
    aten.neg.default: _same_op,
    aten.permute.default: _permute_back,
    aten.unsqueeze.default: _unsqueeze_back,
    aten.squeeze.default: _squeeze_back,
    aten.squeeze.dim: _squeeze_back,
    aten.squeeze.dims: _squeeze_back,
    aten.expand.default: _expand_back,
    aten.select.int: _scatter_with(aten.select_scatter.default),
    aten.slice.Tensor: _scatter_with(aten.slice_scatter.default),
    aten.diagonal.default: _scatter_with(aten.diagonal_scatter.default),
    aten.as_strided.default: _as_strided_back,
    aten.view_as_real.default: lambda build, step, base, value: build.call(aten.view_as_complex.default, value),
    aten.view_as_complex.default: lambda build, step, base, value: build.call(aten.view_as_real.default, value),
}


def _split_steps(node: torch.fx.Node, index: int, size: Dim) -> ViewStep:
    type_: TensorType = node.args[0].meta["type"]  # type: ignore[union-attr]
    axis = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % type_.ndim  # type: ignore[operator]
    start = size * index
    return ViewStep(aten.slice.Tensor, (axis, start, minimum(start + size, type_.shape[axis])))  # type: ignore[index]


def _split(node: torch.fx.Node, index: int) -> ViewStep:
    return _split_steps(node, index, node.args[1])  # type: ignore[arg-type]


def _split_with_sizes(node: torch.fx.Node, index: int) -> ViewStep:
    type_: TensorType = node.args[0].meta["type"]  # type: ignore[union-attr]
    axis = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % type_.ndim  # type: ignore[operator]
    sizes: list[Dim] = list(node.args[1])  # type: ignore[arg-type]
    start: Dim = 0
    for size in sizes[:index]:
        start = start + size
    return ViewStep(aten.slice.Tensor, (axis, start, start + sizes[index]))


def _unbind(node: torch.fx.Node, index: int) -> ViewStep:
    return ViewStep(aten.select.int, (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0), index))


# Operators with several views as results: result `index` as one view step.
PARTS: dict[OpOverload, Callable[[torch.fx.Node, int], ViewStep]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
}
