"""Which operators cannot be recorded as they come, and which graph break each of them is."""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

from fusewright.operators.schema import argument
from fusewright.record.special_operators import SCALAR_READ

aten = torch.ops.aten

# Operators whose result would need the data. The rest of them carry a tag (data_dependent_output,
# dynamic_output_shape).
BREAKS: dict[OpOverload, tuple[str, str]] = {
    aten._local_scalar_dense.default: SCALAR_READ,
    aten.item.default: SCALAR_READ,
    aten.is_nonzero.default: ("data-dependent-scalar", "a Python bool is read from a tensor"),
    aten.set_.source_Tensor: ("inplace-metadata", "set_"),
    aten.set_.source_Storage_storage_offset: ("inplace-metadata", "set_"),
    aten.resize_as_.default: ("inplace-metadata", "resize_as_"),
}

# Operators whose gradient PyTorch computes by other formulas where a tensor subclass has a part: its layout is not
# eager's.
OTHER_GRADIENT: frozenset[OpOverload] = frozenset({aten.ormqr.default})


@functools.cache
def _sparse_flags(func: OpOverload) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.name in ("sparse", "sparse_grad"))


def has_sparse_gradient(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the operator's gradient, if one is asked for, is a sparse tensor: no type of the graph's says so."""
    flags = _sparse_flags(func)
    if not any(argument(func, args, kwargs, index) is True for index in flags):
        return False
    return any(
        isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()
        for value in (*args, *kwargs.values())
    )


@functools.cache
def refusal(func: OpOverload) -> tuple[str, str] | None:
    """The graph break that this operator may need: (code, detail)."""
    tags = func.tags
    found = BREAKS.get(func)
    if found is None and torch.Tag.data_dependent_output in tags:
        found = ("data-dependent-scalar", f"{func} gives a Python value")
    if found is None and torch.Tag.dynamic_output_shape in tags:
        found = ("data-dependent-shape", f"{func} gives a shape that depends on data")
    if found is None and torch.Tag.inplace_view in tags:
        found = ("inplace-metadata", str(func))
    return found
