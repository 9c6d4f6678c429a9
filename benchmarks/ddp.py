"""Distributed training steps: fusewright, eager and torch.compile under DistributedDataParallel, one process a device.

Starts the processes itself: gloo on the CPU, NCCL on CUDA devices. Each engine trains the same model on the same data; the steady step is
timed with the engines taking turns, and the gradients of the first step are compared with eager's. Prints a table and writes JSON.

    python benchmarks/ddp.py [--processes 2] [--device cpu|cuda] [--blocks 6] [--width 512] [--batch 16] [--bucket-mb 2]
                             [--engines eager,fusewright,torch.compile] [--steps 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "src")]
Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A transformer's feed-forward half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def compiler(engine: str) -> Callable[[Any], Any]:
    """What an engine does to a module."""
    if engine == "fusewright":
        import fusewright

        return fusewright.compile
    return torch.compile if engine == "torch.compile" else lambda module: module


def make(engine: str, options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Step]:
    """The model and a training step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).to(device)
    places = [device.index] if device.type == "cuda" else None
    wrapped = compiler(engine)(DistributedDataParallel(model, device_ids=places, bucket_cap_mb=options.bucket_mb))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters() if parameter.grad is not None]


def worker(rank: int, options: argparse.Namespace, store: str, report: str) -> None:
    """One process: every engine in turn; rank 0 writes the report."""
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    file = dist.FileStore(store, options.processes)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=file, rank=rank, world_size=options.processes)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(options.batch, options.width, generator=generator).to(device)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    reference: list[Tensor] | None = None
    for engine in options.engines.split(","):
        model, steps[engine] = make(engine, options, device)
        wait_for(device)
        begun = time.perf_counter()
        steps[engine](x)
        wait_for(device)
        rows[engine] = {"first": time.perf_counter() - begun, "times": []}
        found = gradients(model)
        reference = found if reference is None else reference
        worst = max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(found, reference, strict=True))
        rows[engine]["error"] = worst
        for _ in range(3):
            steps[engine](x)
    for _ in range(options.steps):
        for engine, step in steps.items():
            wait_for(device)
            begun = time.perf_counter()
            step(x)
            wait_for(device)
            rows[engine]["times"].append(time.perf_counter() - begun)
    if rank == 0:
        Path(report).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    from benchmarks.tables import save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.device_count() > 1 else "cpu")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bucket-mb", type=float, default=2.0)
    parser.add_argument("--engines", default="eager,fusewright")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.json"
        multiprocessing.spawn(worker, (options, f"{folder}/store", report), nprocs=options.processes)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(report).read_text())
    first = next(iter(rows))
    base = statistics.median(rows[first]["times"])
    print(f"{options.processes} processes on {options.device}, {options.blocks} blocks of width {options.width}")
    print(f"{'engine':<16}{'first step':>12}{'steady step':>14}{f'against {first}':>18}{'gradient error':>16}")
    for engine, row in rows.items():
        steady = statistics.median(row["times"])
        print(
            f"{engine:<16}{row['first']:>10.2f} s{steady * 1e3:>11.2f} ms{base / steady:>17.2f}x{row['error']:>16.1e}"
        )
    if options.json:
        medians = {engine: statistics.median(row["times"]) for engine, row in rows.items()}
        save_rows(
            Path(options.json),
            [
                {
                    "engine": engine,
                    "first step, s": row["first"],
                    "steady step, s": medians[engine],
                    "error": row["error"],
                }
                for engine, row in rows.items()
            ],
        )


if __name__ == "__main__":
    main()
