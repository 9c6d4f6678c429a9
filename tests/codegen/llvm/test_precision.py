"""Kernels over rows and pieces against double precision: at most 2 units in the last place worse than eager's (GELU: of half its argument)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusewright

Function = Callable[[torch.Tensor], torch.Tensor]
LONG: list[tuple[int, ...]] = [
    (1000, 64), (1000, 4096), (20001, 64), (300_000, 3), (3, 400_001), (16, 100_000), (7, 33, 41, 37),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("dims", [0, -1, (0, -1)])
def test_long_sums(shape: tuple[int, ...], dims: int | tuple[int, ...], dynamic: bool) -> None:
    """A sum that one accumulator takes element by element loses a digit with each hundredfold of its length: of a
    million equal numbers, all of which are rounded the same way, 3e-4 of it."""
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(1)), 4e-7
    for x, room in (numbers, (torch.full(shape, 0.1), 8e-6)):
        scaled = x * 1.1
        exact, eager = scaled.double().mean(dims), scaled.mean(dims)
        got = fusewright.compile(lambda x: (x * 1.1).mean(dims), dynamic=dynamic)(x)
        ours, theirs = (((result.double() - exact).abs() / exact).max().item() for result in (got, eager))
        assert ours <= theirs + room


PROGRAMS: dict[str, Function] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax over columns": lambda x: torch.softmax(x, 0),
    "log softmax": lambda x: torch.log_softmax(x, -1),
    "log of sums": lambda x: torch.logsumexp(x, -1),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "transposed": lambda x: x.t() * 1.5,
}


@pytest.mark.parametrize("shape", [(3, 5), (129, 1000), (300, 4099), (1030, 2100), (2048, 1040), (33, 40001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_near_as_eager(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    x = (torch.randn(shape) * (0.5 if shape[0] % 2 else 6)).to(dtype)
    if "soft" in name:
        x[torch.rand(shape) < 0.1] = -math.inf
    function = PROGRAMS[name]
    with torch.no_grad():
        exact, eager, got = function(x.double()), function(x), fusewright.compile(function)(x)
    counts = exact.isfinite() & (exact.abs() > 1e-30)
    large = (
        torch.maximum(exact.abs(), x.abs().double() / 2) if "gelu" in name else exact.abs()
    )  # 1 + erf cancels, in eager as well
    unit = 2.0 ** (large.clamp(min=2.0**-100).log2().floor() - (23 if dtype is torch.float32 else 7))
    ours, theirs = (((result.double() - exact).abs() / unit)[counts].max().item() for result in (got, eager))
    assert ours <= theirs + 2
    torch.testing.assert_close(got[~counts], eager[~counts])


CHOICES: dict[str, Function] = {
    "equal": lambda y: y == y.max(), "not less": lambda y: y >= y.amax(1, True), "number": lambda y: y > 0.5,
    "argmax": lambda y: y.argmax(), "argmin of columns": lambda y: y.argmin(0), "argmax of rows": lambda y: y.argmax(1),
    "position": lambda y: y.max(1)[1], "cummax": lambda y: y.cummax(1)[1], "cummin": lambda y: y.cummin(1)[1],
    "median": lambda y: y.median(1)[1],
    "isclose": lambda y: torch.isclose(y, y.amax(), 0, 0), "maximum": lambda y: torch.maximum(y, y.amax()) == y,
    "isin": lambda y: torch.isin(y, y.amax()), "kthvalue": lambda y: y.kthvalue(2)[1],
    "pooled": lambda y: F.max_pool1d(y[None], 2, return_indices=True)[1],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CHOICES)
def test_values_are_compared_as_they_are_stored(name: str, dtype: torch.dtype) -> None:
    """A value that one kernel keeps in a higher precision is compared with one that was stored."""
    drawn = [torch.randn(40, 50, dtype=dtype, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    falling = torch.linspace(2, 1, 2000, dtype=dtype).view(40, 50)  # neighbours that may become equal
    for x in (*drawn, falling, falling.flip(0), -falling):
        assert torch.equal(fusewright.compile(lambda x: CHOICES[name](x * 1.1))(x), CHOICES[name](x * 1.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["max", "amax", "median"])
def test_the_gradient_of_an_extreme_reaches_its_elements(name: str, dtype: torch.dtype) -> None:
    given = torch.randn(300, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (lambda x: getattr(x * 1.1, name)(), fusewright.compile(lambda x: getattr(x * 1.1, name)())):
        x = given.clone().requires_grad_()
        function(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


STEPS: dict[str, Function] = {
    "uint8": lambda y: y.to(torch.uint8), "int64": lambda y: y.to(torch.int64), "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "trunc": torch.trunc, "frac": torch.frac, "remainder": lambda y: y % 1.0,
    "fmod": lambda y: y.fmod(1.0), "floor_divide": lambda y: y // 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_eager_has_rounded(name: str) -> None:
    """Colours made of others: the exact sum is often a whole number, and eager's rounded one is not, or the other way round."""

    def function(x: torch.Tensor) -> torch.Tensor:
        r, g, b = x.unbind(0)
        return STEPS[name](0.7 * r + 0.3 * g - 0.2 * b + 60.0)

    x = torch.randint(0, 256, (3, 40000), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fusewright.compile(function)(x), function(x))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_takes_what_eager_has_scaled_and_added(name: str, sign: int) -> None:
    """A scaled operand is not rounded before it is added, a product beside it is: torchvision's blending of images."""

    def function(x: torch.Tensor) -> torch.Tensor:
        r, g, b = x.unbind(0)
        grey = r.mul(0.2989).add_(g, alpha=0.587).sub_(b, alpha=-0.114 * sign)
        return STEPS[name](r.mul(1.4).add_(grey.floor_(), alpha=-0.4).clamp_(0, 255))

    x = torch.randint(0, 256, (3, 40000), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fusewright.compile(function)(x), function(x))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_takes_what_eager_has_rounded_to_a_half(name: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return STEPS[name](x * 1.1)

    x = torch.randint(0, 256, (40000,), generator=torch.Generator().manual_seed(0)).to(dtype) * 0.875
    assert torch.equal(fusewright.compile(function)(x), function(x))


@pytest.mark.parametrize("order", [0, 1.5, 2, 3])
def test_nothing_overflows_in_a_norm_of_one_element(order: float) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.norm(order, dim=1), torch.linalg.vector_norm(x[:1], order), x.prod().norm(order)

    x = torch.tensor([[1e23], [-2e23], [float("nan")]])
    torch.testing.assert_close(fusewright.compile(function)(x), function(x), equal_nan=True)


SCORES: dict[str, Function] = {
    "softmax": lambda y: torch.softmax(y, -1), "softmax of columns": lambda y: torch.softmax(y, 0),
    "log of the sum": lambda y: torch.logsumexp(y, -1), "log softmax": lambda y: torch.log_softmax(y, -1),
    "log softmax of columns": lambda y: torch.log_softmax(y, 0),
    "exponentials": lambda y: torch.exp(y - y.amax(0)), "loss": lambda y: F.cross_entropy(y, torch.arange(len(y))),
    "attention": lambda y: torch.softmax(y @ y.T * 0.3, -1) @ y.softmax(-1),
    "attention kernel": lambda y: F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None].softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_large_scores_are_rounded_before_their_maximum_is_subtracted(name: str) -> None:
    """Unrounded they lie above it: exp(6000) where eager has 1. In a gradient, exp(scores - logarithm) was of others."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return SCORES[name](x * 0.7)

    run = fusewright.compile(function)
    for by in (1e2, 1e4, 1e6, 1e8, 1e10):
        ours, eagers = [], []
        for seed in range(4):
            torch.manual_seed(seed)
            x = (torch.randn(8, 33) * (by**0.5 if "attention" in name else by)).requires_grad_()
            tangent = torch.randn(eager.shape) if (eager := function(x)).ndim else torch.tensor(1.0)
            double = x.detach().double().requires_grad_()
            exact = (truth := function(double)), *torch.autograd.grad(truth, double, tangent.double())
            for out, off in ((eager, eagers), (run(x), ours)):
                found = out, *torch.autograd.grad(out, x, tangent)
                off.append(torch.stack([(one - true).detach().norm() for one, true in zip(found, exact, strict=True)]))
        room = 1e-6 + 1e-6 * torch.stack([true.detach().norm() for true in exact])
        assert (torch.stack(ours).amax(0) <= 4 * torch.stack(eagers).amax(0) + room).all(), (by, ours, eagers)


CANCELLED: dict[str, Function] = {
    "products": lambda x: x * x.flip(0) - x.flip(0) * x, "sum": lambda x: x * 1.3 + x.neg() * 1.3,
    "determinant": lambda x: x[:, :1] * x[:, 1:] - x[:, 1:] * x[:, :1],
    "cross": lambda x: x[:, [1, 2, 0]] * (2 * x[:, [2, 0, 1]]) - x[:, [2, 0, 1]] * (2 * x[:, [1, 2, 0]]),
    "conjugate": lambda x: (lambda z: (z * z.conj()).imag)(torch.complex(x, x.flip(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", CANCELLED)
def test_equal_products_cancel(name: str) -> None:
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    assert not CANCELLED[name](x).any()
    assert not fusewright.compile(CANCELLED[name])(x).any()
