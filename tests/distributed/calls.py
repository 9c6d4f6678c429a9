"""Programs that call collectives: each is one graph under every backend, and gives what eager gives on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

world: Any = dist.group


def all_reduce(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def all_reduce_of_an_input(x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x + 1


def reductions(x: Tensor) -> list[Tensor]:
    made = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        y = x + 1
        dist.all_reduce(y, op=op)
        made.append(y)
    return made


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x + 1)
    return torch.cat(parts[::-1]) * 2


def all_gather_into_tensor(x: Tensor) -> Tensor:
    made = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(made, x.sin())
    return made.cos()


def reduce_scatter_tensor(x: Tensor) -> Tensor:
    whole = torch.cat([x * (rank + 1) for rank in range(dist.get_world_size())])
    made = torch.empty_like(x)
    dist.reduce_scatter_tensor(made, whole)
    return made + dist.get_rank()


def all_to_all_single(x: Tensor) -> Tensor:
    whole = torch.cat([x + rank for rank in range(dist.get_world_size())])
    made = torch.empty_like(whole)
    dist.all_to_all_single(made, whole)
    return made * 2


def broadcast(x: Tensor) -> Tensor:
    y = x * (dist.get_rank() + 1)
    dist.broadcast(y, src=dist.get_world_size() - 1)
    return y - x


def asynchronous(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    first = dist.all_reduce(y, async_op=True)
    second = dist.all_reduce(z, op=dist.ReduceOp.MAX, async_op=True)
    between = x.exp()
    second.wait()
    first.wait()
    return y + z + between


def never_used(x: Tensor) -> Tensor:
    """The result is dead, the other ranks wait for it nevertheless."""
    dist.all_reduce(x * 2)
    return x + 1


def twice_the_same(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", world.WORLD) + funcol.all_reduce(x, "sum", world.WORLD)


def functional(x: Tensor) -> Tensor:
    group = world.WORLD
    gathered = funcol.all_gather_tensor(x, gather_dim=1, group=group)
    summed = funcol.reduce_scatter_tensor(gathered.repeat(dist.get_world_size(), 1), "sum", 0, group)
    return funcol.broadcast(summed, 0, group) + funcol.all_reduce(x.sum(), "max", group)


def operators(x: Tensor) -> Tensor:
    ops, name = torch.ops._c10d_functional, world.WORLD.group_name
    started = ops.all_reduce(x * 2, "sum", name)
    coalesced = ops.all_gather_into_tensor_coalesced([x, x + 1], dist.get_world_size(), name)
    first, second = map(ops.wait_tensor, coalesced)
    return first.sum() + second.mean() + ops.wait_tensor(ops.wait_tensor(started))


def exchanged_unevenly(x: Tensor) -> Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    sent = [1 + (rank + other) % 2 for other in range(size)]
    whole = x.repeat(size, 1)[: sum(sent)]
    return funcol.all_to_all_single(whole, sent, sent, world.WORLD) * 2


def over_a_mesh(x: Tensor) -> Tensor:
    over = mesh(x.device.type)
    y = x * over.size() + over.get_local_rank()
    dist.all_reduce(y, group=over.get_group())
    return y + funcol.all_reduce(x, "sum", over) + funcol.all_reduce(x, "max", (over, 0)) * world.WORLD.rank()


def reduced(x: Tensor) -> Tensor:
    y = x * 2
    dist.reduce(y, dst=dist.get_world_size() - 1)
    return y + 1 if dist.get_rank() == dist.get_world_size() - 1 else x  # elsewhere nobody says what is in it


def gathered(x: Tensor) -> Any:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    dist.gather(x.exp(), parts, dst=1)
    return [part * 2 for part in parts or [x]]


def scattered(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    parts = [x + rank for rank in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.scatter(made, parts, src=0)
    return made.sin()


def sent(x: Tensor) -> Tensor:
    """From each to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = torch.zeros_like(x)
    if rank % 2:
        source = dist.recv(made, src=(rank - 1) % size)
        dist.send(x * 2, dst=(rank + 1) % size)
    else:
        dist.send(x * 2, dst=(rank + 1) % size)
        source = dist.recv(made, src=(rank - 1) % size, tag=0)
    return made * (source + 1)


def lists(x: Tensor) -> Tensor:
    size = dist.get_world_size()
    made, exchanged = torch.empty_like(x), [torch.empty_like(x) for _ in range(size)]
    dist.reduce_scatter(made, [x * rank for rank in range(size)])
    if x.device.type == "cuda":  # gloo has no all_to_all of lists
        work = dist.all_to_all(exchanged, [x + rank for rank in range(size)], async_op=True)
        work.wait()
    else:
        exchanged = [x] * size
    return torch.stack([made, *exchanged]).sum(0)


def passed_on(x: Tensor) -> Tensor:
    """From each to the next, both ways at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = torch.zeros_like(x)
    begin = [lambda: dist.isend(x * 2, (rank + 1) % size), lambda: dist.irecv(made, src=(rank - 1) % size)]
    works = [call() for call in (begin[::-1] if rank % 2 else begin)]  # NCCL's run one after the other
    between = x.exp()
    for work in works:
        work.wait()
    return made + between


def in_a_batch(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = torch.zeros_like(x), torch.zeros_like(x)
    before, behind = (rank - 1) % size, (rank + 1) % size
    batch = [
        dist.P2POp(dist.isend, x.sin(), behind, tag=1),
        dist.P2POp(dist.isend, x.cos(), before, tag=2),
        dist.P2POp(dist.irecv, left, before, tag=1),
        dist.P2POp(dist.irecv, right, behind, tag=2),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return left * right


def behind_barriers(x: Tensor) -> Tensor:
    dist.barrier()
    y = x * 2
    work = dist.barrier(async_op=True)
    z = y.exp()
    work.wait()
    return z


def without_waiting(x: Tensor) -> Tensor:
    y, z, given = x * 2, torch.zeros_like(x), x.exp()
    works = [dist.reduce(y, dst=0, async_op=True), dist.broadcast(given, src=1, async_op=True)]
    parts = [x + rank for rank in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    works.append(dist.scatter(z, parts, src=0, async_op=True))
    into = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    works.append(dist.gather(x, into, dst=1, async_op=True))
    for work in works[::-1]:
        work.wait()
    return torch.stack([z, given, *(into or [])]) + (y if dist.get_rank() == 0 else x)


@functools.cache
def mesh(kind: str) -> Any:
    return dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))


CALLS: dict[str, Callable[[Tensor], Any]] = {
    function.__name__: function
    for function in (
        all_reduce, all_reduce_of_an_input, reductions, all_gather, all_gather_into_tensor, reduce_scatter_tensor,
        all_to_all_single, broadcast, asynchronous, never_used, twice_the_same, functional, operators,
        exchanged_unevenly, over_a_mesh, reduced, gathered, scattered, sent, lists, passed_on, in_a_batch,
        behind_barriers, without_waiting,
    )
}  # fmt: skip
