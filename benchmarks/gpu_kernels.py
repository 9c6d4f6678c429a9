"""Many GPU kernels beside eager and torch.compile: `benchmarks/gpu_rows.py` timed with a cold cache, in turn.

    python -m benchmarks.gpu_kernels --processes 12 --json out.json
    python -m benchmarks.gpu_kernels --only flex,fp8 --seconds 60

Compiling takes most of the time, so processes divide the rows; each compiles its own, and then they take turns on
the GPU, alone on it. A figure is the median of rounds in which the ways alternate: GPU time between two events around
a call, with the cache overwritten before; "back to back" is wall time of a call in a row of calls. A row that is
wrong, or fails, says so. `--seconds` bounds the whole run: rows that were not reached are left out.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("FUSEWRIGHT_CACHE_DIR", tempfile.mkdtemp(prefix="fusewright-bench-"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor-bench-"))

import torch
from torch import nn

import fusewright
from benchmarks.gpu import error, flat, profiled, told
from benchmarks.gpu_rows import ROWS, Row
from benchmarks.tables import save_rows
from fusewright.base import events

MODE = "default"
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "fusewright": lambda f: fusewright.compile(f, dynamic=False, mode=MODE),
    "torch.compile": lambda f: torch.compile(f, dynamic=False, mode=MODE),
}
Call = Callable[[], Any]
FLUSHED = 256 << 20


def call_of(row: Row, function: Any, compiled: Any) -> Call:
    """One call on arguments of its own: the results, and in training the gradients."""
    torch.manual_seed(1)
    arguments = row.make()
    if not row.train:

        def infer() -> Any:
            with torch.no_grad():
                return compiled(*arguments)

        return infer
    leaves = [one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()]
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    leaves = [*(one.requires_grad_() for one in leaves), *(one for one in parameters if one.requires_grad)]
    tangents: list[torch.Tensor] = []

    def step() -> Any:
        out = flat_with_history(compiled(*arguments))
        if not tangents:
            torch.manual_seed(2)
            tangents.extend(torch.randn_like(one) for one in out)
        return [*(one.detach() for one in out), *torch.autograd.grad(out, leaves, tangents, allow_unused=True)]

    return step


def flat_with_history(value: Any) -> list[torch.Tensor]:
    found = [value] if isinstance(value, torch.Tensor) else [t for item in value for t in flat_with_history(item)]
    return [one for one in found if one.requires_grad]


def compiled_row(name: str, row: Row, record: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The row's function in each way, checked against eager; what cannot be is in the record."""
    made: dict[str, tuple[Any, Any]] = {}
    expected: Any = None
    heard: list[str] = []
    for way, compile_ in WAYS.items():
        heard.clear()
        torch.manual_seed(0)
        try:
            function = row.function() if row.setup else row.function
            begin = time.perf_counter()
            compiled = compile_(function)
            with events.STREAM.listening(lambda event: heard.extend(filter(None, [told(event)]))):
                call = call_of(row, function, compiled)
                found = [(torch.view_as_real(one) if one.is_complex() else one).clone() for one in flat(call())]
                torch.cuda.synchronize()
                record[f"{way}, first"] = round(time.perf_counter() - begin, 2)
                call()
            if expected is None:
                expected = found
                record["bytes"] = sum(one.nbytes for one in [*flat(row.make()), *expected])
            record[f"{way}, error"] = error(found, expected)
            if not record[f"{way}, error"] <= row.tolerance:
                record[f"{way}, note"] = f"WRONG by {record[f'{way}, error']:.1e}"
            elif heard:
                record[f"{way}, note"] = heard[0][:300]
            made[way] = (function, compiled)
        except Exception as problem:
            record[f"{way}, note"] = f"{type(problem).__name__}: {problem}"[:400]
            if isinstance(problem, torch.AcceleratorError):
                raise
    return made


def timed(row: Row, made: dict[str, tuple[Any, Any]], record: dict[str, Any], seconds: float) -> None:
    calls = {way: call_of(row, *one) for way, one in made.items()}
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    estimate: dict[str, float] = {}
    for way, call in calls.items():
        for _ in range(4):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        estimate[way] = (time.perf_counter() - begin) / 3
    samples: dict[str, list[float]] = {way: [] for way in calls}
    walls: dict[str, list[float]] = {way: [] for way in calls}
    rounds = int(min(40, max(5, seconds / (sum(estimate.values()) + 3e-4))))
    for turn in range(rounds):
        for way, call in calls.items():
            if turn > 3 and estimate[way] > 5 * min(estimate.values()) and estimate[way] > 5e-3:
                continue
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flushed.zero_()
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            samples[way].append(first.elapsed_time(last))
    for _ in range(5):
        for way, call in calls.items():
            repeat = max(1, min(20, int(0.004 / estimate[way])))
            begin = time.perf_counter()
            for _ in range(repeat):
                call()
            torch.cuda.synchronize()
            walls[way].append((time.perf_counter() - begin) / repeat * 1e3)
    for way in calls:
        record[way] = round(statistics.median(samples[way]), 4)
        record[f"{way}, back to back"] = round(statistics.median(walls[way]), 4)


def worker(names: list[str], folder: Path, seconds: float) -> None:
    """Compiles its rows, waits for the others, then times its rows, alone on the GPU; at last the kernels of slow ones
    are listed."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    records: dict[str, dict[str, Any]] = {}
    ready: dict[str, dict[str, tuple[Any, Any]]] = {}
    try:
        for name in names:
            if time.time() > START + 0.55 * seconds:
                break
            records[name] = {"kernel": name}
            ready[name] = compiled_row(name, ROWS[name], records[name])
            torch.cuda.empty_cache()
    finally:
        (folder / f"{os.getpid()}.compiled").touch()
    while len(list(folder.glob("*.compiled"))) < PROCESSES and time.time() < START + 0.6 * seconds:
        time.sleep(0.1)
    for look in (False, True):
        for name, made in ready.items():
            record = records[name]
            if look and not _is_slow(record):
                continue
            with open(folder / "turn", "w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                if time.time() > START + seconds:
                    return
                try:
                    if look:
                        for way, one in made.items():
                            if way != "eager":
                                record[f"{way}, kernels"] = profiled(call_of(ROWS[name], *one))[3]
                    else:
                        timed(ROWS[name], made, record, 0.1)
                except Exception as problem:
                    record["fusewright, note"] = f"timing: {type(problem).__name__}: {problem}"[:300]
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                with open(folder / "records", "a") as out:
                    out.write(json.dumps(record) + "\n")


def _is_slow(record: dict[str, Any]) -> bool:
    eager, ours, peer = (record.get(way, math.nan) for way in WAYS)
    return ours > 1.05 * min(eager, peer)


START, PROCESSES = time.time(), 1


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        target.copy_(source)
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return 2 * source.nbytes / (statistics.median(times) / 1e3)


def table(records: list[dict[str, Any]], bandwidth: float) -> str:
    ways = f"{'eager':>8} {'ours':>8} {'peer':>8} {'/peer':>6} {'/best':>6} {'copy':>7}"
    lines = [f"{'kernel':36} {ways} | back to back, ms | first, s"]
    ratios = []
    for one in records:
        eager, ours, peer = (one.get(way, math.nan) for way in WAYS)
        ratios.append(ours / peer)
        best = min((time for time in (eager, peer) if time == time), default=math.nan)
        back = "/".join(f"{one.get(f'{way}, back to back', math.nan):.3f}" for way in WAYS)
        first = "/".join(f"{one.get(f'{way}, first', math.nan):.1f}" for way in WAYS)
        notes = " ".join(f"[{way}: {one[f'{way}, note']}]" for way in WAYS if f"{way}, note" in one)
        lines.append(
            f"{one['kernel']:36} {eager:8.4f} {ours:8.4f} {peer:8.4f} {ours / peer:6.2f} {ours / best:6.2f} "
            f"{one.get('bytes', 0) / bandwidth * 1e3:7.4f} | {back} | {first} {notes[:300]}"
        )
        for way in WAYS:
            for kernel, milliseconds in one.get(f"{way}, kernels", ()):
                lines.append(f"      {way:14} {milliseconds:8.4f} {kernel[:90]}")
    usable = [one for one in ratios if one == one]
    if usable:
        mean = math.exp(statistics.fmean(math.log(one) for one in usable))
        slow = sum(one > 1.05 for one in usable)
        lines.append(f"{len(usable)} kernels: {mean:.3f} of torch.compile's time in geometric mean, {slow} above 1.05")
    return "\n".join(lines)


def main() -> int:
    global PROCESSES, MODE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    modes = ("default", "reduce-overhead", "max-autotune")
    parser.add_argument("--mode", default=MODE, choices=modes, help="of both compilers")
    parser.add_argument("--json", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = options.only.split(",") if options.only else [""]
    names = [name for name in ROWS if any(part in name for part in parts)][::-1]  # what compiles longest comes first
    PROCESSES, MODE = options.processes, options.mode
    if options.worker:
        number, place = options.worker.split(":")
        worker(names[int(number) :: PROCESSES], Path(place), options.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.gpu_kernels", *sys.argv[1:], "--worker"]
        started = [subprocess.Popen([*words, f"{number}:{folder}"]) for number in range(PROCESSES)]
        for one in started:
            try:
                one.wait(max(START + options.seconds - time.time(), 0))
            except subprocess.TimeoutExpired:  # it still compiles
                one.kill()
        lines = (Path(folder) / "records").read_text().splitlines()
    order = {name: place for place, name in enumerate(ROWS)}
    latest = {one["kernel"]: one for one in map(json.loads, lines)}
    records = sorted(latest.values(), key=lambda one: order[one["kernel"]])
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    print(table(records, bandwidth))
    if options.json:
        save_rows(Path(options.json), records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
