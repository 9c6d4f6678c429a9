"""Draws from the random generators of Python and NumPy, as operators: a graph draws at every call what eager would.

Takes the name of a row of DRAWS, its parameters and, for arrays, a shape; gives a tensor on the CPU. Always holds: the
generators are those of the modules `random` and `numpy.random`; draws stay in order and are never removed or merged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusewright.base.records import dataclass

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define(
    "host_draw(str name, Scalar[] parameters, int[]? size) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
HOST_DRAW = torch.ops.fusewright.host_draw.default


@dataclass(frozen=True, slots=True)
class Draw:
    """function   the bound method of a module's own generator
    signature  what gives (parameters, shape or None) for the arguments of a call
    dtype      of the tensor: float64 or int64
    by_sizes   the shape is given by the positional arguments, not by `size`
    """

    function: Callable[..., Any]
    signature: Callable[..., tuple[tuple[Any, ...], Any]]
    dtype: torch.dtype = torch.float64
    by_sizes: bool = False


DRAWS: dict[str, Draw] = {
    "random.random": Draw(random.random, lambda: ((), None)),
    **{
        f"numpy.random.{name}": Draw(getattr(np.random, name), lambda size=None: ((), size))
        for name in ("random", "random_sample", "standard_normal")
    },
    "numpy.random.uniform": Draw(np.random.uniform, lambda low=0.0, high=1.0, size=None: ((low, high), size)),
    "numpy.random.normal": Draw(np.random.normal, lambda loc=0.0, scale=1.0, size=None: ((loc, scale), size)),
    "numpy.random.rand": Draw(np.random.rand, lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randn": Draw(np.random.randn, lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randint": Draw(
        np.random.randint,
        lambda low, high=None, size=None: ((0, low) if high is None else (low, high), size),
        torch.int64,
    ),
}


def _draw(name: str, parameters: Sequence[Any], size: Sequence[int] | None) -> torch.Tensor:
    row = DRAWS[name]
    if size is None:
        value = row.function(*parameters)
    else:
        value = row.function(*size) if row.by_sizes else row.function(*parameters, size=tuple(size))
    return torch.as_tensor(value, dtype=row.dtype, device="cpu")


_LIBRARY.impl("host_draw", _draw, "CompositeExplicitAutograd")
