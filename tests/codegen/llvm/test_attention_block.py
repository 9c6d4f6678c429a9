"""Attention of many queries on processors with other registers than this one's, at the end of memory that may be read."""

from __future__ import annotations

import pytest
import torch

from fusewright.codegen.llvm.module import _machine
from fusewright.codegen.llvm.templates.attention_block import is_supported
from fusewright.schedule import schedule
from fusewright.schedule.driver import with_memory
from fusewright.select.attention import find, replaced
from tests.backends.rounding import assert_as_near_as_eager
from tests.codegen.llvm.harness import Guarded, run_plan
from tests.codegen.llvm.test_plans import NO_AVX512, PROCESSORS
from tests.loops.tracing import lowered


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, attn_mask=mask)[0]


@pytest.mark.parametrize("processor", [name for name in PROCESSORS if name != "without AVX"])
@pytest.mark.parametrize("mask", ["none", "causal", "added", "for all queries"])
@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, 24), (torch.bfloat16, 40), (torch.float16, 128)])
def test_processors(dtype: torch.dtype, features: int, mask: str, processor: str) -> None:
    guarded = Guarded()
    for queries, keys in ((50, 70), (16, 9), (7, 65), (24, 1)):
        q, k, v = (torch.randn(2, 2, rows, features).to(dtype) for rows in (queries, keys, keys))
        masks = {"added": torch.randn(2, 1, queries, keys), "for all queries": torch.randn(2, 1, 1, keys)}
        given = [q, k, v, *([masks[mask].to(dtype)] if mask in masks else [])]

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            whole = [one.expand(2, 1, q.shape[2], k.shape[2]) for one in inputs[3:]]
            return attend(*inputs[:3], *whole, causal=mask == "causal")

        plan = schedule(lowered(run, given))
        target = _machine(PROCESSORS[processor]).target
        found = find(plan)
        assert len(found) == 1 and found[0].is_known
        if not is_supported(found[0].attention, found[0].kernel.outer[2], target):
            pytest.skip("no kernel for this processor")
        plan = with_memory(replaced(plan, [(site, True) for site in found]), None)
        (got,), status = run_plan(plan, [guarded.copy(one) for one in given], without=PROCESSORS[processor])
        assert status == 0
        assert_as_near_as_eager(got, run(*given), run(*(one.double() for one in given)), 2e-6)


def test_where_there_is_no_kernel() -> None:
    """Without AVX, for features that are no multiple of eight, or so many that a stack might not hold them."""
    for features, is_one in ((64, True), (160, True), (60, False), (1024, False)):
        plan = schedule(lowered(attend, [torch.randn(1, 1, 40, features)] * 3))
        (site,) = find(plan)
        operands = site.attention, site.kernel.outer[2]
        assert is_supported(*operands, _machine(NO_AVX512).target) == is_one
        assert not is_supported(*operands, _machine(PROCESSORS["without AVX"]).target)
