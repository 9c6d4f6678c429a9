"""Real graphs through lowering and scheduling: eager's numbers, and the number of kernels that each should take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.schedule import ScheduleOptions
from fusewright.schedule.plan import Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from tests.loops import tracing
from tests.schedule import reference as plans
from tests.schedule.reference import schedule


def attention(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Heads of 8, scores masked; the output goes through one more projection."""
    b, s, e = x.shape
    q, k, v = (F.linear(x, p).view(b, s, e // 8, 8).transpose(1, 2) for p in w.chunk(3))
    probabilities = F.softmax(q @ k.transpose(-1, -2) * 8**-0.5 + mask, -1)
    return (probabilities @ v).transpose(1, 2).reshape(b, s, e)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w, h


def swiglu(x: Tensor, w: Tensor) -> Tensor:
    gate, value = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * value


def batch_norm_block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True) + x)


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, tuple[Callable[..., object], list[Tensor], int]] = {
    # name: (function, inputs, most kernels)
    "layer_norm_gelu": (lambda x, w, b: F.gelu(F.layer_norm(x, (32,), w, b)), [t(4, 16, 32), t(32), t(32)], 1),
    "residual_rms_norm": (rms_norm, [t(4, 16, 32), t(4, 16, 32), t(32)], 1),
    "softmax": (lambda x: F.softmax(x * 0.5, -1), [t(4, 3, 16, 16)], 1),
    "softmax of long columns": (lambda x: F.softmax(x * 0.5, 0), [t(128, 80)], 1),
    "softmax of longer columns": (lambda x: F.softmax(x * 0.5, 0), [t(300, 80)], 4),
    "centred columns": (lambda x: torch.relu(x - x.mean(0)), [t(128, 80)], 2),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [t(64, 20)], 1),
    "group_norm": (lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), [t(8, 16, 5, 5), t(16), t(16)], 1),
    "batch_norm_block": (batch_norm_block, [t(4, 40, 5, 5), t(40), t(40)], 1),
    "attention": (attention, [t(2, 16, 32), t(96, 32), t(2, 1, 1, 16)], 5),
    "rotary": (rotary, [t(2, 4, 16, 32), t(16, 32), t(16, 32)], 1),
    "swiglu": (swiglu, [t(64, 32), t(96, 32)], 1),
    "cat_pointwise": (lambda a, b: F.silu(torch.cat([a * 2, b.exp()], -1)), [t(64, 16), t(64, 32)], 1),
    "cumsum": (lambda x: x.cumsum(-1) * 2, [t(64, 16)], 1),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(64) % 20), [t(64, 20)], 2),
    "transposed_sum": (lambda x: x.t().contiguous().sum(1) + 1, [t(64, 48)], 2),
    "full_mean": (lambda x: (x * x).mean(), [t(300, 400)], 2),
    "variance": (lambda x: (x - x.mean(1, keepdim=True)).pow(2).sum(1).sqrt(), [t(64, 48)], 1),
}


def scheduled(
    name: str, options: ScheduleOptions = ScheduleOptions()
) -> tuple[Plan, list[Tensor], Callable[..., object]]:
    function, inputs, _ = CASES[name]
    plan = schedule(tracing.lowered(function, inputs), options)
    verify(plan)
    return plan, inputs, function


@pytest.mark.parametrize("name", CASES)
def test_against_eager(name: str) -> None:
    plan, inputs, function = scheduled(name)
    expected = function(*inputs)
    actual = plans.run(plan, [x.clone() for x in inputs])
    torch.testing.assert_close(
        actual, list(expected) if isinstance(expected, tuple) else [expected], rtol=1e-4, atol=1e-5
    )
    assert len(plan.kernels) <= CASES[name][2], plan_text(plan, False)


@pytest.mark.parametrize("name", CASES)
def test_unfused_against_eager(name: str) -> None:
    plan, inputs, function = scheduled(name, ScheduleOptions(fusion=False))
    expected = function(*inputs)
    actual = plans.run(plan, [x.clone() for x in inputs], one_at_a_time=0)
    torch.testing.assert_close(
        actual, list(expected) if isinstance(expected, tuple) else [expected], rtol=1e-4, atol=1e-5
    )


def test_training_graph_of_a_norm_and_activation() -> None:
    """Forward and backward in one graph: gradients of a layer norm, a GELU and a sum over rows."""

    def step(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        leaves = [v.detach().requires_grad_() for v in (x, w, b)]
        loss = (F.gelu(F.layer_norm(leaves[0], (48,), leaves[1], leaves[2])) * 0.5).sum()
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    inputs = [t(64, 48), t(48), t(48)]
    program = tracing.lowered(step, inputs)
    plan = schedule(program)
    verify(plan)
    actual = plans.run(plan, [x.clone() for x in inputs])
    torch.testing.assert_close(actual, list(step(*inputs)), rtol=1e-4, atol=1e-4)
    loops = [operation for operation in program.operations if not hasattr(operation, "target")]
    assert len(plan.kernels) <= max(3, len(loops) // 3), plan_text(plan, False)
