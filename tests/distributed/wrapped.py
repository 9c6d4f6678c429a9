"""What programs do with models under FSDP2 and DistributedDataParallel besides training them: each trains a few steps
like those of models.py, and gives losses, gradients and parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.distributed.models import WRAPPERS, Form, Llama, Make, _whole, device, tokens


def numbers(step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step)).to(device())


def of_tokens(step: int) -> Tensor:
    return tokens(step)[0]


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device())


def llama() -> Any:
    torch.manual_seed(0)
    return Llama().to(device())


def each(model: Any, names: Any, form: Callable[[Any], Any]) -> Any:
    for name in names:
        model[name] = form(model[name])
    return model


def adam(model: Any) -> torch.optim.Optimizer:
    """With an epsilon that keeps it from making a step of the rounding error of a gradient that is nearly 0."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def step_of(model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(
    make: Callable[[Form], Any], batch: Callable[[int], Tensor], before: Callable[[Any, Tensor], None] | None = None
) -> Make:
    """before: what is done with the model in front of each step."""

    def run(inside: Form, outside: Form) -> list[Tensor]:
        model = outside(make(inside))
        optimizer = adam(model)
        kept = []
        for step in range(4):
            if before is not None:
                before(model, batch(50 + step))
            kept.append(step_of(model, optimizer, batch(step)))
        return kept + [_whole(parameter.detach()).float() for parameter in model.parameters()]

    return run


def sharded_layers(**settings: Any) -> Callable[[Form], Any]:
    def make(inside: Form) -> Any:
        model = each(layers(), (0, 2, 4), lambda layer: fully_shard(inside(layer), **settings))
        return fully_shard(model, **settings)

    return make


def without_communication(model: Any, inputs: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    model(inputs).square().mean().backward()
    model.set_requires_gradient_sync(True)


def checkpointed(within: bool) -> Callable[[Form], Any]:
    """Activations are computed again in the backward: of a compiled layer, or within one."""

    def make(inside: Form) -> Any:
        model = llama()
        for index, layer in enumerate(model.layers):
            wrapped = inside(checkpoint_wrapper(layer)) if within else checkpoint_wrapper(inside(layer))
            model.layers[index] = fully_shard(wrapped)
        return fully_shard(model)

    return make


def saved(wrapper: str) -> Make:
    """torch.distributed.checkpoint: what is loaded goes on as what was saved does."""

    def run(inside: Form, outside: Form) -> list[Tensor]:
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        model = outside(WRAPPERS[wrapper](llama(), inside))
        optimizer = adam(model)
        kept = [step_of(model, optimizer, of_tokens(step)) for step in range(2)]
        found, of_optimizer = get_state_dict(model, optimizer)
        assert found.keys() == dict(llama().named_parameters()).keys()
        dist.checkpoint.save({"model": found, "optimizer": of_optimizer}, checkpoint_id=folder[0])
        kept.append(step_of(model, optimizer, of_tokens(2)))
        other = outside(WRAPPERS[wrapper](llama(), inside))
        optimizer = adam(other)
        step_of(other, optimizer, of_tokens(7))
        found, of_optimizer = get_state_dict(other, optimizer)
        dist.checkpoint.load({"model": found, "optimizer": of_optimizer}, checkpoint_id=folder[0])
        set_state_dict(other, optimizer, model_state_dict=found, optim_state_dict=of_optimizer)
        again = step_of(other, optimizer, of_tokens(2))
        torch.testing.assert_close(again, kept[-1])
        return [*kept, again, *(_whole(parameter.detach()) for parameter in other.parameters())]

    return run


HALF = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)  # exact, unlike bfloat16
ON_CPU = CPUOffloadPolicy(pin_memory=False)


def of_one(inside: Form) -> Any:
    return fully_shard(inside(layers()))


WRAPPED: dict[str, tuple[Make, str, tuple[int, ...]]] = {
    "fsdp2 of a sequence inside": (trained(of_one, numbers), "inside", (2,)),
    "fsdp2 of a sequence outside": (trained(of_one, numbers), "outside", (2,)),
    "fsdp2 of layers inside": (trained(sharded_layers(), numbers), "inside", (2,)),
    "fsdp2 mixed precision inside": (trained(sharded_layers(mp_policy=HALF), numbers), "inside", (2,)),
    "fsdp2 offloaded inside": (trained(sharded_layers(offload_policy=ON_CPU), numbers), "inside", (2,)),
    "fsdp2 kept inside": (trained(sharded_layers(reshard_after_forward=False), numbers), "inside", (2,)),
    "fsdp2 accumulation inside": (trained(sharded_layers(), numbers, without_communication), "inside", (2,)),
    "fsdp2 accumulation outside": (trained(of_one, numbers, without_communication), "outside", (2,)),
    "fsdp2 checkpointed inside": (trained(checkpointed(False), of_tokens), "inside", (2,)),
    "fsdp2 checkpointed within inside": (trained(checkpointed(True), of_tokens), "inside", (2,)),
    "fsdp2 saved inside": (saved("fsdp2"), "inside", (2,)),
    "fsdp2 saved outside": (saved("fsdp2"), "outside", (4,)),
    "ddp saved inside": (saved("ddp"), "inside", (2,)),
}
