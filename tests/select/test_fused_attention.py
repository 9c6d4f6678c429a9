"""Attention as one kernel under Triton's interpreter: flex_attention's mods and masks against eager."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention, noop_mask

from fusewright.graph import passes
from fusewright.graph.passes.attention import short_attention
from fusewright.loops.lower import lower
from fusewright.operators.decompositions import flex_attention as written_out
from fusewright.schedule import schedule
from fusewright.schedule.plan import Plan, RunExtern
from fusewright.select import fused_attention, sites
from tests.capture.call.test_flex_attention import MASKS, SCORE_MODS, operands
from tests.loops.tracing import lowered, record
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


def repeated(heads: torch.Tensor) -> torch.Tensor:
    """The heads of a group side by side, as models write it."""
    return heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(heads.shape[0], -1, *heads.shape[2:])


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    form = short_attention.FORMS[torch.ops.aten._scaled_dot_product_cudnn_attention.default]
    monkeypatch.setitem(short_attention.FORMS, target, form._replace(device="cpu"))


def planned(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Plan:
    graph, constants = record(function, inputs)
    for stage in (passes.PIPELINE, passes.ATTENTION):
        graph = passes.run_passes(graph, stage, passes.PassContext())
    return fused_attention.fused(schedule(lower(graph, constants), GPU), lambda kernel, buffers: True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mask", ["none", "causal", "added", "nothing for some"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (9, 37), (16, 5), (40, 40), (24, 300)])
def test_short_attention(rows: int, columns: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's operator over few queries is one kernel, which reads keys and values where they are."""
    if mask == "causal" and rows != columns:
        pytest.skip("not written out")
    dtype = torch.float16  # the interpreter multiplies no bfloat16
    given = torch.randn(2, 1, rows, columns, dtype=dtype)
    given[0, 0, 2] = -math.inf if mask == "nothing for some" else 0.0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        bias = given.expand(2, 4, -1, -1) if mask in ("added", "nothing for some") else None
        made = F.scaled_dot_product_attention(q, repeated(k), repeated(v), bias, is_causal=mask == "causal")
        return made.transpose(1, 2).reshape(2, rows, -1)

    heads = [torch.randn(2, n, count, 24, dtype=dtype) for n, count in ((rows, 4), (columns, 2), (columns, 2))]
    as_on_a_gpu(monkeypatch)
    plan = planned(attend, [*heads, given])
    (kernel,) = plan.kernels.values()
    assert kernel.product is not None and kernel.product.softmax is not None and len(plan.steps) == 1
    exact = attend(*(one.double() for one in (*heads, given)))
    (result,) = run_plan(plan, [*heads, given])
    error, usual = ((one.double() - exact).norm() for one in (result, attend(*heads, given)))
    assert error <= 1.5 * usual and result.dtype is dtype


def normalised(heads: torch.Tensor) -> torch.Tensor:
    return (heads * torch.rsqrt(heads.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(heads.dtype)


LOOPS = {"pointwise": (lambda q: q * 1.5, torch.cos), "normalised": (normalised, lambda k: normalised(k) * 2)}


@pytest.mark.parametrize("name", LOOPS)
def test_halves_behind_loops_are_read_as_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel makes of halves, in one stage or several, is not stored as float32 for the scores; and the
    projection of values takes no attention for the kernel that follows it."""
    of_q, of_k = LOOPS[name]

    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, w).view(2, 16, 3, 4, 24).permute(2, 0, 3, 1, 4)
        q, k = of_q(q), of_k(k)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 16, -1)

    inputs = [torch.randn(2, 16, 64).half(), (torch.randn(288, 64) / 8).half()]
    as_on_a_gpu(monkeypatch)
    plan = planned(attend, inputs)
    (kernel,) = (one for one in plan.kernels.values() if one.product is not None)
    assert set(kernel.dtypes) == {torch.float16}
    assert all(site.following < 0 or plan.kernels[plan.steps[site.following].kernel].product is None
               for site in sites.find(plan))  # type: ignore[union-attr] # fmt: skip
    exact = attend(*(one.double() for one in inputs))
    error, usual = ((one.double() - exact).norm() for one in (run_plan(plan, inputs)[0], attend(*inputs)))
    assert error <= 1.5 * usual
