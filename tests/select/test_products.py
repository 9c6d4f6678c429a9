"""Products of a plan as kernels: every variant of every site, by the reference interpreter, against eager."""

from __future__ import annotations

import pytest
import torch

from fusewright.schedule import with_memory
from fusewright.schedule.plan import RunExtern
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from fusewright.select import replacement, sites, variants
from tests.schedule import reference
from tests.select import product_programs


@pytest.mark.parametrize("name", product_programs.FUNCTIONS)
def test_every_variant_gives_eagers_result(name: str) -> None:
    plan, inputs, expected = product_programs.planned(name)
    found = product_programs.all_variants(plan)
    assert set(product_programs.FUNCTIONS[name][2]) <= {variant.name for _, variant in found}
    for site, variant in found:
        made = with_memory(replacement.replaced(plan, [variants.of_variant(site, variant)]), None)
        verify(made)
        actual = reference.run(made, inputs, one_at_a_time=8)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4, msg=lambda text, v=variant: f"{v.name}: {text}"
        )
        assert "product = sum over k" in plan_text(made, False)


def test_all_products_at_once() -> None:
    plan, inputs, expected = product_programs.planned("two products that meet")
    claimed: set[int] = set()
    chosen = []
    for site in reversed(sites.find(plan)):
        site = sites.alone(site) if site.following in claimed else site
        claimed.add(site.following)
        chosen.append((site, variants.variants(plan, site)[0]))
    assert [variant.name for _, variant in chosen] == ["fused", "plain"]
    made = with_memory(
        replacement.replaced(plan, [variants.of_variant(site, variant) for site, variant in chosen]), None
    )
    assert not any(isinstance(step, RunExtern) for step in made.steps)
    torch.testing.assert_close(reference.run(made, inputs), expected, rtol=1e-4, atol=1e-4)


def test_what_is_written_between_keeps_a_product_in_its_place() -> None:
    """A kernel may take a product over only where nothing between the two changes what the product reads."""
    plan, _, _ = product_programs.planned("a linear layer with an activation")
    (site,) = sites.find(plan)
    assert site.following == 1
    moved = replacement.replaced(plan, [])
    moved.steps = (plan.steps[0], plan.steps[0], plan.steps[1])  # a second writer of the result stands between
    assert [found.following for found in sites.find(moved)] == [-1, 2]
