"""SPMD over jax's devices: one function runs on every device of a mesh, on that device's part of the arguments.

Takes a function or module and what its arguments and results are on the mesh; gives a function over whole tensors.
Needs jax (`pip install fusewright[xla]`): docs/backends.md.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fusewright import api
from fusewright.operators.spmd import PSUM


def shard(f: Callable[..., Any], mesh: Any = None, in_specs: Any = None, out_specs: Any = None) -> Callable[..., Any]:
    """A function that runs `f` on all devices of a mesh at once, each on its part of the arguments.

    mesh       a jax.sharding.Mesh; or how many of jax's devices, in one axis named "devices"; by default all of them
    in_specs   for each positional argument, or one for all: None for what every device gets whole, the number of the
               dimension that is cut into equal parts (by the mesh's first axis), or a jax.sharding.PartitionSpec.
               It holds for all tensors in the argument; other values go to every device
    out_specs  the same for the results. A tensor whose spec is None must be alike on all devices, as `psum` makes it

    Parameters and other tensors that `f` reads besides its arguments go to every device whole. Gradients are those of
    the whole function: what every device got whole receives the sum over the devices.

    Raises ValueError for a dimension that cannot be cut, BackendError for what XLA has no row for (random numbers among
    it), for a result that should be alike and is not, and for a function that writes to its arguments.
    """
    made = importlib.import_module("fusewright.backends.xla.shards").shards(f, mesh, in_specs, out_specs)
    compiled = api.compile(made.compiled, backend=made.backend, fullgraph=True, name="shard")

    @functools.wraps(f.forward if isinstance(f, torch.nn.Module) else f)
    def run(*args: Any) -> Any:
        made.check(*args)
        return compiled(*args)

    return run


def psum(x: torch.Tensor, *axes: str) -> torch.Tensor:
    """Inside of a function of `shard`: the sum of `x` over the devices along these axes of the mesh, by default all."""
    made: torch.Tensor = PSUM(x, axes)
    return made
