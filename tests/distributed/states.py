"""What programs do with distributed parameters besides calling them: each compares the compiled form with eager's, on
every rank, and takes a mesh over all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusewright
from fusewright.base.events import STREAM, PlanLoaded
from fusewright.tools.overlaps import overlaps
from tests.distributed.models import device


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def layers(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Layers().to(device()), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def shared(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value  # type: ignore[no-any-return]


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.requires_grad == theirs.requires_grad
    torch.testing.assert_close(whole(ours), whole(theirs), rtol=1e-5, atol=1e-5)


def alike(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        same(one, other)
        if other.grad is not None:
            same(one.grad, other.grad)


def placements_are_guarded(mesh: DeviceMesh) -> None:
    def function(x: Any) -> Any:
        return (x * 2).sum(0)

    compiled = fusewright.compile(function, fullgraph=True)
    kinds: list[Placement] = [Shard(0), Replicate(), Shard(1), Partial(), Shard(0)]
    for kind in kinds:
        x = DTensor.from_local(torch.randn(4, 4, device=device()), mesh, [kind])
        ours, theirs = compiled(x), function(x)
        assert ours.placements == theirs.placements
        same(ours, theirs)


def optimizers(mesh: DeviceMesh) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        ours, theirs = layers(mesh), layers(mesh)
        mine, its = (kind(model.parameters(), lr=0.1) for model in (ours, theirs))
        steps = fusewright.compile(mine.step), its.step
        for number in range(3):
            for model, optimizer, step in ((ours, mine, steps[0]), (theirs, its, steps[1])):
                optimizer.zero_grad()
                model(shared(number, 4, 8)).square().mean().backward()
                step()
        alike(ours, theirs)


def written_in_place(mesh: DeviceMesh) -> None:
    def function(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        return model(x).square().sum()  # type: ignore[no-any-return]

    ours, theirs = layers(mesh), layers(mesh)
    compiled = fusewright.compile(function, fullgraph=True)
    for _ in range(3):
        compiled(ours, shared(1, 2, 8)).backward()
        function(theirs, shared(1, 2, 8)).backward()
    alike(ours, theirs)


def gradients_accumulate(mesh: DeviceMesh) -> None:
    """A result is distributed, and its gradient has other placements than it."""

    def function(weight: Any, x: Any) -> Any:
        return (x @ weight.t()).relu()

    x = DTensor.from_local(shared(2, 4, 8), mesh, [Replicate()])
    kinds: list[Placement] = [Shard(0), Replicate(), Shard(1)]
    for kind in kinds:
        ours, theirs = (nn.Parameter(distribute_tensor(shared(1, 8, 8), mesh, [kind])) for _ in "12")
        compiled = fusewright.compile(function, fullgraph=True)
        for _ in range(2):
            results = compiled(ours, x), function(theirs, x)
            assert results[0].placements == results[1].placements
            for result in results:
                result.sum().backward()
        same(ours.grad, theirs.grad)


def gradients_turned_on_inside(mesh: DeviceMesh) -> None:
    def function(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        total = model.first.weight.sum().full_tensor()
        with torch.enable_grad():
            return model(x).square().sum(), total

    ours, theirs = layers(mesh), layers(mesh)
    with torch.no_grad():
        found, expected = fusewright.compile(function)(ours, shared(1, 2, 8)), function(theirs, shared(1, 2, 8))
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    found[0].backward()
    expected[0].backward()
    alike(ours, theirs)


def a_mask_leaves(mesh: DeviceMesh) -> None:
    """The placement of the result holds a tensor of the call; so it runs eagerly."""
    table = distribute_tensor(shared(1, 8, 4), mesh, [Shard(0)])
    index = DTensor.from_local(torch.arange(8, device=device()), mesh, [Replicate()])

    def function(index: Any, table: Any) -> Any:
        return F.embedding(index, table)

    compiled = fusewright.compile(function)
    for _ in range(2):
        results = [call(index, table).redistribute(placements=[Replicate()]) for call in (compiled, function)]
        same(*results)


def settings_are_guarded(mesh: DeviceMesh) -> None:
    def function(x: Any, y: Tensor) -> Any:
        return (x * y).full_tensor()

    x, y = DTensor.from_local(torch.randn(4, 4, device=device()), mesh, [Shard(0)]), torch.ones(4 * mesh.size(), 4, device=device())
    compiled = fusewright.compile(function)
    with implicit_replication():
        same(compiled(x, y), function(x, y))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        compiled(x, y)


def on_two_dimensions(mesh: DeviceMesh) -> None:
    """Tensor parallelism below FSDP2."""
    if mesh.size() < 4:
        return
    plane = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "model"))
    results: list[list[Tensor]] = []
    for form in (lambda module: module, fusewright.compile):
        torch.manual_seed(0)
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        net = fully_shard(form(parallelize_module(Layers().to(device()), plane["model"], plan)), mesh=plane["data"])
        optimizer, kept = torch.optim.AdamW(net.parameters(), lr=0.01), []
        for step in range(5):
            optimizer.zero_grad()
            loss = net(shared(10 * step + plane["data"].get_local_rank(), 4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(loss.detach())
        results.append(kept + [whole(parameter.detach()) for parameter in net.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def works_are_waited_for_by_eager_code(mesh: DeviceMesh) -> None:
    """What begins in front of a break is waited for behind it; of a work more can be asked than to wait."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def over_a_break(x: Tensor) -> Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        fusewright.graph_break()
        z = x.exp()
        work.wait()
        return y + z

    def message_over_a_break(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        begin = [lambda: dist.isend(x, (rank + 1) % size), lambda: dist.irecv(made, (rank - 1) % size)]
        works = [call() for call in (begin[::-1] if rank % 2 else begin)]
        fusewright.graph_break()
        for work in works:
            work.wait()
        return made * 2

    def asked_for_its_future(x: Tensor) -> Tensor:
        y = x * 3
        (found,) = dist.all_reduce(y, async_op=True).get_future().wait()
        return found + 1

    def left(x: Tensor) -> tuple[Tensor, Any]:
        y = x * 2
        return y, dist.all_reduce(y, async_op=True)

    for function in (over_a_break, message_over_a_break, asked_for_its_future, left):
        compiled = fusewright.compile(function)
        for step in range(2):
            results = []
            for call in (compiled, function):
                found = call(shared(10 * rank + step, 3, 4))
                if isinstance(found, tuple):
                    assert found[1].wait(), "a work that eager code was given"
                    found[1].is_completed()  # NCCL's may not be: it is waited for by a stream
                    found = found[0]
                results.append(found)
            same(*results)


def neighbours_are_joined(mesh: DeviceMesh) -> None:
    """Where all processes ask for it, and their graphs are alike; else each stays as it is."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def function(x: Tensor, differs: bool) -> list[Tensor]:
        ys = [x + 1, x * 2, x.sum() * (rank if differs else 1)]
        for y in ys:
            dist.all_reduce(y)
        gathered = [torch.empty(size * len(x), 3, device=x.device) for _ in "12"]
        for made, given in zip(gathered, (x.sin(), x.cos())):
            dist.all_gather_into_tensor(made, given)
        scattered = [torch.empty_like(x) for _ in "12"]
        for made, given in zip(scattered, gathered):
            dist.reduce_scatter_tensor(made, given)
        return ys + scattered

    kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    for case in ("alike", "other graphs", "one asks"):
        fusewright.reset()
        asks, differs = case != "one asks" or rank == 0, case == "other graphs"
        compiled = fusewright.compile(function, fullgraph=True, options={"join_collectives": asks})
        found: list[str] = []
        hear = lambda event: found.extend(
            one.operator for one in (overlaps(event.call_plan) if isinstance(event, PlanLoaded) else ())
        )
        for step, rows in enumerate((4, 4, 6, 8)):
            with STREAM.listening(hear):
                ours = compiled(shared(10 * rank + step, rows, 3), differs)
            for one, other in zip(ours, function(shared(10 * rank + step, rows, 3), differs), strict=True):
                same(one, other)
        wanted = [kind for kind, count in zip(kinds, (3, 2, 2)) for _ in range(count)]
        if case == "alike":
            wanted = [f"{kind}_coalesced" for kind in kinds]
        assert found[: len(wanted)] == wanted, (case, found)


def products_are_cut(mesh: DeviceMesh) -> None:
    """Products beside collectives, in pieces of rows; gradients too."""
    rank, size = mesh.get_local_rank(), mesh.size()
    group: Any = dist.group
    seed = torch.Generator().manual_seed(5)
    w, b = (torch.randn(*shape, generator=seed).to(device()) for shape in ((8, 8), (8,)))

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        gathered = funcol.all_gather_tensor_autograd(x, 0, group.WORLD)
        scattered = funcol.reduce_scatter_tensor_autograd(torch.cat([x] * size) @ w, "sum", 0, group.WORLD)
        summed = funcol.all_reduce(torch.addmm(b, x, w.detach()), "sum", group.WORLD)
        return gathered @ w, F.relu(scattered), summed.view(2, -1, 8) + 1

    found: list[str] = []
    hear = lambda event: found.extend(
        one.operator for one in (overlaps(event.call_plan) if isinstance(event, PlanLoaded) else ())
    )
    settings: dict[str, Any] = {"cut_collectives": 2, "join_collectives": True, "pack_weights": False}
    compiled = fusewright.compile(function, fullgraph=True, dynamic=False, options=settings)
    for rows in (4, 8):
        leaves = [(shared(rank, rows, 8).requires_grad_(), w.clone().requires_grad_()) for _ in "12"]
        with STREAM.listening(hear):
            results = compiled(*leaves[0]), function(*leaves[1])
        for one, other in zip(*results, strict=True):
            same(one, other)
        for result in results:
            sum(one.square().sum() for one in result).backward()  # type: ignore[union-attr]
        for one, other in zip(*leaves, strict=True):
            same(one.grad, other.grad)
    # a version: three collectives cut in two, but for the gather, which is kept for the gradient of w
    assert Counter(found) == {"all_reduce": 6, "all_gather_into_tensor": 4, "reduce_scatter_tensor": 8}, found
    found.clear()
    with torch.no_grad(), STREAM.listening(hear):
        for one, other in zip(*(call(*leaves[0]) for call in (compiled, function)), strict=True):
            same(one, other)
    assert found.count("all_gather_into_tensor") == 2, found


STATES: dict[str, Callable[[DeviceMesh], None]] = {
    found.__name__: found
    for found in (
        placements_are_guarded, optimizers, written_in_place, gradients_accumulate, gradients_turned_on_inside,
        a_mask_leaves, settings_are_guarded, on_two_dimensions, neighbours_are_joined,
        products_are_cut, works_are_waited_for_by_eager_code,
    )
}  # fmt: skip


def check(state: Callable[[DeviceMesh], None]) -> None:
    state(init_device_mesh(device().type, (dist.get_world_size(),)))
