"""The sweep as a program: `python -m tests.ops.sweep --slice 0/8 --form function --dtype float32`.

Takes a selection of cases; runs them in a child process (a native crash costs one operator, not the sweep), prints a table of outcomes
and every defect, and writes the outcomes as JSON lines with --out. Exit status 1 when there is a defect.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.ops import optimizers
from tests.ops.cases import FORMS, Case, foreach_cases, module_cases, operator_cases, operator_name, supports
from tests.ops.opinfo import DATABASES
from tests.ops.running import GOOD, run_case_apart

DTYPES = {
    name: getattr(torch, name) for name in "float32 int64 bool bfloat16 float16 float64 complex64 int32 uint8".split()
}
ALL_FORMS = [*FORMS, "foreach", "train", "eval", *optimizers.FORMS]
Unit = tuple[str, str, str]
"""(form, dtype, entry): what is run together; entry is the key of an operator or a module class."""


def _name(kind: str, info: Any) -> str:
    if kind == "optimizer":
        return str(info.name)
    return str(info.module_cls.__name__) if kind == "module" else operator_name(info)


def entries() -> dict[str, Any]:
    """Every database entry by a key of its own (several entries may share their name and variant)."""
    found: dict[str, Any] = {}
    for kind, database in DATABASES.items():
        for info in database:
            name = _name(kind, info)
            key = f"{kind}:{name}"
            while key in found:
                key += "'"
            found[key] = info
    return found


def units(options: argparse.Namespace, table: dict[str, Any]) -> list[Unit]:
    """What the options select, in the order of the databases."""
    pattern = re.compile(options.only) if options.only else None
    chosen: list[Unit] = []
    for form in options.form:
        for dtype in options.dtype:
            for key, info in table.items():
                kind, _, name = key.partition(":")
                if pattern and not pattern.fullmatch(name):
                    continue
                if kind not in options.database:
                    continue
                if kind == "foreach":
                    wanted = form == "foreach" and DTYPES[dtype] in info.supported_dtypes(options.device)
                elif kind == "optimizer":
                    wanted = form in optimizers.FORMS and optimizers.supports(info, DTYPES[dtype], form)
                elif kind == "module":
                    wanted = form in ("train", "eval") and DTYPES[dtype] in info.dtypes
                else:
                    wanted = form in FORMS and supports(info, DTYPES[dtype], form, options.device)
                if wanted:
                    chosen.append((form, dtype, key))
    index, _, count = options.slice.partition("/")
    return chosen[int(index) :: int(count)]


def cases_of(unit: Unit, table: dict[str, Any], limit: int, device: str = "cpu") -> Iterator[Case]:
    form, dtype, key = unit
    info = table[key]
    if form == "foreach":
        return foreach_cases(info, DTYPES[dtype], limit, device)
    if form in optimizers.FORMS:
        return optimizers.optimizer_cases(info, DTYPES[dtype], form, limit, device)
    if form in ("train", "eval"):
        return module_cases(info, DTYPES[dtype], form == "train", limit, device)
    return operator_cases(info, DTYPES[dtype], form, limit, device)


HOW: dict[str, dict[str, Any]] = {
    "": {},
    "eager": {"backend": "eager"},
    "aot_eager": {"backend": "aot_eager"},
    "dynamic": {"dynamic": True},
    "xla": {"backend": "xla"},
}
"""The ways to compile: the default, a backend that tests one half of the compiler, symbolic sizes."""


def run_unit(
    unit: Unit, table: dict[str, Any], limit: int, how: str = "", device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """The outcomes of one unit, as JSON data."""
    form, dtype, key = unit
    try:
        for case in cases_of(unit, table, limit, device):
            try:
                outcome = run_case_apart(case, **HOW[how])
            except Exception as error:  # the harness's own trouble with a sample is an outcome too, never silence
                yield {
                    "form": form,
                    "how": how,
                    "dtype": dtype,
                    "entry": key,
                    "case": case.name,
                    "kind": "no verdict",
                    "code": "",
                    "detail": repr(error)[:600],
                }
                continue
            yield {
                "form": form, "how": how, "dtype": dtype, "entry": key, "case": case.name,
                "kind": outcome.kind, "code": outcome.code, "detail": outcome.detail,
            }  # fmt: skip
    except Exception as error:
        yield {
            "form": form,
            "how": how,
            "dtype": dtype,
            "entry": key,
            "case": key,
            "kind": "no samples",
            "code": "",
            "detail": repr(error)[:600],
        }


def work(options: argparse.Namespace) -> None:
    """The child: runs the units that it reads from its standard input and writes outcomes as it goes."""
    table = entries()
    on_gpu = options.device == "cuda"
    # PyTorch's own also notes a stack trace for each kind of device that is absent: 60% of a sweep's time.
    if not on_gpu:
        torch.manual_seed = torch.default_generator.manual_seed
    for line in sys.stdin:
        unit = tuple(json.loads(line))
        for outcome in run_unit(unit, table, options.limit, options.how, options.device):  # type: ignore[arg-type]
            print(json.dumps(outcome), flush=True)
        if on_gpu:
            torch.cuda.synchronize()  # a GPU that an operator has stopped ends this child
        print(json.dumps({"done": unit}), flush=True)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All outcomes of the selection; a child that dies is replaced, and the unit that it was at is an outcome of kind "died". Units that the
    --out file has are not run again, and after --seconds no further one is begun: the same command again goes on."""
    finished = done(Path(options.out)) if options.out else set()
    pending = [unit for unit in units(options, entries()) if unit not in finished]
    total = len(pending)
    outcomes: list[dict[str, Any]] = []
    out = Path(options.out).open("a") if options.out else None
    started = time.monotonic()
    late = False
    while pending and not late:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.ops.sweep", "--work", "--limit", str(options.limit), "--how", options.how, "--device", options.device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "FUSEWRIGHT_CACHE": "1" if options.cache else "0"},
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        # One line at a time: everything at once would fill the pipe while the child waits for us to read.
        child.stdin.write(json.dumps(pending[0]) + "\n")
        child.stdin.flush()
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            data = json.loads(line)
            if "done" not in data:
                outcomes.append(data)
                if out:
                    out.write(line)
                continue
            pending.pop(0)
            if out:
                out.write(line)
                out.flush()
            if not options.quiet and not len(pending) % 50:
                print(
                    f"{total - len(pending)} of {total} in {time.monotonic() - started:.0f} s: {dict(Counter(o['kind'] for o in outcomes))}",
                    flush=True,
                )
            late = bool(options.seconds) and time.monotonic() - started > options.seconds
            if not pending or late:
                break
            child.stdin.write(json.dumps(pending[0]) + "\n")
            child.stdin.flush()
        child.stdin.close()
        status = child.wait()
        if pending and not late:
            form, dtype, key = pending.pop(0)
            outcomes.append(
                {
                    "form": form,
                    "how": options.how,
                    "dtype": dtype,
                    "entry": key,
                    "case": key,
                    "kind": "died",
                    "code": "",
                    "detail": f"exit status {status}",
                }
            )
            if out:
                out.write(json.dumps(outcomes[-1]) + "\n" + json.dumps({"done": [form, dtype, key]}) + "\n")
                out.flush()
    if pending and not options.quiet:
        print(f"{len(pending)} of {total} units are left", flush=True)
    return outcomes


def done(path: Path) -> set[Unit]:
    """The units that an --out file has the outcomes of."""
    return {tuple(data["done"]) for data in lines_of(path) if "done" in data}


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """What an --out file holds; a line that was cut off when its sweep was stopped is left out (its unit is not done)."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def outcomes_of(files: list[Path]) -> list[dict[str, Any]]:
    """The outcomes in --out files, of finished units only, each case once (the last one counts: a unit may have been cut off and run again)."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in files:
        whole = done(path)
        for data in lines_of(path):
            if "done" not in data and (data["form"], data["dtype"], data["entry"]) in whole:
                found[data["form"], data["how"], data["dtype"], data["entry"], data["case"]] = data
    return list(found.values())


def rows_of(outcomes: list[dict[str, Any]]) -> dict[tuple[str, str], Counter[str]]:
    """(form, dtype) → how many cases of each kind."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for o in outcomes:
        rows.setdefault((f"{o['form']}, {o['how']}" if o["how"] else o["form"], o["dtype"]), Counter())[o["kind"]] += 1
    return rows


def table_of(outcomes: list[dict[str, Any]]) -> str:
    """Counts by form and dtype, and the breaks by code."""
    kinds = list(dict.fromkeys(o["kind"] for o in outcomes))
    rows = rows_of(outcomes)
    lines = [f"{'form':<20}{'dtype':<10}{'cases':>8}" + "".join(f"{kind:>15}" for kind in kinds)]
    for (form, dtype), counts in rows.items():
        lines.append(f"{form:<20}{dtype:<10}{counts.total():>8}" + "".join(f"{counts[kind]:>15}" for kind in kinds))
    codes = Counter(o["code"] for o in outcomes if o["kind"] == "broke")
    lines += [f"broke by {code}: {count}" for code, count in codes.most_common()]
    return "\n".join(lines)


def defects_of(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is no good outcome. Operators that XLA has no row for run with PyTorch: that is no defect of backend xla."""
    return [o for o in outcomes if o["kind"] not in GOOD and (o["how"], o["kind"]) != ("xla", "fell back")]


SECTION = "## Operators"


def record(path: Path, outcomes: list[dict[str, Any]]) -> None:
    """Writes the counts as the section `## Operators` of a Markdown file, replacing the one that is there."""
    rows = rows_of(outcomes)
    defects = [o for o in outcomes if o["kind"] not in GOOD]
    codes = Counter(o["code"] for o in outcomes if o["kind"] == "broke")
    lines = [
        SECTION, "",
        f"PyTorch {torch.__version__.partition('+')[0]}'s own samples of every operator, module and foreach function (`python -m tests.ops.sweep`),",
        "all of them, or evenly spread ones where there are many: compiled and eager agree in values, dtypes, shapes, strides, aliasing,",
        "what is written to arguments, and the type of exceptions. *captured*: the whole call in one graph; *broke*: equal, eager by a catalogued break.",
        "", "| form | dtype | entries | cases | captured | broke | same error | differ |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (form, dtype), counts in sorted(rows.items()):
        differ = counts.total() - counts["captured"] - counts["broke"] - counts["same error"]
        entered = len({o["entry"] for o in outcomes if rows_of([o]).keys() == {(form, dtype)}})
        lines.append(
            f"| {form} | {dtype} | {entered} | {counts.total()} | {counts['captured']} | {counts['broke']} | {counts['same error']} | {differ} |"
        )
    total = Counter(o["kind"] for o in outcomes)
    share = 100 * total["captured"] / max(1, total["captured"] + total["broke"])
    lines += ["", f"Of the cases that eager accepts, {share:.1f}% are captured whole. Breaks: "]
    lines[-1] += ", ".join(f"`{code}` {count}" for code, count in codes.most_common()) + "."
    if defects:
        lines += ["", "Cases that differ:", ""]
        lines += [f"- {o['case']}: {o['kind']}, {o['detail'].strip().splitlines()[-1][:140]}" for o in defects]
    text = path.read_text() if path.exists() else "# Coverage\n"
    before, found, after = text.partition(SECTION)
    rest = after.partition("\n## ") if found else ("", "", "")
    tail = f"\n\n## {rest[2]}" if rest[1] else "\n"
    path.write_text(before.rstrip("\n") + "\n\n" + "\n".join(lines) + tail)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", default="0/1", help="i/n: every n-th unit, from the i-th")
    parser.add_argument("--form", nargs="*", default=["function"], choices=ALL_FORMS)
    parser.add_argument("--dtype", nargs="*", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--database", nargs="*", default=list(DATABASES), choices=list(DATABASES))
    parser.add_argument("--only", help="a regular expression for whole names")
    parser.add_argument("--limit", type=int, default=0, help="at most so many samples of one operator (0: all)")
    parser.add_argument("--how", default="", choices=list(HOW), help="the way to compile")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the samples lie")
    parser.add_argument("--out", help="append the outcomes to this file, and go on where it ends")
    parser.add_argument(
        "--seconds", type=float, default=0, help="begin no further entry after so many seconds (0: no limit)"
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="take compiled graphs from the disk cache, as a second run of a program does",
    )
    parser.add_argument(
        "--record",
        nargs="+",
        metavar="FILE",
        help="FILE.md OUTCOMES...: write the section of a report from --out files, and run nothing",
    )
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options)
        return 0
    if options.record:
        report, *files = map(Path, options.record)
        record(report, outcomes_of(files))
        return 0
    outcomes = run(options)
    print(table_of(outcomes))
    defects = defects_of(outcomes)
    for o in defects if not options.quiet else ():
        print(f"{o['kind']}: {o['case']}: {o['code']} {o['detail'][-300:]}")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
