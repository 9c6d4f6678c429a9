"""Runs with tests/native/short_memory.cpp in front: each request for memory of the native part fails once.

Takes the library's path and what to run; prints how many requests failed. Fails if one ends in anything but MemoryError or the right
result, or if the next call is not right.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

import fusewright
from fusewright import _native


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    z = (x * 2 + 1).relu() @ w
    return z.sum(1).sort()[0], {"z": z}


def step(function: Any, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor | None]:
    w.grad = None
    total, found = function(x, w)
    if w.requires_grad:
        total.sum().backward()
    return [total, found["z"], w.grad]


def main(library: str, calls: int, training: bool) -> None:
    """calls: how many come before memory is short."""
    shim = ctypes.CDLL(library)
    shim.fail_request.argtypes = [ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t]
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0].split("-") for line in maps if _native.__file__ in line]
    start, end = int(mapped[0][0], 16), int(mapped[-1][1], 16)
    x, w = torch.ones(4, 3), torch.ones(3, 3, requires_grad=training)
    expected = step(program, x, w)
    for number in range(10_000):
        fusewright.reset()
        compiled = fusewright.compile(program)
        for _ in range(calls):
            step(compiled, x, w)
        found = None
        shim.fail_request(number, start, end)
        try:
            found = step(compiled, x, w)
        except MemoryError:
            pass
        failed = shim.stop_failing()
        for results in (expected if found is None else found, step(compiled, x, w)):
            torch.testing.assert_close(results, expected)
        if not failed:
            print(number)
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "training")
