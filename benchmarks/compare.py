"""Side by side: fusewright, eager and torch.compile on the same models.

Every (model, engine) runs in a fresh process, one after the other: once with empty caches (cold first call, then the steady state
interleaved with eager), once more with the caches that the first run left (warm first call). Prints a table and writes JSON.

    python benchmarks/compare.py [--models bert,mlp | --models architectures --batch 1,8] [--engines fusewright,torch.compile] [--dtypes float32] [--seconds 3] [--json FILE]
        [--slice 1/4] [--resume]

The file is written after each row, and --resume leaves out the rows that it has, so a long comparison can be taken in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENGINES = ("eager", "torch.compile", "max-autotune", "freezing", "onnxruntime", "fusewright")
Row = dict[str, Any]
Case = tuple[str, str, str]
"""Model, dtype, engine."""


def measure(model: str, engine: str, dtype: str, seconds: float, caches: str) -> Row:
    """One worker process; an engine that fails gives a row with its error."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "FUSEWRIGHT_CACHE_DIR": f"{caches}/fusewright",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "worker.py"), model, engine, dtype, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"model": model, "engine": engine, "dtype": dtype, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def table(rows: list[Row], peer: str = "torch.compile") -> str:
    """The rows as text, each with its ratio to the peer's cold first call and speed-up, then geometric means by engine and dtype."""
    lines = [
        f"{'model':20} {'dtype':9} {'engine':14} {'cold s':>8} {'warm s':>8} {'eager ms':>10} {'ms':>10} {'speed-up':>8} {'rel. error':>10} {'MiB':>7}"
        f" {'breaks':>6} {'kernels':>7}"
    ]
    for row in rows:
        head = f"{row['model']:20} {row['dtype']:9} {row['engine']:14} "
        if "error" in row:
            lines.append(head + row["error"][:100])
            continue
        lines.append(
            head
            + f"{row['first_call_s']:8.2f} {row.get('warm_first_call_s', float('nan')):8.2f} {row['eager_ms']:10.4f} {row['steady_ms']:10.4f}"
            f" {row['speedup']:8.2f} {row['relative_error']:10.1e} {row['peak_memory_growth_mib']:7.0f} {row.get('breaks', '-'):>6} {row.get('kernels', '-'):>7}"
        )
    good = [row for row in rows if "error" not in row]
    peers = {(row["model"], row["dtype"]): row for row in good if row["engine"] == peer}
    for engine in dict.fromkeys(row["engine"] for row in good):
        for dtype in dict.fromkeys(row["dtype"] for row in good):
            mine = [row for row in good if row["engine"] == engine and row["dtype"] == dtype]
            both = [(row, peers[row["model"], dtype]) for row in mine if (row["model"], dtype) in peers]
            if not mine:
                continue
            text = f"{engine:14} {dtype:9} geomean speed-up over eager {geometric_mean([row['speedup'] for row in mine]):.2f}"
            if both and engine != peer:
                text += (
                    f"; over {peer} {geometric_mean([a['speedup'] / b['speedup'] for a, b in both]):.2f}"
                    f"; cold first call 1/{geometric_mean([b['first_call_s'] / a['first_call_s'] for a, b in both]):.1f} of its"
                    f" (worst 1/{min(b['first_call_s'] / a['first_call_s'] for a, b in both):.1f})"
                )
            lines.append(text)
    return "\n".join(lines)


def part(cases: list[Case], text: str) -> list[Case]:
    """Every n-th of the cases from the k-th on, for the text "k/n"."""
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise SystemExit(f"--slice takes k/n with 1 <= k <= n, not {text}")
    return cases[int(first) - 1 :: int(step)]


def main() -> None:
    from benchmarks.architectures import ARCHITECTURES
    from benchmarks.models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, or `architectures`: those of architectures.py")
    parser.add_argument("--batch", default="1,8", help="batch sizes of the architectures")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-warm", action="store_true", help="leave out the second process with full caches")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "compare.json")
    parser.add_argument("--slice", default="1/1", help="k/n: every n-th of the (model, dtype, engine), from the k-th on")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the JSON file, and add those that it lacks")
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(arguments.json.read_text()) if arguments.resume and arguments.json.exists() else []
    models = arguments.models.split(",")
    if models == ["architectures"]:
        models = [f"{name}:{batch}" for name in ARCHITECTURES for batch in arguments.batch.split(",")]
    cases = [(model, dtype, engine) for model in models for dtype in arguments.dtypes.split(",") for engine in arguments.engines.split(",")]
    known = {(row["model"], row["dtype"], row["engine"]) for row in rows}
    for model, dtype, engine in [case for case in part(cases, arguments.slice) if case not in known]:
        with tempfile.TemporaryDirectory() as caches:
            row = measure(model, engine, dtype, arguments.seconds, caches)
            if "error" not in row and not arguments.no_warm and engine != "eager":
                row["warm_first_call_s"] = measure(model, engine, dtype, 0.0, caches).get("first_call_s", float("nan"))
        rows.append(row)
        arguments.json.write_text(json.dumps(rows, indent=1))
        print(table([row]).splitlines()[1], flush=True)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
