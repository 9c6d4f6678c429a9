"""Products padded with zeros give the results of the plain ones, with their types."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base import events
from tests.listening import stage_texts


@pytest.fixture(autouse=True)
def padded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's products are padded, and small ones too."""
    module = importlib.import_module("fusewright.graph.passes.layout.pad_products")
    monkeypatch.setattr(module, "ALIGNMENT", {"cpu": 64})
    monkeypatch.setattr(module, "RATES", dict.fromkeys((torch.float32, torch.bfloat16), (1.0, 0.5)))


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "inner and columns": (lambda x, y: x @ y, ((40, 37), (37, 51))),
    "a linear layer": (lambda x, w, b: F.gelu(F.linear(x, w, b)), ((40, 37), (51, 37), (51,))),
    "a batch": (lambda x, y: torch.bmm(x, y.mT).softmax(-1), ((3, 40, 37), (3, 51, 37))),
    "added with factors": (lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2.0), ((40, 51), (40, 37), (37, 51))),
    "added to all columns": (lambda c, x, y: torch.addmm(c, x, y), ((40, 1), (40, 37), (37, 51))),
    "batches added": (lambda c, x, y: torch.baddbmm(c, x, y), ((3, 40, 51), (3, 40, 37), (3, 37, 51))),
    "columns alone": (lambda x, y: (x @ y).view(-1) + 1, ((40, 64), (64, 51))),
    "rows of a transposed factor": (lambda x, y: x.t() @ y, ((40, 37), (40, 64))),
    "both factors transposed": (lambda x, y: x.t() @ y.t(), ((40, 37), (51, 40))),
    "a bias of rows": (lambda c, x, y: torch.addmm(c, x.t(), y), ((37, 1), (40, 37), (40, 64))),
    "batches of transposed factors": (lambda x, y: torch.bmm(x.mT, y), ((3, 40, 37), (3, 40, 51))),
    "transposed result": (lambda x, y: (x @ y).t(), ((40, 37), (37, 64))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_types_and_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, shapes = PROGRAMS[name]
    inputs = [torch.randn(*shape).to(dtype) for shape in shapes]
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    compiled = fusewright.compile(function, fullgraph=True, options={"disk_cache": False})
    with stage_texts("padding") as texts:
        got, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(got, expected, **tolerance, check_stride=True)
        leaves = [[one.clone().requires_grad_() for one in inputs] for _ in range(2)]
        gradients = [
            torch.autograd.grad(run(*mine).float().square().sum(), mine)
            for run, mine in zip((compiled, function), leaves)
        ]
    torch.testing.assert_close(*gradients, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])
    assert len(texts) == 2 and all("constant_pad_nd" in text for text in texts)


def test_without_the_option_nothing_is_padded() -> None:
    seen: list[str] = []
    with events.STREAM.listening(
        lambda event: seen.append(event.stage) if isinstance(event, events.StageDone) else None
    ):
        compiled = fusewright.compile(lambda x, y: x @ y, options={"disk_cache": False, "shape_padding": False})
        compiled(torch.randn(40, 37), torch.randn(37, 51))
    assert seen and "padding" not in seen


def test_what_is_aligned_stays() -> None:
    texts: list[str] = []
    with events.STREAM.listening(
        lambda event: texts.append(event.text()) if getattr(event, "stage", "") == "padding" else None
    ):
        compiled = fusewright.compile(lambda x, y: x @ y, options={"disk_cache": False})
        compiled(torch.randn(39, 32), torch.randn(32, 48))
    assert len(texts) == 1 and "constant_pad_nd" not in texts[0]


def padded(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    texts: list[str] = []
    with events.STREAM.listening(
        lambda event: texts.append(event.text()) if getattr(event, "stage", "") == "padding" else None
    ):
        fusewright.compile(function, options={"disk_cache": False})(*inputs)
    (text,) = texts
    return "constant_pad_nd" in text


def test_rows_that_are_spread_are_aligned_by_their_stride() -> None:
    wide = torch.randn(40, 48)
    assert not padded(lambda x, y: x[:, :37] @ y, wide, torch.randn(37, 64))  # rows of 37 numbers start 48 apart
    assert padded(lambda x, y: x @ y, wide[:, :37].contiguous(), torch.randn(37, 64))


def test_only_what_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fusewright.graph.passes.layout.pad_products")
    monkeypatch.setattr(module, "RATES", {torch.float32: (2e9, 1e9)})
    monkeypatch.setattr(module, "BANDWIDTH", 1e9)
    monkeypatch.setattr(module, "LAUNCH", 0.0)
    # 2 * 64 * 1000 * 37 operations at a gain of 0.5 ns each are 2.4 ms; copies of (64 + 1000) * 37 * 4 bytes, read and written, 0.3 ms.
    assert padded(lambda x, y: x @ y, torch.randn(64, 37), torch.randn(1000, 37).t())
    # With one row: 37 us against 0.3 ms.
    assert not padded(lambda x, y: x @ y, torch.randn(1, 37), torch.randn(1000, 37).t())
    monkeypatch.setattr(module, "RATES", {torch.bfloat16: (2e9, 1e9)})
    assert not padded(lambda x, y: x @ y, torch.randn(64, 37), torch.randn(1000, 37).t())
