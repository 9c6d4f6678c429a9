"""Programs with matrix products, and the variants (select/variants.py) that each of their sites must have at least."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import Plan
from fusewright.select import sites, variants
from tests.loops.tracing import lowered

GPU = ScheduleOptions(
    min_parallel=16, lanes=8, chunks=16, smallest_chunk=64, chunk_points=1024, scratch_bytes=128 * 1024
)
SLICES = (2, 3, 4, 8)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def attention_heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b).view(2, 9, 4, 10).transpose(1, 2).contiguous() * 0.5


def normalised(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + F.linear(x, w, b), (64,), g)


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


def planned(name: str) -> tuple[Plan, list[torch.Tensor], list[torch.Tensor]]:
    """(plan, inputs, what eager gives)."""
    function, make, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = make()
    expected = function(*inputs)
    return (
        schedule(lowered(function, inputs), GPU),
        inputs,
        list(expected) if isinstance(expected, tuple) else [expected],
    )


def all_variants(plan: Plan) -> list[tuple[sites.Site, variants.Variant]]:
    return [(site, variant) for site in sites.find(plan) for variant in variants.variants(plan, site, SLICES)]
