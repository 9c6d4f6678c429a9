"""Bytes per second of generated CPU kernels beside those of a copy, on tensors larger than the caches.

Each row is one program that becomes one or two kernels. "GB/s" counts the bytes that must move (every input read once, every output written
once); "copy" is its share of the rate at which `Tensor.copy_` moves tensors of the same size, measured in turn with it.

    python benchmarks/kernels.py [--rows softmax,gelu] [--dtypes float32,bfloat16] [--mib 128] [--seconds 1] [--keep-memory] [--json FILE]

The C library gives large results back to the system and maps them afresh at each call, so that kernels and copies that store pay for page
faults. `--keep-memory` has it keep them, and so measures the kernels alone.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

LARGE = 8 << 20
"""Bytes of results from which their memory counts."""

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

Program = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
ROWS: dict[str, Callable[[int, int, torch.dtype], Program]] = {}
"""name → builder of (function, inputs) from rows, columns and dtype."""


def row(builder: Callable[[int, int, torch.dtype], Program]) -> Callable[[int, int, torch.dtype], Program]:
    ROWS[builder.__name__] = builder
    return builder


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns).to(dtype)


@row
def add_relu(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x, y: torch.relu(x + y), (_matrix(m, n, dtype), _matrix(m, n, dtype))


@row
def scale(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: x * 2.0 + 1.0, (_matrix(m, n, dtype),)


@row
def silu_mul(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x, y: F.silu(x) * y, (_matrix(m, n, dtype), _matrix(m, n, dtype))


@row
def gelu(m: int, n: int, dtype: torch.dtype) -> Program:
    return F.gelu, (_matrix(m, n, dtype),)


@row
def to_float(m: int, n: int, dtype: torch.dtype) -> Program:
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    return lambda x: x.to(other) * 2, (_matrix(m, n, dtype),)


@row
def softmax(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: torch.softmax(x, -1), (_matrix(m, n, dtype),)


@row
def log_softmax(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: torch.log_softmax(x, -1), (_matrix(m, n, dtype),)


@row
def softmax_short_rows(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: torch.softmax(x, -1), (_matrix(m * (n // 128), 128, dtype),)


@row
def softmax_columns(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: torch.softmax(x, 0), (_matrix(128, m * n // 128, dtype),)


@row
def layer_norm(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), (_matrix(m * (n // 1024), 1024, dtype), _matrix(1, 1024, dtype)[0], _matrix(1, 1024, dtype)[0])  # fmt: skip


@row
def residual_rms_norm(m: int, n: int, dtype: torch.dtype) -> Program:
    def run(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return total, F.rms_norm(total, (total.shape[-1],), w)

    return run, (
        _matrix(m * (n // 1024), 1024, dtype),
        _matrix(m * (n // 1024), 1024, dtype),
        _matrix(1, 1024, dtype)[0],
    )


@row
def batch_norm_relu(m: int, n: int, dtype: torch.dtype) -> Program:
    x = torch.randn(m * n // (64 * 56 * 56), 64, 56, 56).to(dtype)
    return lambda x, a, b, c, d: torch.relu(F.batch_norm(x, a, b, c, d)), (
        x,
        *(torch.rand(64).to(dtype) + 0.5 for _ in range(4)),
    )


@row
def row_sum(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: x.sum(-1), (_matrix(m, n, dtype),)


@row
def column_sum(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: x.sum(0), (_matrix(m, n, dtype),)


@row
def full_mean_square(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: (x * x).mean(), (_matrix(m, n, dtype),)


@row
def row_argmax(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: x.argmax(-1), (_matrix(m, n, dtype),)


@row
def cumulative_sum(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x: x.cumsum(-1), (_matrix(m, n, dtype),)


@row
def transpose_add(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda x, y: x.t() + y, (_matrix(m, n, dtype), _matrix(n, m, dtype))


@row
def cross_entropy(m: int, n: int, dtype: torch.dtype) -> Program:
    return F.cross_entropy, (_matrix(m, n, dtype), torch.randint(0, n, (m,)))


@row
def embedding(m: int, n: int, dtype: torch.dtype) -> Program:
    return lambda w, i: F.embedding(i, w) * 2.0, (
        _matrix(m * (n // 1024), 1024, dtype),
        torch.randperm(m * (n // 1024)),
    )


def _keep_memory() -> None:
    """Has malloc serve everything from the heap and give nothing back (glibc)."""
    library = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # names of malloc.h
    if not (library.mallopt(trim_threshold, (1 << 31) - 1) and library.mallopt(mmap_max, 0)):
        raise RuntimeError("this C library's malloc has no such parameters")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in _tensors(item)]


def measure(name: str, dtype: torch.dtype, mib: int, seconds: float) -> dict[str, Any]:
    """One row: milliseconds of eager, fusewright and a copy, called in turn, and the shares that follow."""
    import fusewright

    torch.manual_seed(0)
    columns = 8192
    function, inputs = ROWS[name]((mib << 20) // dtype.itemsize // columns, columns, dtype)
    with torch.no_grad():
        compiled = fusewright.compile(function)
        expected, got = _tensors(function(*inputs)), _tensors(compiled(*inputs))
        error = max(
            (a.double() - b.double()).norm().item() / max(b.double().norm().item(), 1e-30)
            for a, b in zip(got, expected)
        )
        moved = sum(t.nbytes for t in (*inputs, *got))
        source = torch.randn((mib << 20) // 4)
        target = torch.empty_like(source)
        large = sum(t.nbytes for t in got) >= LARGE
        del expected, got
        times: dict[str, list[float]] = {"eager": [], "fusewright": [], "copy": []}
        calls: dict[str, Callable[[], Any]] = {
            "eager": lambda: function(*inputs),
            "fusewright": lambda: compiled(*inputs),
            "copy": source.clone if large else lambda: target.copy_(source),
        }
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(times["copy"]) < 5:
            for key, call in calls.items():
                begin = time.perf_counter()
                result = call()
                times[key].append(time.perf_counter() - begin)
                del result
    medians = {key: statistics.median(values) for key, values in times.items()}
    rate, copy_rate = moved / medians["fusewright"], 2 * source.nbytes / medians["copy"]
    return {
        "row": name,
        "dtype": str(dtype).removeprefix("torch."),
        "mib": mib,
        **{f"{key}_ms": value * 1e3 for key, value in medians.items()},
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / copy_rate,
        "speedup": medians["eager"] / medians["fusewright"],
        "relative_error": error,
    }


def main() -> None:
    from benchmarks.tables import RUNS, save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=RUNS / "kernels.json")
    parser.add_argument("--keep-memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.keep_memory:
        _keep_memory()
    rows = []
    print(f"{'kernel':20} {'dtype':9} {'eager ms':>9} {'ms':>9} {'GB/s':>7} {'copy':>6} {'speed-up':>8} {'error':>8}")
    for dtype in arguments.dtypes.split(","):
        for name in arguments.rows.split(","):
            made = measure(name, getattr(torch, dtype), arguments.mib, arguments.seconds)
            rows.append(made)
            print(
                f"{name:20} {dtype:9} {made['eager_ms']:9.2f} {made['fusewright_ms']:9.2f} {made['gb_per_s']:7.1f} {made['share_of_copy']:6.0%}"
                f" {made['speedup']:8.2f} {made['relative_error']:8.0e}",
                flush=True,
            )
    save_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
