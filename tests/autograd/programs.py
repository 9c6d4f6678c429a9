"""Programs that use autograd in every way that PyTorch offers; each is run by eager and compiled, and must give the same.

Takes a function that compiles (or leaves its argument as it is); gives what is compared: tensors (values, dtype, strides, requires_grad,
is_leaf), numbers and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compiled = Callable[[Any], Any]
PROGRAMS: dict[str, Callable[[Compiled], list[Any]]] = {}


def program(function: Callable[[Compiled], list[Any]]) -> Callable[[Compiled], list[Any]]:
    """Adds a program under its name."""
    PROGRAMS[function.__name__] = function
    return function


def random(*shape: int, g: bool = True, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on shape and seed only; `g`: requires a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(g)


# each prog(C) -> list of results ; C compiles
