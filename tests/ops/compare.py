"""Whether a compiled call gave what the eager call gave: values, types, layouts, aliasing, and what it did to its arguments.

Takes trees of results and of arguments; gives a list of differences in words (empty: equal). Always holds: a value may differ from
eager's only within `torch.testing.assert_close`'s own tolerance for the dtype, or else must be as close as eager's to the result of the
same call in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copy_tree(tree: Any) -> Any:
    """A private copy of a tree of arguments: the same layouts, and tensors that shared memory still do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.copy() if isinstance(leaf, list) else leaf
        if id(leaf) in copies:
            return copies[id(leaf)]
        copies[id(leaf)] = made = _copy_tensor(leaf, storages)
        return made

    return pytree.tree_map(copy, tree)


def _copy_tensor(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in storages:
        storages[key] = storage.clone()
    with torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def differences(ours: Any, eager: Any, reference: Callable[[], Any] | None = None, values: bool = True) -> list[str]:
    """What is different between two results. `reference`: computes the same in higher precision, asked only when values disagree;
    `values`: False compares types and layouts only."""
    found: list[str] = []
    left, left_spec = pytree.tree_flatten(ours)
    right, right_spec = pytree.tree_flatten(eager)
    if left_spec != right_spec:
        return [f"structure: {left_spec} is not {right_spec}"]
    precise: list[Any] | None = None
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or (values and not _same_plain(a, b)):
                found.append(f"value: result {place} is {a!r}, eager gives {b!r}"[:300])
            continue
        kind = _type_difference(a, b)
        if kind:
            found.append(f"{kind} of result {place}")
        elif values and not close(a, b):
            if precise is None and reference is not None:
                precise = pytree.tree_leaves(reference())
            if precise is None or len(precise) != len(right) or not _as_accurate(a, b, precise[place]):
                found.append(f"value: result {place}: {_worst(a, b)}")
    return found


def _same_plain(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= 1e-6 * abs(b)
    return bool(a == b)


def _type_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if type(a) is not type(b):
        return f"class: {type(a).__name__}, eager {type(b).__name__}"
    if a.dtype != b.dtype:
        return f"dtype: {a.dtype}, eager {b.dtype}"
    if a.layout != b.layout or a.device != b.device:
        return f"layout: {a.layout} {a.device}, eager {b.layout} {b.device}"
    if a.is_nested or b.is_nested:
        return ""
    if a.shape != b.shape:
        return f"shape: {tuple(a.shape)}, eager {tuple(b.shape)}"
    if a.requires_grad != b.requires_grad:
        return f"requires_grad: {a.requires_grad}, eager {b.requires_grad}"
    if a.layout == torch.strided and not same_strides(a, b):
        return f"stride: {a.stride()}, eager {b.stride()} for shape {tuple(b.shape)}"
    return ""


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal strides where they mean something: of dimensions that have several elements, of tensors that are not empty."""
    return a.numel() == 0 or all(x == y for x, y, size in zip(a.stride(), b.stride(), b.shape, strict=True) if size > 1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.to_dense() if tensor.layout != torch.strided else tensor.resolve_conj().resolve_neg()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within the dtype's usual tolerance; exact for integers and bool."""
    if a.is_nested:
        return all(close(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    a, b = _dense(a), _dense(b)
    if b.dtype.is_floating_point and b.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    try:
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def _as_accurate(ours: torch.Tensor, eager: torch.Tensor, precise: Any) -> bool:
    """Whether our worst distance from the precise result is at most eager's (with one rounding of room), finiteness agreeing."""
    if (
        not isinstance(precise, torch.Tensor)
        or precise.shape != eager.shape
        or (not eager.dtype.is_floating_point and not eager.is_complex())
    ):
        return False
    wide = torch.complex128 if eager.is_complex() else torch.float64
    a, b, p = (_dense(t).to(wide) for t in (ours, eager, precise))
    if not torch.equal(torch.isnan(a), torch.isnan(b)) or not torch.equal(torch.isinf(a), torch.isinf(b)):
        return False
    finite = torch.isfinite(a) & torch.isfinite(p)
    if not finite.any():
        return True
    a, b, p = a[finite], b[finite], p[finite]
    rounding = torch.finfo(eager.dtype).eps * p.abs().max()
    return bool((a - p).abs().max() <= 2 * (b - p).abs().max() + rounding)


def _worst(a: torch.Tensor, b: torch.Tensor) -> str:
    a, b = _dense(a), _dense(b)
    if a.dtype == torch.bool or not a.numel():
        return f"{int((a != b).sum())} of {a.numel()} differ"
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    place = int(torch.nan_to_num(distance, nan=float("inf")).argmax())
    return f"{a.flatten()[place].item()!r}, eager {b.flatten()[place].item()!r} ({int((distance > 0).sum())} of {a.numel()} differ)"


def alias_pattern(results: Any, arguments: Any) -> list[object]:
    """For each result tensor: which argument it is, else which earlier tensor (arguments first, then results) it shares memory with, and
    where in that memory it starts. Tensors without elements count as fresh: nobody can tell."""
    pattern: list[object] = []
    given = tensors_of(arguments)
    owners: dict[int, int] = {}
    for index, tensor in enumerate(given):
        key = _memory(tensor)
        if key:
            owners.setdefault(key, index)
    for tensor in tensors_of(results):
        same = next((index for index, argument in enumerate(given) if argument is tensor), None)
        key = _memory(tensor)
        if same is not None:
            pattern.append(("argument", same))
        elif key and key in owners:
            pattern.append(("shares", owners[key], tensor.storage_offset()))
        else:
            if key:
                owners[key] = len(given) + len(pattern)
            pattern.append(None)
    return pattern


def _memory(tensor: torch.Tensor) -> int:
    if (
        tensor.layout != torch.strided
        or tensor.is_nested
        or not tensor.numel()
        or not tensor.untyped_storage().nbytes()
    ):
        return 0
    return tensor.untyped_storage()._cdata
