"""Tensors indexed by whole numbers that vary: `x[:, i]` as `x.select(1, i)`, since PyTorch's own indexing asks for the
number.

Takes a tensor and a key; gives the view that the key's varying numbers select, and what is left of the key. Always
holds: a key with tensors, lists or masks in it is left as it is, and so is one without varying numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

WHOLE = object()
"""Nothing is left of the key. (None is a key.)"""
_BASIC = (slice, int, torch.SymInt, type(None), type(Ellipsis))


def selected(world: World, tensor: Any, key: Any) -> tuple[Any, Any]:
    """(a view of `tensor`, the rest of the key or WHOLE): the view, indexed by the rest, is `tensor[key]`."""
    parts = key if type(key) is tuple else (key,)
    if not any(isinstance(part, torch.SymInt) for part in parts):
        return tensor, key
    if any(not isinstance(part, _BASIC) or isinstance(part, bool) for part in parts):
        return tensor, key
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if taken > tensor.dim() or sum(part is Ellipsis for part in parts) > 1:
        return tensor, key  # PyTorch has the error
    axis, rest = 0, list[Any]()
    for part in parts:
        if isinstance(part, torch.SymInt):
            tensor = world.torch_call(torch._C.TensorBase.select, (tensor, axis, part), {})
            continue
        rest.append(part)
        if part is Ellipsis:
            axis += tensor.dim() - axis - _left(parts)
        elif part is not None:
            axis += 1
    return tensor, WHOLE if all(part == slice(None) for part in rest) else tuple(rest)


def _left(parts: Any) -> int:
    """How many dimensions the parts behind the ellipsis take."""
    behind = parts[parts.index(Ellipsis) + 1 :]
    return sum(part is not None for part in behind)
