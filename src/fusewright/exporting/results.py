"""What a captured frame returns, leaf by leaf.

Takes a captured frame; runs its finish function on markers in place of the graph's outputs, and finds them again in the
result. Always holds: a frame with effects besides writes to tensors is refused before.
"""

from __future__ import annotations

from typing import Any, cast

from torch.utils import _pytree as pytree

from fusewright.base.errors import ExportError
from fusewright.base.pytorch import torch
from fusewright.capture.frame import CapturedFrame
from fusewright.exporting.spec import opened


class _Size(int):
    """Stands for a size that the graph computes."""


def flat_results(
    frame: CapturedFrame, model: Any, arguments: tuple[Any, ...]
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """One (kind, target) a leaf of the result: ("output", position among the graph's), ("tensor", a tensor from
    outside), ("value", a number, a string or None); and the containers."""
    assert frame.graph is not None
    returned = next(list(cast(Any, node.args[0])) for node in frame.graph.nodes if node.op == "output")
    markers = [torch.zeros(1, device="cpu") if isinstance(value, torch.fx.Node) else _Size(1) for value in returned]
    assert frame.finish is not None
    made: Any = frame.finish(tuple(markers), None, model, *arguments)
    result = made[0]
    places = {id(marker): place for place, marker in enumerate(markers)}
    memory = {marker.data_ptr(): place for place, marker in enumerate(markers) if isinstance(marker, torch.Tensor)}
    leaves, spec = opened(result, cast(Any, frame.finish(tuple(markers), None, model, *arguments))[0])
    found: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in places:
            found.append(("output", places[id(leaf)]))
        elif isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.data_ptr() in memory:
            found.append(("output", memory[leaf.data_ptr()]))
        elif isinstance(leaf, torch.Tensor):
            found.append(("tensor", leaf))
        elif leaf is None or type(leaf) in (bool, int, float, str):
            found.append(("value", leaf))
        else:
            raise ExportError(f"a program cannot return a {type(leaf).__name__}: {leaf!r:.80}")
    return found, spec
