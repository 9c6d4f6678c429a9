"""Backend `inductor`: PyTorch's own compiler on our captured graph, for comparison. Imported only when it is asked for
by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx

from fusewright.backends.registry import from_callable


def _compile(
    module: torch.fx.GraphModule,
    example_inputs: list[Any],
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    changes = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return compile_fx(module, example_inputs, config_patches=changes)  # type: ignore[return-value]


# Its symbolic sizes are PyTorch's own, which its capture makes; ours would be taken for constants.
BACKEND = from_callable(_compile, "inductor", dynamic=False)
