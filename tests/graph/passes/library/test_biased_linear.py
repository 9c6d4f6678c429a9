"""Linear layers with a bias in bfloat16: one library operator, and gradients as good as eager's."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

import fusewright
from tests.listening import stage_texts

pytestmark = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs bfloat16 in oneDNN")


@pytest.fixture(autouse=True)
def multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor had instructions for bfloat16: without them these products are in float32."""
    monkeypatch.setattr(
        importlib.import_module("fusewright.graph.passes.precision.half_products"), "multiplies", lambda dtype: True
    )


def graphs_of(run: object) -> list[str]:
    with stage_texts("forward graph") as texts:
        run()  # type: ignore[operator]
    return texts


@pytest.mark.parametrize("bias", [True, False])
def test_training_under_autocast(bias: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 96, bias=bias), nn.GELU(), nn.Linear(96, 16, bias=bias))
    x = torch.randn(4, 10, 48)
    found: dict[str, list[torch.Tensor]] = {}
    texts: list[str] = []

    def step(name: str, module: nn.Module, dtype: torch.dtype | None) -> None:
        def run() -> None:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                y = (fusewright.compile(module, fullgraph=True) if name == "compiled" else module)(x)
            y.float().square().sum().backward()

        texts.extend(graphs_of(run))
        found[name] = [y for y in (value.grad for value in module.parameters()) if y is not None]

    for name, dtype in (("exact", None), ("eager", torch.bfloat16), ("compiled", torch.bfloat16)):
        step(name, copy.deepcopy(net), dtype)
    assert ("mkldnn._linear_pointwise" in texts[0]) == bias and "aten.addmm" not in texts[0]
    for mine, theirs, exact in zip(found["compiled"], found["eager"], found["exact"], strict=True):
        assert (mine - exact).norm() <= 1.25 * (theirs - exact).norm() + 1e-6


def test_other_forms_stay() -> None:
    x, w, b = (torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for program in (lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: torch.addmm(b[0], x, w.t(), beta=2)):
        (text,) = graphs_of(lambda program=program: fusewright.compile(program, fullgraph=True)(x, w, b))  # type: ignore[misc]
        assert "aten.addmm" in text and "linear_pointwise" not in text
