"""Which sizes of an input are symbolic.

Takes a real tensor, its source and the capture's options; gives the symbols of its symbolic dimensions.
Always holds: sizes 0 and 1 are never symbolic (they broadcast or vanish); parameters and buffers of modules stay static unless marked;
under `dynamic=None` a size is symbolic once it has been seen with two values.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from fusewright.capture.signals import SkipFrame
from fusewright.capture.sources import Item, Local, Source, TensorSize

if TYPE_CHECKING:
    from fusewright.capture.settings import CaptureOptions
    from fusewright.graph.shape_env import ShapeEnv
    from fusewright.graph.sizes import Symbol

# Attributes that mark_dynamic and its kin leave on a tensor: PyTorch's names, which fusewright's own functions set as well.
DYNAMIC, MAYBE_DYNAMIC, STATIC, RANGES = (
    "_dynamo_dynamic_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_static_indices",
    "_dynamo_dynamic_range",
)


def symbolic_dims(
    real: torch.Tensor, source: Source, code: types.CodeType, env: ShapeEnv | None, options: CaptureOptions
) -> dict[int, Symbol]:
    """dimension → symbol, for the dimensions of this input that are to be symbolic."""
    marked: Any = getattr(real, DYNAMIC, frozenset())
    maybe: Any = getattr(real, MAYBE_DYNAMIC, frozenset())
    static: Any = getattr(real, STATIC, frozenset())
    wanted = _wanted(real, source, code, options) | set(marked) | set(maybe)
    if env is None or options.dynamic is False:
        return {}
    chosen: dict[int, Symbol] = {}
    for dim in sorted(wanted - set(static)):
        size = real.shape[dim]
        lower, upper = _range(real, dim)
        if size < lower or (upper is not None and size > upper):
            if dim in marked:
                raise SkipFrame("size-out-of-range", f"{source.text()}.size({dim}) is {size}; it is marked as {lower}..{upper}")
            continue
        chosen[dim] = env.create(f"s{len(env.symbols)}", size, TensorSize(source, dim), lower, upper)
    return chosen


def _range(real: torch.Tensor, dim: int) -> tuple[int, int | None]:
    for marked in getattr(real, RANGES, ()):
        if marked.dim == dim:
            return max(2, marked.min if marked.min is not None else 2), marked.max
    return 2, None


def _wanted(real: torch.Tensor, source: Source, code: types.CodeType, options: CaptureOptions) -> set[int]:
    if isinstance(real, torch.nn.Parameter) or not _from_argument(source):
        return set()
    sizes = tuple(real.shape)
    if options.dynamic is True:
        return {dim for dim, size in enumerate(sizes) if size > 1}
    if options.dynamic is False:
        return set()
    key: Any = (code, source)
    seen = options.size_history.get(key)
    if seen is None or len(seen) != len(sizes):
        options.size_history[key] = sizes
        return set()
    merged = tuple(old if old == new else None for old, new in zip(seen, sizes, strict=False))
    options.size_history[key] = merged
    return {dim for dim, size in enumerate(merged) if size is None}


def _from_argument(source: Any) -> bool:
    """Whether a tensor comes with the call (an argument, or an element of one), not from a module or a global."""
    while isinstance(source, Item):
        source = source.base
    return isinstance(source, Local)
