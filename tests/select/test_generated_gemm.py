"""Matrix products of few rows by kernels of our own, and attention over few tokens as loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import thresholds
from fusewright.base.records import replace
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.templates.skinny_gemm import tile_for
from fusewright.graph.passes.library.linear_paths import OWN, PLAIN, Linear, candidates_for
from fusewright.select import generated_gemm, linear as linear_choice
from tests.backends.rounding import ROUNDING, assert_as_near_as_eager
from tests.listening import kernel_names, products

DTYPES = list(ROUNDING)


QUICK_ROWS = generated_gemm._quick_rows


@pytest.fixture(autouse=True)
def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor had no instructions for halves, with which the library is the quicker one."""

    def quick_rows(dtype: torch.dtype, target: Target) -> int:
        return thresholds.MOST_ROWS_OF_FLOATS if dtype is torch.float32 else thresholds.MOST_ROWS

    monkeypatch.setattr(generated_gemm, "_quick_rows", quick_rows)


@pytest.fixture
def kernels() -> Iterator[list[str]]:
    """Names of the kernels made, products among them."""
    with kernel_names() as made:
        yield made


def agrees(compiled: Callable[..., Any], net: Callable[..., Any], exact: Callable[..., Any], *xs: torch.Tensor) -> None:
    """As near to float64 as eager is, within a rounding of the result."""
    with torch.no_grad():
        got, eager = compiled(*xs), net(*xs)
        reference = exact(*(x.double() for x in xs))
    assert got.dtype is eager.dtype and got.shape == eager.shape and got.stride() == eager.stride()
    if got.numel():
        assert_as_near_as_eager(got, eager, reference, 1e-6)


def compiled(net: nn.Module, **options: Any) -> Any:
    return fusewright.compile(net, options={"disk_cache": False, **options})


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_with_what_follows(dtype: torch.dtype, rows: int, kernels: list[str]) -> None:
    net = (
        nn.Sequential(nn.Linear(77, 50), nn.GELU(), nn.Linear(50, 33, bias=False), nn.Tanh(), nn.Linear(33, 1))
        .to(dtype)
        .eval()
    )
    agrees(compiled(net), net, copy.deepcopy(net).double(), torch.randn(rows, 77, dtype=dtype))
    assert products(kernels) == 3 and len(kernels) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_by_inputs_and_a_residual(dtype: torch.dtype, kernels: list[str]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(40, 24) / 6), nn.Parameter(torch.randn(24))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight) * 2 + y

    net = Block().to(dtype)
    run, x, y = compiled(net), torch.randn(4, 40, dtype=dtype), torch.randn(4, 24, dtype=dtype)
    agrees(run, net, copy.deepcopy(net).double(), x, y)
    with torch.no_grad():
        net.weight.mul_(-2)
        net.bias.data.add_(1)
    agrees(run, net, copy.deepcopy(net).double(), x, y)
    assert products(kernels) == 1


def test_a_changed_weight_is_read_as_it_is(kernels: list[str]) -> None:
    net = nn.Linear(64, 32).eval()
    run, x = compiled(net), torch.randn(2, 64)
    for change in (lambda: None, lambda: net.weight.data.neg_(), lambda: net.weight.data.view(-1)[7].fill_(3.0)):
        change()
        agrees(run, net, copy.deepcopy(net).double(), x)
    net.weight.data = torch.randn(32, 64)
    agrees(run, net, copy.deepcopy(net).double(), x)
    assert products(kernels) >= 1


def test_a_result_that_is_read_twice(kernels: list[str]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.one(x)
            return self.two(F.silu(h)) * h + x

    net = Twice().eval()
    agrees(compiled(net), net, copy.deepcopy(net).double(), torch.randn(3, 32))
    assert products(kernels) == 2


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_nan_and_infinities_stay_where_they_are(special: float) -> None:
    net = nn.Linear(40, 20).eval()
    run, x = compiled(net), torch.randn(3, 40)
    x[1, 39] = special
    with torch.no_grad():
        got, expected = run(x), net(x)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    net = nn.Linear(32, 16).eval()
    assert compiled(net)(torch.randn(shape)).shape == (*shape[:-1], 16)


def test_training_stays_with_the_library(kernels: list[str]) -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    compiled(net)(torch.randn(4, 32)).sum().backward()
    assert products(kernels) == 0 and net[0].weight.grad is not None


def test_many_threads_give_what_one_gives() -> None:
    net, x = nn.Linear(512, 1024).eval(), torch.randn(5, 512)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            with torch.no_grad():
                results.append(compiled(net)(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_max_autotune_races_and_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(linear_choice, "_winners", {})
    linear = Linear(torch.float32, 4, 512, 256, True, True)
    candidates = candidates_for(linear)
    asked: list[tuple[str, ...]] = []

    def slow_library(linear: Linear, candidates: tuple[str, ...], default: str) -> str:
        asked.append(tuple(candidates))
        return PLAIN

    monkeypatch.setattr(linear_choice, "measured", slow_library)
    tuning = linear_choice.Chooser(budget=10.0, longest=10.0, autotunes=True)
    assert tuning(linear, candidates) == PLAIN and OWN in asked[0]
    assert not tuning.takes_generated(linear)  # it lost
    assert linear_choice.Chooser().takes_generated(linear)  # nobody measured: the rule
    monkeypatch.setattr(linear_choice, "_known", {})
    monkeypatch.setattr(linear_choice, "_winners", {})
    again = linear_choice.Chooser(budget=10.0, longest=10.0, autotunes=True)
    assert again(linear, candidates) == PLAIN and len(asked) == 1 and not again.takes_generated(linear)


def test_a_kernel_can_be_tried() -> None:
    linear = Linear(torch.float32, 3, 48, 40, True, True)
    x, weight, bias = torch.randn(3, 48), torch.randn(40, 48), torch.randn(40)
    (got,) = generated_gemm.trial(linear, x, weight, bias)()  # type: ignore[misc]
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    candidates = (*candidates_for(linear), OWN)
    assert linear_choice.measured(linear, candidates, PLAIN) in candidates


def test_the_rule_asks_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_gemm, "_quick_rows", QUICK_ROWS)

    def target(bits: int, features: str = "") -> Target:
        return Target("x86_64-unknown-linux", "generic", features, bits, True, False, bits == 512, lambda name: False)

    floats, halves = (Linear(dtype, 8, 512, 512, True, True) for dtype in (torch.float32, torch.bfloat16))
    assert generated_gemm.is_likely_quick(floats, target(256)) and not generated_gemm.is_likely_quick(
        floats, target(128)
    )
    assert generated_gemm.is_likely_quick(halves, target(512)) and not generated_gemm.is_likely_quick(
        halves, target(512, "+avx2,+amx-bf16")
    )
    few, vectors = replace(halves, rows=4, inner=1024, columns=1024), "+avx512bf16"
    assert generated_gemm.is_likely_quick(few, target(512, vectors))
    assert not generated_gemm.is_likely_quick(few, target(512, vectors + ",+amx-bf16"))
    assert not generated_gemm.is_likely_quick(halves, target(512, "+avx512bf16"))
    small = replace(halves, inner=64, columns=64)
    assert generated_gemm.is_likely_quick(small, target(512, "+amx-bf16"))
    for rows in range(1, 17):
        for bits, registers in ((256, 16), (512, 32)):
            for dtype in DTYPES:
                tile = tile_for(rows, target(bits), dtype)
                assert tile.rows * tile.columns * tile.chains + tile.rows < registers


# --- attention ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "causal", "added", "chosen", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_few_tokens(dtype: torch.dtype, mask: str | None, kernels: list[str]) -> None:
    for batch, heads, rows, columns, features in (
        (1, 2, 1, 1, 64),
        (2, 3, 1, 7, 16),
        (1, 1, 3, 9, 33),
        (1, 2, 5, 5, 8),
    ):
        q = torch.randn(batch, rows, heads, features, dtype=dtype).transpose(1, 2)
        k, v = (torch.randn(batch, heads, columns, features, dtype=dtype) for _ in range(2))
        allowed = {
            "chosen": torch.rand(batch, 1, rows, columns) > 0.5,
            "all": torch.zeros(rows, columns, dtype=torch.bool),
        }.get(mask or "")
        added = torch.randn(batch, 1, rows, columns, dtype=dtype) if mask == "added" else None

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            given = allowed if added is None else added.to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal").transpose(1, 2).flatten(2)

        run = fusewright.compile(attend, options={"disk_cache": False})
        agrees(run, attend, attend, q, k, v)
        assert "0 C operators, 0 Python" in repr(run.entries[0].graph)
