"""Kernels over rows and pieces against double precision: at most 2 units in the last place worse than eager's (GELU: of half its argument)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright

Function = Callable[[torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Function] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax over columns": lambda x: torch.softmax(x, 0),
    "log softmax": lambda x: torch.log_softmax(x, -1),
    "log of sums": lambda x: torch.logsumexp(x, -1),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "transposed": lambda x: x.t() * 1.5,
}


@pytest.mark.parametrize("shape", [(3, 5), (129, 1000), (300, 4099), (1030, 2100), (2048, 1040), (33, 40001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_near_as_eager(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    x = (torch.randn(shape) * (0.5 if shape[0] % 2 else 6)).to(dtype)
    if "soft" in name:
        x[torch.rand(shape) < 0.1] = -math.inf
    function = PROGRAMS[name]
    with torch.no_grad():
        exact, eager, got = function(x.double()), function(x), fusewright.compile(function)(x)
    counts = exact.isfinite() & (exact.abs() > 1e-30)
    large = (
        torch.maximum(exact.abs(), x.abs().double() / 2) if "gelu" in name else exact.abs()
    )  # 1 + erf cancels, in eager as well
    unit = 2.0 ** (large.clamp(min=2.0**-100).log2().floor() - (23 if dtype is torch.float32 else 7))
    ours, theirs = (((result.double() - exact).abs() / unit)[counts].max().item() for result in (got, eager))
    assert ours <= theirs + 2
    torch.testing.assert_close(got[~counts], eager[~counts])
