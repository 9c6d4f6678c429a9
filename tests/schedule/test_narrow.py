"""Temporaries that hold widened values are stored narrow, with the same results to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright.loops.ir import Extern
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.narrow import store_narrow
from tests.loops.tracing import lowered
from tests.schedule.reference import run, schedule

Half = torch.bfloat16


def norm_backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """The weight's gradient sums over rows, x's over columns: the product of both lies between them."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = (grad * w).float()
    dot = (scaled * wide).sum(-1, keepdim=True)
    return scaled * inverse - wide * dot, (scaled.to(Half) * x).sum(0)


def of_both(x: torch.Tensor, w: torch.Tensor) -> Any:
    """The narrow value is read too."""
    y = x * w
    return y.sum(1), y.float().sum(1), y.float().cumsum(0) * 2


def of_flags(x: torch.Tensor) -> Any:
    mask = (x > x.sum(0)).to(torch.float32)
    return mask.sum(1, keepdim=True) * mask, mask.cumsum(0)


def of_numbers(x: torch.Tensor, i: torch.Tensor) -> Any:
    place = (i * 2).long()
    return x[place.cumsum(0) % 5], place.cumsum(0) + place.sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "the backward of a norm": (
        norm_backward,
        lambda: [torch.randn(6, 8).to(Half), torch.randn(6, 8).to(Half), torch.randn(8).to(Half)],
    ),
    "read narrow and wide": (of_both, lambda: [torch.randn(6, 8).to(Half), torch.randn(8).to(Half)]),
    "flags": (of_flags, lambda: [torch.randn(6, 8)]),
    "numbers": (of_numbers, lambda: [torch.randn(5, 8), torch.arange(6, dtype=torch.int32)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_the_same_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = PROGRAMS[name][0], PROGRAMS[name][1]()
    program = lowered(function, inputs)
    before = schedule(program)
    after = schedule(store_narrow(program, lambda buffer: True))
    assert _bytes(after) <= _bytes(before)
    for ours, theirs in zip(run(after, inputs), run(before, inputs), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_fewer_bytes_are_stored() -> None:
    program = lowered(norm_backward, PROGRAMS["the backward of a norm"][1]())
    narrow = store_narrow(program, lambda buffer: True)
    assert _bytes(schedule(narrow)) < _bytes(schedule(program))


def test_what_the_caller_or_the_library_sees_stays_wide() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        wide = (x + 1).float()
        return wide.sum(), wide @ w, (x * 2).float()

    made = lowered(program, [torch.randn(4, 4).to(Half), torch.randn(4, 4)])
    narrow = store_narrow(made, lambda buffer: True)
    calls = [operation for operation in made.operations if isinstance(operation, Extern)]
    seen = {output.buffer for output in made.outputs}.union(*map(extern_reads, calls))
    assert len(calls) == 1 and len(seen) == 5
    assert all(narrow.buffers[name].dtype == made.buffers[name].dtype for name in seen)
    assert store_narrow(made, lambda buffer: False) is made


def _bytes(plan: Any) -> int:
    temporaries = [buffer for buffer in plan.buffers.values() if buffer.role == "temporary"]
    return sum(buffer.span() * buffer.dtype.itemsize for buffer in temporaries)
