"""When collectives begin and are waited for, in one process that is a group by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusewright
from fusewright.base.events import STREAM, StageDone

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
group: Any = dist.group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathers_between(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    first = x @ w
    beside = (first + 1) @ w
    given = first @ w
    gathered = funcol.all_gather_tensor(given, 0, group.WORLD)
    late = (beside.sin() @ w).exp() @ w
    return gathered * 2, late


def stages(*names: str) -> dict[str, str]:
    """What the stages of a compile say."""
    found: dict[str, str] = {}

    def hear(event: Any) -> None:
        if isinstance(event, StageDone) and event.stage in names:
            found[event.stage] = event.text()

    x, w = torch.randn(8, 16), torch.randn(16, 16) / 4
    with STREAM.listening(hear), torch.no_grad():
        compiled = fusewright.compile(gathers_between, fullgraph=True, options={"disk_cache": False})
        for ours, theirs in zip(compiled(x, w), gathers_between(x, w), strict=True):
            torch.testing.assert_close(ours, theirs)
    return found


def test_it_begins_early_and_is_waited_for_late(alone: None) -> None:
    lines = stages("overlap")["overlap"].splitlines()
    begun, waited = (
        next(k for k, line in enumerate(lines) if name in line) for name in ("all_gather_into_tensor", "wait_tensor")
    )
    products = [k for k, line in enumerate(lines) if "aten.mm" in line]
    assert sum(begun < k < waited for k in products) >= 2, "\n".join(lines)


def test_what_it_reads_is_kept_until_then(alone: None) -> None:
    text = stages("loops")["loops"]
    (line,) = (line for line in text.splitlines() if "wait_tensor" in line)
    (begun,) = (line for line in text.splitlines() if "all_gather_into_tensor" in line)
    read = begun.split("all_gather_into_tensor.default(")[1].split("[")[0].split(",")[0]
    assert f"keeps {read}" in line, text


def test_explain_says_what_a_collective_runs_beside(alone: None) -> None:
    x, w = torch.randn(8, 16), torch.randn(16, 16) / 4
    for _ in range(2):  # compiled, and from the disk cache
        with torch.no_grad():
            report = fusewright.explain(gathers_between)(x, w)
        (one,) = report.overlaps
        assert (one.operator, one.bytes, one.awaited) == ("all_gather_into_tensor", 8 * 16 * 4, True)
        assert one.beside.count("aten::mm") >= 2, one.beside
        assert f"all_gather_into_tensor of {one.bytes} bytes runs beside " in str(report)


def gathers_while_training(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradient of w is a product that the collective's own gradient does not need."""
    return funcol.all_gather_tensor_autograd((x @ w).exp(), 0, group.WORLD) @ v


def test_explain_tells_forward_and_backward_apart(alone: None) -> None:
    x, w, v = torch.randn(8, 16), *(torch.randn(16, 16).requires_grad_() for _ in "12")
    report = fusewright.explain(gathers_while_training)(x, w, v)
    assert [(one.operator, one.function.split()[-1]) for one in report.overlaps] == [
        ("all_gather_into_tensor", "forward"), ("reduce_scatter_tensor", "backward"),
    ]  # fmt: skip
    assert "aten::mm" in report.overlaps[1].beside, report.overlaps


def test_what_waits_shares_no_kernel_with_what_need_not(alone: None) -> None:
    """Else the wait would stand before all that needs the kernel's other result."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ w
        gathered = funcol.all_gather_tensor(first, 0, group.WORLD)
        return gathered * 2, (first.exp() @ w).sin() @ w

    x, w = torch.randn(8, 16), torch.randn(16, 16) / 4
    with torch.no_grad():
        report = fusewright.explain(function)(x, w)
        for ours, theirs in zip(report.result, function(x, w), strict=True):
            torch.testing.assert_close(ours, theirs)
    (one,) = report.overlaps
    assert one.beside.count("aten::mm") == 2 and len(one.beside) == 4, one.beside


def test_a_collective_does_not_wait_for_what_it_does_not_read(alone: None) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        sent, beside = x * 2, (x @ w) * 3  # loops over the same elements
        return funcol.all_gather_tensor(sent, 0, group.WORLD) + 1, beside

    x, w = torch.randn(8, 16), torch.randn(16, 16) / 4
    with torch.no_grad():
        (one,) = fusewright.explain(function)(x, w).overlaps
    assert "aten::mm" in one.beside, one.beside
