"""Functions of NumPy's that are simply called where all their arguments are constants.

Takes real values; gives the function's own result. Always holds: an array is made anew at each call of the compiled
code, since the program may write to it; what is not constant throughout is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values.array import TORCH_DTYPES, TracedArray
from fusewright.capture.call.builtins import Row, plain_data
from fusewright.capture.guards import MISSING

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_WRITTEN_OUT = 1024
"""What arrays of at most so many elements hold stays known to the graph."""


def _made(world: World, value: Any) -> Any:
    """What NumPy made, inside."""
    if isinstance(value, (tuple, list)):
        return type(value)(_made(world, part) for part in value)
    if not isinstance(value, np.ndarray):
        return value
    dtype = TORCH_DTYPES.get(value.dtype)
    if dtype is None or not value.dtype.isnative or not value.flags.c_contiguous:
        raise GraphBreak("numpy-call", f"an array of dtype {value.dtype}, or in another order than C's")
    world.uses_arrays = True
    if 0 < value.size <= _WRITTEN_OUT:
        tensor = world.torch_call(torch.tensor, (value.tolist(),), {"dtype": dtype, "device": "cpu"})
    else:
        tensor = world.torch_call(torch.clone, (torch.from_numpy(value.copy()),), {})
    return TracedArray(world, tensor)


def _of_numpy(fn: Callable[..., Any]) -> Row:
    """Of traced arrays it has been handled before (values/array.py)."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        ready = [_known(tracer, value) for value in args]
        keywords = {name: _known(tracer, value) for name, value in kwargs.items()}
        if any(value is MISSING for value in (*ready, *keywords.values())):
            raise GraphBreak("numpy-call", f"numpy.{fn.__name__} of something that is no constant")
        return _made(tracer.world, unwatched(fn, *ready, **keywords))

    return call


def _known(tracer: Tracer, value: Any) -> Any:
    return value if isinstance(value, (np.generic, type)) else plain_data(tracer, value)


_NUMPY = (
    np.array, np.asarray, np.arange, np.zeros, np.ones, np.full, np.eye, np.identity, np.linspace, np.logspace, np.tri,
    np.prod, np.sum, np.mean, np.max, np.min, np.cumsum, np.meshgrid, np.linalg.norm, np.argmax, np.argmin, np.median,
)  # fmt: skip
ROWS: list[tuple[Any, Row]] = [(fn, _of_numpy(fn)) for fn in _NUMPY]
