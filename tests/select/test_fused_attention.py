"""Attention as one kernel under Triton's interpreter: flex_attention's mods and masks against eager."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention, noop_mask

from fusewright.operators.decompositions import flex_attention as written_out
from fusewright.schedule import schedule
from fusewright.schedule.plan import RunExtern
from fusewright.select import fused_attention
from tests.capture.call.test_flex_attention import MASKS, SCORE_MODS, operands
from tests.loops.tracing import lowered
from tests.select.product_programs import GPU

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("compiles for a GPU", allow_module_level=True)
from tests.codegen.triton.harness import run_plan

LENGTH = 40
QUICK = [("alibi", "window"), ("none", "document")]
ALL = [(score, mask) for score in ("none", "alibi", "head_bias") for mask in MASKS]


@pytest.mark.parametrize(
    ("score", "mask"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.sweep]) for one in ALL],
)
def test_flex_attention(score: str, mask: str) -> None:
    q, k, v = (one[:1, :, :LENGTH] for one in operands(key_heads=2))
    mod = SCORE_MODS[score] or (lambda s, b, h, q, k: s)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, sums, _ = written_out.flex_attention(q, k, v, mod, (MASKS.get(mask, noop_mask),), 0.25)
        return result, sums * math.log(2)

    plan = fused_attention.fused(schedule(lowered(attend, [q, k, v]), GPU), lambda kernel, buffers: True)
    (kernel,) = (one for one in plan.kernels.values() if one.product is not None)  # a mask's numbers may be one before
    assert kernel.product is not None and kernel.product.softmax is not None and len(plan.steps) <= 2
    assert not any(isinstance(step, RunExtern) for step in plan.steps)
    made = create_block_mask(MASKS[mask], 1, 4, LENGTH, LENGTH, device="cpu")
    result, aux = flex_attention(
        q, k, v, SCORE_MODS[score], made, scale=0.25, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close(run_plan(plan, [q, k, v]), [result, aux.lse])
