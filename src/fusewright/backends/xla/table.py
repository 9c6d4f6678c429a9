"""The table: how each ATen operator is computed by jax.

Takes the operator's arguments as jax arrays and Python values; gives arrays. Always holds: a row's result has eager's
value for every argument that the row takes. It raises `NoRow` for arguments that it does not take, and hands to
`Values.check` what eager would raise an error for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fusewright.base.errors import FusewrightError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field

Array = Any

DTYPES = {
    getattr(torch, name): jnp.dtype(getattr(jnp, "bool_" if name == "bool" else name))
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


class NoRow(FusewrightError):
    """XLA does not compute this operator, or not with these arguments."""


class FailedRow(NoRow):
    """A row raised an error that it did not expect: a defect of the row."""


@dataclass(slots=True)
class Values:
    """What rows know beside their arguments.

    kind    the type, or types, of the result
    wrote   position of an argument that the operator writes to → its new value
    bad     conditions under which eager raises an error
    axes    of the mesh, where the graph runs on one
    """

    kind: Any = None
    wrote: dict[int, Array] = field(default_factory=dict)
    bad: list[Array] = field(default_factory=list)
    axes: tuple[str, ...] = ()

    @property
    def dtype(self) -> Any:
        """The result's dtype; float32 where the row computes in it."""
        return jnp.promote_types(dtype, jnp.float32) if is_half(dtype := DTYPES[self.kind.dtype]) else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.kind.shape)

    def check(self, wrong: Array) -> None:
        self.bad.append(jnp.any(wrong))


@dataclass(frozen=True, slots=True)
class Row:
    """compute(values, *args, **kwargs); `widens`: halves are computed in float32, as eager does."""

    compute: Callable[..., Any]
    widens: bool


ROWS: dict[str, Row] = {}


def row(*names: str, widens: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function computes these operators, named as `add.Tensor`."""

    def add(compute: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.update({name: Row(compute, widens) for name in names})
        return compute

    return add


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A row of a function that needs nothing but the arguments."""
    return lambda values, *args, **kwargs: function(*args, **kwargs)


def is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def common(*operands: Any) -> list[Array]:
    """The operands in the dtype that PyTorch computes them in."""
    kinds = [
        torch.empty((1,) * value.ndim, dtype=TORCH_DTYPES[value.dtype], device="cpu")
        if isinstance(value, jax.Array)
        else value
        for value in operands
    ]
    found = torch.result_type(kinds[0], kinds[1])
    for kind in kinds[2:]:
        found = torch.promote_types(found, torch.result_type(torch.empty(1, dtype=found, device="cpu"), kind))
    return [jnp.asarray(value).astype(DTYPES[found]) for value in operands]  # numbers wrap, as PyTorch's do


def is_half(dtype: Any) -> bool:
    return dtype in (jnp.bfloat16, jnp.float16)


def axis(x: Array, dim: int) -> int:
    """Where `dim` is, counted from the front. Of a scalar PyTorch takes 0 and -1 too: rows make such an axis of it."""
    return dim % max(x.ndim, 1)


def dims_of(x: Array, dims: Any) -> tuple[int, ...]:
    """The axes of a reduction: all for None and for none."""
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(range(x.ndim)) if not dims else tuple(dim % x.ndim for dim in dims if x.ndim)


def with_axis(*arrays: Array) -> list[Array]:
    """Scalars as arrays of one element."""
    return [value.reshape(1) if value.ndim == 0 else value for value in arrays]


def floating(x: Array) -> Array:
    return x if is_float(x) else x.astype(jnp.float32)
