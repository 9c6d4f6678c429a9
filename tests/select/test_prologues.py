"""Products that compute their operands: every variant by the reference interpreter, against eager."""

from __future__ import annotations

import pytest
import torch

from fusewright.schedule import with_memory
from fusewright.schedule.plan import Kernel, Plan
from fusewright.schedule.printer import plan_text
from fusewright.schedule.verify import verify
from fusewright.select import replacement
from tests.schedule import reference
from tests.select import prologue_programs


def run(plan: Plan, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    made = with_memory(plan, None)
    verify(made)
    return reference.run(made, [item.clone() for item in inputs], one_at_a_time=8)


@pytest.mark.parametrize("name", prologue_programs.FUNCTIONS)
def test_every_variant_gives_eagers_result(name: str) -> None:
    plan, inputs, expected = prologue_programs.planned(name)
    _, _, sides, kernels = prologue_programs.FUNCTIONS[name]
    assert sorted(producer.side for _, found in prologue_programs.offers(plan) for producer in found) == sides
    tolerance = 1e-4 if expected[0].dtype is torch.float32 else 5e-3
    for variant, replacements in prologue_programs.all_variants(plan):
        actual = run(replacement.replaced(plan, replacements), inputs)
        assert any(side.value is not None for side in (variant.product.product.left, variant.product.product.right))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()), msg=lambda t, v=variant: f"{v.name}: {t}"
            )
    whole = replacement.replaced(plan, prologue_programs.everything(plan))
    assert len(whole.kernels) == kernels or not sides, plan_text(whole, False)
    for a, b in zip(run(whole, inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_an_operand_is_rounded_as_it_would_be_stored() -> None:
    """The sum of one product (the other factor is 1 once in each row) is the rounded value itself."""
    plan, inputs, _ = prologue_programs.planned("a gated unit")
    inputs[2] = torch.eye(40, 67, dtype=torch.float16)
    (_, replacements), *_ = prologue_programs.all_variants(plan)
    (actual,) = run(replacement.replaced(plan, replacements), inputs)
    gate, up = (item.float() for item in inputs[:2])
    stored = (torch.nn.functional.silu(gate) * up).half()[..., :40]
    torch.testing.assert_close(actual, stored + 1, rtol=0, atol=0)


def kernel_of(plan: Plan, name: str) -> Kernel:
    return next(kernel for kernel in plan.kernels.values() if name in kernel.written)


def test_what_is_left_of_a_kernel_stores_the_rest() -> None:
    plan, _, _ = prologue_programs.planned("a value that others read too")
    ((_, (producer,)),) = prologue_programs.offers(plan)
    whole = kernel_of(plan, producer.buffer)
    rest = kernel_of(
        replacement.replaced(plan, prologue_programs.everything(plan)), *(whole.written - {producer.buffer})
    )
    assert (
        rest.name == whole.name and producer.buffer not in rest.buffers and len(rest.written) == 1 < len(whole.written)
    )
    assert producer.alone.written == {producer.buffer}
