"""Whole models under capture: which of the zoo's models fusewright compiles as one graph, whether the results equal eager's, and what breaks.

Usage: coverage.py [--only NAME,NAME] [--family NAME] [--skip-generate] [--outermost NAME,NAME] [--write docs/coverage.md] [--json FILE]

Each model's forward is compiled with fullgraph=True; a model that breaks is compiled once more without it, so that every break is counted and
named. Models that generate then generate eight tokens greedily through the compiled module, and some through a compiled `generate`. The work is
done in a worker process, so that a crash costs one row.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TOKENS = 8
TOLERANCE = 1e-5
SECONDS_A_MODEL = 240
HEADING = "## Models"


def difference(got: Any, expected: Any) -> float:
    """The largest ||got - expected|| / ||expected|| over the tensors of two results; inf where their structure, types, shapes, dtypes or
    integer values differ."""
    import torch

    if type(got) is not type(expected):
        return float("inf")
    if isinstance(expected, torch.Tensor):
        if got.shape != expected.shape or got.dtype != expected.dtype or got.stride() != expected.stride():
            return float("inf")
        if not expected.is_floating_point():
            return 0.0 if torch.equal(got, expected) else float("inf")
        finite = torch.isfinite(expected)
        if not torch.equal(got[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)) or not bool(
            torch.isfinite(got[finite]).all()
        ):
            return float("inf")
        scale = expected[finite].double().norm().item()
        return (got[finite].double() - expected[finite].double()).norm().item() / (scale or 1.0)
    if isinstance(expected, dict):
        if list(got) != list(expected):
            return float("inf")
        return max((difference(got[key], value) for key, value in expected.items()), default=0.0)
    if isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return float("inf")
        return max((difference(one, other) for one, other in zip(got, expected)), default=0.0)
    if isinstance(expected, int | float | str | bytes | type(None) | type):
        return 0.0 if got == expected else float("inf")
    if (
        hasattr(expected, "__dict__")
        and not isinstance(expected, torch.nn.Module)
        and not type(expected).__name__.endswith("Config")
    ):
        return difference(vars(got), vars(expected))
    return 0.0


class Facts:
    """What the event stream said during a block."""

    def __init__(self) -> None:
        self.graphs = self.operators = self.compiles = self.recompiles = 0
        self.breaks: list[str] = []
        self.seconds = 0.0

    def __enter__(self) -> Facts:
        from fusewright.base import events

        self._events = events
        events.STREAM.subscribers.append(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._events.STREAM.subscribers.remove(self._listen)

    def _listen(self, event: Any) -> None:
        events = self._events
        if isinstance(event, events.Captured):
            if event.graph is not None and event.op_count:
                self.graphs += 1
                self.operators += event.op_count
            self.compiles += 1
        elif isinstance(event, events.Recompiling):
            self.recompiles += 1
        elif isinstance(event, events.Broken | events.Skipped):
            self.breaks.append(cause(event.report))
        elif isinstance(event, events.InternalError):
            self.breaks.append(f"internal error in {event.stage}: {event.trace.strip().splitlines()[-1]}")
        elif isinstance(event, events.FellBack):
            self.breaks.append(f"a compiled call was repeated eagerly: {event.reason}")
        elif isinstance(event, events.LimitReached):
            self.breaks.append("recompile limit")


def cause(report: Any) -> str:
    """`reason [code] (file.py:12)`."""
    place = ""
    if report.stack:
        last = report.stack[-1]
        place = f" ({os.path.basename(str(last.file))}:{last.line})"
    return f"{report.reason} [{report.code}]{place}"


def measure(name: str, generate: bool, outermost: bool = True) -> dict[str, Any]:
    """One model's row. generate: through the compiled module; outermost: through a compiled `generate` as well."""
    import torch

    import fusewright
    from benchmarks.zoo import ROWS

    row = ROWS[name]
    record: dict[str, Any] = {
        "name": name,
        "family": row.family,
        "whole": False,
        "error": None,
        "breaks": [],
        "reason": "",
    }
    torch.manual_seed(1)
    model, inputs = row.build(), row.inputs()
    with torch.no_grad():
        torch.manual_seed(2)
        expected = model(**inputs)
        started = time.perf_counter()
        with Facts() as facts:
            try:
                compiled = fusewright.compile(model, fullgraph=True)
                torch.manual_seed(2)
                got = compiled(**inputs)
                record["whole"], record["reason"] = not facts.breaks, "; ".join(facts.breaks)
            except Exception as error:
                record["reason"] = str(error).splitlines()[0] if not facts.breaks else facts.breaks[0]
                if os.environ.get("COVERAGE_TRACE"):
                    traceback.print_exc()
        record["first_call_s"] = time.perf_counter() - started
        if not record["whole"]:
            fusewright.reset()
            with Facts() as facts, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = fusewright.compile(model)
                torch.manual_seed(2)
                got = compiled(**inputs)
        record.update(
            graphs=facts.graphs, operators=facts.operators, breaks=facts.breaks, difference=difference(got, expected)
        )
        torch.manual_seed(2)
        record["difference"] = max(record["difference"], difference(compiled(**inputs), expected))
        record["share"] = 1.0
        if not record["whole"]:
            fusewright.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record["share"] = captured_share(model, inputs)
        if row.generate_inputs is not None and generate:
            record["generate"] = through(
                model, row.generate_inputs(), lambda module: fusewright.compile(module).generate
            )
        if row.generate_inputs is not None and generate and outermost:
            record["outermost"] = through(
                model, row.generate_inputs(), lambda module: fusewright.compile(module.generate)
            )
    return record


def captured_share(model: Any, inputs: dict[str, Any]) -> float:
    """The share of PyTorch's operators in a call that run from captured graphs; the rest run eagerly, between the graphs."""
    import torch

    import fusewright

    region = "captured graph"

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            with torch.profiler.record_function(region):
                return gm(*values)

        return run

    compiled = fusewright.compile(model, backend=backend)
    compiled(**inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(**inputs)
    inside = outside = 0
    for event in profile.events():
        above, around = [], event.cpu_parent
        while around is not None:
            above.append(around.name)
            around = around.cpu_parent
        if event.name.startswith("aten::") and not any(name.startswith("aten::") for name in above):
            inside, outside = inside + (region in above), outside + (region not in above)
    return inside / max(1, inside + outside)


def through(model: Any, inputs: dict[str, Any], make: Any) -> dict[str, Any]:
    """Eight greedy tokens by `make(model)`, against eager's."""
    import torch

    import fusewright

    fusewright.reset()
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    started = time.perf_counter()
    with Facts() as facts, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = make(model)(**inputs, **settings)
            equal, error = bool(torch.equal(got, expected)), ""
        except Exception as failure:
            equal, error = False, f"{type(failure).__name__}: {failure}".splitlines()[0]
            if os.environ.get("COVERAGE_TRACE"):
                traceback.print_exc()
    return {
        "equal": equal,
        "error": error,
        "compiles": facts.compiles,
        "graphs": facts.graphs,
        "breaks": facts.breaks,
        "seconds": time.perf_counter() - started,
    }


def work(names: list[str], generate: bool, outermost: list[str]) -> None:
    """The worker: one JSON line before and one after each model."""
    import transformers

    import fusewright

    transformers.logging.set_verbosity_error()
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        fusewright.reset()
        try:
            record = measure(name, generate, name in outermost or outermost == ["all"])
        except Exception as error:
            record = {
                "name": name,
                "whole": False,
                "reason": f"{type(error).__name__}: {error}".splitlines()[0],
                "breaks": [],
                "difference": None,
            }
            if os.environ.get("COVERAGE_TRACE"):
                traceback.print_exc()
        print(json.dumps(record), flush=True)


def run(names: list[str], generate: bool, outermost: str) -> list[dict[str, Any]]:
    """All rows, from as many worker processes as crashes make necessary."""
    records: list[dict[str, Any]] = []
    left = list(names)
    while left:
        command = [
            sys.executable,
            __file__,
            "--worker",
            ",".join(left),
            "--outermost",
            outermost,
            *([] if generate else ["--skip-generate"]),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        current, deadline = None, time.monotonic() + SECONDS_A_MODEL
        while True:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                break
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            deadline = time.monotonic() + SECONDS_A_MODEL
            if "begin" in record:
                current = record["begin"]
                continue
            records.append(record)
            show(record)
            left.remove(record["name"])
            current = None
        process.kill()
        process.wait()
        if current is None and left and process.returncode == 0:
            break
        if left:
            failed = current or left[0]
            record = {
                "name": failed,
                "whole": False,
                "reason": "the process died or ran out of time",
                "breaks": [],
                "difference": None,
            }
            records.append(record)
            show(record)
            left.remove(failed)
    return records


def show(record: dict[str, Any]) -> None:
    """One line for people."""
    state = "whole" if record["whole"] else "BREAKS"
    error = record.get("difference")
    print(f"{record['name']:32} {state:7} {'' if error is None else f'{error:.1e}':8} {record.get('graphs', 0):3} graphs {record.get('operators', 0):5} ops  {record['reason']}")  # fmt: skip
    for key in ("generate", "outermost"):
        if key in record:
            told = record[key]
            print(f"    {key:10} {'equal' if told['equal'] else 'DIFFERS ' + told['error']:10} {told['compiles']} compiles, {told['graphs']} graphs, {len(told['breaks'])} breaks, {told['seconds']:.1f} s  {'; '.join(dict.fromkeys(told['breaks']))[:200]}")  # fmt: skip
    sys.stdout.flush()


def table(records: list[dict[str, Any]]) -> str:
    """The section of docs/coverage.md."""
    from benchmarks.tables import origin, provenance
    from benchmarks.zoo import ROWS

    whole = sum(record["whole"] for record in records)
    equal = sum(record["difference"] is not None and record["difference"] <= TOLERANCE for record in records)
    said = [
        HEADING,
        "",
        origin(provenance()),
        "",
        "Written by `benchmarks/coverage.py`: tiny configs, random weights, float32, CPU, under `no_grad`. *Whole*: one graph under",
        "`fullgraph=True`. *Difference*: the largest ||compiled - eager|| / ||eager|| over all tensors of the output, whose whole structure is compared.",
        "*Operators*: torch-level operators captured. *Share*: of the operators that a call runs, how many run from captured graphs (by the profiler,",
        "backend at torch level). *Generate*: eight greedy tokens through the compiled module, and (some models) through a",
        "compiled `generate`; whether the tokens equal eager's, compiles, breaks.",
        "",
        f"{whole} of {len(records)} models are one graph ({100 * whole / max(1, len(records)):.1f}%); {equal} of {len(records)} agree with eager within {TOLERANCE:g}.",
        "",
        "| model | family | whole | graphs | operators | share | difference | generate | compiled `generate` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        error = record.get("difference")
        said.append(
            f"| {record['name']} | {ROWS[record['name']].family} | {'yes' if record['whole'] else 'no'} | {record.get('graphs', '')} "
            f"| {record.get('operators', '')} | {percent(record.get('share'))} | {'' if error is None else f'{error:.1e}'} | {told(record.get('generate'))} | {told(record.get('outermost'))} |"
        )
    broken = [record for record in records if not record["whole"]]
    if broken:
        said += ["", "What breaks, and where:", "", "| model | breaks | causes |", "|---|---|---|"]
        said += [
            f"| {record['name']} | {len(record['breaks'])} | {'; '.join(dict.fromkeys(record['breaks'] or [record['reason']])).replace('|', '/').replace(chr(10), ' ')} |"
            for record in broken
        ]
    return "\n".join(said) + "\n"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def told(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return ""
    return f"{'equal' if facts['equal'] else 'differs'}, {facts['compiles']} compiles, {len(facts['breaks'])} breaks"


def write(path: Path, section: str) -> None:
    """Puts the section in its place in the page; the other sections stay."""
    page = path.read_text() if path.exists() else "# Coverage\n\n"
    before, _, after = page.partition(HEADING + "\n")
    rest = after.find("\n## ")
    path.write_text(before + section + (after[rest:] if rest >= 0 else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--family", default="")
    parser.add_argument("--skip-generate", action="store_true")
    parser.add_argument(
        "--outermost", default="gpt2,llama,t5", help="models whose `generate` is compiled itself, too (slow); all: each"
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", default="")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker.split(","), not arguments.skip_generate, arguments.outermost.split(","))
        return
    from benchmarks.tables import save_rows
    from benchmarks.zoo import ROWS

    names = (
        arguments.only.split(",")
        if arguments.only
        else [name for name, row in ROWS.items() if arguments.family in row.family]
    )
    records = run(names, not arguments.skip_generate, arguments.outermost)
    whole = sum(record["whole"] for record in records)
    print(f"{whole} of {len(records)} whole")
    if arguments.json:
        save_rows(arguments.json, records)
    if arguments.write:
        write(arguments.write, table(records))


if __name__ == "__main__":
    main()
