"""Own shape rules."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

RULES: dict[OpOverload, Callable[..., object]] = {}


def exact_device(device: torch.device) -> torch.device:
    """`device` with its index, as tensors on it report it."""
    if device.type == "cpu" or device.index is not None or device.type == "meta":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
