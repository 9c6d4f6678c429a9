"""Two gloo processes that do not do the same: the error that each of them meets. Run as a script like the worker, with
the name of the case."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fusewright
from fusewright.backends import agreement
from fusewright.base.events import STREAM, Hint

operations = [dist.ReduceOp.SUM]


def differs(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    dist.all_reduce(x, op=operations[-1])
    return x


def uneven(x: torch.Tensor) -> torch.Tensor:
    y = x.sum()
    dist.all_reduce(y)
    return y * x


def sums(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def shapes(rank: int) -> None:
    fusewright.compile(sums, fullgraph=True)(torch.ones(3 + rank))


def dtypes(rank: int) -> None:
    fusewright.compile(sums, fullgraph=True)(torch.ones(3, dtype=(torch.float32, torch.float64)[rank]))


def code(rank: int) -> None:
    """The program of one process is an older one, which lacks the last collective."""
    text = "def step(x):\n y = x * 2\n dist.all_reduce(y)\n" + " dist.all_reduce(y)\n" * rank + " return y"
    names: dict[str, Any] = {"dist": dist, "__name__": "program"}
    exec(compile(text, "program.py", "exec"), names)
    fusewright.compile(names["step"], fullgraph=True)(torch.ones(3))


def eager(rank: int) -> None:
    """One process runs eagerly: the other one goes on without its list, and says so."""
    agreement.PATIENCE = 1.0
    events: list[Any] = []
    with STREAM.listening(events.append):
        found = (sums if rank else fusewright.compile(sums, fullgraph=True))(torch.ones(3))
    torch.testing.assert_close(found, torch.full((3,), 5.0))
    hints = [event.text for event in events if isinstance(event, Hint)]
    assert rank or any("rank 1 of group 0 has not compiled" in text for text in hints), hints


def dies_in_the_backward(rank: int) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor_autograd(x.exp(), 0, dist.group.WORLD).square().sum()

    compiled = fusewright.compile(loss, fullgraph=True)
    compiled(torch.ones(3, requires_grad=True)).backward()
    result = compiled(torch.ones(3, requires_grad=True))
    if rank:
        os._exit(0)
    result.backward()


def dies(rank: int) -> None:
    compiled = fusewright.compile(sums, fullgraph=True)
    compiled(torch.ones(3))
    if rank:
        os._exit(0)
    compiled(torch.ones(3))


def mismatch(rank: int) -> None:
    """What the processes agreed on before a reset says nothing about what they compile after it."""
    fusewright.compile(differs, fullgraph=True)(torch.ones(3))
    operations.append(dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)
    fusewright.reset()
    fusewright.compile(differs, fullgraph=True)(torch.ones(3))


def recompile(rank: int) -> None:
    """A later compile with other collectives is compared, too."""
    compiled = fusewright.compile(differs, fullgraph=True)
    compiled(torch.ones(3))
    operations.append(dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)
    compiled(torch.ones(3))


def sizes(rank: int) -> None:
    """One process meets another size, and compiles alone: it asks nobody."""
    compiled = fusewright.compile(uneven, fullgraph=True)
    for step in range(3):
        compiled(torch.ones(3 + rank * step))


CASES = {
    found.__name__: found
    for found in (dies, dies_in_the_backward, mismatch, recompile, sizes, shapes, dtypes, code, eager)
}


def main(rank: int, size: int, store: str, out: str, case: str) -> None:
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    started = time.monotonic()
    try:
        CASES[case](rank)
        found = "nothing was raised"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with open(out, "w") as file:
        json.dump([found, time.monotonic() - started], file)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
