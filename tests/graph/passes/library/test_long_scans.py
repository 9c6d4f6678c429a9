"""Running sums of few long rows, cut into parts, against eager."""

from __future__ import annotations

import math

import pytest
import torch

import fusewright
from fusewright.graph.passes.library import long_scans


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_scans, "DEVICES", ("cpu",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(2, 16384), (98304,), (3, 1, 20480)], ids=str)
def test_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 2).to(dtype)
    compiled = fusewright.compile(lambda x: x.cumsum(-1) * 2, fullgraph=True)
    found, wanted = compiled(x), x.cumsum(-1) * 2
    assert len(fusewright.explain(compiled)(x).kernels) > 1 and found.dtype is wanted.dtype
    exact = x.double().cumsum(-1) * 2
    assert (found.double() - exact).abs().max() <= 2 * (wanted.double() - exact).abs().max() + 1e-3


def test_gradients() -> None:
    x = torch.randn(2, 16384, requires_grad=True)
    tangent = torch.randn(2, 16384)
    compiled = fusewright.compile(lambda x: x.cumsum(-1), fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x), x, tangent)
    (wanted,) = torch.autograd.grad(x.cumsum(-1), x, tangent)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_infinities_do_not_reach_back() -> None:
    x = torch.ones(1 << 15)
    x[9000], x[20000] = math.inf, -math.inf
    compiled = fusewright.compile(lambda x: x.cumsum(-1), fullgraph=True)
    torch.testing.assert_close(compiled(x), x.cumsum(-1), equal_nan=True)


@pytest.mark.parametrize("make", [lambda: torch.randn(16384, 2).t(), lambda: torch.randn(2, 16381)], ids=["turned", "prime"])
def test_others_stay_whole(make: object) -> None:
    x = make()  # type: ignore[operator]
    torch.testing.assert_close(fusewright.compile(lambda x: x.cumsum(-1))(x), x.cumsum(-1), rtol=1e-3, atol=1e-3)
