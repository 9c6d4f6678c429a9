"""How long a user waits: the first call of each model in a fresh process, with empty caches and with those of an earlier process.

    python benchmarks/startup.py [--models six,mlp,bert] [--engines fusewright,torch.compile] [--repeat 3] [--jax PYTHON] [--json FILE]

One process at a time; each engine has a cache folder of its own, new for each model. Figures are medians of fresh processes (torch.compile's
cold start is measured once: it takes half a minute). Models are those of benchmarks/models.py, `six`, and `bert_of_<layers>` (for how it
grows with depth). The rows are added to FILE, those of the same model and engine replaced, so that models can be measured in several runs.
`--jax` names an interpreter that has jax: XLA's figure for the six pointwise operators.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODELS = "six,mlp,transformer_layer,bert,gpt2,llama,vit,resnet50,convnext,t5,mobilenet_v2"
Row = dict[str, Any]


def first_call(model: str, engine: str, caches: str, python: str = sys.executable) -> Row:
    """One fresh process. Raises CalledProcessError, with what it wrote, when it fails."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "FUSEWRIGHT_CACHE_DIR": f"{caches}/fusewright",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, str(ROOT / "benchmarks" / "startup_worker.py"), model, engine]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(model: str, engine: str, repeat: int) -> Row:
    """Medians: cold_s and warm_s (engine's import and first call together), again_s."""
    cold: list[Row] = []
    warm: list[Row] = []
    for _ in range(1 if engine == "torch.compile" else repeat):
        with tempfile.TemporaryDirectory() as caches:
            cold.append(first_call(model, engine, caches))
            warm += [first_call(model, engine, caches) for _ in range(repeat if engine == "torch.compile" else 1)]

    def median(rows: list[Row]) -> float:
        return statistics.median(row["import_s"] + row["first_call_s"] for row in rows)

    again = [row["again_s"] for row in cold if "again_s" in row]
    found = {
        "model": model,
        "engine": engine,
        "cold_s": median(cold),
        "warm_s": median(warm),
        "processes": len(cold) + len(warm),
    }
    return found | ({"again_s": statistics.median(again)} if again else {})


def measure_jax(python: str, repeat: int) -> Row:
    with tempfile.TemporaryDirectory() as caches:
        rows = [first_call("six", "jax", caches, python) for _ in range(repeat)]
    medians = {name: statistics.median(row[name] for row in rows) for name in ("import_s", "first_call_s", "again_s")}
    return {"model": "six", "engine": "jax", "cold_s": medians["first_call_s"], **medians}


def table(rows: list[Row]) -> str:
    from benchmarks.compare import geometric_mean

    by = {(row["model"], row["engine"]): row for row in rows}
    lines = [
        f"{'model':18} {'cold: ours':>10} {'peer':>8} {'ratio':>7} {'warm: ours':>10} {'peer':>8} {'ratio':>7} {'again':>7}  (seconds)"
    ]
    cold: list[float] = []
    warm: list[float] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        ours, peer = by.get((model, "fusewright")), by.get((model, "torch.compile"))
        if ours is None or peer is None:
            continue
        cold.append(peer["cold_s"] / ours["cold_s"])
        warm.append(peer["warm_s"] / ours["warm_s"])
        lines.append(
            f"{model:18} {ours['cold_s']:10.3f} {peer['cold_s']:8.2f} {f'1/{cold[-1]:.1f}':>7} {ours['warm_s']:10.3f} {peer['warm_s']:8.2f}"
            f" {f'1/{warm[-1]:.1f}':>7} {ours['again_s']:7.3f}"
        )
    if cold:
        lines.append(
            f"geometric means: cold 1/{geometric_mean(cold):.1f} of torch.compile's, warm 1/{geometric_mean(warm):.1f}"
        )
    xla, ours = by.get(("six", "jax")), by.get(("six", "fusewright"))
    if xla and ours:
        lines.append(
            f"six pointwise operators: jax.jit {xla['first_call_s']:.3f} s once jax is up (which takes {xla['import_s']:.2f} s); fusewright"
            f" {ours['cold_s']:.3f} s with its imports, {ours['again_s']:.3f} s once it is up"
        )
    return "\n".join(lines)


def main() -> None:
    from benchmarks.tables import RUNS, load_rows, save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--engines", default="fusewright,torch.compile")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--jax", help="an interpreter that has jax")
    parser.add_argument("--json", type=Path, default=RUNS / "startup.json")
    arguments = parser.parse_args()
    rows = load_rows(arguments.json)

    def add(made: Row) -> None:
        rows[:] = [row for row in rows if (row["model"], row["engine"]) != (made["model"], made["engine"])] + [made]
        save_rows(arguments.json, rows)

    for model in filter(None, arguments.models.split(",")):
        for engine in arguments.engines.split(","):
            add(measure(model, engine, arguments.repeat))
    if arguments.jax:
        add(measure_jax(arguments.jax, arguments.repeat))
    print(table(rows))


if __name__ == "__main__":
    main()
