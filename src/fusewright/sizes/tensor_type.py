"""The type of a value in a graph: what every stage after capture knows about a tensor without having it.

Always holds: shape and stride have the same length, and both are counted in elements (never bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright.base.records import dataclass, replace
from fusewright.sizes.expressions import Dim, Expr, free_symbols


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, strides (in elements), element type and device of a tensor, with symbolic sizes allowed.

    `offset` is the storage offset in elements; it matters only for views.
    """

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    offset: Dim = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> Dim:
        """Number of elements, symbolic if any size is."""
        total: Dim = 1
        for size in self.shape:
            total = total * size
        return total

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in self.shape) or "scalar"
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{sizes}]"


def symbols_in(value: object) -> set[Expr]:
    """The symbolic sizes that a type, or an argument of an operator, is made of."""
    if isinstance(value, TensorType):
        return {
            symbol
            for size in (*value.shape, *value.stride, value.offset)
            if type(size) is not int
            for symbol in free_symbols(size)
        }
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in symbols_in(item)}
    if isinstance(value, dict):
        return {symbol for item in value.values() for symbol in symbols_in(item)}
    return set(free_symbols(value)) if isinstance(value, Expr) else set()


def with_sizes(value: object, becomes: Callable[[Expr], Dim]) -> object:
    """A type, or an argument of an operator, with each symbolic size replaced by what it becomes."""
    if isinstance(value, TensorType):
        dims = (*value.shape, *value.stride, value.offset)
        made = [dim if type(dim) is int else becomes(dim) for dim in dims]  # type: ignore[arg-type]
        if all(a is b for a, b in zip(made, dims, strict=True)):
            return value
        rank = len(value.shape)
        return replace(value, shape=tuple(made[:rank]), stride=tuple(made[rank:-1]), offset=made[-1])
    if isinstance(value, (list, tuple)):
        return type(value)([with_sizes(item, becomes) for item in value])
    if isinstance(value, dict):
        return {name: with_sizes(item, becomes) for name, item in value.items()}
    return becomes(value) if isinstance(value, Expr) else value


def same_strides(a: TensorType, b: TensorType) -> bool:
    """Whether two types of one shape address memory alike; the stride of a dimension of size 1 does not matter."""
    return all(x == y or size == 1 for x, y, size in zip(a.stride, b.stride, a.shape, strict=True)) or 0 in a.shape


def alike(expected: object, found: object, strides: bool = True) -> bool:
    """Whether two types, or what stands in their places, are of the same values. `strides`: laid out alike as well; the
    stride of a dimension of size 1 does not matter."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(expected) != len(found):
            return False
        return all(alike(one, other, strides) for one, other in zip(expected, found, strict=True))
    if not isinstance(expected, TensorType) or not isinstance(found, TensorType):
        return type(expected) is type(found) and expected == found
    if (expected.shape, expected.dtype, expected.device) != (found.shape, found.dtype, found.device):
        return False
    if not strides or 0 in expected.shape:
        return True
    return expected.offset == found.offset and same_strides(expected, found)


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides of `shape`, in elements; a dimension of size 0 or 1 counts as PyTorch counts it (as 1)."""
    strides: list[Dim] = []
    running: Dim = 1
    for size in reversed(shape):
        strides.append(running)
        running = running * (1 if isinstance(size, int) and size == 0 else size)
    return tuple(reversed(strides))


def held_number(value: torch.Tensor) -> Any:
    """The number that a real tensor of one element holds, also while traced tensors are recorded."""
    with torch.utils._python_dispatch._disable_current_modes():
        return value.item()
