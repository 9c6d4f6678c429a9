"""Tensors made of floats that are known only at run time: `torch.as_tensor(rate / step)`.

Takes a float, or a flat list of numbers with such a float in it; gives the tensor that the graph makes of it. Always
holds: without one, and for other arguments than a dtype and a device, PyTorch's own function makes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright.sizes.symfloat import node_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _made(fn: Callable[..., Any]) -> Callable[[Tracer, Args, Kwargs], Any]:
    def make(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        given: dict[str, Any] = dict(zip(("data", "dtype", "device"), args)) | kwargs
        data: Any = given.get("data")
        listed = type(data) in (list, tuple)
        parts = list(data) if listed else [data]
        floats = any(node_of(part) is not None for part in parts)
        plain = all(node_of(part) is not None or type(part) in (int, float) for part in parts)
        if not floats or not plain or not given.keys() <= {"data", "dtype", "device"}:
            return tracer.world.torch_call(fn, args, kwargs)
        dtype: Any = given.get("dtype") or torch.get_default_dtype()
        device = given.get("device") or torch.get_default_device()

        def record() -> Any:
            tensors = [torch.full((), part, dtype=dtype, device=device) for part in parts]
            return torch.stack(tensors) if listed else tensors[0]

        return tracer.world.torch_call(record, (), {})

    return make


ROWS = [(fn, _made(fn)) for fn in (torch.tensor, torch.as_tensor)]
