"""Own shape rules."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch._ops import OpOverload

from fusewright.graph.types import TensorType

RULES: dict[OpOverload, Callable[..., object]] = {}


def exact_device(device: torch.device) -> torch.device:
    """`device` with its index, as tensors on it report it."""
    if device.type == "cpu" or device.index is not None or device.type == "meta":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def result_device(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    """The device of the results: asked for, else that of the first tensor with dimensions, else of the first tensor, else the CPU."""
    asked = kwargs.get("device")
    if asked is not None:
        return exact_device(torch.device(asked))  # type: ignore[arg-type]
    first: torch.device | None = None
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, TensorType):
                if item.shape:
                    return item.device
                first = first or item.device
    return first or torch.device("cpu")
