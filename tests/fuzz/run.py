"""Runs many random programs in child processes: `python -m tests.fuzz.run tensors --programs 1000 --processes 2`, on a GPU
with FUZZ_DEVICE=cuda before it.

A child says each seed before it runs it, so that a crash or a hang of the process is a finding of that seed. A finding
is made small before it is printed: lines, calls and settings go as long as the same kind of difference stays.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import itertools
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fusewright.base.records import dataclass
from tests.fuzz import modules, python, state, tensors
from tests.fuzz.session import DEVICE, Finding, World, errors_of, examine, printed, steps_of

SLOWEST = 120.0  # seconds that one program may take, its shrinking included
GENERATORS = {
    "tensors": tensors.program,
    "python": python.program,
    "state": state.program,
    "modules": modules.program,
    "images": modules.images,  # those of modules that take images
}
SIMPLER = (
    (r"^SETTINGS = .+$", "SETTINGS = {}"),
    (r"(made\([^=]*?\)(?:, \w+)*[^()]*\)).+$", r"\1"),
    (r", special=True", ""),
    (r", grad=True", ""),
    (r", (?:f16|bf16|f64|c64|i64|i32|i16|i8|u8|b8),", ", f32,"),
    (r"\b(?:17|33|16)\b", "5"),
    (r"\b(?:4|5|7|8)\b", "3"),
    (r"^    with torch.\w+\(\): ", "    "),
    (r"result = (.+?); backward\(result.*?\); return result", r"return \1"),
    (r", again=True", ""),
    (r"return (\w+), .+$", r"return \1"),
    (r"return \w+, (.+)$", r"return \1"),
    (r"= \((.+)\) if .+ else \w+$", r"= \1"),
)


ON_A_GPU = (
    (r"(autocast|GradScaler)\('cpu'", r"\1('cuda'"),
    (r"SETTINGS = \{(?!'backend': '(?:eager|aot))", r"SETTINGS = {'mode': 'reduce-overhead', "),  # of every second one
)


def text_of(generator: str, seed: int) -> str:
    text = GENERATORS[generator](seed)
    for pattern, other in ON_A_GPU[: 1 + seed % 2] if DEVICE.type == "cuda" else ():
        text = re.sub(pattern, other, text)
    return text


def smaller(text: str) -> Iterator[str]:
    """Texts with one thing less, the largest cuts first."""
    for length in (8, 4, 2):
        for body, index in _places(ast.parse(text)):
            if index % length == 0 and len(body) >= length:
                yield from _cut(text, body[index : index + length], "statements")
    for cut in CUTS:
        for body, index in _places(ast.parse(text)):
            yield from _cut(text, body[index : index + 1], cut)
    lines = text.splitlines()
    for place, line in enumerate(lines):
        for pattern, simple in SIMPLER:
            other = re.sub(pattern, simple, line)
            if other != line:
                yield "\n".join([*lines[:place], other, *lines[place + 1 :]]) + "\n"
    yield from _simpler_expressions(text)


CUTS = ("steps", "statements", "blocks")


def _cut(text: str, statements: list[ast.stmt], cut: str) -> Iterator[str]:
    """The text with other statements in the place of some neighbours."""
    spans = {(statement.lineno, statement.col_offset, type(statement)) for statement in statements}
    for number in range(len(_others(statements[0], cut))):
        tree = ast.parse(text)
        for body in {id(body): body for body, _ in _places(tree)}.values():
            found = [place for place, one in enumerate(body) if (one.lineno, one.col_offset, type(one)) in spans]
            if found:
                body[found[0] : found[-1] + 1] = _others(body[found[0]], cut)[number]
                break
        yield _text(tree)


def _others(statement: ast.stmt, cut: str) -> list[list[ast.stmt]]:
    """What may stand in the place of a statement."""
    if isinstance(statement, ast.FunctionDef) and (statement.name == "program" or statement.name.startswith("step")):
        return [[]] if cut == "steps" and statement.name != "program" else []
    if cut == "statements":
        return [[]]
    if cut == "blocks":
        held = [body for _, body in _bodies(statement)]
        if isinstance(statement, ast.If | ast.For | ast.While | ast.Try):
            held += [[_without(statement, name)] for name in ("orelse", "finalbody") if getattr(statement, name, ())]
        return held
    return []


def _without(statement: ast.stmt, name: str) -> ast.stmt:
    other = copy.copy(statement)
    setattr(other, name, [])
    return other


def _bodies(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body:
            yield node, body
    for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from _bodies(inner)


def _places(node: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Every statement, as a body and a place in it, outer ones and late ones first."""
    for _, body in _bodies(node):
        for index in reversed(range(len(body))):
            yield body, index
        for statement in reversed(body):
            yield from _places(statement)


def _text(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and not body and not isinstance(node, ast.Module):
            body.append(ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _simpler_expressions(text: str) -> Iterator[str]:
    """An expression is replaced by one of its parts, an argument or an element goes."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr)]
    for place, node in enumerate(nodes):
        for number in range(len(_simpler(node))):
            tree = ast.parse(text)
            old = next(itertools.islice((n for n in ast.walk(tree) if isinstance(n, ast.expr)), place, None))
            yield _text(_Replace(old, _simpler(old)[number]).visit(tree))


def _simpler(node: ast.expr) -> list[ast.expr]:
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) or isinstance(node, ast.Name | ast.Constant):
        return []
    if isinstance(node, ast.JoinedStr | ast.FormattedValue):
        return []
    held = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    for name in ("elts", "args", "keywords"):
        if not isinstance(getattr(node, name, None), list):  # a lambda's arguments are a node
            continue
        for index in range(len(getattr(node, name))):
            other = copy.copy(node)
            setattr(other, name, [part for place, part in enumerate(getattr(node, name)) if place != index])
            held.append(other)
    return held


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def shrunk(text: str, like: str, seconds: float = SLOWEST / 2, most: float = math.inf) -> str:
    """The smallest text that was reached within the time, or so many trials, and in which such a difference is
    found."""
    end, again = time.monotonic() + seconds, True
    while again:
        again, tried = False, 0
        while True:
            for other in itertools.islice(smaller(text), tried, None):
                tried, most = tried + 1, most - 1
                if time.monotonic() > end or most < 0:
                    return text
                found = found_in(other)
                if found is not None and found.like == like:
                    text, again = other, True
                    tried -= 1  # what stands in the place of what went
                    break
            else:
                break
    return text


def found_in(text: str) -> Finding | None:
    try:
        return examine(text) if errors_of(text) is not None else None
    except Exception:  # a cut has left text that is no program
        return None


def child(generator: str, seeds: range, seconds: float) -> None:
    """Says `seed N`, then `found N` with the program's text up to a line of its own, and ends: a text that was cut may have
    changed what all programs share (the class in the place of an object of it)."""
    sys.unraisablehook = lambda _: None  # generators that fail when they are collected
    gc.freeze()  # what was imported stays
    for seed in seeds:
        print("seed", seed, flush=True)
        text = text_of(generator, seed)
        found = examine(text)
        if found is not None:
            text = shrunk(text, found.like, seconds)
            print(f"found {seed} {found.kind}\n# {str(found_in(text) or found)[:400]!r}\n{text}.", flush=True)
            return
    print("end", flush=True)


@dataclass(slots=True)
class Worker:
    """A child process over some seeds; starts again behind a seed that ended it, as each finding does."""

    generator: str
    seeds: range
    say: Callable[[str, int, str], None]
    shrink: float
    count: int = 0

    def run(self, until: float) -> None:
        first = self.seeds.start
        while first < self.seeds.stop and time.monotonic() < until:
            first = self.stretch(first, until) + 1

    def eager_runs(self, seed: int, seconds: float = SLOWEST) -> bool:
        """Whether the program ends without a compiler, in this time, and does not end the process (a division that
        overflows does)."""
        try:
            return self.asked("--eager", seed, seconds).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def asked(self, what: str, seed: int, seconds: float = SLOWEST) -> subprocess.CompletedProcess[str]:
        """A process of its own: programs are generated in a main thread, which hears signals."""
        command = [sys.executable, "-m", "tests.fuzz.run", self.generator, what, "--seed", str(seed)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)

    def stretch(self, first: int, until: float) -> int:
        """Runs one child; the last seed that it spoke of."""
        command = [sys.executable, "-m", "tests.fuzz.run", self.generator, "--child", str(first), str(self.seeds.stop)]
        command += ["--shrink", str(self.shrink)]
        # Sets of text are in the same order again; many processes with a thread for each core would wait for one another.
        environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None and process.stderr is not None
        errors = process.stderr
        heard: queue.Queue[str | None] = queue.Queue()
        said: list[str] = []

        def listen() -> None:
            for line in process.stdout or ():
                heard.put(line.rstrip("\n"))
            heard.put(None)

        threading.Thread(target=listen, daemon=True).start()
        threading.Thread(target=lambda: said.extend(errors), daemon=True).start()
        seed, finding = first - 1, None
        while True:
            try:
                line = heard.get(timeout=max(1.0, min(SLOWEST, until - time.monotonic() + 1)))
            except queue.Empty:
                if time.monotonic() > until:
                    process.kill()
                    return self.seeds.stop
                process.kill()
                if self.eager_runs(seed, SLOWEST / 10):  # an examination runs it that often
                    self.say("hang", seed, self.asked("--show", seed).stdout)
                return seed
            if line is None:
                process.wait()
                if not self.eager_runs(seed):
                    return seed
                self.say(f"crash ({process.returncode})", seed, "# " + "".join(said[-6:]).replace("\n", "\n# "))
                return seed
            if line == "end":
                process.wait()
                return self.seeds.stop
            if finding is not None:
                if line == ".":
                    process.wait()
                    self.say(finding[0], seed, "\n".join(finding[1:]))
                    return seed
                finding.append(line)
            elif line.startswith("found "):
                finding = [line.split()[2]]
            elif line.startswith("seed "):
                seed, self.count = int(line[5:]), self.count + 1
                if time.monotonic() > until:
                    process.kill()
                    return self.seeds.stop


def main() -> int:
    """Exit status 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("generator", choices=GENERATORS)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--shrink", type=float, default=SLOWEST / 2, help="seconds to make a finding small")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help="run the program of --seed without compiling it")
    parser.add_argument("--show", action="store_true", help="print the program of --seed as a file that runs")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.generator, range(*arguments.child), arguments.shrink)
        return 0
    if arguments.eager:
        world = World(text_of(arguments.generator, arguments.seed))
        for step in steps_of(world):
            world.run(step)
        return 0
    if arguments.show:
        print(printed(text_of(arguments.generator, arguments.seed)))
        return 0
    kinds: Counter[str] = Counter()
    lock, start = threading.Lock(), time.monotonic()

    def say(kind: str, seed: int, text: str) -> None:
        with lock:
            kinds[kind] += 1
            print(f"== {kind}, seed {seed}\n{text}", flush=True)

    each = -(-arguments.programs // arguments.processes)
    last = arguments.seed + arguments.programs
    workers = [
        Worker(arguments.generator, range(first, min(first + each, last)), say, arguments.shrink)
        for first in range(arguments.seed, last, each)
    ]
    until = start + arguments.minutes * 60
    threads = [threading.Thread(target=worker.run, args=(until,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    print(f"{sum(worker.count for worker in workers)} programs, {seconds:.0f} s, found: {dict(kinds) or 'nothing'}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
