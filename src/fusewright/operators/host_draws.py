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
    """signature  what gives (parameters, shape or None) for the arguments of a call
    dtype      of the tensor: float64 or int64
    by_sizes   the shape is given by the positional arguments, not by `size`
    """

    signature: Callable[..., tuple[tuple[Any, ...], Any]]
    dtype: torch.dtype = torch.float64
    by_sizes: bool = False


DRAWS: dict[str, Draw] = {
    "random.random": Draw(lambda: ((), None)),
    "numpy.random.random": Draw(lambda size=None: ((), size)),
    "numpy.random.random_sample": Draw(lambda size=None: ((), size)),
    "numpy.random.standard_normal": Draw(lambda size=None: ((), size)),
    "numpy.random.uniform": Draw(lambda low=0.0, high=1.0, size=None: ((low, high), size)),
    "numpy.random.normal": Draw(lambda loc=0.0, scale=1.0, size=None: ((loc, scale), size)),
    "numpy.random.rand": Draw(lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randn": Draw(lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randint": Draw(
        lambda low, high=None, size=None: ((0, low) if high is None else (low, high), size), torch.int64
    ),
}
"""By module and method of the module's own generator. NumPy imports `numpy.random` when it is first asked for: nothing
here asks before a draw."""


def _draw(name: str, parameters: Sequence[Any], size: Sequence[int] | None) -> torch.Tensor:
    row = DRAWS[name]
    module, _, method = name.rpartition(".")
    function = getattr(random if module == "random" else np.random, method)
    if size is None:
        value = function(*parameters)
    else:
        value = function(*size) if row.by_sizes else function(*parameters, size=tuple(size))
    return torch.as_tensor(value, dtype=row.dtype, device="cpu")


_LIBRARY.impl("host_draw", _draw, "CompositeExplicitAutograd")
