"""One of several processes: every check of this folder, in one process group. Run as a script: rank, world size,
store's file, report's file; and a part of the names of the checks to run, and "cuda" for NCCL.

What the compiled form gives must equal what the eager form gives, on every rank.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch import Tensor
from torch.distributed.tensor import DTensor

import fusewright
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, Captured, Compiled, FellBack, Skipped
from fusewright.graph.collectives import is_collective
from tests.distributed.calls import CALLS
from tests.distributed.models import MODELS
from tests.distributed.parallel import ON_CPUS_ONLY, ON_GPUS_ONLY, PARALLEL
from tests.distributed.states import STATES, check
from tests.distributed.tensors import PROGRAMS, Program
from tests.distributed.wrapped import WRAPPED

BACKENDS = ("native", "eager", "aot_eager")
device = torch.device("cpu")


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(*shape, generator=generator, dtype=dtype).to(device)


def same(value: Any) -> Any:
    return value


def check_call(program: Callable[[Tensor], Any], backend: str) -> None:
    """Two sizes, so that the first of them is symbolic in the end; fullgraph: a break is an error."""
    compiled = fusewright.compile(program, backend=backend, fullgraph=True)
    for step, rows in enumerate((4, 4, 6, 8)):
        ours, theirs = batch(step, rows, 3), batch(step, rows, 3)
        torch.testing.assert_close(compiled(ours), program(theirs))
        torch.testing.assert_close(ours, theirs)


def check_tensors(program: Program, backend: str, trains: bool) -> None:
    """Gradients go through plain tensors and DTensors; sizes change."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    compiled = fusewright.compile(program, backend=backend, fullgraph=True)
    events: list[Any] = []
    for step, rows in enumerate((4, 4, 6, 8) if trains else (4, 6)):
        ours, theirs = (batch(step, rows, 3, dtype=torch.float64).requires_grad_(trains) for _ in "12")
        with STREAM.listening(events.append):
            found = compiled(mesh, ours)
        expected = program(mesh, theirs)
        compare(found, expected)
        if trains and with_gradients(expected):
            for made in (found, expected):
                sum(whole(one).square().sum() for one in with_gradients(made)).backward()  # type: ignore[union-attr]
            torch.testing.assert_close(ours.grad, theirs.grad)
    left = [event for event in events if isinstance(event, (Skipped, FellBack))]
    assert not left, left


def compare(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, (list, tuple)) and not isinstance(ours, torch.Size):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs):
            compare(*pair)
    elif isinstance(ours, Tensor):
        assert ours.requires_grad == theirs.requires_grad
        if isinstance(ours, DTensor):
            facts = [(one.placements, one.device_mesh, one.shape, one.stride()) for one in (ours, theirs)]
            assert facts[0] == facts[1]
            ours, theirs = ours.to_local(), theirs.to_local()
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


def with_gradients(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in with_gradients(part)]
    return [value] if isinstance(value, Tensor) and value.requires_grad else []


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def check_model(make: Callable[[Callable[[Any], Any], Callable[[Any], Any]], list[Tensor]], form: str) -> None:
    unbroken = functools.partial(fusewright.compile, fullgraph=True)  # a break is an error
    forms = {"eager": (same, same), "inside": (fusewright.compile, same), "outside": (same, fusewright.compile)}
    forms["whole"] = (same, unbroken)
    expected = make(*forms["eager"])
    events: list[Any] = []
    with STREAM.listening(events.append):
        found = make(*forms[form])
    assert any(isinstance(event, Compiled) for event in events)
    if form == "whole":
        assert not [event.report for event in events if isinstance(event, Skipped)]
        graphs = [event.graph for event in events if isinstance(event, Captured)]
        assert graphs
        assert all(any(map(is_collective, graph.nodes)) for graph in graphs if graph is not None)
    assert len(found) == len(expected)
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, at=position: f"{at}: {text}")


def run(report: dict[str, str], name: str, call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
        report[name] = ""
    except Exception:
        report[name] = traceback.format_exc()
    fusewright.reset()


def main(rank: int, size: int, store: str, out: str, only: str = "", kind: str = "cpu") -> None:
    global device
    warnings.simplefilter("error", InternalErrorWarning)
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    through = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(through, store=dist.FileStore(store, size), rank=rank, world_size=size)
    report: dict[str, str] = {}
    for name, program in CALLS.items():
        for backend in BACKENDS if size == 2 else BACKENDS[:1]:
            if only in f"{name} {backend}":
                run(report, f"{name} {backend}", check_call, program, backend)
    for name, tensors in PROGRAMS.items():
        for backend in BACKENDS if size == 2 else BACKENDS[:1]:
            if only in f"{name} {backend}":
                run(report, f"{name} {backend}", check_tensors, tensors, backend, backend == "native")
    for name, state in STATES.items():
        if only in name:
            run(report, name, check, state)
    for name, (make, form, sizes) in (MODELS | PARALLEL | WRAPPED).items():
        if size in sizes and only in name and name not in (ON_GPUS_ONLY if kind == "cpu" else ON_CPUS_ONLY):
            run(report, name, check_model, make, form)
    dist.barrier()
    dist.destroy_process_group()
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
