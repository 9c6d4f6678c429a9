"""One of two gloo processes: every check of test_distributed.py, in one process group. Run as a script: rank, world size, store's file.

Each check gives a list of tensors; what the compiled form gives must equal what the eager form gives, on both ranks.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fusewright
from fusewright.autograd.buckets import Progress
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, Captured, Compiled


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branches(nn.Module):
    """Of the two branches one runs: the other one's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, width: int = 48, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(rows, width, generator=generator)


def train(model: nn.Module, steps: int = 3, accumulate: bool = False) -> list[Tensor]:
    """Gradients of the first step, then the parameters after a few."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():  # type: ignore[operator]
                model(batch(step + 50)).square().mean().backward()
        loss = model(batch(step)).square().mean()
        loss.backward()
        if not step:
            kept += [
                loss.detach(),
                *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
            ]
        optimizer.step()
    return kept + [parameter.detach().clone() for parameter in model.parameters()]


def ddp(**options: Any) -> Callable[[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]], list[Tensor]]:
    steps = {name: options.pop(name) for name in ("accumulate",) if name in options}

    def run(inside: Callable[[nn.Module], nn.Module], outside: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        return train(outside(DDP(inside(net()), bucket_cap_mb=0.05, **options)), **steps)

    return run


def unused(inside: Any, outside: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = outside(DDP(inside(Branches()), find_unused_parameters=True))
    kept = []
    for step, left in enumerate((True, False, True)):
        model.zero_grad()
        model(batch(step, 8), left).square().sum().backward()
        kept += [
            torch.zeros(1) if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()
        ]
    return kept


def sizes(inside: Any, outside: Any) -> list[Tensor]:
    """Batches of several sizes: from the second one on the size is symbolic."""
    model = outside(DDP(inside(net()), bucket_cap_mb=0.05))
    for rows in (6, 8, 10):
        model(batch(rows, rows=rows)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def hooks(inside: Any, outside: Any) -> list[Tensor]:
    """Hooks on parameters see the gradient before DDP averages it."""
    model = outside(DDP(inside(net())))
    seen: list[Tensor] = []
    next(model.parameters()).register_hook(lambda gradient: seen.append(gradient.clone()))
    model(batch(0)).square().mean().backward()
    return [*seen, *(parameter.grad.clone() for parameter in model.parameters())]


def steps(inside: Any, outside: Any) -> list[Tensor]:
    """A whole training step around the module is compiled: the module's own communication stays outside of graphs."""
    model = DDP(inside(net()), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    call = outside(step)
    losses = [call(batch(number)).detach() for number in range(4)]
    return losses + [parameter.detach().clone() for parameter in model.parameters()]


def sharded(inside: Any, outside: Any) -> list[Tensor]:
    """FSDP2: each block is a unit of its own."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = inside(block)
        fully_shard(model.blocks[index])
    fully_shard(model)
    model = outside(model)
    model(batch(0)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def collective(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], list[Tensor]]:
    def run(inside: Any, outside: Any) -> list[Tensor]:
        call = outside(function)
        return [call(batch(step)) for step in range(2)]

    return run


def reduce_in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def functional(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as funcol

    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x + 1)
    return torch.cat(parts) * 2


def same(value: Any) -> Any:
    return value


CHECKS: dict[str, Any] = {
    "ddp": ddp(),
    "ddp static graph": ddp(static_graph=True),
    "ddp gradient as bucket view": ddp(gradient_as_bucket_view=True),
    "ddp accumulation": ddp(accumulate=True),
    "ddp unused parameters": unused,
    "ddp hooks": hooks,
    "ddp sizes": sizes,
    "ddp training step": steps,
    "fsdp": sharded,
    "all_reduce": collective(reduce_in_place),
    "functional all_reduce": collective(functional),
    "all_gather": collective(gathered),
}


@contextmanager
def watched(log: list[str]) -> Iterator[None]:
    """Notes each part of a backward as it begins."""
    run = Progress.run

    def noted(progress: Progress, index: int) -> list[Any]:
        log.append(f"part {index} of {len(progress.parts)}")
        return run(progress, index)

    Progress.run = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Progress.run = run  # type: ignore[method-assign]


def overlap(inside: Any, outside: Any) -> dict[str, Any]:
    """Into how many parts the backward was cut, and whether gradients arrived between them."""
    log: list[str] = []
    model = outside(DDP(inside(net()), bucket_cap_mb=0.05))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    for rows in (6, 8, 10):  # the last one's backward has symbolic sizes
        log.clear()
        with watched(log):
            model(batch(0, rows=rows)).square().mean().backward()
    parts = [entry for entry in log if entry != "gradient"]
    return {
        "parts": len(parts),
        "overlaps": bool(parts) and "gradient" in log[: log.index(parts[-1])],
        "gradients": log.count("gradient"),
    }


def compare(name: str, check: Any, report: dict[str, Any]) -> None:
    expected = check(same, same)
    for form, inside, outside in (("inside", fusewright.compile, same), ("outside", same, fusewright.compile)):
        if form == "inside" and name.endswith(("all_reduce", "all_gather")):
            continue
        compiles: list[Any] = []
        try:
            with STREAM.listening(compiles.append):
                found = check(inside, outside)
            assert len(found) == len(expected), f"{len(found)} results, {len(expected)} expected"
            for position, (ours, theirs) in enumerate(zip(found, expected)):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=f"result {position}")
            report[f"{name} {form}"] = {
                "graphs": sum(isinstance(event, Captured) and event.graph is not None for event in compiles),
                "compiles": sum(isinstance(event, Compiled) for event in compiles),
            }
            if name == "ddp":
                report[f"{name} {form}"] |= overlap(inside, outside)
        except Exception:
            report[f"{name} {form}"] = {"error": traceback.format_exc()}
        fusewright.reset()


def main(rank: int, size: int, store: str, out: str) -> None:
    warnings.simplefilter("error", InternalErrorWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    report: dict[str, Any] = {}
    for name, check in CHECKS.items():
        compare(name, check, report)
        dist.barrier()
    dist.destroy_process_group()
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
