"""Product kernels under Triton's interpreter: each variant of each site against eager."""

from __future__ import annotations

import pytest
import torch

from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.schedule.printer import plan_text
from fusewright.select import replacement, variants
from tests.codegen.triton.harness import run_plan
from tests.select import product_programs

SMALL = ProductTile(32, 16, 16, 4, 3, 2)


@pytest.mark.parametrize("name", product_programs.FUNCTIONS)
def test_every_variant_gives_eagers_result(name: str) -> None:
    plan, inputs, expected = product_programs.planned(name)
    for site, variant in product_programs.all_variants(plan):
        made = replacement.replaced(plan, [variants.of_variant(site, variant)])
        tiles = {kernel.name: SMALL for kernel in made.kernels.values() if kernel.product is not None}
        try:
            actual = run_plan(made, inputs, tiles=tiles)
        except Exception as error:
            raise AssertionError(
                f"{variant.name}: {type(error).__name__}: {error}\n{plan_text(made, False)}"
            ) from error
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4, msg=lambda text, v=variant: f"{v.name}: {text}"
        )
