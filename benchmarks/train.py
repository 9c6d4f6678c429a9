"""Training steps side by side: fusewright, eager and torch.compile on the same models.

Every (model, engine) runs in a fresh process with empty caches, one after the other: cold first step, then the steady step interleaved with
eager; once more for the memory of a step; and, when asked for, for gradients and fifty losses with dropout off. Prints a table and adds
to a JSON file, whose rows of the same model, engine and dtype are replaced: so models may be measured one at a time.

    python benchmarks/train.py [--quick] [--models bert,mlp] [--engines fusewright,torch.compile] [--dtypes float32,bfloat16]
                               [--seconds 3] [--what time,memory,check] [--json FILE]
    python benchmarks/train.py --summary      what the JSON file says
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENGINES = ("eager", "torch.compile", "fusewright")
STEPS = 50
QUICK = ("mlp", "gpt2", "gan_critic")
Row = dict[str, Any]


def measure(model: str, engine: str, dtype: str, seconds: float, what: str) -> Row:
    """One worker process; an engine that fails gives a row with its error."""
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "FUSEWRIGHT_CACHE_DIR": f"{caches}/fusewright",
            "HF_HUB_OFFLINE": "1",
        }
        if what == "memory":
            environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "train_worker.py"),
            model,
            engine,
            dtype,
            str(seconds),
            what,
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {
            "model": model,
            "engine": engine,
            "dtype": dtype,
            "error": (done.stderr.strip().splitlines() or ["?"])[-1],
        }
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


COLUMNS = ("first_step_s", "eager_ms", "steady_ms", "speedup", "step_mib", "worst_gradient_error", "loss_difference")
HEAD = f"{'model':14} {'dtype':9} {'engine':14} {'cold s':>8} {'eager ms':>10} {'ms':>10} {'speed-up':>8} {'MiB':>8} {'grad. error':>11} {'loss':>8}"


def line(row: Row) -> str:
    head = f"{row['model']:14} {row['dtype']:9} {row['engine']:14} "
    if "error" in row:
        return head + row["error"][:100]
    nothing = float("nan")
    first, eager, steady, speedup, memory, gradient, loss = (row.get(name, nothing) for name in COLUMNS)
    return head + f"{first:8.2f} {eager:10.3f} {steady:10.3f} {speedup:8.2f} {memory:8.1f} {gradient:11.1e} {loss:8.1e}"


def summary(rows: list[Row]) -> list[str]:
    """Each engine's geometric means, and against torch.compile and eager."""
    from benchmarks.compare import geometric_mean
    from benchmarks.train_worker import STEPS

    good = [row for row in rows if "error" not in row]
    by_engine = {(row["model"], row["dtype"], row["engine"]): row for row in good}
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in good if row["engine"] != "eager"):
        mine = [row for row in good if row["engine"] == engine]
        if speeds := [row["speedup"] for row in mine if "speedup" in row]:
            lines.append(f"{engine:14} over eager: geomean {geometric_mean(speeds):.2f}, least {min(speeds):.2f}")
        if checks := [row for row in mine if "loss_difference" in row]:
            worst = {
                dtype: max(row["worst_gradient_error"] for row in checks if row["dtype"] == dtype)
                for dtype in dict.fromkeys(row["dtype"] for row in checks)
            }
            difference = max(row["loss_difference"] for row in checks)
            lines.append(f"{'':14} worst gradient error {worst}, loss difference over {STEPS} steps {difference:.1e}")
        for peer in ("torch.compile", "eager"):
            pairs = [
                (row, by_engine[key])
                for row in mine
                if (key := (row["model"], row["dtype"], peer)) in by_engine and peer != engine
            ]
            memory = [a["step_mib"] / b["step_mib"] for a, b in pairs if "step_mib" in a and "step_mib" in b]
            if memory:
                lines.append(
                    f"{'':14} memory of a step over {peer}: geomean {geometric_mean(memory):.2f}, most {max(memory):.2f}"
                )
            pairs = [pair for pair in pairs if all("speedup" in row for row in pair)]
            if pairs and peer != "eager":
                cold = [b["first_step_s"] / a["first_step_s"] for a, b in pairs]
                steady = [a["speedup"] / b["speedup"] for a, b in pairs]
                lines.append(
                    f"{'':14} over {peer}: steady geomean {geometric_mean(steady):.2f}, least {min(steady):.2f};"
                    f" cold first step 1/{geometric_mean(cold):.1f} of its (worst 1/{min(cold):.1f})"
                )
    return lines


def main() -> None:
    from benchmarks.tables import RUNS, load_rows, save_rows
    from benchmarks.train_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)} in float32, one second each")
    parser.add_argument("--models")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--dtypes")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--what", default="time,memory", help="time, memory, check: a process for each")
    parser.add_argument("--summary", action="store_true", help="measure nothing, print what the JSON file holds")
    parser.add_argument("--json", type=Path, default=RUNS / "train.json")
    arguments = parser.parse_args()
    quick = arguments.quick
    models = (arguments.models or ",".join(QUICK if quick else MODELS)).split(",")
    dtypes = (arguments.dtypes or ("float32" if quick else "float32,bfloat16")).split(",")
    seconds = arguments.seconds if arguments.seconds is not None else 1.0 if quick else 3.0
    rows = load_rows(arguments.json)
    print(HEAD)
    if arguments.summary:
        print("\n".join([*map(line, rows), *summary(rows)]))
        return
    for model in models:
        for dtype in dtypes:
            for engine in arguments.engines.split(","):
                known = next(
                    (row for row in rows if (row["model"], row["engine"], row["dtype"]) == (model, engine, dtype)), {}
                )
                row = {name: value for name, value in known.items() if name != "error"}
                for what in arguments.what.split(","):
                    if not (engine == "eager" and what == "check"):
                        row |= measure(model, engine, dtype, seconds, what)
                rows = [*(other for other in rows if other is not known), row]
                print(line(row), flush=True)
                save_rows(arguments.json, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
