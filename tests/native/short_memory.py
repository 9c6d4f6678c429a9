"""Runs with tests/native/short_memory.cpp in front: each request for memory of one library fails once.

Takes the shim's path, whose requests fail ("native": this compiler's; "torch": of PyTorch's allocator), how many calls come before, and
a name of PROGRAMS; prints how many requests there were. Fails if one ends in anything but the error of memory that is short or
the right result, if the next call is not right or not compiled whole, or if 100 failures leave objects or memory behind.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import warnings
from collections import Counter
from typing import Any

import torch

import fusewright
from fusewright import _native
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, Broken, Event, Skipped
from fusewright.operators import eager_dtypes

LIBRARIES = {"native": _native.__file__, "torch": "/libc10.so"}
"""What the path of the library ends with."""


FEWEST, MORE = 50, 120
"""Failures before what the process holds is counted, and until it is counted again. What a single compile leaves is about
fifty objects, once."""


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    z = (x * 2 + 1).relu() @ w + torch.tensor([1.0, 2.0, 3.0])
    return z.sum(1).sort()[0], {"z": z}


def broken(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Frames that the hook compiles, one of many arguments."""
    y = x * 2 + 1
    fusewright.graph_break()
    total, found = program(y, *[w])
    return many(*[total] * 40), found


def many(*args: torch.Tensor) -> torch.Tensor:
    return args[0] + args[39]


class Module(torch.nn.Module):
    """Its parameters are packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).eval()

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        z = self.layers(x) @ w
        return z.sum(1), {"z": z}


PROGRAMS: dict[str, tuple[Any, bool]] = {
    "inference": (program, False),
    "training": (program, True),
    "broken": (broken, False),
    "module": (Module(), False),
}
"""(what is compiled, whether gradients are wanted)."""


def step(function: Any, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor | None]:
    w.grad = None
    with torch.set_grad_enabled(w.requires_grad):
        total, found = function(x, w)
    if w.requires_grad:
        total.sum().backward()
    return [total, found["z"], w.grad]


class Shim:
    def __init__(self, path: str, whose: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.fail_request.argtypes = [ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_long]
        with open("/proc/self/maps") as maps:
            mapped = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(LIBRARIES[whose])]
        self.whole, self.aligned = (int(mapped[0][0], 16), int(mapped[-1][1], 16)), whose == "torch"

    def failing(self, number: int, function: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[Any, bool]:
        """(results or None, whether a request failed) of a step whose request `number` fails."""
        found = None
        self.library.fail_request(number, *self.whole, self.aligned)
        try:
            found = step(function, x, w)
        except MemoryError:
            pass
        except RuntimeError as error:
            assert self.aligned and "can't allocate memory" in str(error), error
        return found, bool(self.library.stop_failing())


def held() -> tuple[Counter[str], int]:
    """(objects that the collector knows, by class; KiB of memory that the process has)."""
    fusewright.reset()  # what is compiled is no loss
    gc.collect()
    with open("/proc/self/statm") as statm:
        kilobytes = int(statm.read().split()[1]) * resource.getpagesize() // 1024
    return Counter(type(one).__qualname__ for one in gc.get_objects()), kilobytes


def main(path: str, whose: str, calls: int, name: str) -> None:
    function, training = PROGRAMS[name]
    shim = Shim(path, whose)
    x, w = torch.ones(4, 3), torch.ones(3, 3, requires_grad=training)
    expected = step(function, x, w)
    events: list[Event] = []
    requests, failures, before = -1, 0, None
    last = FEWEST + MORE  # once each request has failed, what is kept for later calls is there: further ones leave nothing
    while failures < last or requests < 0:
        number = failures if requests < 0 else failures % requests
        if not calls or before is None or failures <= last - MORE + 1:
            fusewright.reset()
            eager_dtypes._answer.cache_clear()  # what operators were asked, they are asked again
            compiled = fusewright.compile(function)
        for _ in range(calls):
            step(compiled, x, w)
        with STREAM.listening(events.append):
            found, failed = shim.failing(number, compiled, x, w)
            short = [event for event in events if isinstance(event, Skipped) and event.report.code == "memory-short"]
            assert failed or not short, "memory is short where no request failed"
            for results in (expected if found is None else found, step(compiled, x, w)):
                torch.testing.assert_close(results, expected)
        breaks = [event for event in events if isinstance(event, (Broken, Skipped)) and name != "broken"]
        unwanted = [event for event in breaks if event not in short]
        assert not unwanted, unwanted
        events.clear()
        if not failed:
            requests = number
            if not requests:
                break
        failures += 1
        if before is None and FEWEST <= failures and 0 < requests <= failures:
            before, last = held(), failures + MORE
    if before is None:  # calls that ask for no memory any more
        print(requests)
        return
    (objects, kilobytes), (objects_then, kilobytes_then) = held(), before
    left = objects - objects_then
    told = f"left by {MORE} failures: {left.most_common(8)}, {kilobytes - kilobytes_then} KiB"
    assert left.total() < MORE // 2 and kilobytes - kilobytes_then < 8 * 1024, told
    print(requests)


if __name__ == "__main__":
    warnings.simplefilter("error", InternalErrorWarning)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
