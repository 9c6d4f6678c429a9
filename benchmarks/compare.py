"""Side by side: fusewright, eager and torch.compile on the same models.

First calls are made in fresh processes, one after the other: once with empty caches (cold), once with the caches that the first left (warm). Then one
process calls eager and all engines in turn: the steady state. Prints a table and writes JSON.

    python benchmarks/compare.py [--models bert,mlp | --models architectures --batch 1,8] [--engines fusewright,torch.compile] [--dtypes float32] [--seconds 3] [--json FILE]
        [--slice 1/4] [--resume] [--stages first,steady] [--caches FOLDER]

The file is written after each model, and --resume leaves out what it has, so a long comparison can be taken in parts. With --caches the engines' caches are kept: the
steady states, for which the machine should be quiet, then need not wait for what the first calls compiled. All engines of torch.compile share a cache, so only the
first of them in --engines has a cold first call; the others find what does not depend on their options.
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
Rows = dict[tuple[str, str, str], Row]
"""By model, dtype, engine."""


def ran(caches: Path, *words: str) -> dict[str, Any]:
    """What a worker process found, with the engines' caches in a folder; {"error"} with its last line when it failed."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FUSEWRIGHT_CACHE_DIR": str(caches / "fusewright"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "worker.py"), *words],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_calls(model: str, dtype: str, engine: str, caches: Path, warm: bool = True) -> Row:
    """The first call with the caches as they are (empty: a cold one), and again in another process."""
    row = {"model": model, "dtype": dtype, "engine": engine} | ran(caches, "first", model, engine, dtype, "0")
    if warm and "error" not in row and engine != "onnxruntime":
        row["warm_first_call_s"] = ran(caches, "first", model, engine, dtype, "0").get("first_call_s", math.nan)
    return row


def steady_states(model: str, dtype: str, engines: list[str], caches: Path, seconds: float) -> list[Row]:
    """A row for each engine, all called in turn in one process."""
    found = ran(caches, "steady", model, ",".join(engines), dtype, str(seconds))
    if "error" in found:
        found = dict.fromkeys(engines, found)
    return [{"model": model, "dtype": dtype, "engine": engine} | found[engine] for engine in engines]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


COLUMNS = {
    "cold s": ("first_call_s", "8.2f"),
    "warm s": ("warm_first_call_s", "8.2f"),
    "eager ms": ("eager_ms", "10.4f"),
    "ms": ("steady_ms", "10.4f"),
    "speed-up": ("speedup", "8.2f"),
    "rel. error": ("relative_error", "10.1e"),
    "MiB": ("peak_memory_growth_mib", "7.0f"),
    "breaks": ("breaks", "6"),
    "kernels": ("kernels", "7"),
}


def table(rows: list[Row]) -> str:
    """The rows as text, then for each dtype how fusewright compares with each other engine: geometric means over the models that both ran, and the worst model."""
    widths = {title: int(form.split(".")[0]) for title, (_, form) in COLUMNS.items()}
    lines = [f"{'model':20} {'dtype':9} {'engine':14} " + " ".join(f"{title:>{widths[title]}}" for title in COLUMNS)]
    for row in rows:
        head = f"{row['model']:20} {row['dtype']:9} {row['engine']:14} "
        cells = [
            f"{row[key]:>{form}}" if key in row else f"{'-':>{widths[title]}}" for title, (key, form) in COLUMNS.items()
        ]
        lines.append(head + (row["error"][:100] if "error" in row else " ".join(cells)))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype and "error" not in row]
        ours = {row["model"]: row for row in of_dtype if row["engine"] == "fusewright"}
        for engine in dict.fromkeys(row["engine"] for row in of_dtype):
            if engine != "fusewright":
                theirs = {row["model"]: row for row in of_dtype if row["engine"] == engine and row["model"] in ours}
                lines.append(f"fusewright over {engine:14} {dtype:9} " + "; ".join(comparison(ours, theirs, engine)))
        best = {model: min(over.values()) for model, row in ours.items() if len(over := row.get("over", {})) > 1}
        if best:
            lines.append(f"fusewright over the best     {dtype:9} " + spread(best))
    return "\n".join(lines)


def comparison(ours: dict[str, Row], theirs: dict[str, Row], engine: str) -> list[str]:
    """Steady state, cold and warm first call, as far as they were measured: their time over ours."""
    found = []
    steady = {model: ours[model]["over"][engine] for model in theirs if engine in ours[model].get("over", {})}
    if steady:
        found.append("speed " + spread(steady))
    for title, key in (("cold", "first_call_s"), ("warm", "warm_first_call_s")):
        ratios = {
            model: row[key] / ours[model][key] for model, row in theirs.items() if key in row and key in ours[model]
        }
        if ratios:
            found.append(f"{title} first call " + spread(ratios))
    return found


def spread(ratios: dict[str, float]) -> str:
    least = min(ratios, key=lambda model: ratios[model])
    return f"{geometric_mean(list(ratios.values())):.2f} (least {ratios[least]:.2f} {least}; {sum(one < 0.97 for one in ratios.values())} of {len(ratios)} under 0.97)"


def part(models: list[tuple[str, str]], text: str) -> list[tuple[str, str]]:
    """Every n-th of the (model, dtype) from the k-th on, for the text "k/n"."""
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise SystemExit(f"--slice takes k/n with 1 <= k <= n, not {text}")
    return models[int(first) - 1 :: int(step)]


def main() -> None:
    from benchmarks.architectures import ARCHITECTURES
    from benchmarks.models import MODELS
    from benchmarks.tables import RUNS, load_rows, save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default=",".join(MODELS), help="names, or `architectures`: those of architectures.py; `all`: both"
    )
    parser.add_argument("--batch", default="1,8", help="batch sizes of the architectures")
    parser.add_argument("--engines", default=",".join(ENGINES), help="eager is always measured beside them")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the steady state, for each engine")
    parser.add_argument("--stages", default="first,steady")
    parser.add_argument("--no-warm", action="store_true", help="leave out the first calls with full caches")
    parser.add_argument(
        "--caches", type=Path, help="keeps the engines' caches there, a folder for each model; empty at first"
    )
    parser.add_argument("--json", type=Path, default=RUNS / "compare.json")
    parser.add_argument("--slice", default="1/1", help="k/n: every n-th of the (model, dtype), from the k-th on")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the JSON file, and add what they lack")
    arguments = parser.parse_args()
    known = load_rows(arguments.json) if arguments.resume else []
    rows: Rows = {(row["model"], row["dtype"], row["engine"]): row for row in known}
    every = [f"{name}:{batch}" for name in ARCHITECTURES for batch in arguments.batch.split(",")]
    groups = {"architectures": every, "all": [*MODELS, *every]}
    models = [name for word in arguments.models.split(",") for name in groups.get(word, [word])]
    engines = [engine for engine in arguments.engines.split(",") if engine != "eager"]
    stages = arguments.stages.split(",")

    def note(row: Row) -> None:
        rows.setdefault((row["model"], row["dtype"], row["engine"]), {}).update(row)
        save_rows(arguments.json, rows.values())

    for model, dtype in part(
        [(model, dtype) for model in models for dtype in arguments.dtypes.split(",")], arguments.slice
    ):
        with tempfile.TemporaryDirectory() as temporary:
            caches = (arguments.caches or Path(temporary)) / f"{model}-{dtype}".replace(":", "-")
            measured = [rows.get((model, dtype, engine), {}) for engine in engines]
            for engine, row in zip(engines, measured, strict=True):
                if "first" in stages and not {"first_call_s", "error"} & row.keys():
                    note(first_calls(model, dtype, engine, caches, not arguments.no_warm))
            if "steady" in stages and not all({"steady_ms", "error"} & row.keys() for row in measured):
                able = [engine for engine in engines if "error" not in rows.get((model, dtype, engine), {})]
                for row in steady_states(model, dtype, able, caches, arguments.seconds):
                    note(row)
        print(
            "\n".join(
                table(
                    [rows[model, dtype, engine] for engine in engines if (model, dtype, engine) in rows]
                ).splitlines()[1 : 1 + len(engines)]
            ),
            flush=True,
        )
    print("\n" + table(list(rows.values())))


if __name__ == "__main__":
    main()
