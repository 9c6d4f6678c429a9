"""The random generators that a graph draws from, and their states: so that it can be run again and draw the same.

Takes a graph, or the devices that it draws on; gives `States`. Always holds: the CPU's generator is among them wherever
there is one (an operator on a GPU may draw from it); a state is given back to the generator that it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.operators import host_draws
from fusewright.sizes.tensor_type import TensorType

CPU = torch.device("cpu")
_CPUS_STATE = torch.default_generator.get_state


Drawn = torch.device | str


def drawing_devices(graph: torch.fx.Graph) -> tuple[Drawn, ...]:
    """Where the graph draws random numbers; nothing if it draws none."""
    found: dict[Drawn, None] = {}
    for node in graph.nodes:
        if draws(node):
            found |= dict.fromkeys((CPU, *devices_of(node.meta["type"])))
            if node.target is host_draws.HOST_DRAW:
                found[host_draws.drawn_from(node.args[0])] = None
    return tuple(found)


def draws(node: torch.fx.Node) -> bool:
    """Whether the node draws random numbers. Attention that drops nothing does not, though its operator may."""
    if not node.meta.get("random"):
        return False
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get("dropout_p", argument.default_value)
            return bool((node.args[place] if place < len(node.args) else given) != 0)
    return True


def devices_of(kind: Any) -> list[torch.device]:
    """The devices in the type of a node's value."""
    if isinstance(kind, (tuple, list)):
        return [device for item in kind for device in devices_of(item)]
    return [kind.device] if isinstance(kind, TensorType) else []


def generator_of(device: torch.device) -> torch.Generator:
    """PyTorch's own generator of a device. (Other kinds of devices than these are not compiled for.)"""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@dataclass(frozen=True, slots=True)
class States:
    kept: tuple[tuple[torch.device, torch.Tensor], ...]
    hosts: tuple[tuple[str, Any], ...] = ()
    """Of Python's and NumPy's generators (`host_draws.states`, by what they are of)."""

    def restore(self) -> None:
        for _, states in self.hosts:
            for restore, state in states:
                restore(state)
        for device, state in self.kept:
            generator_of(device).set_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draws inside are those that followed when the states were kept; what is drawn afterwards is what it would
        have been."""
        now = _now([*(device for device, _ in self.kept), *(host for host, _ in self.hosts)])
        self.restore()
        try:
            yield
        finally:
            now.restore()


def states_of(drawn: Sequence[Drawn]) -> States | None:
    """The generators' states now. None where the program records a CUDA graph: what a replay of that draws is not known
    here."""
    for one in drawn:
        if one != CPU and not isinstance(one, str) and one.type == "cuda":
            return None if torch.cuda.is_current_stream_capturing() else _now(drawn)
    return _now(drawn)


def _now(drawn: Sequence[Drawn]) -> States:
    kept, hosts = [], []
    for one in drawn:  # at each call of a graph that draws
        if isinstance(one, str):
            hosts.append((one, host_draws.states(one)))
        else:
            kept.append((one, _CPUS_STATE() if one == CPU else generator_of(one).get_state()))
    return States(tuple(kept), tuple(hosts))
