"""torch.nn.functional.interpolate over symbolic sizes, as one operator.

Takes the call's arguments; gives the recorded result. PyTorch's C++ for it needs numbers for sizes, and its Python
version for symbolic ones writes an interpolation as thirty operators. Always holds: what this file does not know,
arguments that are wrong included, runs natively.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak
from fusewright.operators.decompositions.eager_kernels import refuse_dtypes
from fusewright.sizes.expressions import floor_div
from fusewright.sizes.interfaces import Recorder
from fusewright.sizes.symint import dim_of, size_of

aten = torch.ops.aten
_PARAMETERS = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
_OPERATORS: dict[tuple[str, int], OpOverload] = {
    ("nearest", 1): aten.upsample_nearest1d.default,
    ("nearest", 2): aten.upsample_nearest2d.default,
    ("nearest", 3): aten.upsample_nearest3d.default,
    ("nearest-exact", 1): aten._upsample_nearest_exact1d.default,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d.default,
    ("nearest-exact", 3): aten._upsample_nearest_exact3d.default,
    ("linear", 1): aten.upsample_linear1d.default,
    ("bilinear", 2): aten.upsample_bilinear2d.default,
    ("bicubic", 2): aten.upsample_bicubic2d.default,
    ("trilinear", 3): aten.upsample_trilinear3d.default,
}
_LARGEST_DENOMINATOR = 1 << 10
"""A size times a scale that is a fraction of this denominator at most is exact in double precision."""


def interpolate(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `interpolate(*args, **kwargs)`, or None."""
    given: dict[str, Any] = {"size": None, "scale_factor": None, "mode": "nearest", "align_corners": None}
    given |= dict(zip(_PARAMETERS, args)) | kwargs
    symbolic = _fix_scales(given)
    plain = given.keys() <= set(_PARAMETERS) and not given.get("recompute_scale_factor") and not given.get("antialias")
    found = _operator_call(recorder, given) if plain and len(args) <= len(_PARAMETERS) else None
    if found is None and _keeps_layout(recorder, given):
        given["input"], symbolic = call(methods.contiguous, (given["input"],), {}), True
    if found is None:
        return call(torch.nn.functional.interpolate, (), given) if symbolic else None
    return call(*found, {})


def _keeps_layout(recorder: Recorder, given: dict[str, Any]) -> bool:
    """Whether PyTorch's Python version would lay the result out as the input lies, where eager copies that first."""
    x, mode = given.get("input"), given["mode"]
    if recorder.level == "aten" or not recorder.symbolic or not isinstance(x, torch.Tensor) or not recorder.owns(x):
        return False
    return x.dim() == 3 and mode in ("nearest", "nearest-exact") and not x.is_contiguous()


def _fix_scales(given: dict[str, Any]) -> bool:
    """Scales that are sizes become their values, which are then guarded: PyTorch takes numbers only. Whether there are
    any."""
    scale = given["scale_factor"]
    scales = list(scale) if type(scale) in (list, tuple) else [scale]
    values = [_NUMBER_OF.get(type(one), lambda other: other)(one) for one in scales]
    given["scale_factor"] = values if type(scale) in (list, tuple) else values[0]
    return any(type(one) in _NUMBER_OF for one in scales)


_NUMBER_OF: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float}


def _operator_call(recorder: Recorder, given: dict[str, Any]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    x, mode, corners = given.get("input"), given["mode"], given["align_corners"]
    if recorder.level != "aten" or not recorder.symbolic or not isinstance(x, torch.Tensor):
        return None
    inside = x
    while torch._C._functorch.is_functorch_wrapped_tensor(inside):  # by a transform of torch.func
        inside = torch._C._functorch.get_unwrapped(inside)
    if not recorder.owns(inside):
        return None
    rank = x.dim() - 2
    operator = _OPERATORS.get((mode, rank)) if type(mode) is str else None
    nearest = type(mode) is str and mode.startswith("nearest")
    if (
        operator is None
        or (corners is not None if nearest else type(corners) not in (bool, type(None)))
        or not x.is_cpu
    ):
        return None
    between = () if nearest else (bool(corners),)
    refuse_dtypes(recorder, operator, (x,), [1] * rank, *between)  # PyTorch's Python version takes other ones
    sizes = _each(given["size"], rank, (int, torch.SymInt))
    scales = _each(given["scale_factor"], rank, (int, float))
    if (sizes is None) == (scales is None) or (given["size"] is not None and given["scale_factor"] is not None):
        return None
    if scales is not None:
        fractions = [float(scale).as_integer_ratio() if 0 < scale < 1 << 20 else (0, 0) for scale in scales]
        if not all(0 < denominator <= _LARGEST_DENOMINATOR for _, denominator in fractions):
            _refuse_sizes(x, scales)
            return None
        sizes = [
            size_of(floor_div(dim_of(size) * numerator, denominator), recorder.env)
            for size, (numerator, denominator) in zip(x.shape[2:], fractions, strict=True)
        ]
        scales = [float(scale) for scale in scales]
    return operator, (x, sizes, *between, *(scales or (None,) * rank))


def _refuse_sizes(x: torch.Tensor, scales: list[Any]) -> None:
    """PyTorch's Python version lets pass what has nothing to read or to write."""
    if not all(scale > 0 for scale in scales):
        return
    least = (1, *(max(1, math.ceil(1 / scale)) for scale in scales))
    if not all(size >= one for size, one in zip(x.shape[1:], least, strict=True)):
        raise GraphBreak("operator-failed", "an interpolation from, or to, no elements")


def _each(value: Any, rank: int, kinds: tuple[type, ...]) -> list[Any] | None:
    """The value of each spatial dimension; None when it is not given, or not as it should be."""
    values = list(value) if type(value) in (list, tuple, torch.Size) else [value] * rank
    return values if len(values) == rank and all(type(item) in kinds for item in values) else None


__all__ = ["interpolate"]
