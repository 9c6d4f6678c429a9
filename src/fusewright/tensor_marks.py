"""mark_dynamic, maybe_mark_dynamic, mark_static: which sizes of a tensor are expected to change from call to call.

Takes tensors; leaves the attributes that PyTorch's functions of these names leave, so that either compiler honours
either's marks.
Always holds: a dimension is given from either end, and one that the tensor does not have is an IndexError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.base import marks
from fusewright.base.errors import OptionError


def mark_dynamic(
    t: torch.Tensor, index: int | Sequence[int], *, min: int | None = None, max: int | None = None
) -> None:
    """Marks dimension `index` (or several) of `t` as changing: compiled code takes it as symbolic from the first call.

    `min` and `max` bound the sizes that the compiled code has to serve; they are guarded. If the program fixes the size
    after all, the call raises DynamicMarkError, which names the line. Sizes 0 and 1 are compiled apart from larger
    ones. Raises OptionError for empty ranges and wrong types, IndexError for a dimension that `t` does not have.
    """
    for bound in (min, max):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise OptionError(f"mark_dynamic takes bounds of at least 0, got {bound!r}")
    if min is not None and max is not None and min > max:
        raise OptionError(f"mark_dynamic got an empty range: min={min} is above max={max}")
    for dim in _dims("mark_dynamic", t, index):
        ranges = _attribute(t, marks.RANGES, set)
        ranges -= {known for known in ranges if known.dim == dim}
        ranges.add(marks.DimRange(dim, min, max))
        _attribute(t, marks.DYNAMIC, set).add(dim)
        _attribute(t, "_specialize_on", dict)[dim] = []
        _attribute(t, "_dynamo_hint_overrides", dict)


def maybe_mark_dynamic(t: torch.Tensor, index: int | Sequence[int]) -> None:
    """As mark_dynamic, without the error when the program fixes the size."""
    for dim in _dims("maybe_mark_dynamic", t, index):
        _attribute(t, marks.MAYBE_DYNAMIC, set).add(dim)


def mark_static(t: Any, index: int | Sequence[int] | None = None) -> Any:
    """Marks dimension `index` (several; None: all) of `t` as fixed: never symbolic, whatever `dynamic=` says;
    mark_dynamic prevails.

    Also takes a subclass of nn.Module, which is returned unchanged: attributes of modules are always taken as fixed,
    and guarded.
    """
    if isinstance(t, type) and issubclass(t, torch.nn.Module):
        t._dynamo_marked_static = True  # type: ignore[attr-defined]
        return t
    if not isinstance(t, torch.Tensor):
        raise OptionError(f"mark_static takes a tensor or a subclass of nn.Module, got {type(t).__name__}")
    for dim in range(t.dim()) if index is None else _dims("mark_static", t, index):
        _attribute(t, marks.STATIC, set).add(dim)
    return None


def _dims(function: str, t: Any, index: Any) -> list[int]:
    if not isinstance(t, torch.Tensor):
        raise OptionError(f"{function} takes a tensor, got {type(t).__name__}")
    indices = list(index) if isinstance(index, (list, tuple)) else [index]
    for dim in indices:
        if type(dim) is not int:
            raise OptionError(f"{function} takes an int or a list of ints for the dimension, got {dim!r}")
        if not -t.dim() <= dim < t.dim():
            raise IndexError(f"{function}: dimension {dim} is out of range for a tensor of {t.dim()} dimensions")
    return [dim % t.dim() for dim in indices]


def _attribute(t: torch.Tensor, name: str, make: Any) -> Any:
    t._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    if not hasattr(t, name):
        setattr(t, name, make())
    return getattr(t, name)
