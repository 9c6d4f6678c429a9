"""Running sums and their like over values whose place in memory is a quotient and a remainder of the scanned position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright

INTERLEAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded": lambda x: F.pad(x, (1, 2)).flatten(),
    "repeated": lambda x: x.flatten().repeat_interleave(2),
    "stacked": lambda x: torch.stack([x, x * 2], -1).flatten(),
    "joined": lambda x: torch.cat([x, -x], -1).flatten(),
    "transposed": lambda x: x.T.flatten(),
    "rows": lambda x: torch.stack([x, x * 2], -1).flatten(1),
}
SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda v: v.cumsum(-1),
    "integers": lambda v: (v * 5).long().cumsum(-1).float(),
    "cumprod": lambda v: v.cumprod(-1),
    "logcumsumexp": lambda v: v.logcumsumexp(-1),
    "cummax": lambda v: v.cummax(-1)[0] + v.cummax(-1)[1],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("made", INTERLEAVED)
def test_in_order(made: str, scan: str, dynamic: bool) -> None:
    """Loops over the quotient and over the remainder are in the order of the position, whichever has lanes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return SCANS[scan](INTERLEAVED[made](x)).tanh()

    compiled = fusewright.compile(function, dynamic=dynamic)
    for shape in ((3, 1), (8, 1), (17, 2), (40, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_long_ones_are_rounded_once(name: str, dim: int) -> None:
    """Eager accumulates float32 in float64."""
    x = torch.rand(3000, 4000 if dim else 5, generator=torch.Generator().manual_seed(1)) * 2e-3 + 1
    exact = getattr(x.double(), name)(dim).float()
    with torch.no_grad():
        torch.testing.assert_close(fusewright.compile(lambda x: getattr(x, name)(dim))(x), exact, rtol=1.2e-7, atol=0)
