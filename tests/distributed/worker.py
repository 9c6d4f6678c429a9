"""One of several gloo processes: every check of this folder, in one process group. Run as a script: rank, world size,
store's file, report's file.

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
from torch import Tensor

import fusewright
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, Captured, Compiled, Skipped
from fusewright.graph.collectives import is_collective
from tests.distributed.calls import CALLS
from tests.distributed.models import MODELS

BACKENDS = ("native", "eager", "aot_eager")


def batch(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def same(value: Any) -> Any:
    return value


def check_call(program: Callable[[Tensor], Any], backend: str) -> None:
    """Two sizes, so that the first of them is symbolic in the end; fullgraph: a break is an error."""
    compiled = fusewright.compile(program, backend=backend, fullgraph=True)
    for step, rows in enumerate((4, 4, 6, 8)):
        ours, theirs = batch(step, rows, 3), batch(step, rows, 3)
        torch.testing.assert_close(compiled(ours), program(theirs))
        torch.testing.assert_close(ours, theirs)


def check_model(make: Callable[[Callable[[Any], Any], Callable[[Any], Any]], list[Tensor]], form: str) -> None:
    whole = functools.partial(fusewright.compile, fullgraph=True)  # a break is an error
    forms = {"eager": (same, same), "inside": (fusewright.compile, same), "outside": (same, fusewright.compile)}
    forms["whole"] = (same, whole)
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


def run(report: dict[str, str], name: str, check: Callable[..., None], *args: Any) -> None:
    try:
        check(*args)
        report[name] = ""
    except Exception:
        report[name] = traceback.format_exc()
    fusewright.reset()


def main(rank: int, size: int, store: str, out: str, only: str = "") -> None:
    warnings.simplefilter("error", InternalErrorWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    report: dict[str, str] = {}
    for name, program in CALLS.items():
        for backend in BACKENDS if size == 2 else BACKENDS[:1]:
            if only in f"{name} {backend}":
                run(report, f"{name} {backend}", check_call, program, backend)
    for name, (make, form, sizes) in MODELS.items():
        if size in sizes and only in name:
            run(report, name, check_model, make, form)
    dist.barrier()
    dist.destroy_process_group()
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
