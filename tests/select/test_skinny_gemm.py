"""Products and attention over sizes that vary: a plan has a kernel of ours and the library, and the sizes decide in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.backends import pipeline as native_stages
from fusewright.base import thresholds
from fusewright.codegen.call_plan_types import CallPlan, Guarded, SlotSpec, SlotStep, slots_of
from fusewright.runtime.artifact import dump, load_plan
from fusewright.schedule.plan import Plan
from fusewright.schedule.verify import PlanError, verify
from fusewright.select import generated_gemm
from tests.backends.rounding import ROUNDING, assert_as_near_as_eager
from tests.listening import kernel_names, products

DTYPES = list(ROUNDING)
ROWS = (4, 1, 2, 5, 8, 9, 16, 17, 200, 0, 3)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels made; each plan with two ways is verified."""
    given = native_stages.with_memory

    def verified(plan: Plan, own_bytes: int | None) -> Plan:
        whole = given(plan, own_bytes)
        if any(step.when is not None for step in whole.steps):
            verify(whole)
        return whole

    monkeypatch.setattr(native_stages, "with_memory", verified)
    with kernel_names() as made:
        yield made


def agrees(run: Callable[..., Any], eager: Callable[..., Any], exact: Callable[..., Any], *given: torch.Tensor) -> None:
    """As near to float64 as eager is, within a rounding of the result."""
    with torch.no_grad():
        got, expected = run(*given), eager(*given)
        reference = exact(*(one.double() if one.is_floating_point() else one for one in given))
    assert got.dtype is expected.dtype and got.shape == expected.shape
    if got.numel():
        assert got.stride() == expected.stride()
        assert_as_near_as_eager(got, expected, reference, 2e-6)


class Block(nn.Module):
    """A product that an activation follows, one that is read twice, and one with a residual; weights by outputs and by inputs."""

    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(inner, 96), nn.Linear(96, 96, bias=False), nn.Linear(96, inner)
        self.weight, self.bias = nn.Parameter(torch.randn(inner, 40) / 8), nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.one(x))
        y = self.two(h)
        z = self.three(y * torch.sigmoid(y)) + x
        return torch.addmm(self.bias, z, self.weight).tanh()


@pytest.mark.parametrize("inner", [64, 77])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_both_sides_of_the_bound(dtype: torch.dtype, inner: int, kernels: list[str]) -> None:
    net = Block(inner).to(dtype).eval()
    run, exact = fusewright.compile(net, dynamic=True, options={"disk_cache": False}), copy.deepcopy(net).double()
    for rows in ROWS:
        agrees(run, net, exact, torch.randn(rows, inner, dtype=dtype))
    assert products(kernels) >= 4
    with torch.no_grad():
        net.two.weight.neg_()
        net.weight.data.mul_(2)
    exact = copy.deepcopy(net).double()
    for rows in ROWS:
        agrees(run, net, exact, torch.randn(rows, inner, dtype=dtype))


@pytest.mark.parametrize("first", [3, 300])
def test_batches_of_sequences(first: int, kernels: list[str]) -> None:
    """Rows that are a product of two sizes, by automatic dynamic; with many rows at first there is no kernel of ours to be compiled."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(48, 128), nn.Linear(128, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            heads = self.up(x).view(batch, length, 4, 32).transpose(1, 2) * 2
            return self.down(heads.relu().transpose(1, 2).reshape(batch, length, 128)) + x

    net = Heads().eval()
    run, exact = fusewright.compile(net, options={"disk_cache": False}), copy.deepcopy(net).double()
    for batch, length in (
        (1, first),
        (2, first + 1),
        (1, 4),
        (3, 2),
        (1, 1),
        (2, 8),
        (4, 50),
        (2, 0),
        (0, 3),
        (8, 1),
        (1, 8),
        (17, 1),
    ):
        agrees(run, net, exact, torch.randn(batch, length, 48))
    assert (products(kernels) > 0) == (first == 3)


def test_inputs_that_are_not_contiguous(kernels: list[str]) -> None:
    net = nn.Sequential(nn.Linear(40, 24), nn.ReLU()).eval()
    run, exact = fusewright.compile(net, dynamic=True, options={"disk_cache": False}), copy.deepcopy(net).double()
    for rows in (3, 5, 30):
        agrees(run, net, exact, torch.randn(40, rows).t())
        agrees(run, net, exact, torch.randn(rows, 80)[:, ::2])
        agrees(run, net, exact, torch.randn(rows, 80)[:, 7:47])
        agrees(run, net, exact, torch.randn(1, 40).expand(rows, 40))


def test_nan_and_infinities_stay_where_they_are() -> None:
    net = nn.Linear(40, 20).eval()
    run = fusewright.compile(net, dynamic=True, options={"disk_cache": False})
    for rows in (3, 12):
        x = torch.randn(rows, 40)
        x[1, 39], x[2, 0] = float("nan"), float("inf")
        with torch.no_grad():
            got, expected = run(x), net(x)
        assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


def test_results_of_operators_that_return_them(monkeypatch: pytest.MonkeyPatch, kernels: list[str]) -> None:
    """With packed weights the library's result is its own: a kernel of ours that writes it needs memory for it."""
    from fusewright.graph.passes.library.linear_paths import MKL, ONEDNN

    for way in (MKL, ONEDNN):
        monkeypatch.setattr(
            "fusewright.select.linear.Chooser.__call__",
            lambda self, linear, ways, way=way: way if way in ways else ways[0],
        )
        net = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)).eval()
        run, exact = fusewright.compile(net, dynamic=True, options={"disk_cache": False}), copy.deepcopy(net).double()
        for rows in (16, *ROWS):
            agrees(run, net, exact, torch.randn(rows, 64))
        got = [run(torch.ones(rows, 64)) for rows in (2, 40, 2)]
        assert torch.equal(got[0], got[2]) and products(kernels)


def test_the_rule_asks_for_the_example() -> None:
    def linear(rows: int | None, dtype: torch.dtype = torch.float32, inner: int = 2048) -> Any:
        return generated_gemm.Linear(dtype, rows, inner, 2048, True, True, varies=True)

    assert generated_gemm.most_rows(linear(3)) == thresholds.MOST_ROWS_OF_FLOATS
    assert (
        generated_gemm.most_rows(linear(3, inner=64)) == 8
        and generated_gemm.most_rows(linear(3, inner=32)) == thresholds.MOST_ROWS
    )
    assert (
        generated_gemm.most_rows(linear(100))
        == generated_gemm.most_rows(linear(None))
        == generated_gemm.most_rows(linear(3, torch.float64))
        == 0
    )


def test_a_kernel_for_few_rows_needs_its_condition(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    given = native_stages.with_memory
    monkeypatch.setattr(native_stages, "with_memory", lambda plan, own: seen.append(given(plan, own)) or seen[-1])
    with torch.no_grad():
        fusewright.compile(nn.Linear(64, 64), dynamic=True, options={"disk_cache": False})(torch.randn(3, 64))
    (plan,) = [plan for plan in seen if any(step.when is not None for step in plan.steps)]
    verify(plan)
    plan.steps = tuple(type(step)(step.kernel) if hasattr(step, "kernel") else step for step in plan.steps)
    with pytest.raises(PlanError, match="few rows"):
        verify(plan)


def test_steps_under_a_condition_are_written_and_read() -> None:
    slot = SlotSpec("x", "fresh", True, 0, torch.float32, "cpu", -1, 1, 0, 0, 0)
    step = Guarded(0, (SlotStep("allocate", 0), SlotStep("release", 0)))
    plan = CallPlan("p", "", (1,), (), (), (slot,), (step,), (), 0, False)
    assert load_plan(dump(plan)) == plan and slots_of(step) == (0, 0)


# --- attention ---------------------------------------------------------------------------------------------------------------

HEADS = 4
SHAPES = (
    (2, 4, 7),
    (1, 1, 1),
    (3, 1, 40),
    (2, 5, 16),
    (2, 3, 17),
    (1, 33, 33),
    (2, 1, 300),
    (3, 20, 200),
    (2, 0, 5),
    (2, 4, 0),
    (0, 3, 4),
    (1, 3, 1),
)


@pytest.mark.parametrize("mask", ["none", "causal", "added", "two dimensions", "chosen", "all"])
@pytest.mark.parametrize(
    ("dtype", "features"),
    [(torch.float32, 64), (torch.float32, 16), (torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 20)],
)
def test_attention(
    dtype: torch.dtype, features: int, mask: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated_gemm, "MOST_ATTENTION_WORK", 1 << 16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (x.view(x.shape[0], x.shape[1], HEADS, features).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal").transpose(1, 2).flatten(2)

    run = fusewright.compile(attend, dynamic=True, options={"disk_cache": False})
    for batch, rows, columns in SHAPES:
        q, k, v = (torch.randn(batch, n, HEADS * features, dtype=dtype) for n in (rows, columns, columns))
        masks = {
            "added": torch.randn(batch, 1, rows, columns, dtype=dtype),
            "two dimensions": torch.randn(rows, columns, dtype=dtype),
            "chosen": torch.rand(batch, 1, rows, columns) > 0.5,
            "all": torch.zeros(batch, 1, rows, columns, dtype=torch.bool),
        }
        agrees(run, attend, attend, q, k, v, *([masks[mask]] if mask in masks else []))
    assert any(name.startswith("attention_") for name in kernels) == (features != 20)


def test_groups_of_heads_are_read_where_they_are(kernels: list[str]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(q.shape[0], q.shape[1], 6, 32).transpose(1, 2)
        k, v = (x.view(x.shape[0], x.shape[1], 2, 32).transpose(1, 2) for x in (k, v))
        k, v = (
            x[:, :, None].expand(x.shape[0], 2, 3, x.shape[2], 32).reshape(x.shape[0], 6, x.shape[2], 32)
            for x in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    run = fusewright.compile(attend, dynamic=True, options={"disk_cache": False})
    for batch, rows, columns in (*SHAPES, (4, 64, 300)):
        agrees(run, attend, attend, torch.randn(batch, rows, 192), *(torch.randn(batch, columns, 64) for _ in range(2)))
    assert any(name.startswith("attention_") for name in kernels)


def test_attention_to_what_is_not_a_number() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(x.shape[0], x.shape[1], 2, 32).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    run = fusewright.compile(attend, dynamic=True, options={"disk_cache": False})
    q, k, v = torch.randn(2, 3, 64), torch.randn(2, 20, 64), torch.randn(2, 20, 64)
    for which in (q, k, v):
        which[1, 2, 5] = float("nan")
        torch.testing.assert_close(run(q, k, v).isnan(), attend(q, k, v).isnan())
        which[1, 2, 5] = 1.0
