"""Which operators are cheap enough to be computed twice: views, and pointwise operators (which fuse into what reads them)."""

from __future__ import annotations

import torch
import torch.fx

_VIEW_TAGS = (
    "view",
    "expand",
    "permute",
    "transpose",
    "t",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "alias",
    "detach",
    "as_strided",
    "_unsafe_view",
)


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node only renames its input's elements."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.removeprefix("aten::") in _VIEW_TAGS


def is_cheap(node: torch.fx.Node) -> bool:
    """Whether the backward may compute the node again instead of reading a saved value."""
    target = node.target
    if node.op != "call_function" or node.meta.get("random"):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # arithmetic on sizes, getitem
    return torch.Tag.pointwise in target.tags or is_view(node)
