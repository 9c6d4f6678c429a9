"""fusewright as a backend of PyTorch's own compiler: `torch.compile(model, backend="fusewright")`.

Takes the graph that torch.compile captured; gives a callable over its flat inputs, compiled at its first call. Always
holds: a size that torch.compile passes as an argument is read from the tensor that has it, so that it can stay symbolic
here as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from fusewright import api


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: api.Mode | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles `gm`, a torch-level graph; entry point "fusewright" of the group torch_dynamo_backends.

    mode, options: as `fusewright.compile`'s. Raises OptionError for a wrong one.
    """
    graph = copy.deepcopy(gm.graph)
    dynamic = _read_sizes_from_tensors(graph, example_inputs)
    module = torch.fx.GraphModule(gm, graph)  # torch.compile's own makes its code only when it is called
    return api.compile(module.forward, dynamic=dynamic or None, mode=mode, options=options, name="torch.compile")


def _read_sizes_from_tensors(graph: torch.fx.Graph, example_inputs: list[Any]) -> bool:
    """Replaces the uses of size arguments by `tensor.size(dim)`; gives whether the graph has any symbolic size."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    # these know their symbols
    values = [node.meta.get("example_value", value) for node, value in zip(placeholders, example_inputs)]
    homes: dict[Any, tuple[torch.fx.Node, int]] = {}
    dynamic = False
    for node, value in zip(placeholders, values):
        for dim, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                dynamic = True
                homes.setdefault(size.node.expr, (node, dim))
    last = placeholders[-1] if placeholders else None
    for node, value in zip(placeholders, values):
        if isinstance(value, torch.SymInt) and value.node.expr in homes and node.users:
            tensor, dim = homes[value.node.expr]
            with graph.inserting_after(last):
                call = graph.call_method("size", (tensor, dim))
            node.replace_all_uses_with(call)
    return dynamic
