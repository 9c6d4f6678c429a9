"""Streams of changing sizes side by side: fusewright, torch.compile by default and with dynamic=True.

Every (stream, way) runs in a fresh process with empty caches, one after the other (see dynamic_worker.py). Prints a table and writes
JSON; rows of the same stream and way in an existing file are replaced, so that a long comparison can be taken in parts.

    python benchmarks/dynamic.py [--only bert,t5] [--ways fusewright,torch.compile] [--seconds 2] [--json FILE] [--summary]
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
WAYS = ("fusewright", "fusewright-dynamic", "cold", "torch.compile", "torch.compile-dynamic")
PEERS = ("torch.compile", "torch.compile-dynamic")
Row = dict[str, Any]


def measure(name: str, way: str, seconds: float) -> Row:
    """One worker process; a way that fails gives a row with its error."""
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "FUSEWRIGHT_CACHE_DIR": f"{caches}/fusewright",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(ROOT / "benchmarks" / "dynamic_worker.py"), name, way, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"stream": name, "way": way, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


HEAD = f"{'stream':18} {'way':22} {'compiles':>8} {'fallbacks':>9} {'stream s':>9} {'error':>8}  steady: ms (x eager; share of static's speed)"


def line(row: Row) -> str:
    head = f"{row['stream']:18} {row['way']:22} "
    if "error" in row:
        return head + row["error"][:140]
    if row["way"] == "cold":
        return (
            head
            + f"compile static {row['static_compile_s']:.3f} s, dynamic {row['dynamic_compile_s']:.3f} s: {row['dynamic_over_static']:.2f}"
        )
    steady = "; ".join(
        f"{case['dynamic_ms']:.2f} ({case['speedup']:.2f}"
        + (f"; {case['static_over_dynamic']:.0%})" if "static_ms" in case else ")")
        for case in row["steady"]
    )
    return (
        head + f"{row['compiles']:8} {row['fallbacks']:9} {row['stream_s']:9.2f} {row['relative_error']:8.1e}  {steady}"
    )


def summary(rows: list[Row]) -> list[str]:
    """Geometric means against static compiles and against torch.compile."""
    from benchmarks.compare import geometric_mean

    found = {(row["stream"], row["way"]): row for row in rows if "error" not in row}
    lines = []
    for way in ("fusewright", "fusewright-dynamic"):
        shares = [
            case["static_over_dynamic"] for (_, which), row in found.items() if which == way for case in row["steady"]
        ]
        if shares:
            lines.append(
                f"{way}: share of static's speed: geomean {geometric_mean(shares):.1%}, least {min(shares):.1%} ({len(shares)} cases)"
            )
    ratios = [row["dynamic_over_static"] for (_, way), row in found.items() if way == "cold"]
    if ratios:
        lines.append(f"dynamic compile over static: geomean {geometric_mean(ratios):.2f}, most {max(ratios):.2f}")
    for peer in PEERS:
        streams = [name for name, way in found if way == "fusewright" and (name, peer) in found]
        if streams:
            times = {name: found[name, peer]["stream_s"] / found[name, "fusewright"]["stream_s"] for name in streams}
            speeds = [
                ours["speedup"] / theirs["speedup"]
                for name in streams
                for ours, theirs in zip(found[name, "fusewright"]["steady"], found[name, peer]["steady"])
            ]
            least = min(times, key=lambda name: times[name])
            text = f"over {peer}: stream time 1/{geometric_mean(list(times.values())):.1f} of its (worst 1/{times[least]:.1f}, {least})"
            lines.append(
                text
                + (f"; steady speed geomean {geometric_mean(speeds):.2f}, least {min(speeds):.2f}" if speeds else "")
            )
    return lines


def main() -> None:
    from benchmarks.dynamic_streams import STREAMS
    from benchmarks.tables import RUNS, load_rows, save_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STREAMS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each steady state; 0 leaves them out")
    parser.add_argument("--summary", action="store_true", help="measure nothing: print what the file holds")
    parser.add_argument("--json", type=Path, default=RUNS / "dynamic.json")
    arguments = parser.parse_args()
    rows = load_rows(arguments.json)
    if arguments.summary:
        print("\n".join([HEAD, *map(line, rows), *summary(rows)]))
        return
    print(HEAD)
    for name in arguments.only.split(","):
        for way in arguments.ways.split(","):
            row = measure(name, way, arguments.seconds)
            rows = [old for old in rows if (old["stream"], old["way"]) != (name, way)] + [row]
            print(line(row), flush=True)
            save_rows(arguments.json, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
