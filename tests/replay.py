"""Shows that a change generates the same code: what every stage of a compile prints, over many programs.

    python -m tests.replay record FOLDER             # in the checkout before the change (or with --tree CHECKOUT)
    python -m tests.replay compare FOLDER            # in the changed checkout
    python -m tests.replay compare BEFORE AFTER      # two folders that were recorded

Programs are those of tests/replay_programs.py (a minute), with `--models` also those of benchmarks/models.py and
benchmarks/train_models.py (ten minutes), static and dynamic; `--only` takes patterns of their names. A folder holds a
file a program and stage: `graph`, `guards` and `finish` of the capture, each stage of the backend, `kernels`,
`output_code` (the call plan), and `events` (breaks, recompiles, hints). `compare` prints for each stage how many texts
are equal, then the first differences; its exit status is 1 where there is any.

Always holds: two records of one tree are equal to the byte, whatever the hash seed, so a difference is the change's.
Nothing is measured (the clock moves by the same tick whenever somebody looks, so no candidate is quickest and defaults are
taken), the disk cache is off, random numbers have a seed. Texts hold no addresses, no modules of fusewright and no
lines of its source. Both records must be of one machine and environment: kernels are generated for the processor at
hand.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import functools
import gc
import itertools
import linecache
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2
TICK = 2.0**-30
"""Seconds between two looks at the clock: sums and differences of a few ticks are exact."""
QUICK = ".quick_onednn"
"""Ends the name of a program that is recorded as where oneDNN's products in float32 are much quicker than eager's."""

Program = Callable[[Callable[..., Any]], object]


def internal(name: str) -> Any:
    """An object of fusewright by its name, wherever it lies. The only names of the inside that the script knows are
    `STREAM`, and `Chooser` with its method `has_quick_onednn`."""
    for key in sorted(key for key in sys.modules if key.split(".")[0] == "fusewright"):
        if hasattr(sys.modules[key], name):
            return getattr(sys.modules[key], name)
    raise SystemExit(f"no module of fusewright has a {name}: tests/replay.py must learn its new name")


# --- the texts of a compile -------------------------------------------------------------------------------------------


class Texts:
    """A subscriber of the event stream: the texts of each stage, in the order in which they came."""

    def __init__(self) -> None:
        self.stages: dict[str, list[str]] = defaultdict(list)

    def __call__(self, event: Any) -> None:
        kind = type(event).__name__
        for stage, text in WRITERS.get(kind, lambda event: [("events", repr(event))])(event):
            heading = f"{event.function} {kind}" if stage == "events" else event.function
            self.stages[stage].append(f"== {heading}\n{text.rstrip()}\n")

    def write(self, folder: Path, source: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        place = functools.cache(functools.partial(place_text, module_files(source), source))
        for stage, texts in self.stages.items():
            (folder / f"{stage.replace(' ', '_')}.txt").write_text(normal("\n".join(texts), source, place))


def _captured(event: Any) -> list[tuple[str, str]]:
    guards, inputs, replayed = ("\n".join(lines) for lines in (event.guards, event.inputs, event.replayed))
    return [
        ("graph", f"{event.graph}\n{event.op_count} operators"),
        ("guards", f"{guards}\ninputs:\n{inputs}"),
        ("finish", f"{event.finish_text}\nafter the graph:\n{replayed}"),
    ]


def _stage(event: Any) -> list[tuple[str, str]]:
    # The module that stage `kernels` prints holds the texts of the KernelMade events once more.
    return (
        []
        if event.stage == "kernels"
        else [(event.artifact if event.artifact == "output_code" else event.stage, event.text())]
    )


def _kernel(event: Any) -> list[tuple[str, str]]:
    places = "".join(f"\n; {location}" for location in event.locations)
    return [("kernels", f"; {event.name} of {', '.join(event.origins)}{places}\n{event.text()}")]


def _break(event: Any) -> list[tuple[str, str]]:
    return [("events", str(event.report))]


def _failures(event: Any) -> list[tuple[str, str]]:
    return [("events", "\n".join(event.failures))]


WRITERS: dict[str, Callable[[Any], list[tuple[str, str]]]] = {
    "Captured": _captured,
    "StageDone": _stage,
    "KernelMade": _kernel,
    "Broken": _break,
    "Skipped": _break,
    "Recompiling": _failures,
    "LimitReached": _failures,
    "Compiled": lambda event: [("events", "")],
    "Autotuned": lambda event: [("events", f"{event.question}: {event.winner}")],
    "Hint": lambda event: [("events", event.text)],
    "Reused": lambda event: [("events", event.reason)],
    "FellBack": lambda event: [("events", event.reason)],
    "CacheUse": lambda event: [],
}

CODE_FILE = re.compile(
    r', file "[^\n]*?(?:, line \d+>|\.\.\.)'
)  # of a code object; long ones are cut, at the path's length
MODULE_FILE = re.compile(r" from '[^\n]*?(?:'>|\.\.\.)")
ADDRESS = re.compile(r"\b0x(?:[0-9a-f]{6,12}\b|[0-9a-f]+(?=\.\.\.))")  # numbers in LLVM's text have 16 digits
NAMED_ADDRESS = re.compile(r"(?<=_)[0-9a-f]{12}(?![0-9a-f])")  # a variable that stands for an object
PLACE = re.compile(r"[\w./<>-]+\.py:\d+(?:, \d+)*\b")


def normal(text: str, source: Path, place: Callable[[str], str]) -> str:
    """The text without what differs between two trees that do the same: addresses, and where things lie."""
    text = ADDRESS.sub("0x", MODULE_FILE.sub(">", CODE_FILE.sub(">", text)))
    numbers: dict[str, str] = {}
    text = NAMED_ADDRESS.sub(lambda match: numbers.setdefault(match[0], f"object{len(numbers)}"), text)
    text = _modules(source).sub("fusewright", text)
    return PLACE.sub(lambda match: place(match[0]), text)


def module_files(source: Path) -> dict[str, str]:
    """The loaded modules' files by name; one of fusewright's only where no other has the name."""
    paths = [path for module in [*sys.modules.values()] if (path := getattr(module, "__file__", None))]
    ours = [path for path in paths if path.startswith(f"{source}/")]
    return {os.path.basename(path): path for path in (*ours, *(path for path in paths if path not in ours))}


@functools.cache
def _modules(source: Path) -> re.Pattern[str]:
    """fusewright's modules, as Python names them and as generated code does."""
    parts = {path.relative_to(source).with_suffix("").parts for path in source.rglob("*.py")}
    names = {"[._]".join(part for part in path if part != "__init__") for path in parts} - {""}
    return re.compile(rf"fusewright[._](?:{'|'.join(sorted(names, key=len, reverse=True))})(?!\w)")


def place_text(files: dict[str, str], source: Path, place: str) -> str:
    """Lines of a file, by its path or name: of a program they become their text, of fusewright nothing."""
    name, _, lines = place.rpartition(":")
    path = Path(name if "/" in name else files.get(name, source))
    if path.is_relative_to(source):
        return "fusewright"
    if any(path.is_relative_to(ROOT / folder) for folder in ("tests", "benchmarks")):
        lines = ", ".join(f"<{linecache.getline(str(path), int(line)).strip()}>" for line in lines.split(", "))
    return f"{path.name}:{lines}"


# --- recording --------------------------------------------------------------------------------------------------------


def stop_the_clock() -> None:
    """From here on any two spans of time that are measured alike are equal."""
    ticks = itertools.count()
    time.perf_counter = lambda: next(ticks) * TICK


def programs(models: bool, patterns: Sequence[str]) -> dict[str, Program]:
    """Those whose names fit a pattern (all without patterns), in the order in which they are recorded."""
    from tests import replay_programs

    found: dict[str, Program] = dict(replay_programs.PROGRAMS)
    if models:
        found |= replay_programs.models()
    found |= {f"{name}{QUICK}": found[name] for name in replay_programs.QUICK_ONEDNN if name in found}
    return {name: program for name, program in found.items() if fits(name, patterns)}


def fits(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def record(folder: Path, tree: Path, models: bool, patterns: Sequence[str]) -> None:
    """Compiles the programs by the fusewright of `tree`; the process is good for nothing else afterwards."""
    source = tree / "src" / "fusewright"
    sys.path[:0] = [str(source.parent), str(ROOT)]
    import torch

    import fusewright

    if Path(fusewright.__file__).parent != source:
        raise SystemExit(f"fusewright was imported from {fusewright.__file__}, not from {source}")

    def compile(function: Any, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        return fusewright.compile(function, options={"disk_cache": False, **(options or {})}, **settings)

    clock = time.perf_counter
    started = clock()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    compile(lambda x: x + 1)(torch.zeros(2))  # imports the compiler
    stream, chooser = internal("STREAM"), internal("Chooser")
    if not hasattr(chooser, "has_quick_onednn"):
        raise SystemExit("Chooser has no has_quick_onednn: tests/replay.py must learn its new name")
    stop_the_clock()
    chosen = programs(models, patterns)
    for name, program in chosen.items():
        fusewright.reset()
        gc.collect()
        torch.manual_seed(0)
        chooser.has_quick_onednn = lambda self, answer=name.endswith(QUICK): answer
        texts = Texts()
        with stream.listening(texts):
            try:
                program(compile)
            except BaseException as error:
                error.add_note(f"in the program {name} of tests/replay.py")
                raise
        texts.write(folder / name, source)
    print(f"{len(chosen)} programs recorded in {clock() - started:.0f} s")


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(before: Path, after: Path, stages: Sequence[str], patterns: Sequence[str], show: int) -> bool:
    """Prints how the two records differ; whether they are equal."""
    equal: Counter[str] = Counter()
    different: Counter[str] = Counter()
    shown: list[str] = []
    names = sorted({path.name for folder in (before, after) for path in folder.iterdir() if fits(path.name, patterns)})
    for name in names:
        files = {
            path.stem for folder in (before, after) for path in (folder / name).glob("*.txt") if fits(path.stem, stages)
        }
        for stage in sorted(files):
            texts = [_lines(folder / name / f"{stage}.txt") for folder in (before, after)]
            if texts[0] == texts[1]:
                equal[stage] += 1
                continue
            different[stage] += 1
            if len(shown) < show:
                diff = difflib.unified_diff(
                    *texts, f"before: {name} {stage}", f"after: {name} {stage}", n=2, lineterm=""
                )
                shown.append("\n".join(itertools.islice(diff, LINES)))
    for stage in sorted(equal | different):
        print(f"{stage:22} {equal[stage]:5} equal {different[stage]:5} different")
    print(*shown, sep="\n\n")
    return bool(equal) and not different


LINES = 24
"""Of a difference that is shown."""


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else ["(not there)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "after", type=Path, nargs="?", help="compare: a second record; without it, one of --tree is made"
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout whose fusewright compiles (default: the script's own)"
    )
    parser.add_argument("--models", action="store_true", help="the benchmarks' models too")
    parser.add_argument("--only", default="", metavar="NAMES", help="patterns of programs' names, with commas between")
    parser.add_argument(
        "--stages", default="", metavar="NAMES", help="compare: patterns of stages' names, e.g. kernels,output_code"
    )
    parser.add_argument("--show", type=int, default=3, metavar="N", help="compare: how many differences to print")
    arguments = parser.parse_args()
    os.environ |= {"FUSEWRIGHT_CACHE": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the processor from other processes
    tree, patterns = arguments.tree.resolve(), [name for name in arguments.only.split(",") if name]
    if arguments.command == "record":
        record(arguments.folder, tree, arguments.models, patterns)
        return
    stages = [name for name in arguments.stages.split(",") if name]
    with tempfile.TemporaryDirectory() as temporary:
        after = arguments.after or Path(temporary)
        if arguments.after is None:
            record(after, tree, arguments.models, patterns)
            before, now = ({path.name for path in folder.iterdir()} for folder in (arguments.folder, after))
            print(f"compared: {len(before & now)}; only there: {len(before - now)}; only here: {len(now - before)}")
            patterns = sorted(before & now)
        same = compare(arguments.folder, after, stages, patterns, arguments.show)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
