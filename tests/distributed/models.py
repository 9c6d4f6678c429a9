"""Small models trained for 20 steps on several processes; each gives its losses, then gradients and parameters.

`inside` compiles the model before it is wrapped or sharded, `outside` afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def device() -> torch.device:
    """That of the process group: gloo's the CPU, NCCL's this process's GPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


Form = Callable[[Any], Any]
group: Any = dist.group


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """Attention whose heads can be cut among ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.each = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, causal: bool, feed_forward: nn.Module) -> None:
        super().__init__()
        norm = nn.RMSNorm if causal else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.attention, self.feed_forward = Attention(width, 2, causal), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Llama(nn.Module):
    def __init__(
        self, feed_forward: Callable[[int], nn.Module] = Gated, width: int = 16, layers: int = 2, vocabulary: int = 31
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, True, feed_forward(width)) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.zeros(1, 16, width))
        feed_forward = (
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in "12"
        )
        self.layers = nn.ModuleList(Block(width, False, module) for module in feed_forward)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.convolutions(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Residual(8) for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """An expert a rank; the tokens of each rank are cut evenly among them, sent there, and sent back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, width)
        with torch.random.fork_rng():
            torch.manual_seed(dist.get_rank())
            self.expert = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.router(x)).flatten(0, 1)
        sizes = [tokens.shape[0] // dist.get_world_size()] * dist.get_world_size()
        sent = funcol.all_to_all_single_autograd(tokens, sizes, sizes, group.WORLD)
        return funcol.all_to_all_single_autograd(self.expert(sent), sizes, sizes, group.WORLD).view_as(x)


class _Entered(torch.autograd.Function):
    """What enters a column-parallel layer is the same on all ranks: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return funcol.all_reduce(gradient.contiguous(), "sum", group.WORLD)


class _Left(torch.autograd.Function):
    """What leaves a row-parallel layer is summed, and its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def parallelized(of_loss: bool, mesh: Any = None) -> Any:
    """A Llama by parallelize_module. of_loss: between the layers the sequence is cut too, and the logits stay cut."""
    model = Llama(width=32, vocabulary=32)
    for block in model.layers:
        block.attention = Separate(32, 4)
    model.to(device())
    whole, between = Replicate(), Shard(1) if of_loss else Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    logits = Shard(-1) if of_loss else whole
    top: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=not of_loss),
    }
    layer: dict[str, Any] = {"attention.out": rows, "feed_forward.down": rows}
    for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
        layer[name] = columns
    if of_loss:
        gathered = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,))
        layer |= {"attention": gathered, "feed_forward": gathered}
        layer |= {"first": SequenceParallel(), "second": SequenceParallel()}
        top["norm"] = SequenceParallel()
    mesh = mesh or dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.layers:
        parallelize_module(block, mesh, layer)
    return parallelize_module(model, mesh, top)


class TensorParallel(nn.Module):
    """A gated layer whose columns, then rows, are cut among the ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(dist.get_rank())
            self.part = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        return _Left.apply(self.part(_Entered.apply(x)))  # type: ignore[no-any-return]


def tokens(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    made = torch.randint(31, (rows, 9), generator=generator).to(device())
    return made[:, :-1].contiguous(), made[:, 1:].flatten()


def shared(step: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks."""
    made = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step)).to(device())
    return made[:, :-1].contiguous(), made[:, 1:].flatten()


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    made = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(10, (4,), generator=generator)
    return made[0].to(device()), made[1].to(device())


def train(model: Any, batch: Callable[[int], tuple[Tensor, Tensor]]) -> list[Tensor]:
    # on a GPU eager's one call for all parameters refuses plain ones beside distributed ones
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    kept: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, wanted = batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), wanted)
        loss.backward()
        kept.append(_whole(loss.detach()))
        if not step % 5:  # of FSDP1's parameters a process may have nothing
            kept += [_whole(one.grad) for one in model.parameters() if one.grad is not None]
        optimizer.step()
    return kept + [_whole(parameter.detach()) for parameter in model.parameters()]


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()  # type: ignore[no-any-return]


def _sharded(model: Any, inside: Form) -> Any:
    """FSDP2, each layer a unit of its own."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = fully_shard(inside(layer))
    return fully_shard(model)


def _flat(model: Any, inside: Form) -> Any:
    """FSDP1, each layer a unit of its own."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(inside(layer), device_id=device(), use_orig_params=True)
    return FullyShardedDataParallel(model, device_id=device(), use_orig_params=True)


WRAPPERS: dict[str, Callable[[Any, Form], Any]] = {
    "ddp": lambda model, inside: DistributedDataParallel(inside(model), bucket_cap_mb=0.01),
    "fsdp2": _sharded,
    "fsdp1": _flat,
    "alone": lambda model, inside: inside(model),
}
Make = Callable[[Form, Form], list[Tensor]]


def made(create: Callable[[], Any], wrapper: str, batch: Callable[[int], tuple[Tensor, Tensor]]) -> Make:
    def run(inside: Form, outside: Form) -> list[Tensor]:
        torch.manual_seed(0)
        return train(outside(WRAPPERS[wrapper](create().to(device()), inside)), batch)

    return run


def of_loss(inside: Form, outside: Form) -> list[Tensor]:
    torch.manual_seed(0)
    with loss_parallel():
        return train(outside(parallelized(True)), shared)


LLAMA, VIT, RESNET = (Llama, tokens), (ViT, images), (ResNet, images)
EXPERTS, PARALLEL = (lambda: Llama(Experts), tokens), (lambda: Llama(TensorParallel), lambda step: tokens(step % 1))
# name: (what trains it, what is compiled, the world sizes that run it)
MODELS: dict[str, tuple[Make, str, tuple[int, ...]]] = {
    "llama ddp inside": (made(LLAMA[0], "ddp", LLAMA[1]), "inside", (2,)),
    "llama ddp outside": (made(LLAMA[0], "ddp", LLAMA[1]), "outside", (4,)),
    "llama fsdp2 inside": (made(LLAMA[0], "fsdp2", LLAMA[1]), "inside", (2,)),
    "llama fsdp2 outside": (made(LLAMA[0], "fsdp2", LLAMA[1]), "outside", (4,)),
    # PyTorch refuses it on a CPU
    "llama fsdp1 inside": (made(LLAMA[0], "fsdp1", LLAMA[1]), "inside", (2,)),
    "vit fsdp1 outside": (made(VIT[0], "fsdp1", VIT[1]), "outside", (2,)),
    "vit ddp inside": (made(VIT[0], "ddp", VIT[1]), "inside", (4,)),
    "vit ddp outside": (made(VIT[0], "ddp", VIT[1]), "outside", (2,)),
    "vit fsdp2 outside": (made(VIT[0], "fsdp2", VIT[1]), "outside", (2,)),
    "resnet ddp inside": (made(RESNET[0], "ddp", RESNET[1]), "inside", (2,)),
    "resnet fsdp2 inside": (made(RESNET[0], "fsdp2", RESNET[1]), "inside", (2,)),
    "experts whole": (made(EXPERTS[0], "alone", EXPERTS[1]), "whole", (2, 4)),
    "parallelize_module whole": (made(lambda: parallelized(False), "alone", shared), "whole", (2, 4)),
    "loss parallel whole": (of_loss, "whole", (2, 4)),
    "tensor parallel whole": (made(PARALLEL[0], "alone", PARALLEL[1]), "whole", (2, 4)),
}
