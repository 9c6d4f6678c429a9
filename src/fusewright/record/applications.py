"""User code that has a part in a graph's gradients: applications of custom autograd functions, and hooks on tensors.

The recorder notes them as it goes; `autograd/replay.py` calls them again, natively, for gradients of gradients. Always
holds: what is noted names nodes of the recorded graph and otherwise only values that do not depend on the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx

from fusewright.base.records import dataclass


class Shape(tuple[Any, ...]):
    """A torch.Size, some of whose numbers are expressions."""


@dataclass(frozen=True, slots=True)
class Application:
    """`function(*args)`, whose operators were recorded as `nodes` and whose result's tensors as `outputs` (None: no
    tensor).

    args      nodes stand for tensors, size expressions for symbolic ints
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    nodes: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node | None, ...]


@dataclass(frozen=True, slots=True)
class Hook:
    """`hook` is called with the gradient of `tensor`, as that is behind the node `after`."""

    tensor: torch.fx.Node
    after: torch.fx.Node
    hook: Callable[..., Any]
