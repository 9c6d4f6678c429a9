"""Eight processes that compile the same functions with one disk cache, and are killed at any moment.

Run as a program: `cache_processes.py FOLDER KILLS SEED`. It forks the processes, kills one after the other (SIGKILL), starts another for
each, lets the last ones finish, and exits with status 0 if no process has seen a wrong result, a damaged entry, or a defect.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch

import fusewright
from fusewright.backends.graph_cache import store
from fusewright.base.events import STREAM, InternalError

PROCESSES = 8
FUNCTIONS = 12
MOST_TURNS = 30
LONGEST = 600.0
"""Seconds that the last processes have: more means that they hang."""


def function_of(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Different source and constants for each number, so different entries."""
    scale = 1.0 + number

    def small(x: torch.Tensor) -> torch.Tensor:
        return (x * scale).sin() + x.softmax(-1)

    def large(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.t() * scale).sum(0)

    return (small, large)[number % 2]


def work(seed: int, turns: int | None) -> None:
    """Compiles and checks, for a number of turns, or until it is killed."""
    warnings.simplefilter("error")
    defects: list[str] = []
    STREAM.subscribers.append(lambda event: defects.append(event.trace) if isinstance(event, InternalError) else None)
    generator = random.Random(seed)
    while turns is None or turns > 0:
        function = function_of(generator.randrange(FUNCTIONS))
        x = torch.randn(generator.choice((3, 8)), 8)
        fusewright.reset()
        torch.testing.assert_close(fusewright.compile(function, dynamic=False)(x), function(x))
        assert not defects, defects[0]
        if generator.random() < 0.05:
            store().evict()
        turns = None if turns is None else turns - 1


def start(seed: int, turns: int | None) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(seed, turns)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    generator = random.Random(seed)
    running = [start(number, None) for number in range(PROCESSES)]
    bad = 0
    for kill in range(kills):
        time.sleep(generator.random() * 0.3)
        victim = running.pop(generator.randrange(len(running)))
        os.kill(victim, signal.SIGKILL)
        status = os.waitpid(victim, 0)[1]
        bad += not os.WIFSIGNALED(status)  # it had ended by itself, which only an error makes it do
        running.append(start(1000 + kill, None))
    for process in running:
        os.kill(process, signal.SIGKILL)
        bad += not os.WIFSIGNALED(os.waitpid(process, 0)[1])
    last = [start(5000 + number, min(kills, MOST_TURNS)) for number in range(PROCESSES)]
    deadline = time.monotonic() + LONGEST
    while last and time.monotonic() < deadline:
        for process in list(last):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                bad += status != 0
                last.remove(process)
        time.sleep(0.02)
    for process in last:  # it hangs
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        bad += 1
    return bad


if __name__ == "__main__":
    os.environ["FUSEWRIGHT_CACHE_DIR"] = sys.argv[1]
    os.environ["FUSEWRIGHT_CACHE"] = "1"
    sys.exit(min(main(int(sys.argv[2]), int(sys.argv[3])), 100))
