"""Models whose layers or sequences are cut among processes: pipelines, context parallelism, and tensor parallelism below
FSDP2. Each gives its losses, then gradients and parameters, like those of models.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import experimental

from tests.distributed.models import (
    STEPS,
    Block,
    Form,
    Gated,
    Llama,
    Make,
    Separate,
    device,
    made,
    parallelized,
    shared,
    tokens,
    train,
)

try:  # PyTorch moves these
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
except ImportError:
    from torch.distributed.tensor.experimental import _attention as ring  # type: ignore[no-redef]

group: Any = dist.group
aten = torch.ops.aten


def pipeline(schedule: Any) -> Make:
    """A stage a process, each compiled by itself."""

    def run(inside: Form, outside: Form) -> list[Tensor]:
        rank, size, width = dist.get_rank(), dist.get_world_size(), 16
        torch.manual_seed(rank)
        layers: list[nn.Module] = [Block(width, True, Gated(width))]
        layers = [nn.Embedding(31, width), *layers] if rank == 0 else layers
        layers = [*layers, nn.Linear(width, 31)] if rank == size - 1 else layers
        net = nn.Sequential(*layers)
        net.to(device())
        stage = PipelineStage(inside(net), rank, size, device())
        runs = schedule(stage, n_microbatches=4, loss_fn=lambda y, wanted: F.cross_entropy(y.flatten(0, 1), wanted))
        optimizer, kept = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), []
        for step in range(STEPS):
            given, wanted = shared(step)
            optimizer.zero_grad()
            losses: list[Tensor] = []
            last: dict[str, Any] = {"target": wanted, "losses": losses} if rank == size - 1 else {}
            runs.step(*([given] if rank == 0 else []), **last)
            kept += [loss.detach() for loss in losses]
            if not step % 5:
                kept += [parameter.grad.clone() for parameter in net.parameters()]
            optimizer.step()
        return kept + [parameter.detach() for parameter in net.parameters()]

    return run


class _Ring(torch.autograd.Function):
    """Causal attention over a sequence that is cut among the processes, by PyTorch's own ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        op: Any = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = ring._templated_ring_attention(
            group.WORLD, 2, op, query=q, key=k, value=v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        found = ring._templated_ring_attention_backward(
            group.WORLD, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad_out=gradient,
            grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return found[:3]


class InARing(Separate):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(_Ring.apply(q, k, v).transpose(1, 2).flatten(2))


class Gathering(Separate):
    """Each process has its part of the queries, and gathers all keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (funcol.all_gather_tensor_autograd(one.contiguous(), 2, group.WORLD) for one in (k, v))
        place = torch.arange(q.shape[2], device=x.device) + dist.get_rank() * q.shape[2]
        mask = place[:, None] >= torch.arange(k.shape[2], device=x.device)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def context_parallel(attention: Any) -> Make:
    def create() -> Any:
        model = Llama(width=32)
        for block in model.layers:
            block.attention = attention(32, 4)
        return model

    return made(create, "alone", lambda step: tokens(step, 2))


def in_pytorchs_context(inside: Form, outside: Form) -> list[Tensor]:
    """`context_parallel`, which has no attention for CPUs: sequences are cut where it is entered."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Llama(width=32)
    for block in model.layers:
        block.attention = Separate(32, 4)
    call = outside(model.to(device()))
    long = [one.view(4, -1).repeat(1, 8 * dist.get_world_size()) for one in shared(0)]  # attention's blocks are of 32
    call(long[0])  # compiled before the context changes what attention is
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        given, wanted = (one.clone() for one in long)
        optimizer.zero_grad()
        with experimental.context_parallel(mesh, buffers=[given, wanted], buffer_seq_dims=[1, 1]):
            loss = F.cross_entropy(call(given).flatten(0, -2), wanted.flatten())
            loss.backward()
        kept += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return kept


def sharded_in_two_ways(inside: Form, outside: Form) -> list[Tensor]:
    """Tensor parallelism below FSDP2, on a plane of processes."""
    plane = init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    model = parallelized(False, plane["model"])
    for index, layer in enumerate(model.layers):
        model.layers[index] = fully_shard(inside(layer), mesh=plane["data"])
    batch = lambda step: shared(10 * step + plane["data"].get_local_rank())
    return train(outside(fully_shard(model, mesh=plane["data"])), batch)


ON_GPUS_ONLY = frozenset({"llama fsdp1 inside", "vit fsdp1 outside", "context_parallel outside"})
ON_CPUS_ONLY = frozenset({"ring attention whole", "fsdp2 offloaded inside"})  # NCCL gathers nothing on a CPU
PARALLEL: dict[str, tuple[Make, str, tuple[int, ...]]] = {
    "pipeline GPipe inside": (pipeline(ScheduleGPipe), "inside", (2,)),
    "pipeline 1F1B inside": (pipeline(Schedule1F1B), "inside", (2, 4)),
    "ring attention whole": (context_parallel(InARing), "whole", (2, 4)),
    "context_parallel outside": (in_pytorchs_context, "outside", (2,)),
    "gathered context whole": (context_parallel(Gathering), "whole", (2,)),
    "tensor parallel fsdp2 inside": (sharded_in_two_ways, "inside", (2, 4)),
    "tensor parallel fsdp2 outside": (sharded_in_two_ways, "outside", (4,)),
}
