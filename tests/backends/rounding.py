"""How near to float64 a kernel's result must be, for tests of products and attention."""

from __future__ import annotations

import torch

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of a result, relative, beside what float32 sums in another order leave."""


def assert_as_near_as_eager(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, of_sums: float) -> None:
    """As near to `exact` as eager is (twice its distance), within a rounding of the result and `of_sums`, relative to the largest."""
    allowed = 2 * (eager.double() - exact).abs().max() + (of_sums + ROUNDING[got.dtype]) * (1 + exact.abs().max())
    assert (got.double() - exact).abs().max() <= allowed
