"""`torch.nn.attention.flex_attention` written out: scores, what the mods make of them, a softmax, and a product.

Takes and gives what the operator behind PyTorch's function does, and what `create_mask` does. Always holds: a mod sees
tensors without dimensions, as `torch.vmap` shows them, and a tensor indexed by such is read at each point; scores are
float32 (float64 for such operands); a row without keys gives zeros. Gradients are autograd's own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fusewright.base.pytorch import methods, torch

_PLACES = 4  # batch, head, row, column


class IndexByTensors(TorchFunctionMode):
    """`x[i]` by numbers and tensors reads `x` at the tensors' values, also where those have no dimension (which else
    are read as Python numbers)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is methods.__getitem__:
            places = pytree.tree_leaves(args[1])
            if any(isinstance(place, torch.Tensor) for place in places) and all(
                isinstance(place, (torch.Tensor, int)) for place in places
            ):
                device = args[0].device
                return torch.ops.aten.index(
                    args[0],
                    [place if isinstance(place, torch.Tensor) else torch.full((), place, device=device)
                     for place in places],
                )  # fmt: skip
        return func(*args, **(kwargs or {}))


def at_each_point(mod: Callable[..., Any], *values: torch.Tensor) -> Any:
    """What a mod gives at each (batch, head, row, column), of the four indices behind the scores, if it takes those."""
    scores = (0,) * (len(values) - _PLACES)
    for last in reversed(range(_PLACES)):
        mod = torch.vmap(mod, in_dims=(*scores, *(0 if place == last else None for place in range(_PLACES))))
    with IndexByTensors():
        return mod(*values)


def _indices(sizes: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    return [torch.arange(0, size, device=device) for size in sizes]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    *options: Any,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and of each row the logarithm of the sum and the maximum, for the base 2."""
    device = query.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = (
            one.to(dtype) if one.is_floating_point() and one.dtype != torch.float64 else one
            for one in (query, key, value)
        )
    with torch.autocast(device.type, enabled=False):
        return _attention((query, key, value), score_mod, block_mask[-1], scale)


def _attention(
    operands: tuple[torch.Tensor, ...], score_mod: Callable[..., Any], mask_mod: Callable[..., Any], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (_LaidOut.apply(one) for one in operands)
    batch, heads, rows, _ = query.shape
    group = heads // key.size(1)
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if key.size(0) != batch:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(working) @ key.to(working).transpose(-2, -1)) * scale
    indices = _indices((batch, heads, rows, key.size(2)), query.device)
    seen = at_each_point(mask_mod, *indices)
    scores = torch.where(seen, at_each_point(score_mod, scores, *indices), -math.inf)
    sums, most = scores.logsumexp(-1), scores.amax(-1).detach()
    result = torch._safe_softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
    return _laid_out(result, query), sums / math.log(2), most / math.log(2)


def _laid_out(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The result with its dimensions in memory in the other's order, but with the features side by side."""
    strides = like.stride()
    order = sorted(range(3), key=lambda place: strides[place])
    back = [*reversed(order), 3]
    return result.permute(back).contiguous().permute([back.index(place) for place in range(4)])


class _LaidOut(torch.autograd.Function):
    """An operand, whose gradient is laid out as it is. (PyTorch's operator has no gradients of gradients either.)"""

    @staticmethod
    def forward(ctx: Any, operand: torch.Tensor) -> torch.Tensor:
        ctx.operand = operand
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _laid_out(gradient, ctx.operand)


def _takes_score(mod: Any) -> bool:
    if hasattr(mod, "__code__"):
        return bool(mod.__code__.co_argcount - len(getattr(mod, "__defaults__", None) or ()) == _PLACES + 1)
    needed = [one for one in inspect.signature(mod).parameters.values() if one.default is one.empty]
    return len(needed) == _PLACES + 1


def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
) -> torch.Tensor:
    """Whether each (batch, head, row, column) is seen, by a mask_mod or a score_mod."""
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    indices = _indices(sizes, device)
    if not _takes_score(mod_fn):
        mask: torch.Tensor = at_each_point(mod_fn, *indices)
        return mask
    return ~torch.isneginf(at_each_point(mod_fn, torch.zeros(sizes, device=device), *indices))
