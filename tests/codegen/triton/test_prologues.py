"""Products that compute their operands, under Triton's interpreter: values against eager, and what lies outside of an operand."""

from __future__ import annotations

import pytest
import torch

from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.schedule.plan import Plan
from fusewright.schedule.printer import plan_text
from fusewright.select import replacement
from tests.codegen.triton.harness import run_plan
from tests.select import prologue_programs

SMALL = ProductTile(32, 16, 16, 4, 3, 2)


def run(plan: Plan, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    tiles = {kernel.name: SMALL for kernel in plan.kernels.values() if kernel.product is not None}
    try:
        return run_plan(plan, [item.clone() for item in inputs], tiles=tiles)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan_text(plan, False)}") from error


@pytest.mark.parametrize("name", prologue_programs.FUNCTIONS)
def test_every_variant_gives_eagers_result(name: str) -> None:
    plan, inputs, expected = prologue_programs.planned(name)
    tolerance = 1e-4 if expected[0].dtype is torch.float32 else 5e-3
    for variant, replacements in prologue_programs.all_variants(plan):
        actual = run(replacement.replaced(plan, replacements), inputs)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()), msg=lambda t, v=variant: f"{v.name}: {t}"
            )


def test_what_lies_outside_counts_as_nothing_after_the_expression() -> None:
    """1/0 and log(0) stand where a block reaches beyond the operands: neither comes into a sum."""
    plan, inputs, (expected,) = prologue_programs.planned("both operands")
    for _, replacements in prologue_programs.all_variants(plan):
        made = replacement.replaced(plan, replacements)
        (actual,) = run(made, inputs)
        assert torch.isfinite(actual).all()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_an_operand_is_rounded_as_it_would_be_stored() -> None:
    plan, inputs, _ = prologue_programs.planned("a gated unit")
    inputs[2] = torch.eye(40, 67, dtype=torch.float16)
    (_, replacements), *_ = prologue_programs.all_variants(plan)
    (actual,) = run(replacement.replaced(plan, replacements), inputs)
    (stored,) = run(plan, inputs)  # by a kernel of its own, and the library
    torch.testing.assert_close(actual, stored, rtol=0, atol=0)
