"""The tables of README.md and docs/, printed from the JSON files in benchmarks/results/.

    python -m benchmarks.tables [--check] [RESULT ...]

A page says where a table stands by a line `<!-- table: NAME -->`, and where it ends by `<!-- end of table -->`; NAME is a file of
benchmarks/results/ without its ending, or a key of SUMMARIES. Without arguments the pages are written anew; --check
writes nothing and fails where a page differs; RESULT prints single tables.

A file of results holds machine, date, commit and command, perhaps a note, and rows: dictionaries from a column's
name to a number or a text. The benchmarks write such files (`save_rows`): by default into benchmarks/runs/, which
git ignores. To publish a figure, copy its file to benchmarks/results/, and run this script.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "benchmarks" / "runs"
PAGES = ("README.md", "docs/performance.md", "docs/peers.md")
PLACE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Row = dict[str, Any]


# --- files of results -------------------------------------------------------------------------------------------------


def machine() -> str:
    """The processor, or the GPU where there is one, and the versions that figures depend on."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unnamed processor'}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor
    return f"{device}, PyTorch {version('torch')}"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def command(words: list[str]) -> str:
    """How to measure again: the script from the root of the tree, without where its JSON goes."""
    script = Path(words[0]).resolve()
    said = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    rest = [word for before, word in itertools.pairwise(words) if "--json" not in (before, word)]
    return " ".join(["python", str(said), *rest])


def provenance() -> dict[str, str]:
    """Where figures that this process measures come from."""
    return {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command(sys.argv),
    }


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with where they come from, a row a line."""
    head = provenance()
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


def load_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none where there is no such file yet."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def cell(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(found: dict[str, Any]) -> str:
    note = f" {found['note']}" if "note" in found else ""
    return f"{found['machine']}; {found['date']}, commit {found['commit']}: `{found['command']}`.{note}"


@dataclass(frozen=True)
class Ratio:
    """A column over another one in rows of some files; `under` is empty where the column holds ratios already."""

    files: tuple[str, ...]
    over: str
    under: str = ""
    leave_out: tuple[str, ...] = ()
    """Rows, by what stands in their first column."""

    def values(self) -> dict[str, float]:
        rows = [row for file in self.files for row in result(file)["rows"]]
        named = {str(next(iter(row.values()))): row for row in rows}
        return {
            name: row[self.over] / (row[self.under] if self.under else 1)
            for name, row in named.items()
            if name not in self.leave_out and isinstance(row.get(self.over), (int, float)) and row.get(self.under, 1)
        }

    def text(self) -> str:
        found = self.values()
        return f"{statistics.geometric_mean(found.values()):.2f} (least {min(found.values()):.2f} of {len(found)})"


FUNCTIONS = ("six_pointwise", "sixteen_elements", "norm_linear_gelu", "mlp", "transformer_layer")
"""Rows of benchmarks/models.py that are no whole models."""

ZEN5 = ("cpu-inference-zen5",)
TRAINING = ("cpu-training-speed-intel",)
GPU = ("gpu-inference-h200", "gpu-inference-others-h200")


def stated(file: str, row: str) -> str:
    """What a file of summaries holds of one comparison."""
    (found,) = [each for each in result(file)["rows"] if each["fusewright over"] == row]
    least = re.findall(r"\d\.\d+", found["least"])[0]
    return f"{found['geometric mean']:.2f} (least {least} of {found['models']})"


def call(file: str) -> str:
    first = result(file)["rows"][0]
    return f"{first['fusewright']:g} / {first['eager']:g} / {first['torch.compile']:g}"


def readme() -> str:
    intel, zen, gpu = "Intel Xeon, 2 cores", "AMD EPYC (Zen 5), 2 cores", "NVIDIA H200"

    def zen5(over: str) -> str:
        return Ratio(ZEN5, over, leave_out=FUNCTIONS).text()

    def measured(what: str, *cells: str) -> Row:
        return {"times the speed of ...": what, **dict(zip((intel, zen, gpu), cells, strict=True))}

    def first(word: str) -> tuple[str, ...]:
        files = ("cpu-first-call-intel", "cpu-first-call-zen5", "gpu-first-call-h200")
        return tuple(Ratio((file,), f"torch.compile {word}", f"fusewright {word}").text() for file in files)

    freezing = "torch.compile with freezing"
    summary = "cpu-inference-intel-summary"
    rows = [
        measured(
            "eager: inference, float32",
            stated(summary, "eager, float32"),
            zen5("over eager"),
            "",
        ),
        measured(
            "eager: inference, bfloat16",
            stated(summary, "eager, bfloat16"),
            zen5("bfloat16 over eager"),
            Ratio(GPU, "eager", "default, fusewright").text(),
        ),
        measured("torch.compile: inference, float32", "", zen5("over torch.compile"), ""),
        measured(
            "torch.compile: inference, bfloat16",
            "",
            zen5("bfloat16 over torch.compile"),
            Ratio(GPU, "default, torch.compile", "default, fusewright").text(),
        ),
        measured(
            f"{freezing}: inference, float32", stated(summary, f"{freezing}, float32"), zen5("over its freezing"), ""
        ),
        measured(
            f"{freezing}: inference, bfloat16",
            stated(summary, f"{freezing}, bfloat16"),
            zen5("bfloat16 over its freezing"),
            "",
        ),
        measured(
            "torch.compile: training step, float32",
            Ratio(TRAINING, "float32, fusewright", "float32, torch.compile").text(),
            "",
            "",
        ),
        measured(
            "torch.compile: training step, bfloat16",
            Ratio(TRAINING, "bfloat16, fusewright", "bfloat16, torch.compile").text(),
            "",
            Ratio(("gpu-training-h200",), "torch.compile", "fusewright").text(),
        ),
        measured("torch.compile: first call, empty caches", *first("cold")),
        measured("torch.compile: first call, full caches", *first("warm")),
        measured(
            "µs of a small call: fusewright / eager / torch.compile",
            *map(call, ("cpu-call-intel", "cpu-call-zen5", "gpu-call-h200")),
        ),
    ]
    dates = sorted(found["date"] for found in map(result, (path.stem for path in RESULTS.glob("*.json"))))
    return f"{table(rows)}\n\nMeasured from {dates[0]} to {dates[-1]}; on the H200 in default mode."


def zen5_summary() -> str:
    rows = []
    for column in list(dict.fromkeys(name for row in result(ZEN5[0])["rows"] for name in row))[1:]:
        if "over" in column:
            models = Ratio(ZEN5, column, leave_out=FUNCTIONS).values()
            least = min(models, key=lambda name: models[name])
            rows.append(
                {
                    "fusewright": column if "bfloat16" in column else f"float32 {column}",
                    "models": len(models),
                    "geometric mean": round(statistics.geometric_mean(models.values()), 2),
                    "median": round(statistics.median(models.values()), 2),
                    "least": f"{least} {models[least]:g}",
                }
            )
    return table(rows)


SUMMARIES: dict[str, Callable[[], str]] = {"readme": readme, "cpu-inference-zen5-summary": zen5_summary}


def printed(name: str) -> str:
    if name in SUMMARIES:
        return SUMMARIES[name]()
    found = result(name)
    return f"{table(found['rows'])}\n\n{origin(found)}"


def filled(text: str) -> str:
    """A page's text with its tables as the results are now."""
    return PLACE.sub(lambda place: f"{place[1]}\n{printed(place[2])}\n\n{place[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", metavar="RESULT")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.results:
        print(printed(name))
    stale = [page for page in PAGES if filled((ROOT / page).read_text()) != (ROOT / page).read_text()]
    for page in stale if not arguments.results else ():
        print(f"{page} {'differs' if arguments.check else 'is written'}")
        if not arguments.check:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
