"""Many processes: eager, torch.compile and fusewright, one process a device, the engines taking turns.

Starts the processes itself: gloo on CPUs, NCCL on GPUs. Parts: `tp1` and `tp8`, a Llama under tensor parallelism in inference (batch 1, 8);
`tp`, its training; `ddp` and `fsdp2`, the training of a Llama (each layer a unit of its own); `ddp-vit`, of a ViT. What the engines compute is
compared with eager's. Each part is written to the file as soon as it is done; a part that exceeds its time ends the run.

    python benchmarks/distributed.py [--processes 2] [--device cpu|cuda] [--parts tp1,tp8,fsdp2,ddp,ddp-vit] [--layers 8] [--width 2048]
                                     [--engines eager,torch.compile,fusewright] [--modes default,reduce-overhead,cut2] [--rounds 30]
                                     [--part-seconds 90] [--seconds 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "src")]
HEAD = 64


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, HEAD).transpose(1, 2) for one in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=rotation is not None)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cosine, sine = rotation[: x.shape[2]].to(x.dtype).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module], feed_forward: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.attention, self.feed_forward = Attention(width), feed_forward(width)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x), rotation)
        return x + self.feed_forward(self.second(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, nn.RMSNorm, Gated) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.arange(2048)[:, None] * 10000.0 ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        self.register_buffer("rotation", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, 196, width))
        self.layers = nn.ModuleList(Layer(width, nn.LayerNorm, Plain) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def compiler(engine: str) -> Callable[[Any], Any]:
    """What an engine ("name", or "name mode") does to a module."""
    name, _, mode = engine.partition(" ")
    if name == "fusewright":
        import fusewright

        if mode.startswith("cut"):  # asynchronous tensor parallelism, in so many pieces
            settings = {"cut_collectives": int(mode.removeprefix("cut"))}
            return lambda module: fusewright.compile(module, dynamic=False, options=settings)
        return lambda module: fusewright.compile(module, mode=mode or None)
    return (lambda module: torch.compile(module, mode=mode or None)) if name == "torch.compile" else lambda module: module


def tensor_parallel(model: Llama, device: torch.device) -> Llama:
    """Column-parallel, then row-parallel layers; logits are gathered."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    columns = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "feed_forward.down")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def make(part: str, engine: str, options: argparse.Namespace, device: torch.device) -> tuple[Any, Callable[[], Any]]:
    """The model under its wrapper and the engine, and one call or one training step of it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0 if part.startswith("tp") else dist.get_rank())
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    if part == "ddp-vit":
        model: Any = ViT(options.layers * 3 // 2, options.width * 3 // 8)
    else:
        with device:
            model = Llama(options.layers, options.width, options.vocabulary)
    model.to(device, kind)
    compiled = compiler(engine)
    if part in ("tp1", "tp8"):
        model = tensor_parallel(model, device).eval()
        tokens = torch.randint(options.vocabulary, (int(part[2:]), 16), generator=generator).to(device)
        call = compiled(model)

        def infer() -> Any:
            with torch.no_grad():
                return call(tokens)

        return model, infer
    if part == "fsdp2":
        for index, layer in enumerate(model.layers):
            model.layers[index] = fully_shard(compiled(layer))
        call = fully_shard(model)
    elif part == "tp":
        call = compiled(tensor_parallel(model, device))
    else:
        places = [device.index] if device.type == "cuda" else None
        call = compiled(DistributedDataParallel(model, device_ids=places))
    if part == "ddp-vit":
        given = torch.randn(32, 3, 224, 224, generator=generator).to(device, kind)
        wanted = torch.randint(1000, (32,), generator=generator).to(device)
    else:
        given = torch.randint(options.vocabulary, (4, options.tokens), generator=generator).to(device)
        wanted = given.flatten().roll(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(given).flatten(0, -2).float(), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def hidden_share(step: Callable[[], Any], device: torch.device) -> float | None:
    """The share of the time of NCCL's kernels in which other kernels run, from the profiler."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: tuple[list[tuple[float, float]], ...] = ([], [])
    for event in kernels:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    others, own = (joined(one) for one in spans)
    total = sum(end - start for start, end in own)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in others)
    return both / total if total else None


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, as spans that do not meet."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def measure(part: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    expected: Any = None
    modes = [mode for mode in options.modes.split(",") if mode == "default" or part.startswith("tp")]
    engines = [
        engine if mode == "default" else f"{engine} {mode}"
        for mode in modes
        for engine in options.engines.split(",")
        if mode == "default" or engine != "eager"
    ]
    for engine in engines:
        torch._dynamo.reset()
        row = rows[engine] = {"part": part, "engine": engine}
        try:
            _, step = make(part, engine, options, device)
            wait_for(device)
            begun = time.perf_counter()
            result = step()
            wait_for(device)
            row["first call, s"] = time.perf_counter() - begun
            result = (result.full_tensor() if isinstance(result, DTensor) else result).float().clone()
            expected = result if expected is None else expected
            row["error"] = float((result - expected).norm() / (expected.norm() + 1e-12))
            for _ in range(5):
                step()
            steps[engine] = step
        except Exception:
            row["failed"] = traceback.format_exc()[-1500:]
    times: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(options.rounds):
        for engine, step in steps.items():
            wait_for(device)
            begun = time.perf_counter()
            step()
            wait_for(device)
            times[engine].append(time.perf_counter() - begun)
    for engine, step in steps.items():
        rows[engine]["ms"] = statistics.median(times[engine]) * 1e3
        rows[engine]["hidden"] = None if part in ("tp1", "tp8") else hidden_share(step, device)
    return list(rows.values())


def worker(rank: int, options: argparse.Namespace, store: str) -> None:
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.FileStore(store, options.processes), rank=rank,
        world_size=options.processes, timeout=timedelta(seconds=options.part_seconds),
        **({"device_id": device} if on_gpu else {}),
    )  # fmt: skip
    begun, rows = time.monotonic(), []
    for part in options.parts.split(","):
        if options.seconds and time.monotonic() - begun > options.seconds:
            break
        faulthandler.dump_traceback_later(options.part_seconds, exit=True)
        found = measure(part, options, device)
        rows += found
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            show(found)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
        if on_gpu:
            torch.cuda.empty_cache()
        past = torch.tensor(float(options.seconds and time.monotonic() - begun > options.seconds), device=device)
        dist.all_reduce(past)  # all processes stop at the same part
        if past:
            break
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    base = rows[0].get("ms")
    for row in rows:
        if "ms" not in row:
            print(f"{row['part']:<8} {row['engine']:<32} failed\n{row.get('failed', '')}", flush=True)
            continue
        hidden = "" if row["hidden"] is None else f", {row['hidden']:.0%} of communication hidden"
        print(
            f"{row['part']:<8} {row['engine']:<32} first {row['first call, s']:6.2f} s, then {row['ms']:8.3f} ms "
            f"({base / row['ms'] if base else 0:.2f}x), error {row['error']:.1e}{hidden}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.device_count() > 1 else "cpu")
    parser.add_argument("--parts", default="tp1,tp8,fsdp2,ddp,ddp-vit")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--engines", default="eager,torch.compile,fusewright")
    parser.add_argument("--modes", default="default,reduce-overhead")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--part-seconds", type=int, default=90)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (options, f"{folder}/store"), nprocs=options.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
