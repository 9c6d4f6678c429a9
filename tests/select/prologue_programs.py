"""Programs whose products may compute an operand themselves: how many of their operands, and how many kernels are left then."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fusewright.graph import passes
from fusewright.loops.lower import lower
from fusewright.schedule import schedule
from fusewright.schedule.plan import Plan
from fusewright.select import prologues, sites, variants
from fusewright.select.prologues import Producer
from fusewright.select.replacement import Replacement
from fusewright.select.sites import Site
from fusewright.select.variants import Variant
from tests.loops.tracing import record
from tests.select.product_programs import GPU, SLICES

Half = torch.float16


def h(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=Half)


def q(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def grouped(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, (w.view(40, 4, 16).to(Half) * scale[:, :, None]).view(40, 64))


def layers(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, v.to(Half) * a[:, None])), w.to(Half) * b[:, None])


def far_from_zero(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What padding gives in front of the product is infinite or no number."""
    return torch.reciprocal(x) @ torch.log(w)


FUNCTIONS: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]], list[str], int]] = {
    # function, inputs, sides that can be computed, kernels left when all are
    "int8 weights": (lambda x, w, s: F.linear(x, w.to(Half) * s[:, None]), lambda: [h(18, 64), q(40, 64), h(40)], ["right"], 1),
    "int8 weights of odd size": (
        lambda x, w, s: F.gelu(F.linear(x, w.to(Half) * s[:, None])), lambda: [h(19, 67), q(41, 67), h(41)], ["right"], 2,
    ),
    "int8 weights in groups": (grouped, lambda: [h(18, 64), q(40, 64), h(40, 4)], ["right"], 1),
    "weights of another precision": (lambda x, w: x @ w.to(Half), lambda: [h(18, 64), r(64, 40)], ["right"], 1),
    "a gated unit": (lambda g, u, w: F.linear(F.silu(g) * u, w) + 1, lambda: [h(3, 7, 67), h(3, 7, 67), h(40, 67)], ["left"], 2),
    "a norm whose statistic is known": (
        lambda x, s, w, v: F.linear((x.float() * s * w.float()).to(Half), v),
        lambda: [h(2, 9, 64), torch.rand(2, 9, 1), h(64), h(40, 64)], ["left"], 1,
    ),
    "both operands": (far_from_zero, lambda: [r(19, 35).abs() + 1, r(35, 23).abs() + 1], ["left", "right"], 1),
    "batches": (lambda a, b: torch.exp(a) @ (b * 0.5).mT, lambda: [r(2, 3, 17, 20), r(2, 3, 19, 20)], ["left", "right"], 1),
    "columns": (lambda a, b: (a + 1).t() @ b, lambda: [r(33, 18), r(33, 21)], ["left"], 1),
    "one value for all": (lambda a, b: a.expand(18, 32) * 0.5 @ b, lambda: [r(1, 1), r(32, 21)], ["left"], 1),
    "positions": (lambda a, b: torch.where(torch.arange(33) < 20, a, 0.0) @ b, lambda: [r(18, 33), r(33, 21)], ["left"], 1),
    "padding": (lambda a, w: F.pad(a, (2, 1), value=0.5) @ w, lambda: [r(18, 30), r(33, 21)], ["left"], 1),
    "1x1 convolution": (
        lambda x, s, w: F.conv2d(F.relu(x * s[:, None, None]), w),
        lambda: [h(2, 64, 7, 6).to(memory_format=torch.channels_last), h(64), h(32, 64, 1, 1)], ["left"], 1,
    ),
    "weights that one kernel makes": (
        lambda x, v, w: (x @ v.to(Half), x @ w.to(Half)), lambda: [h(18, 64), r(64, 40), r(64, 40)], ["right", "right"], 2,
    ),
    "a value that others read too": (
        lambda x, y, w: (x + y, F.silu(x + y) @ w), lambda: [r(18, 64), r(18, 64), r(64, 40)], ["left"], 2,
    ),
    "layers": (layers, lambda: [h(18, 48), q(64, 48), q(40, 64), h(64), h(40)], ["left", "right", "right"], 2),
    "nothing that may be": (
        # read twice; written over; a sum; a gather; padded windows
        lambda x, y, w, i, c, v: (
            torch.exp(x) @ w, w.t() @ torch.exp(x).t(), torch.log(y) @ w, y.add_(1), F.softmax(x, 1) @ w, x[i] @ w, F.conv2d(F.relu(c), v, padding=1),
        ),
        lambda: [
            r(18, 32), r(18, 32).abs(), r(32, 21), torch.arange(18), h(1, 32, 6, 6).to(memory_format=torch.channels_last), h(32, 32, 3, 3),
        ], [], 8,
    ),
}  # fmt: skip


def planned(name: str) -> tuple[Plan, list[torch.Tensor], list[torch.Tensor]]:
    """(plan, inputs, what eager gives)."""
    function, make, _, _ = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = make()
    with torch.no_grad():
        graph, constants = record(function, inputs)
        plan = schedule(
            lower(passes.run_passes(passes.run(graph), passes.LAYOUT, passes.PassContext()), constants), GPU
        )
        expected = function(*(item.clone() for item in inputs))
    return plan, inputs, list(expected) if isinstance(expected, tuple) else [expected]


def offers(plan: Plan) -> list[tuple[Site, tuple[Producer, ...]]]:
    """Each product that can compute operands, with these."""
    used = prologues.uses(plan)
    return [(site, found) for site in sites.find(plan) if (found := prologues.producers(plan, site, used))]


def all_variants(plan: Plan) -> list[tuple[Variant, list[Replacement]]]:
    found = []
    for site, producers in offers(plan):
        for chosen in {producers, *((producer,) for producer in producers)}:
            mine = prologues.computing(site, chosen)
            for variant in variants.variants(plan, mine, SLICES):
                found.append((variant, [*prologues.of_producers(plan, chosen), variants.of_variant(mine, variant)]))
    return found


def everything(plan: Plan) -> list[Replacement]:
    """Every operand computed that can be, no product with the kernel that follows."""
    chosen = [(sites.alone(site), found) for site, found in offers(plan)]
    replaced = prologues.of_producers(plan, [producer for _, found in chosen for producer in found])
    computing = (prologues.computing(site, found) for site, found in chosen)
    return replaced + [variants.of_variant(site, variants.plain(plan, site)) for site in computing]
