"""Programs on DTensors. Each takes a mesh over all processes and a plain tensor that differs between them, and gives
tensors, distributed or plain, and plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros

Program = Callable[[DeviceMesh, Tensor], Any]


def local(mesh: DeviceMesh, x: Tensor, placement: Any) -> Any:
    return DTensor.from_local(x, mesh, [placement])


def moved(mesh: DeviceMesh, x: Tensor) -> Any:
    sharded = local(mesh, x, Shard(0))
    return sharded.redistribute(mesh, [Replicate()]).to_local(), sharded.full_tensor() * 2


def summed(mesh: DeviceMesh, x: Tensor) -> Any:
    partial = local(mesh, x, Partial())
    return partial.redistribute(placements=[Replicate()]).to_local().sin(), partial.full_tensor()


def scattered(mesh: DeviceMesh, x: Tensor) -> Any:
    partial = local(mesh, x.repeat(mesh.size(), 1), Partial("avg"))
    return partial.redistribute(placements=[Shard(0)]).to_local() + 1


def exchanged(mesh: DeviceMesh, x: Tensor) -> Any:
    wide = local(mesh, x.repeat(1, mesh.size()), Shard(0))
    return wide.redistribute(placements=[Shard(1)]).to_local() * 3


def cut(mesh: DeviceMesh, x: Tensor) -> Any:
    return local(mesh, torch.ones_like(x).repeat(1, 5), Replicate()).redistribute(placements=[Shard(1)]).to_local()


def uneven(mesh: DeviceMesh, x: Tensor) -> Any:
    """A dimension that the number of processes does not divide."""
    partial = local(mesh, x.repeat(1, 7)[:, :13].contiguous(), Partial())
    return partial.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]).to_local()


def product(mesh: DeviceMesh, x: Tensor) -> Any:
    """What the product's operands need is redistributed by DTensor itself."""
    columns, rows = local(mesh, x.t().contiguous(), Shard(1)), local(mesh, x, Shard(0))
    result = columns @ rows
    return result.placements, result.full_tensor()


def returned(mesh: DeviceMesh, x: Tensor) -> Any:
    return local(mesh, x, Shard(0)).exp() + 1, [local(mesh, x, Partial()) * 2]


def asked(mesh: DeviceMesh, x: Tensor) -> Any:
    sharded = local(mesh, x, Shard(0))
    known = (sharded.shape, sharded.placements == (Shard(0),), sharded.device_mesh.size(), sharded.placements[0].dim)
    if isinstance(sharded, DTensor) and sharded.placements[0].is_shard(0):
        return x * sharded.shape[0], *known
    return x, *known


def in_place(mesh: DeviceMesh, x: Tensor) -> Any:
    sharded = local(mesh, x.clone(), Shard(0))
    sharded.mul_(2)
    sharded.add_(sharded)
    return sharded.to_local()


def shaped(mesh: DeviceMesh, x: Tensor) -> Any:
    sharded = local(mesh, x.repeat(1, 2), Shard(0))
    turned = sharded.t().reshape(2, 3, -1).transpose(0, 1)
    return turned.full_tensor(), sharded.sum(1).full_tensor(), sharded.mean().full_tensor()


def normalised(mesh: DeviceMesh, x: Tensor) -> Any:
    wide = local(mesh, x, Shard(1))
    return F.softmax(wide, 1).to_local(), F.layer_norm(local(mesh, x, Shard(0)), (3,)).to_local()


def looked_up(mesh: DeviceMesh, x: Tensor) -> Any:
    """A table whose rows are cut: what other processes hold is masked, then summed."""
    table = local(mesh, x, Shard(0))
    index = local(mesh, torch.arange(4, device=x.device), Replicate())
    return F.embedding(index, table).redistribute(placements=[Replicate()]).to_local()


def made(mesh: DeviceMesh, x: Tensor) -> Any:
    return (zeros(4 * mesh.size(), 3, device_mesh=mesh, placements=[Shard(0)]) + 1).to_local() + x[:4]


def plain_beside(mesh: DeviceMesh, x: Tensor) -> Any:
    """Plain numbers and tensors without dimensions stand beside a DTensor."""
    return (local(mesh, x, Shard(0)) * 2.5 + 1).to_local(), torch.stack([x, x]).sum()


def functions_with_gradients(mesh: DeviceMesh, x: Tensor) -> Any:
    size, rank = mesh.size(), mesh.get_local_rank()
    summed = collectives.all_reduce(x.sin())
    gathered = torch.cat(collectives.all_gather(x * 2))
    given = collectives.broadcast(x.cos() * (rank + 1), 1)
    whole = x.repeat(size, 1)
    exchanged = collectives.all_to_all_single(torch.empty_like(whole), whole)
    return summed, gathered, given, exchanged


PROGRAMS: dict[str, Program] = {
    found.__name__: found
    for found in (
        moved, summed, scattered, exchanged, cut, uneven, product, returned, asked, in_place, shaped, normalised,
        looked_up, made, plain_beside, functions_with_gradients,
    )
}  # fmt: skip
