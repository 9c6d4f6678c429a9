"""Product kernels under Triton's interpreter: each variant of each site against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusewright.codegen.triton.product_tiles import ProductTile
from fusewright.schedule import ScheduleOptions, products, schedule
from fusewright.schedule.plan import Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify_kernel
from tests.codegen.triton.harness import run_plan
from tests.loops.tracing import lowered

GPU = ScheduleOptions(min_parallel=16, lanes=8, chunks=16, smallest_chunk=64, chunk_points=1024, scratch_bytes=128 * 1024)
SMALL = ProductTile(32, 16, 16, 4, 3, 2)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def last(*shape: int) -> torch.Tensor:
    return r(*shape).to(memory_format=torch.channels_last)


def run(
    plan: Plan, chosen: list[tuple[products.Site, products.Variant]], inputs: list[torch.Tensor], tile: ProductTile
) -> list[torch.Tensor]:
    made = products.replaced(plan, chosen)
    for kernel in made.kernels.values():
        verify_kernel(kernel)
    tiles = {kernel.name: tile for kernel in made.kernels.values() if kernel.product is not None}
    try:
        return run_plan(made, inputs, tiles=tiles)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan_text(made, False)}") from error


def attention_heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b).view(2, 9, 4, 10).transpose(1, 2).contiguous() * 0.5


def normalised(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + F.linear(x, w, b), (64,), g)


def residual_block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(F.relu(F.conv2d(x, w, b, padding=1)), v) + x)


FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]], list[str]]] = {
    "a plain product of odd size": (lambda a, b: a @ b, lambda: [r(37, 35), r(35, 41)], ["plain"]),
    "transposed operands": (lambda a, b: a.t() @ b.t(), lambda: [r(48, 20), r(33, 48)], ["plain", "3 slices"]),
    "a linear layer with an activation": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: [r(2, 9, 64), r(40, 64), r(40)], ["fused", "2 slices", "4 slices"],
    ),
    "a residual and a cast": (
        lambda x, w, y: (y + 0.25 * (x @ w)).double(), lambda: [r(18, 32), r(32, 40), r(18, 40)], ["fused", "2 slices"],
    ),
    "a result that others read": (
        lambda x, w: (lambda y: (y, F.silu(y), y.sum(0)))(x @ w), lambda: [r(18, 32), r(32, 40)], ["fused", "2 slices"],
    ),
    "two products that meet": (
        lambda x, w, v: F.silu(x @ w) * (x @ v), lambda: [r(17, 32), r(32, 40), r(32, 40)], ["fused", "2 slices"],
    ),
    "heads": (attention_heads, lambda: [r(2, 9, 32), r(40, 32), r(40)], ["fused", "2 slices"]),
    "a norm of what the product gives": (normalised, lambda: [r(2, 9, 64), r(64, 64), r(64), r(64)], ["plain", "2 slices", "4 slices"]),
    "batches": (lambda a, b: (a @ b.transpose(-1, -2) * 0.3).tanh(), lambda: [r(2, 3, 17, 20), r(2, 3, 19, 20)], ["fused"]),
    "a batch and a bias": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0).relu(), lambda: [r(3, 1, 19), r(3, 17, 20), r(3, 20, 19)], ["fused"],
    ),
    "one row": (lambda x, w: torch.sigmoid(x @ w.t()), lambda: [r(1, 128), r(40, 128)], ["fused", "8 slices"]),
    "an expanded bias column": (
        lambda c, a, b: torch.addmm(c, a, b), lambda: [r(17, 1), r(17, 32), r(32, 19)], ["plain", "2 slices"],
    ),
    "a gather in the epilogue": (
        lambda x, w, i, t: (x @ w) + t[i], lambda: [r(18, 32), r(32, 40), torch.arange(18) % 5, r(5, 40)], ["fused"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_variant_gives_eagers_result(name: str) -> None:
    function, make, expected_names = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = make()
    expected = function(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    plan = schedule(lowered(function, inputs), GPU)
    sites = products.find(plan)
    assert sites
    names = []
    for site in sites:
        for variant in products.variants(plan, site, (2, 3, 4, 8)):
            names.append(variant.name)
            actual = run(plan, [(site, variant)], inputs, SMALL)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=lambda text, v=variant: f"{v.name}: {text}")
    assert set(expected_names) <= set(names), names
