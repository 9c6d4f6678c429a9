"""Training steps side by side: fusewright, eager and torch.compile on the same models.

Every (model, engine) runs in a fresh process with empty caches, one after the other: cold first step, then the steady step interleaved with
eager; and once more for the memory of a step. Prints a table and writes JSON.

    python benchmarks/train.py [--quick] [--models bert,mlp] [--engines fusewright,torch.compile] [--dtypes float32,bfloat16]
                               [--seconds 3] [--no-memory] [--json FILE]
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
        command = [sys.executable, str(ROOT / "benchmarks" / "train_worker.py"), model, engine, dtype, str(seconds), what]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"model": model, "engine": engine, "dtype": dtype, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


HEAD = f"{'model':14} {'dtype':9} {'engine':14} {'cold s':>8} {'eager ms':>10} {'ms':>10} {'speed-up':>8} {'grad. error':>11} {'MiB':>8}"


def line(row: Row) -> str:
    head = f"{row['model']:14} {row['dtype']:9} {row['engine']:14} "
    if "error" in row:
        return head + row["error"][:100]
    return head + (
        f"{row['first_step_s']:8.2f} {row['eager_ms']:10.3f} {row['steady_ms']:10.3f} {row['speedup']:8.2f}"
        f" {row['gradient_error']:11.1e} {row.get('step_mib', float('nan')):8.1f}"
    )


def summary(rows: list[Row]) -> list[str]:
    """Each engine's geometric means, and against torch.compile and eager."""
    from benchmarks.compare import geometric_mean

    good = [row for row in rows if "error" not in row]
    by_engine = {(row["model"], row["dtype"], row["engine"]): row for row in good}
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in good if row["engine"] != "eager"):
        mine = [row for row in good if row["engine"] == engine]
        speeds = [row["speedup"] for row in mine]
        lines.append(f"{engine:14} over eager: geomean {geometric_mean(speeds):.2f}, least {min(speeds):.2f}")
        for peer in ("torch.compile", "eager"):
            pairs = [(row, by_engine[key]) for row in mine if (key := (row["model"], row["dtype"], peer)) in by_engine and peer != engine]
            memory = [a["step_mib"] / b["step_mib"] for a, b in pairs if "step_mib" in a and "step_mib" in b]
            if memory:
                lines.append(f"{'':14} memory of a step over {peer}: geomean {geometric_mean(memory):.2f}, most {max(memory):.2f}")
            if pairs and peer != "eager":
                cold = [b["first_step_s"] / a["first_step_s"] for a, b in pairs]
                steady = [a["speedup"] / b["speedup"] for a, b in pairs]
                lines.append(
                    f"{'':14} over {peer}: steady geomean {geometric_mean(steady):.2f}, least {min(steady):.2f};"
                    f" cold first step 1/{geometric_mean(cold):.1f} of its (worst 1/{min(cold):.1f})"
                )
    return lines


def main() -> None:
    from benchmarks.train_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)} in float32, one second each")
    parser.add_argument("--models")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--dtypes")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--no-memory", action="store_true", help="leave out the second process, which measures memory")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "train.json")
    arguments = parser.parse_args()
    quick = arguments.quick
    models = (arguments.models or ",".join(QUICK if quick else MODELS)).split(",")
    dtypes = (arguments.dtypes or ("float32" if quick else "float32,bfloat16")).split(",")
    seconds = arguments.seconds if arguments.seconds is not None else 1.0 if quick else 3.0
    rows: list[Row] = []
    print(HEAD)
    for model in models:
        for dtype in dtypes:
            for engine in arguments.engines.split(","):
                row = measure(model, engine, dtype, seconds, "time")
                if "error" not in row and not arguments.no_memory:
                    row |= measure(model, engine, dtype, 0.0, "memory")
                rows.append(row)
                print(line(row), flush=True)
    print("\n".join(summary(rows)))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
