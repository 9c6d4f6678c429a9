"""PyTorch's functions as they were when fusewright was imported: what code of ours calls.

Takes nothing; gives `torch` and `functional`, modules in which each name leads to what it led to then, and `methods`,
those of tensors. Always holds: what a program puts under a name of PyTorch's later is run where the program looks it
up, never by work of ours; classes, and modules without functions that programs replace, are PyTorch's own.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch as _torch

if TYPE_CHECKING:
    import torch as torch
    import torch.fx
    import torch.nn.functional as functional

_KEPT = ("autograd", "autograd.graph", "fft", "linalg", "nn", "nn.functional", "random", "special")


def _as_now(module: types.ModuleType) -> Any:
    """A module with the names of this one; what the other gets later (a submodule) it has too."""
    made = types.ModuleType(module.__name__)
    vars(made).update(vars(module), __getattr__=module.__getattribute__)
    return made


def _torch_as_now() -> Any:
    made = _as_now(_torch)
    for path in _KEPT:
        place, real = made, _torch
        *way, last = path.split(".")
        for name in way:
            place, real = getattr(place, name), getattr(real, name)
        setattr(place, last, _as_now(getattr(real, last)))
    return made


if not TYPE_CHECKING:
    torch = _torch_as_now()
    functional = torch.nn.functional

now = _torch
"""PyTorch as it is: where a look-up of the program's is followed."""
methods: Any = types.SimpleNamespace(**{name: getattr(_torch.Tensor, name) for name in dir(_torch.Tensor)})


def with_history_as(tensor: _torch.Tensor, kind: type) -> _torch.Tensor:
    """`tensor.as_subclass(kind)`, with the tensor's history also where gradients are not followed."""
    if torch.is_grad_enabled():
        return methods.as_subclass(tensor, kind)  # type: ignore[no-any-return]
    with torch.enable_grad():
        return methods.as_subclass(tensor, kind)  # type: ignore[no-any-return]


def without_history_as(tensor: _torch.Tensor, kind: type) -> _torch.Tensor:
    """`tensor.as_subclass(kind)` as where gradients are not followed."""
    with torch.no_grad():
        return methods.as_subclass(tensor, kind)  # type: ignore[no-any-return]


def as_bytes(tensor: _torch.Tensor) -> _torch.Tensor:
    """A copy of the bytes of a dense tensor's elements, row by row. Of the tensor itself no bytes can be seen where it
    has a single element and a stride, nor any view taken where it counts no writes."""
    copy = torch.clone(torch.detach(tensor), memory_format=torch.contiguous_format)
    return methods.view(torch.flatten(torch.resolve_neg(torch.resolve_conj(copy))), torch.uint8)


def bytes_of(tensor: _torch.Tensor) -> bytes:
    """The elements of a dense tensor on the CPU, row by row."""
    return bytes(methods.numpy(as_bytes(tensor)).tobytes()) if tensor.numel() else b""
