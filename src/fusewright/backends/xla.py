"""Backend `xla`: graphs run on an XLA device through torch_xla.

Takes torch-level graphs; gives callables that move their inputs to the device, run the graph there, and move the
results back. Always holds: without torch_xla the name is an error that says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.backends.registry import from_callable, required
from fusewright.base.records import replace

required("backend 'xla'", {"torch_xla": "torch_xla"})


def _compile(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    import torch_xla

    device = torch_xla.device()
    module.to(device)

    def run(*inputs: Any) -> tuple[Any, ...]:
        homes = [value.device for value in inputs if isinstance(value, torch.Tensor)]
        outputs = module(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs))
        torch_xla.sync()
        home = homes[0] if homes else torch.device("cpu")
        return tuple(value.to(home) if isinstance(value, torch.Tensor) else value for value in outputs)

    return run


BACKEND = replace(from_callable(_compile, "xla", dynamic=False), lowers=False)
