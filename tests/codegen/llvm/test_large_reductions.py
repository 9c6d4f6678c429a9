"""Kernels for data beyond the caches: wide tiles of columns, a row's maximum and exponentials in one pass, sums over doubling distances."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusewright.codegen.analysis import analyse
from fusewright.codegen.llvm import online, parts, prefetch, strategy
from fusewright.codegen.llvm.module import host_target
from fusewright.codegen.llvm.strategy import choose
from fusewright.schedule.plan import Plan
from tests.codegen.llvm.harness import run_plan
from tests.codegen.llvm.test_plans import PROCESSORS
from tests.loops.tracing import lowered
from tests.schedule.reference import schedule

Function = Callable[..., object]


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of any size is taken to be beyond the caches, chunks and pieces of rows are short."""
    monkeypatch.setattr(strategy, "BEYOND_CACHES", 1)
    monkeypatch.setattr(strategy, "LEAST_PIECE", 64)
    monkeypatch.setattr(strategy, "WIDE_PIECE", 256)
    monkeypatch.setattr(prefetch, "LEAST", 1)
    monkeypatch.setattr(online, "CHUNK", 256)


def planned(function: Function, *inputs: torch.Tensor) -> Plan:
    return schedule(lowered(function, [t.clone() for t in inputs]))


def check(function: Function, *inputs: torch.Tensor, processor: str = "host", **tolerances: float) -> None:
    plan = planned(function, *inputs)
    assert plan.kernels
    actual, status = run_plan(plan, [t.clone() for t in inputs], without=PROCESSORS[processor])
    assert status == 0
    expected = function(*inputs)
    wanted = list(expected) if isinstance(expected, tuple) else [expected]
    torch.testing.assert_close(actual, wanted, equal_nan=True, check_stride=False, **tolerances)


def wide(plan: Plan, threads: int = 2) -> list[int]:
    return [choose(analyse(kernel), host_target(), threads).wide for kernel in plan.kernels.values()]


COLUMNS: dict[str, Function] = {
    "sum": lambda x: x.sum(0),
    "largest": lambda x: x.amax(0),
    "position": lambda x: x.argmax(0),
    "mean and variance": lambda x: (x.mean(0), x.var(0)),
    "softmax": lambda x: torch.softmax(x, 0),
    "log softmax": lambda x: torch.log_softmax(x, 0),
    "scaled by its norm": lambda x: x / (x * x).sum(0).sqrt().clamp(min=1.0),
    "two at once": lambda x: (x.sum(0), x.amin(0) * 2),
    "over two dimensions": lambda x: x.view(-1, 3, x.shape[1]).sum((0, 1)),
    "in the middle": lambda x: x.view(3, -1, x.shape[1]).amax(1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", COLUMNS)
def test_wide_tiles(
    name: str, dtype: torch.dtype, processor: str, small_is_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, columns, part in ((45, 515, 64), (3, 256, 64), (24, 1024, 64), (45, 515, 8), (96, 256, 8), (585, 70, 8)):
        monkeypatch.setattr(parts, "PART", part)
        torch.manual_seed(rows)
        x = torch.randn(rows, columns).to(dtype)
        x[rows // 2, 7] = math.nan
        x[0, 9] = math.inf
        tolerances = (
            {}
            if dtype is torch.float32
            else {"rtol": 2e-2, "atol": 2e-2}
            if dtype is torch.bfloat16
            else {"rtol": 1e-9, "atol": 1e-9}
        )
        check(COLUMNS[name], x, processor=processor, **tolerances)


def test_integers_in_wide_tiles(small_is_large: None) -> None:
    x = torch.randint(-50, 50, (45, 515), dtype=torch.int32)
    check(lambda x: (x.amax(0), x.argmin(0)), x)
    check(lambda x: x.sum(0), x)
    check(lambda x: (x > 0).any(0), x)


def test_a_tile_is_wide_where_rows_lie_far_apart_and_columns_are_many() -> None:
    assert wide(planned(lambda x: x.sum(0), torch.randn(512, 8192))) == [1024]
    assert wide(planned(lambda x: x.sum(0), torch.randn(512, 8192)), threads=32) == [256]
    assert wide(planned(lambda x: x.sum(0), torch.randn(512, 8192).bfloat16())) == [2048]
    assert wide(planned(lambda x: x.sum(0), torch.randn(16, 8192))) == [0], "the caches hold it"
    assert wide(planned(lambda x: x.sum(0), torch.randn(65536, 64))) == [0], "a row is a line or two"
    assert wide(planned(lambda x: x.sum(1), torch.randn(512, 8192))) == [0]


def test_the_width_of_a_tile_changes_no_bit() -> None:
    x = torch.randn(700, 4100)
    plan = planned(lambda x: (x.sum(0), x.var(0)), x)
    widths, results = [], []
    threads = torch.get_num_threads()
    try:
        for count in (1, 64):
            torch.set_num_threads(count)
            widths.append(wide(plan, count))
            results.append(run_plan(plan, [x.clone()])[0])
    finally:
        torch.set_num_threads(threads)
    assert widths[0] != widths[1]
    assert all(torch.equal(a, b) for a, b in zip(*results))


ROWS: dict[str, Function] = {
    "log of sums": lambda x: torch.logsumexp(x, 1),
    "log softmax": lambda x: torch.log_softmax(x, 1),
    "loss": lambda x: F.cross_entropy(x, torch.arange(x.shape[0])),
    "maximum as well": lambda x: (x.amax(1), (x - x.amax(1, keepdim=True)).exp().sum(1)),
    "masked": lambda x: torch.logsumexp(x.masked_fill(x > 1, -math.inf), 1),
}


def difficult_rows(columns: int) -> torch.Tensor:
    torch.manual_seed(columns)
    x = torch.randn(13, columns)
    x[1] = -math.inf
    x[2, : columns // 2] = -math.inf
    x[3, columns - 1] = math.nan
    x[4, 0] = math.inf
    x[5] = torch.linspace(-50, 900, columns)
    x[6] = torch.linspace(900, -50, columns)
    x[7, 1:] = -math.inf
    x[8] = -3e38
    x[9, columns // 3] = 3e38
    x[11], x[11, columns // 2] = -math.inf, math.nan
    x[12, 3], x[12, columns - 2] = math.nan, math.inf
    return x


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ROWS)
def test_maximum_and_exponentials_in_one_pass(
    name: str, dtype: torch.dtype, processor: str, small_is_large: None
) -> None:
    for columns in (1024, 1031, 2048 + 16):
        x = difficult_rows(columns).to(dtype)
        tolerances = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
        check(ROWS[name], x, processor=processor, **tolerances)
        check(ROWS[name], x[10:], processor=processor, **tolerances)


def test_long_rows_of_large_data_are_read_once() -> None:
    def pairs(x: torch.Tensor) -> list[dict[int, int]]:
        shapes = [analyse(kernel) for kernel in planned(lambda x: torch.log_softmax(x, 1), x).kernels.values()]
        return [online.find_pairs(shape, choose(shape, host_target()).stage_axes) for shape in shapes]

    assert any(pairs(torch.randn(256, 8192)))
    assert not any(pairs(torch.randn(8, 8192)))
    assert not any(pairs(torch.randn(4096, 512)))


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_cumulative_sums_are_as_precise_as_eagers(dtype: torch.dtype, processor: str) -> None:
    for rows, columns in ((5, 1003), (7, 16), (3, 9), (1, 8192)):
        torch.manual_seed(columns)
        x = (torch.randn(rows, columns) * 3).to(dtype)
        (got,), status = run_plan(planned(lambda x: x.cumsum(1), x), [x.clone()], without=PROCESSORS[processor])
        assert status == 0
        exact = x.double().cumsum(1)
        ours, eager = ((t.double() - exact).abs().max() for t in (got, x.cumsum(1)))
        assert ours <= eager * (1 + 1e-12) or (dtype is torch.float64 and ours < 1e-11)


def test_cumulative_sums_of_infinities_and_nan() -> None:
    x = torch.randn(4, 100)
    x[0, 5], x[1, 7], x[1, 60], x[2, 99] = math.inf, math.inf, -math.inf, math.nan
    x[3] = -0.0
    check(lambda x: x.cumsum(1), x)
    check(lambda x: x.cumsum(1), x.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_cumulative_sums_of_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (6, 333)).to(dtype)
    check(lambda x: x.cumsum(1), x)
    check(lambda x: x.cumsum(1, dtype=torch.int32), x)
