"""Two gloo processes that do not do the same: the error that each of them meets. Run as a script like the worker, with
the name of the case."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import fusewright

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


def main(rank: int, size: int, store: str, out: str, case: str) -> None:
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    started = time.monotonic()
    try:
        {"dies": dies, "mismatch": mismatch, "recompile": recompile, "sizes": sizes}[case](rank)
        found = "nothing was raised"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with open(out, "w") as file:
        json.dump([found, time.monotonic() - started], file)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
