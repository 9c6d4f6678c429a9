"""Typical programs of other people's libraries: graph breaks beside torch.compile's, results and speed beside eager's.

    python -m benchmarks.libraries [--only PROGRAM-OR-LIBRARY,...] [--json FILE] [--write docs/libraries.md] [--seconds 120]
                                   [--peers ours,theirs]

Each program runs in a process of its own, once under `fusewright.compile` (native backend) and once under `torch.compile(backend="eager")`,
which captures as its default backend does, where ours breaks. Three calls each; graph breaks are counted over all of them. A program that trains runs in float64,
since a gradient near zero is nothing but rounding in float32 (unless the library does not run in float64). A program that cannot be made (its
library is missing, or does not load) is named with the reason, and counts nowhere. Programs that are not asked for keep the rows that FILE has
of them, so that a table may be made in parts. The libraries are no part of our environment: install them beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.coverage import Facts, difference
from benchmarks.libraries import cpu_parts, pictures, science, text  # noqa: F401  (they fill the table)
from benchmarks.libraries.table import PROGRAMS, Program
from benchmarks.tables import load_rows, origin, provenance, save_rows

CALLS = 3
CONSEQUENCE = "[loop-goes-on]"
"""The code of a cut that is no break of its own: between the turns of a loop that broke. (torch.compile leaves such a function to eager.)"""
TOLERANCES = {"float32": 1e-4, "float64": 1e-6}
AS_QUICK = 0.95
"""The ratio to eager's speed from which on a program counts as no slower: two runs of one function differ as much."""
SECONDS_OF_TIMING = 1.0
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["benchmarks.libraries.running", "transformers", "fusewright.compiler", "fusewright.backends.native"]
"""What a process for a program begins with. (Not torch._dynamo: it comes with the peer.)"""


def modules_of(f: Any) -> list[nn.Module]:
    """The modules that a callable is, belongs to, or closes over."""
    cells = [cell.cell_contents for cell in getattr(f, "__closure__", None) or ()]
    return [one for one in (f, getattr(f, "__self__", None), *cells) if isinstance(one, nn.Module)]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, through containers and objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = list(value) if isinstance(value, (list, tuple)) else []
    parts = list(value.values()) if isinstance(value, dict) else parts
    return [one for part in parts for one in tensors(part)]


def call(program: Program, f: Callable[..., Any], original: Any, args: tuple[Any, ...]) -> Any:
    """One call: its result, and the gradients where the program trains."""
    torch.manual_seed(5)
    if not program.training:
        with torch.no_grad():
            return f(*args)
    result = f(*args)
    leaves = [one for module in modules_of(original) for one in module.parameters()]
    leaves += [one for one in tensors(args) if one.requires_grad]
    # Weights that differ: behind a normalisation, the gradient of a plain sum is nothing but rounding.
    total = sum(
        (one * torch.linspace(0.5, 1.5, one.numel()).view_as(one)).sum() for one in tensors(result) if one.requires_grad
    )
    total.backward()  # type: ignore[union-attr]
    gradients = [leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return [one.detach() for one in tensors(result)], torch.cat(gradients)


def made(program: Program) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    return program.make()


def their_breaks() -> list[str]:
    """The list that torch.compile's graph breaks will be added to: a frame that breaks logs one, as ours announces one. (Its own counter leaves
    out those at a branch.)"""
    import torch._dynamo

    breaks: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            breaks.append(record.getMessage())

    torch._logging.set_logs(graph_breaks=True)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("torch._dynamo.") and name.endswith(".__graph_breaks") and isinstance(logger, logging.Logger):
            logger.addHandler(Listener())
    return breaks


@dataclass
class Prepared:
    """A program twice, and what eager gives in turn for one of them."""

    f: Any
    args: tuple[Any, ...]
    eager: Any
    eager_args: tuple[Any, ...]
    expected: list[Any]


def prepared(program: Program) -> Prepared:
    f, args = made(program)
    eager, eager_args = made(program)
    return Prepared(f, args, eager, eager_args, [call(program, eager, eager, eager_args) for _ in range(CALLS)])


def said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def work(name: str, peer: str) -> dict[str, Any]:
    """What one peer does with a program, in this process."""
    program = PROGRAMS[name]
    warnings.simplefilter("ignore")
    error: Exception | None = None
    for dtype in (torch.float64, torch.float32) if program.training else (torch.float32,):
        torch.set_default_dtype(dtype)
        try:
            cpu_parts.provide()
            ready = prepared(program)
            break
        except Exception as why:
            error = why
    else:
        return {"unmade": said(error)}
    f, args, eager, eager_args = ready.f, ready.args, ready.eager, ready.eager_args
    if peer == "theirs":
        breaks = their_breaks()
        compiled = torch.compile(f, backend="eager")
        try:
            for _ in range(CALLS):
                call(program, compiled, f, args)
        except Exception as error:
            return {"error": said(error)}
        return {"breaks": breaks}
    import fusewright

    with Facts() as facts:
        compiled = fusewright.compile(f)
        try:
            worst = max(difference(call(program, compiled, f, args), one) for one in ready.expected)
        except Exception as error:
            if os.environ.get("LIBRARIES_TRACE"):
                raise
            return {"error": said(error), "breaks": facts.breaks}
    times: dict[str, list[float]] = {"eager": [], "ours": []}
    until = time.perf_counter() + SECONDS_OF_TIMING
    while len(times["ours"]) < 3 or time.perf_counter() < until:
        for key, run, arguments in (("eager", eager, eager_args), ("ours", compiled, args)):
            start = time.perf_counter()
            call(program, run, eager if key == "eager" else f, arguments)
            times[key].append(time.perf_counter() - start)
    ratio = statistics.median(one / other for one, other in zip(times["eager"], times["ours"], strict=True))
    found = {"breaks": facts.breaks, "difference": worst, "graphs": facts.graphs, "speed": round(ratio, 2)}
    return {**found, "dtype": str(torch.get_default_dtype()).removeprefix("torch.")}


def report(name: str, peer: str, into: Connection) -> None:
    """The child's part of `run`."""
    if not os.environ.get("LIBRARIES_TRACE"):
        with open(os.devnull, "w") as nowhere:  # the libraries say much
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    into.send(work(name, peer))
    into.close()
    os._exit(0)  # threads of the libraries need not be waited for


def run(name: str, peer: str, seconds: int) -> dict[str, Any]:
    """One peer's run of a program, in a process of its own."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=report, args=(name, peer, theirs))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(seconds) else {"error": f"more than {seconds} s"}
    except EOFError:
        process.join()
        return {"error": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        ours.close()


def row(name: str, seconds: int, peers: list[str]) -> dict[str, Any]:
    program = PROGRAMS[name]
    ours = run(name, "ours", seconds)
    record = {"library": program.library, "program": name, "kind": "training" if program.training else "inference"}
    if "unmade" in ours:
        return {**record, "unmade": ours["unmade"]}
    asked = "theirs" in peers and (ours.get("error") or ours["breaks"])  # what has no break cannot have more
    theirs = run(name, "theirs", seconds) if asked else {}
    return {
        **record,
        "breaks": sum(CONSEQUENCE not in cause for cause in ours.get("breaks", ())),
        "theirs": len(theirs["breaks"]) if "breaks" in theirs else None,
        "error": ours.get("error", ""),
        "their error": theirs.get("error", ""),
        "difference": ours.get("difference"),
        "equal": "error" not in ours and ours["difference"] <= TOLERANCES[ours["dtype"]],
        "dtype": ours.get("dtype"),
        "speed": ours.get("speed"),
        "causes": [told(cause) for cause in dict.fromkeys(ours.get("breaks", ())) if CONSEQUENCE not in cause],
    }


def told(cause: str) -> str:
    """A cause without the folders of this machine, and at most so long: its end has the code and the line."""
    short = re.sub(r"(?<![\w.])/[^\s:'\"]*/", "", " ".join(cause.split()))
    return short if len(short) <= 240 else f"{short[:150]}… {short[-80:]}"


def no_more(record: dict[str, Any]) -> bool:
    """Whether a program has no more breaks than torch.compile, which may have failed, and is asked only about what breaks."""
    return not record["error"] and (record["theirs"] is None or record["breaks"] <= record["theirs"])


def page(records: list[dict[str, Any]], head: dict[str, str]) -> str:
    """docs/libraries.md; head: where the rows come from."""
    ran = [record for record in records if "unmade" not in record]
    count = max(1, len(ran))
    shares = [
        (sum(not record["breaks"] and not record["error"] for record in ran), "have no graph break"),
        (sum(map(no_more, ran)), "have no more graph breaks than under torch.compile"),
        (sum(record["equal"] for record in ran), "equal eager"),
        (sum((record["speed"] or 0) >= AS_QUICK for record in ran), f"run at {AS_QUICK:g} of eager's speed or more"),
    ]
    said = [
        "# Libraries",
        "",
        "Typical programs of other people's libraries, with random weights, written by `benchmarks/libraries`.",
        origin(head),
        "",
        *(f"- {good} of {len(ran)} programs ({100 * good / count:.1f}%) {what}." for good, what in shares),
        "",
        '*Breaks*: functions that break or are left to eager, once for each version, in three calls; ours, and those that',
        '`torch.compile(backend="eager")` logs; *failed* where it raised an error or took too long. A loop that breaks is cut between its turns too,',
        "where torch.compile leaves its function to eager; that is not counted. torch.compile is asked where ours breaks.",
        "All calls of a program have the same arguments, so what is taken for granted of values (docs/dynamic-shapes.md) holds in them.",
        "*Difference*: the largest ||compiled - eager|| / ||eager|| over results, and gradients in training; equal up to",
        " or ".join(f"{most:g} in {dtype}" for dtype, most in TOLERANCES.items()) + ". Training is in float64 where the library can.",
        "*Speed*: eager's time over ours, medians of calls in turn, one thread; small programs, so mostly what a call costs.",
        "",
        "| library | program | kind | breaks | torch.compile's | difference | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in ran:
        theirs = "failed" if record["their error"] else record["theirs"] if record["theirs"] is not None else ""
        error = record["difference"]
        cells = [
            record["library"],
            record["program"],
            record["kind"],
            "failed" if record["error"] else record["breaks"],
            theirs,
        ]
        cells += ["" if error is None else f"{error:.1e}", record["speed"] or ""]
        said.append("| " + " | ".join(map(str, cells)) + " |")
    if any(record["causes"] or record["error"] for record in ran):
        said += ["", "## What breaks", "", "| program | causes |", "|---|---|"]
        for record in ran:
            causes = [record["error"]] * bool(record["error"]) + record["causes"]
            if causes:
                said.append(f"| {record['program']} | {'; '.join(causes).replace('|', '/').replace(chr(10), ' ')} |")
    left = [record for record in records if "unmade" in record]
    if left:
        said += ["", "## Left out", "", "| program | reason |", "|---|---|"]
        said += [f"| {record['program']} | {record['unmade'].replace('|', '/')} |" for record in left]
    return "\n".join(said) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs or libraries, separated by commas")
    parser.add_argument("--seconds", type=int, default=120, help="the most that one peer may take for one program")
    parser.add_argument("--peers", default="ours,theirs", help="`ours` leaves torch.compile out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(PRELOADED)
    wanted = arguments.only.split(",") if arguments.only else None
    names = [name for name, one in PROGRAMS.items() if wanted is None or {name, one.library} & set(wanted)]
    records = {record["program"]: record for record in load_rows(arguments.json)} if arguments.json else {}
    for name in names:
        records[name] = row(name, arguments.seconds, arguments.peers.split(","))
        told = {key: value for key, value in records[name].items() if key not in ("library", "program", "kind")}
        print(f"{name:32} {told}", flush=True)
        if arguments.json:
            save_rows(arguments.json, [records[one] for one in PROGRAMS if one in records])
    if arguments.write:
        # Without a program to run, the page of the rows that there are.
        head = json.loads(arguments.json.read_text()) if arguments.json and not names else provenance()
        arguments.write.write_text(page([records[one] for one in PROGRAMS if one in records], head))
