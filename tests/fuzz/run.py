"""Runs many random programs in child processes: `python -m tests.fuzz.run tensors --programs 1000 --processes 2`.

A child says each seed before it runs it, so that a crash or a hang of the process is a finding of that seed. A finding
is made small before it is printed: lines, calls and settings go as long as the same kind of difference stays.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from fusewright.base.records import dataclass
from tests.fuzz import tensors
from tests.fuzz.session import Finding, World, examine, printed, steps_of

SLOWEST = 120.0  # seconds that one program may take, its shrinking included
GENERATORS = {"tensors": tensors.program}
SIMPLER = (
    (r"^SETTINGS = .+$", "SETTINGS = {}"),
    (r"(made\([^=]*?\)(?:, \w+)*[^()]*\)).+$", r"\1"),
    (r", special=True", ""),
    (r", grad=True", ""),
    (r", (?:f16|bf16|f64|c64|i64|i32|i16|i8|u8|b8),", ", f32,"),
    (r"\b(?:17|33|16)\b", "5"),
    (r"\b(?:4|5|7|8)\b", "3"),
    (r"^    with torch.\w+\(\): ", "    "),
    (r"result = (.+?); backward\(result\); return result", r"return \1"),
    (r"return (\w+), .+$", r"return \1"),
    (r"return \w+, (.+)$", r"return \1"),
    (r"= \((.+)\) if .+ else \w+$", r"= \1"),
)


def smaller(text: str) -> Iterator[str]:
    """Texts with one thing less, the largest cuts first."""
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if not line.startswith(" ")] + [len(lines)]
    for start, end in reversed(list(itertools.pairwise(starts))):
        if lines[start].startswith("def step"):
            yield _text(lines[:start] + lines[end:])
    for place, line in reversed(list(enumerate(lines))):
        if not line.startswith("def "):
            yield _text(lines[:place] + lines[place + 1 :])
    for place, line in enumerate(lines):
        for pattern, simple in SIMPLER:
            other = re.sub(pattern, simple, line)
            if other != line:
                yield _text([*lines[:place], other, *lines[place + 1 :]])


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def shrunk(text: str, kind: str, seconds: float = SLOWEST / 2) -> str:
    """The smallest text that was reached within the time and in which a difference of this kind is found."""
    end, again = time.monotonic() + seconds, True
    while again:
        again = False
        for other in smaller(text):
            if time.monotonic() > end:
                return text
            found = found_in(other)
            if found is not None and found.kind == kind:
                text, again = other, True
                break
    return text


def found_in(text: str) -> Finding | None:
    try:
        return examine(text)
    except Exception:  # a cut has left text that is no program
        return None


def child(generator: str, seeds: range) -> None:
    """Says `seed N`, then `found N` with the program's text up to a line of its own."""
    for seed in seeds:
        print("seed", seed, flush=True)
        text = GENERATORS[generator](seed)
        found = examine(text)
        if found is not None:
            text = shrunk(text, found.kind)
            print(f"found {seed} {found.kind}\n# {str(found_in(text) or found)[:400]!r}\n{text}.", flush=True)
    print("end", flush=True)


@dataclass(slots=True)
class Worker:
    """A child process over some seeds; starts again behind a seed that ended it."""

    generator: str
    seeds: range
    say: Callable[[str, int, str], None]
    count: int = 0

    def run(self, until: float) -> None:
        first = self.seeds.start
        while first < self.seeds.stop and time.monotonic() < until:
            first = self.stretch(first, until) + 1

    def eager_runs(self, seed: int) -> bool:
        """Whether the program does not end the process without a compiler (a division that overflows does)."""
        command = [sys.executable, "-m", "tests.fuzz.run", self.generator, "--eager", "--seed", str(seed)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def stretch(self, first: int, until: float) -> int:
        """Runs one child; the last seed that it spoke of."""
        command = [sys.executable, "-m", "tests.fuzz.run", self.generator, "--child", str(first), str(self.seeds.stop)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
                self.say("hang", seed, GENERATORS[self.generator](seed))
                process.kill()
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
                    self.say(finding[0], seed, "\n".join(finding[1:]))
                    finding = None
                else:
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
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help="run the program of --seed without compiling it")
    parser.add_argument("--show", action="store_true", help="print the program of --seed as a file that runs")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.generator, range(*arguments.child))
        return 0
    if arguments.eager:
        world = World(GENERATORS[arguments.generator](arguments.seed))
        for step in steps_of(world):
            world.run(step)
        return 0
    if arguments.show:
        print(printed(GENERATORS[arguments.generator](arguments.seed)))
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
        Worker(arguments.generator, range(first, min(first + each, last)), say)
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
