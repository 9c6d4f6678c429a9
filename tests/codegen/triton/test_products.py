"""Product kernels under Triton's interpreter: each variant of each site against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusewright.codegen.triton import DeviceKernel, Processor, generate
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.loops.lower import lower
from fusewright.schedule import bounds, schedule
from fusewright.schedule.plan import Plan
from fusewright.schedule.printer import plan_text
from fusewright.select import replacement, sites, variants
from tests.codegen.triton.harness import run_plan
from tests.graph.texts import graph_of
from tests.loops.tracing import lowered
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


DUAL = {
    "a gate": lambda x, g, u, d: (F.silu(x @ g) * (x @ u)) @ d,
    "scaled, with a residual": lambda x, g, u, d: (3 * (x @ g) + (x @ u).relu() + 1) @ d,
    "transposed": lambda x, g, u, d: (torch.sigmoid(x @ g) * (x @ u)).view(-1, 2, 20).transpose(0, 1).contiguous(),
}


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("tile", [SMALL, ProductTile(16, 16, 32, 2, 3, 1)], ids=["small", "wide"])
def test_products_that_meet_in_one_kernel(name: str, tile: ProductTile) -> None:
    function = DUAL[name]
    inputs = [torch.randn(*shape) for shape in ((5, 36), (36, 40), (36, 40), (40, 24))]
    plan = schedule(lowered(function, inputs), product_programs.GPU)
    (group,) = [one for one in variants.groups(plan, sites.find(plan)) if len(one) == 2]
    found = variants.dual(plan, group)
    assert found is not None and len(found[0].product.besides) == 1
    made = replacement.replaced(plan, [variants.of_group(group, *found)])
    assert len(made.steps) == len(plan.steps) - 2
    actual = run_plan(made, inputs, tiles={found[0].name: tile})
    torch.testing.assert_close(actual[0], function(*inputs), rtol=1e-4, atol=1e-4)
    (code,) = [one for one in codes_of(made, tile).values() if one.symbol.find("products") >= 0]
    assert code.text.count("tl.dot(") == 2


UNEQUAL = {
    "rows of weights": lambda x, q, k, v, a, b, c: (x @ q.T, x @ k.T, x @ v.T),
    "with biases": lambda x, q, k, v, a, b, c: (F.linear(x, q, a), F.linear(x, k, b), F.linear(x, v, c)),
}


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("columns", [(48, 24, 24), (24, 24, 48), (24, 72, 48), (24, 24, 24)])
def test_skinny_products_with_different_columns_are_one_kernel(name: str, columns: tuple[int, int, int]) -> None:
    inputs = [torch.randn(*shape) for shape in ((5, 36), *((n, 36) for n in columns), *((n,) for n in columns))]
    plan = schedule(lowered(UNEQUAL[name], inputs), product_programs.GPU)
    (group,) = variants.groups(plan, sites.find(plan))
    kernel = variants.horizontal(group)
    assert kernel.outer[0].extent == sum(columns) // 24
    made = replacement.replaced(plan, [variants.of_group(group, kernel)])
    assert len(made.steps) == 1 and not bounds.show(made).unproved
    actual = run_plan(made, inputs, tiles={kernel.name: SMALL})
    torch.testing.assert_close(actual, list(UNEQUAL[name](*inputs)), rtol=1e-4, atol=1e-4)


def test_products_of_many_rows_with_different_columns_stay_apart() -> None:
    inputs = [torch.randn(*shape) for shape in ((96, 36), (48, 36), (24, 36), (24, 36))]
    plan = schedule(lowered(lambda x, q, k, v: (x @ q.T, x @ k.T, x @ v.T), inputs), product_programs.GPU)
    assert [[site.columns for site in group] for group in variants.groups(plan, sites.find(plan))] == [[24, 24]]


def test_a_result_that_others_read_is_no_part_of_a_dual_product() -> None:
    inputs = [torch.randn(*shape) for shape in ((5, 36), (36, 40), (36, 40))]
    plan = schedule(lowered(lambda x, g, u: (lambda y: (F.silu(y) * (x @ u), y))(x @ g), inputs), product_programs.GPU)
    (group,) = variants.groups(plan, sites.find(plan))
    assert variants.dual(plan, group) is None


def codes_of(plan: Plan, tile: ProductTile) -> dict[str, DeviceKernel]:
    tiles = {kernel.name: tile for kernel in plan.kernels.values() if kernel.product is not None}
    return generate(list(plan.kernels.values()), plan.buffers, Processor(), tiles)


def test_many_programs_do_not_start_before_others_have_ended() -> None:
    """Each would have to ask for that."""
    for rows, waits in ((64, True), (65536, False)):
        plan = schedule(lowered(lambda x: x * 2, [torch.empty(rows, 512)]), product_programs.GPU)
        (code,) = generate(list(plan.kernels.values()), plan.buffers, Processor(90, 132)).values()
        assert code.waits == waits == ("lib.wait()" in code.text)


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
