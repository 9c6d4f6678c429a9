"""What torch.compile has around the call of a backend, for those that ask for it: fake tensors and a tracing context.

Takes a torch-level graph and its real inputs; gives the call of the backend inside PyTorch's tracing context, with fake
tensors in the nodes' `meta["example_value"]` and `meta["val"]`. Imported for such a backend only. Always holds: sizes
are numbers (these backends get a graph for each set of sizes), and nothing that runs here touches the real inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.base.pytorch import torch


class _Faked(torch.fx.Interpreter):
    """Runs a graph on fake tensors, and leaves in each node what it gave."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = n.meta["val"] = result
        return result


def call_traced(
    function: Callable[..., Any], module: torch.fx.GraphModule, inputs: Sequence[Any], keywords: dict[str, Any]
) -> Any:
    """`function(module, inputs, **keywords)`, as torch.compile calls it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    with mode, torch.random.fork_rng(devices=()):
        _Faked(module).run(*fakes)
    with tracing(TracingContext(mode)):
        return function(module, inputs, **keywords)
