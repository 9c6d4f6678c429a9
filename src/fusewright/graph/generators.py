"""The random generators that a graph draws from, and their states: so that it can be run again and draw the same.

Takes a graph, or the devices that it draws on; gives `States`. Always holds: the CPU's generator is among them wherever
there is one (an operator on a GPU may draw from it); a state is given back to the generator that it came from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.sizes.tensor_type import TensorType

CPU = torch.device("cpu")


def drawing_devices(graph: torch.fx.Graph) -> tuple[torch.device, ...]:
    """Where the graph draws random numbers; nothing if it draws none."""
    found: dict[torch.device, None] = {}
    for node in graph.nodes:
        if node.meta.get("random"):
            found |= dict.fromkeys((CPU, *_devices(node.meta["type"])))
    return tuple(found)


def _devices(kind: Any) -> list[torch.device]:
    if isinstance(kind, (tuple, list)):
        return [device for item in kind for device in _devices(item)]
    return [kind.device] if isinstance(kind, TensorType) else []


def generator_of(device: torch.device) -> torch.Generator:
    """PyTorch's own generator of a device. (Other kinds of devices than these are not compiled for.)"""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@dataclass(frozen=True, slots=True)
class States:
    kept: tuple[tuple[torch.device, torch.Tensor], ...]
    hosts: tuple[Any, Any] | None = None
    """Of the modules `random` and `numpy.random` (operators/host_draws.py)."""

    def restore(self) -> None:
        if self.hosts is not None:
            random.setstate(self.hosts[0])
            np.random.set_state(self.hosts[1])
        for device, state in self.kept:
            generator_of(device).set_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draws inside are those that followed when the states were kept; what is drawn afterwards is what it would
        have been."""
        now = _now([device for device, _ in self.kept])
        self.restore()
        try:
            yield
        finally:
            now.restore()


def states_of(devices: Sequence[torch.device]) -> States | None:
    """The generators' states now. None where the program records a CUDA graph: what a replay of that draws is not known
    here."""
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        return None
    return _now(devices) if devices else States(())


def _now(devices: Sequence[torch.device]) -> States:
    kept = tuple((device, generator_of(device).get_state()) for device in devices)
    return States(kept, (random.getstate(), np.random.get_state()))
