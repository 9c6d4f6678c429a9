"""The border between a global tensor and its parts on the devices of a mesh, and sums over the devices, as operators.

Takes and gives tensors whose shapes are global outside of a sharded function and of one device inside of it. Always
holds: each device's copy counts as a variable of its own, and a result that is alike on n devices as the mean of n, so
that the gradient of each operator is another of them, whatever is or is not alike on all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.base.errors import BackendError
from fusewright.base.pytorch import torch

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("shard_enter(Tensor x, str[] axes, int[] parts, str[] others, int copies) -> Tensor")
_LIBRARY.define("shard_leave(Tensor x, str[] axes, int[] parts, str[] others, int copies, bool alike) -> Tensor")
_LIBRARY.define("psum(Tensor x, str[] axes) -> Tensor")
ENTER = torch.ops.fusewright.shard_enter.default
"""A device's part of x / copies: dimension d is cut into parts[d] along the mesh's axis axes[d] ("": it is whole).
`others`: the axes along which it is alike."""
LEAVE = torch.ops.fusewright.shard_leave.default
"""The whole of the devices' parts. `alike`: they are alike along `others`; otherwise their sum along these / copies."""
PSUM = torch.ops.fusewright.psum.default


def _part(x: torch.Tensor, axes: Sequence[str], parts: Sequence[int], *rest: Any) -> torch.Tensor:
    return x.new_empty([size // part for size, part in zip(x.shape, parts)])


def _whole(x: torch.Tensor, axes: Sequence[str], parts: Sequence[int], *rest: Any) -> torch.Tensor:
    return x.new_empty([size * part for size, part in zip(x.shape, parts)])


def _alike(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    return x.new_empty(x.shape)


def _refuse(*args: Any) -> Any:
    raise BackendError(
        "fusewright.parallel: only XLA runs functions of `shard` and their `psum`. Either the call is outside of such "
        "a function, or XLA found an argument for which PyTorch raises an error, such as an index out of range"
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rest = inputs[1:]


def _enter_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return LEAVE(gradient, *ctx.rest, False), None, None, None, None


def _leave_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return ENTER(gradient, *ctx.rest[:4]), None, None, None, None, None


def _psum_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return PSUM(gradient, *ctx.rest), None


for _name, _shapes, _backward in (
    ("shard_enter", _part, _enter_backward),
    ("shard_leave", _whole, _leave_backward),
    ("psum", _alike, _psum_backward),
):
    _LIBRARY.impl(_name, _shapes, "Meta")
    _LIBRARY.impl(_name, _refuse, "CPU")
    torch.library.register_autograd(f"fusewright::{_name}", _backward, setup_context=_keep, lib=_LIBRARY)
