"""What is fetched ahead, and erf where only halves are stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base import events

Function = Callable[[torch.Tensor], torch.Tensor]


def run(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The compiled function's result, and its kernels' text."""
    texts: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.KernelMade):
            texts.append(event.text())

    with torch.no_grad(), events.STREAM.listening(listen):
        got = fusewright.compile(function, fullgraph=True, options={"disk_cache": False})(x)
    return got, "\n".join(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rows", "columns", "all"])
def test_reductions_of_large_data_fetch_ahead(name: str, dtype: torch.dtype) -> None:
    functions: dict[str, Function] = {
        "rows": lambda x: x.amax(1),
        "columns": lambda x: x.amax(0),
        "all": lambda x: x.amax(),
    }
    large, small = torch.randn(1030, 2056, dtype=dtype), torch.randn(64, 256, dtype=dtype)
    for x, fetches in ((large, True), (small, False)):
        got, text = run(functions[name], x)
        torch.testing.assert_close(got, functions[name](x), rtol=0, atol=0)
        assert ("llvm.prefetch" in text) == fetches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [("pointwise", True, True), ("softmax", True, True), ("transposed", True, True), ("sums", True, True)],
)
def test_streams_of_large_data_fetch_ahead(name: str, reads: bool, writes: bool, dtype: torch.dtype) -> None:
    functions: dict[str, Function] = {
        "pointwise": lambda x: torch.relu(x) + 1,
        "softmax": lambda x: torch.softmax(x, -1),
        "transposed": lambda x: (x.t() + 1).contiguous(),
        "sums": lambda x: x.abs().cumsum(-1),
    }
    large, small = torch.randn(1030, 2100, dtype=dtype), torch.randn(64, 256, dtype=dtype)
    got, text = run(functions[name], large)
    torch.testing.assert_close(got, functions[name](large))
    assert ("i32 0, i32 2, i32 1)" in text or "i32 0, i32 3, i32 1)" in text) == reads
    assert ("i32 1, i32 2, i32 1)" in text or "i32 1, i32 3, i32 1)" in text) == writes
    assert "llvm.prefetch" not in run(functions[name], small)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_large_tables_are_fetched_one_ahead(dtype: torch.dtype) -> None:
    table, index = torch.randn(5000, 1000).to(dtype), torch.randint(0, 5000, (70,))
    got, text = run(lambda i: F.embedding(i, table) * 2, index)
    torch.testing.assert_close(got, F.embedding(index, table) * 2)
    assert "llvm.prefetch" in text
    assert "llvm.prefetch" not in run(lambda i: F.embedding(i, table[:50]) * 2, index % 50)[1]
    index[-1] = 5000
    with pytest.raises(IndexError):
        run(lambda i: F.embedding(i, table) * 2, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_softmax_rises_with_its_maximum(dtype: torch.dtype) -> None:
    """Rows of several chunks whose maximum lies in the first, the last or between; NaN and infinities."""
    columns = 12345
    x = torch.randn(400, columns) * 4
    x[0], x[1] = torch.linspace(-60, 60, columns), torch.linspace(60, -60, columns)
    x[2, 7], x[3, -1], x[4], x[5, : columns // 2], x[6, 9000:] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("inf"),
        -float("inf"),
    )
    x[7, : columns - 100] = -300.0
    x = x.to(dtype)
    got, text = run(lambda x: torch.softmax(x, -1), x)
    assert text.count("alloca") > 2
    exact = torch.softmax(x.double(), -1)
    torch.testing.assert_close(got.isnan(), exact.isnan())
    torch.testing.assert_close(
        got.double(), exact, rtol=8e-3 if dtype is torch.bfloat16 else 1e-5, atol=1e-37, equal_nan=True
    )


@pytest.mark.parametrize("function", [F.gelu, torch.erf])
def test_erf_where_only_halves_are_stored(function: Function) -> None:
    """All values of bfloat16: as near to the exact value as a rounding and a hundredth."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()]
    got, _ = run(function, x)
    exact = function(x.double())
    spacing = 2.0 ** (exact.abs().clamp(min=1e-30).log2().floor() - 7)
    assert bool(((got.double() - exact).abs() <= 0.52 * spacing + 5e-7).all())
