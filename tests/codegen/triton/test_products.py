"""Product kernels under Triton's interpreter: each variant of each site against eager."""

from __future__ import annotations

import pytest
import torch

from fusewright.codegen.triton import Processor, generate
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.loops.lower import lower
from fusewright.schedule import schedule
from fusewright.schedule.printer import plan_text
from fusewright.select import replacement, sites, variants
from tests.codegen.triton.harness import run_plan
from tests.graph.texts import graph_of
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


LINEAR = """
    %x: bfloat16[16, 2048]@cuda = input
    %w: bfloat16[512, 2048]@cuda = input
    %v: bfloat16[512, 512]@cuda = input
    %t = aten.t(%w)
    %y = aten.mm(%x, %t)
    %z = aten.relu(%y)
    %u = aten.mm(%z, %v)
    return [%u]"""


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_wait_themselves_where_the_gpu_can_start_them_early(arch: int) -> None:
    """Nothing but the cache is asked for memory before the wait, and weights alone are."""
    plan = schedule(lower(graph_of(LINEAR), ()), product_programs.GPU)
    site = sites.find(plan)[0]
    variant = variants.plain(plan, site)
    tiles = {variant.product.name: ProductTile(32, 16, 128, 4, 3, 1)}
    codes = generate(list(variant.kernels), plan.buffers, Processor(arch, 132), tiles)
    others = generate(list(plan.kernels.values()), plan.buffers, Processor(arch, 132))
    assert len(others) == 1
    for code in [*codes.values(), *others.values()]:
        assert code.waits == (arch == 90)
        before, found, after = code.text.partition("lib.wait()")
        assert bool(found) == (arch == 90) == ("lib.let_next_start()" in before)
        assert not found or ("tl.load" not in before and "tl.store" not in before and "tl.store" in after)
    assert codes[variant.product.name].text.count("lib.fetch(") == arch // 90
    assert not any("lib.fetch(" in code.text for code in others.values())
