"""torchvision where its compiled part does not load (a wheel for GPUs beside PyTorch for the CPU): the one operator that its Python needs.

Takes nothing; defines `torchvision::nms` as torchvision's C++ does, in plain PyTorch. Always holds: a torchvision whose compiled part loads
is left as it is, and so is a process without torchvision.
"""

from __future__ import annotations

import importlib.util

import torch

_library: torch.library.Library | None = None


@torch.compiler.disable  # as little a part of the program as torchvision's C++
def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The indices of the boxes (N, 4) that no kept box of a higher score (N,) overlaps by more than the threshold, best first."""
    order = scores.argsort(descending=True, stable=True)
    one, other = boxes[order, None], boxes[None, order]
    sides = (torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])).clamp_min(0)
    shared, area = sides.prod(-1), (boxes[order, 2:] - boxes[order, :2]).prod(-1)
    overlaps = shared / (area[:, None] + area[None] - shared) > iou_threshold
    left = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    for i in range(len(order)):
        if left[i]:
            left[i + 1 :] &= ~overlaps[i, i + 1 :]
    return order[left]


def provide() -> None:
    """Defines what is missing, before torchvision is imported."""
    global _library
    if importlib.util.find_spec("torchvision") is None or _library is not None:
        return
    from importlib.machinery import PathFinder

    found = importlib.util.find_spec("torchvision")
    parts = PathFinder.find_spec("_C", found.submodule_search_locations) if found is not None else None
    if parts is not None and parts.origin is not None:
        try:
            torch.ops.load_library(parts.origin)
            return
        except OSError:
            pass  # it wants a GPU's libraries
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.impl("nms", _nms, "CPU")
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None
