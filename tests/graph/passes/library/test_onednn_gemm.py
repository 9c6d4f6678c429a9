"""Large products in float32 by oneDNN where it is much quicker: eager's values in inference and training, and what stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusewright
from fusewright.select.linear import Chooser
from tests.listening import stage_texts

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")

ONEDNN, EAGERS = "mkldnn._linear_pointwise", re.compile(r"aten\.(add)?mm\b")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "has_quick_onednn", lambda self: True)


def compare(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    """Eager's values, NaN and infinities included; gives whether oneDNN multiplies."""
    with stage_texts("loops") as texts:
        compiled = fusewright.compile(function, options={"disk_cache": False})
        with torch.no_grad():
            got, expected = compiled(*inputs), function(*inputs)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
            assert got.stride() == expected.stride()
            special = [one.clone() for one in inputs]
            special[0][0, 0], special[1][1, 1] = float("nan"), float("inf")
            torch.testing.assert_close(compiled(*special), function(*special), rtol=1e-5, atol=1e-4, equal_nan=True)
    assert any((ONEDNN in text) != bool(EAGERS.search(text)) for text in texts)
    return any(ONEDNN in text for text in texts)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "turned": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_products_of_any_layout(left: str, right: str) -> None:
    x, y = LAYOUTS[left](torch.randn(150, 133)), LAYOUTS[right](torch.randn(133, 141))
    assert compare(lambda x, y: torch.relu(x @ y), x, y) or right == "every other column"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_sum_before_the_product(scaled: bool) -> None:
    x, y, bias = torch.randn(150, 133), torch.randn(133, 141), torch.randn(141)
    alpha = 0.5 if scaled else 1
    assert compare(lambda x, y, bias: torch.addmm(bias, x, y, alpha=alpha), x, y, bias) != scaled
    assert not compare(lambda x, y, whole: torch.addmm(whole, x, y), x, y, torch.randn(150, 141))


@pytest.mark.parametrize("sizes", [(20, 30, 40), (4096, 600, 2), (4, 900, 900)])
def test_small_and_narrow_products_stay(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    assert not compare(lambda x, y: x @ y, torch.randn(rows, inner), torch.randn(inner, columns))


def test_another_dtype_stays() -> None:
    assert not compare(
        lambda x, y: x @ y, torch.randn(150, 133, dtype=torch.float64), torch.randn(133, 141, dtype=torch.float64)
    )


def test_changing_numbers_of_rows() -> None:
    compiled = fusewright.compile(lambda x, y: torch.relu(x @ y), dynamic=True, options={"disk_cache": False})
    y = torch.randn(133, 141)
    with torch.no_grad(), stage_texts("loops") as texts:
        for rows in (150, 151, 7, 1, 0, 400):
            x = torch.randn(rows, 133)
            torch.testing.assert_close(compiled(x, y), torch.relu(x @ y), rtol=1e-5, atol=1e-4)
    assert ONEDNN in texts[0]


def test_a_training_step() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(133, 141), nn.GELU(), nn.Linear(141, 150, bias=False))
    x = torch.randn(160, 133, requires_grad=True)
    with stage_texts("loops") as texts:
        compiled = fusewright.compile(net, options={"disk_cache": False})

        def gradients(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            return list(torch.autograd.grad(call(x).square().mean(), [x, *net.parameters()]))

        for got, expected in zip(gradients(compiled), gradients(net), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    assert sum(text.count(ONEDNN) for text in texts) == 6
    assert not any(EAGERS.search(text) for text in texts)
