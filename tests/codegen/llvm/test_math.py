"""Elementary functions against double precision: the error in units in the last place, and eager's results at special values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.codegen.llvm.harness import elementwise

FUNCTIONS = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "erfc": torch.erfc, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh,
    "acosh": torch.acosh, "atanh": torch.atanh, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
}  # fmt: skip
SPECIAL = torch.tensor(
    [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-45,
        -1e-45,
        1e-38,
        -1e-38,
        88.72,
        89.1,
        -87.33,
        -103.97,
        -104.1,
        3e38,
        -3e38,
        1.0,
        -1.0,
        0.5,
        2.0,
    ]
)


def arguments() -> torch.Tensor:
    """Every part of the range: all exponents (by bit patterns), and densely where functions bend."""
    bits = torch.arange(-(2**31), 2**31, 36541, dtype=torch.int64).to(torch.int32).view(torch.float32)
    dense = [torch.linspace(-110, 110, 40001), torch.linspace(-5, 5, 40001), torch.linspace(0.5, 2, 40001)]
    return torch.cat([bits, *dense, SPECIAL])


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The error in units in the last place of float32 at the exact value; 0 where either is not finite."""
    usual = torch.isfinite(exact.float()) & torch.isfinite(got)
    unit = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))) - 23)
    return torch.where(usual, (got.double() - exact).abs() / unit, 0.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_is_within_two_ulp_and_special_values_are_eagers(name: str) -> None:
    x = arguments()
    exact = FUNCTIONS[name](x.double())
    got = elementwise(name, [x], torch.float32)
    # eager computes sigmoid as 1 / (1 + exp(-x)) in float32, and so do we: up to 2.5 ulp, 0 where exp overflows
    counts = x > -87 if name == "sigmoid" else torch.ones_like(x, dtype=torch.bool)
    assert ulps(got, exact)[counts].max() <= (2.5 if name == "sigmoid" else 2.0)
    eager = FUNCTIONS[name](SPECIAL)
    # SLEEF's sinh and cosh for AVX2 overflow a little before float32 does: there the exact value counts
    eager = torch.where(eager.isinf(), exact[-len(SPECIAL) :].float(), eager)
    torch.testing.assert_close(got[-len(SPECIAL) :], eager, equal_nan=True, rtol=1e-6, atol=0)
    zero = got == 0
    assert torch.equal(torch.signbit(got[zero]), torch.signbit(FUNCTIONS[name](x)[zero]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64(name: str) -> None:
    x = torch.cat(
        [
            torch.linspace(-30, 30, 5001, dtype=torch.float64),
            SPECIAL.double(),
            torch.tensor([1e300, -1e300], dtype=torch.float64),
        ]
    )
    torch.testing.assert_close(
        elementwise(name, [x], torch.float64), FUNCTIONS[name](x), equal_nan=True, rtol=1e-13, atol=1e-300
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["erfinv", "digamma", "lgamma"])
def test_rare_functions(name: str, dtype: torch.dtype) -> None:
    span = 1.1 if name == "erfinv" else 20.0
    x = torch.cat([torch.linspace(-span, span, 3001, dtype=torch.float64), SPECIAL.double()]).to(dtype)
    if name == "lgamma":
        x = x[
            ~((x == x.round()) & (x <= 0))
        ]  # at the poles SLEEF and libm agree on infinity, its neighbours are ill-conditioned
    tolerance = 3e-5 if dtype is torch.float32 else 1e-9
    expected = getattr(torch, name)(x)
    torch.testing.assert_close(
        elementwise(name, [x], dtype), expected, equal_nan=True, rtol=tolerance, atol=tolerance / 10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["pow", "atan2", "hypot", "fmod", "remainder", "floor_divide", "nextafter", "copysign"]
)
def test_two_arguments(name: str, dtype: torch.dtype) -> None:
    values = torch.cat([SPECIAL, torch.linspace(-7, 7, 29)]).to(dtype)
    x, y = (grid.reshape(-1).contiguous() for grid in torch.meshgrid(values, values, indexing="ij"))
    if name in ("fmod", "remainder", "floor_divide"):
        if dtype is torch.float32:  # exact, where eager's vectors give NaN for huge quotients
            finite = torch.isfinite(x) & torch.isfinite(y) & (y != 0)
            exact = getattr(torch, name)(x[finite].double(), y[finite].double()).float()
            torch.testing.assert_close(elementwise(name, [x[finite], y[finite]], dtype), exact, rtol=1e-6, atol=0)
        # huge quotients: eager's vectorised and scalar paths disagree with each other
        usual = (y.abs() > 1e-3) | (y == 0)
        usual &= (x.abs() < 1e6) | ~torch.isfinite(x)
        x, y = x[usual], y[usual]
    expected = getattr(torch, name)(x, y)
    rtol = 1e-6 if dtype is torch.float32 else 1e-13
    torch.testing.assert_close(elementwise(name, [x, y], dtype), expected, equal_nan=True, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_powers(dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -10
    base, exponent = torch.randint(low, 11, (500,)).to(dtype), torch.randint(0, 9, (500,)).to(dtype)
    assert torch.equal(elementwise("pow", [base, exponent], dtype), torch.pow(base, exponent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["fmax", "fmin"])
def test_extremes_of_two_zeros(name: str, dtype: torch.dtype) -> None:
    zeros = torch.tensor([0.0, -0.0] * 32, dtype=dtype)
    got = elementwise(name, [zeros, -zeros], dtype)
    assert torch.equal(torch.signbit(got), torch.signbit(getattr(torch, name)(zeros, -zeros)))
