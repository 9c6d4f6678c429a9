"""Gradients at NaN, infinities, zeros of both signs, denormal numbers and where a function bends: they are eager's.

Each value fills whole vectors: eager's code for the few elements that are left over decides otherwise at a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusewright
from fusewright.operators.schema import facts

Function = Callable[[Tensor], Tensor]

VALUES = (
    math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-40, 3.0, -3.0, 0.5, -0.5, 1.0, -1.0, 6.0, 20.0, -20.0, 2.0, -2.0, 1e30, -1e30,
)  # fmt: skip
TANGENTS = (1.0, -2.0, math.nan)

OF_ELEMENTS: dict[str, Function] = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardtanh of other ends": lambda x: F.hardtanh(x, -2, 3),
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "elu": F.elu, "elu of 2": lambda x: F.elu(x, 2.0), "celu": F.celu,
    "celu of 2": lambda x: F.celu(x, 2.0), "selu": F.selu, "leaky_relu": F.leaky_relu, "rising leaky_relu": lambda x: F.leaky_relu(x, -0.5),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish, "softplus": F.softplus,
    "softplus of 2": lambda x: F.softplus(x, 2.0, 3.0), "softshrink": F.softshrink, "hardshrink": F.hardshrink, "softsign": F.softsign,
    "logsigmoid": F.logsigmoid, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "threshold": lambda x: F.threshold(x, 1.0, 0.0),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype)), "abs": torch.abs, "sign": torch.sign, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "square": torch.square, "log": torch.log, "log1p": torch.log1p, "exp": torch.exp,
    "expm1": torch.expm1, "sin": torch.sin, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan, "acosh": torch.acosh,
    "atanh": torch.atanh, "erf": torch.erf, "erfinv": torch.erfinv, "floor": torch.floor, "frac": torch.frac, "round": torch.round,
    "logit": torch.logit, "logit with eps": lambda x: torch.logit(x, 0.1), "entr": torch.special.entr, "nan_to_num": torch.nan_to_num,
    "clamp": lambda x: x.clamp(-1, 2), "clamp from below": lambda x: x.clamp(min=0.5), "clamp from above": lambda x: x.clamp(max=0.5),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-1.0, dtype=x.dtype), torch.tensor(2.0, dtype=x.dtype)),
    "square by pow": lambda x: x**2, "pow of 0": lambda x: x**0, "pow of 3": lambda x: x**3, "root by pow": lambda x: x**0.5,
    "pow of -1": lambda x: x**-1, "pow of 1.5": lambda x: x**1.5, "power of 2": lambda x: 2**x, "fmod": lambda x: x.fmod(2.0),
    "remainder": lambda x: x % 2.0, "xlogy": lambda x: torch.xlogy(x, x), "hypot": lambda x: torch.hypot(x, x.flip(0)),
    "maximum": lambda x: torch.maximum(x, x.flip(0)), "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "fmax": lambda x: torch.fmax(x, x.flip(0)), "fmin": lambda x: torch.fmin(x, x.flip(0)), "quotient": lambda x: x / x.flip(0),
    "product": lambda x: x * x.flip(0), "copysign": lambda x: torch.copysign(x, x.flip(0)), "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.flip(0)), "where": lambda x: torch.where(x != 0, 1 / x, 0.0),
}  # fmt: skip

ROWS = (
    [1.0, 2.0, 3.0], [2.0, 2.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-0.0, 0.0, 1.0], [math.nan, 1.0, 2.0], [1.0, math.nan, math.nan],
    [math.inf, 1.0, 2.0], [math.inf, math.inf, 1.0], [-math.inf, 1.0, 2.0], [-math.inf] * 3, [math.inf, -math.inf, 0.0],
    [math.nan, math.inf, 0.0], [0.0, math.inf, 1.0], [1.0, 1.0, 1.0], [0.0, math.nan, 0.0],
)  # fmt: skip
OF_ROWS: dict[str, Function] = {
    "sum": lambda x: x.sum(), "mean": lambda x: x.mean(-1), "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "max": lambda x: x.max(),
    "min": lambda x: x.min(), "max of rows": lambda x: x.max(-1)[0], "min of rows": lambda x: x.min(-1)[0], "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(-1)[0], "nanmedian": lambda x: x.nanmedian(-1)[0], "nansum": lambda x: x.nansum(-1),
    "nanmean": lambda x: x.nanmean(-1), "logsumexp": lambda x: x.logsumexp(-1), "softmax": lambda x: x.softmax(-1), "norm": lambda x: x.norm(dim=-1),
    "norm of 1": lambda x: x.norm(1, dim=-1), "norm of inf": lambda x: x.norm(math.inf, dim=-1), "norm of 3": lambda x: x.norm(3, dim=-1),
    "norm of 0": lambda x: x.norm(0, dim=-1), "norm of -inf": lambda x: x.norm(-math.inf, dim=-1), "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1), "cumsum": lambda x: x.cumsum(-1), "cumprod": lambda x: x.cumprod(-1), "cummax": lambda x: x.cummax(-1)[0],
    "cummin": lambda x: x.cummin(-1)[0], "logcumsumexp": lambda x: x.logcumsumexp(-1), "sort": lambda x: x.sort(stable=True, dim=-1)[0],
    "kthvalue": lambda x: x.kthvalue(2, -1)[0], "aminmax": lambda x: torch.stack(list(x.aminmax(dim=-1))), "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "normalize": lambda x: F.normalize(x, dim=-1), "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]), "cdist": lambda x: torch.cdist(x, x),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.flip(0)), "huber": lambda x: F.huber_loss(x, x.flip(0)), "l1": lambda x: F.l1_loss(x, x.flip(0)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(0)), "hinge": lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)),
}  # fmt: skip


def both(function: Function, x: Tensor, tangent: float) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = function(x)
    if y.requires_grad:
        y.backward(torch.full_like(y, tangent))
    return y.detach(), x.grad


def agree(function: Function, compiled: Function, x: Tensor, tangent: float, large: bool = False) -> None:
    """`large`: errors of the gradient's elements are counted in its largest one, as those of a mean are."""
    try:
        expected, wanted = both(function, x, tangent)
    except RuntimeError:  # an operator without derivative in an older PyTorch
        with pytest.raises(RuntimeError):
            both(compiled, x, tangent)
        return
    y, gradient = both(compiled, x, tangent)
    tolerance = {"rtol": 1e-4, "atol": 2e-6} if x.dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-13}
    torch.testing.assert_close(y, expected, equal_nan=True, **tolerance)
    if large and wanted is not None:
        largest = torch.nan_to_num(wanted, 0.0, 0.0, 0.0).abs().max().item()
        tolerance["atol"] = tolerance["atol"] * max(1.0, abs(tangent)) + 1e-7 * largest
    torch.testing.assert_close(gradient, wanted, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_of_elements(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES, dtype=torch.float64).to(dtype).repeat_interleave(64)
    compiled = fusewright.compile(OF_ELEMENTS[name])
    for tangent in TANGENTS:
        agree(OF_ELEMENTS[name], compiled, x, tangent)


@pytest.mark.parametrize("name", sorted(OF_ELEMENTS.keys() - {"hardsigmoid"}))  # PyTorch has none of it
def test_gradients_of_gradients_of_elements(name: str) -> None:
    function, found = OF_ELEMENTS[name], []
    for run in (function, fusewright.compile(function)):
        x = torch.tensor(VALUES).repeat_interleave(64).requires_grad_()
        y = run(x)
        if y.requires_grad:
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append([first.detach()])
            if first.requires_grad:
                found[-1] += torch.autograd.grad(first.square().sum(), x, materialize_grads=True)
    torch.testing.assert_close(found[1:], found[:1], equal_nan=True, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("over_reverse", [False, True])
@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_tangents_of_elements(name: str, over_reverse: bool) -> None:
    """PyTorch's formulas meet zeros without memory, which stay zero whatever they are multiplied by."""
    function = torch.func.grad(lambda x: OF_ELEMENTS[name](x).sum()) if over_reverse else OF_ELEMENTS[name]
    run = lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    x = torch.tensor(VALUES).repeat_interleave(64)
    try:
        wanted = run(x)
    except RuntimeError:  # an operator without forward-mode derivative
        with pytest.raises(RuntimeError):
            fusewright.compile(run)(x)
        return
    torch.testing.assert_close(fusewright.compile(run)(x), wanted, equal_nan=True, rtol=1e-4, atol=2e-6)


def test_zeros_without_memory_add_nothing() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        zeros = torch._efficientzerotensor(x.shape)
        return (
            zeros + x, x + zeros, torch.add(zeros, x, alpha=2), zeros - x, x - zeros, (zeros + zeros) * x, zeros[None] * x, zeros / x, zeros * math.inf,
            torch.dot(zeros, x), zeros.expand(2, 3).t() * x[:, None], torch.linalg.cross(x, zeros), zeros.clone() * x, (zeros + 1) * x,
        )  # fmt: skip

    x = torch.tensor([-0.0, math.inf, -math.inf])
    for found, wanted in zip(fusewright.compile(run)(x), run(x)):
        torch.testing.assert_close(found, wanted.clone(), equal_nan=True, rtol=0, atol=0)
        assert found.nan_to_num().signbit().equal(wanted.clone().nan_to_num().signbit())


@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows(name: str) -> None:
    compiled = fusewright.compile(OF_ROWS[name])
    for row in ROWS:
        for tangent in TANGENTS:
            agree(OF_ROWS[name], compiled, torch.tensor([row, [1.0, 2.0, 4.0]]), tangent)


LARGE = (
    [1e30, 1e30, 1e30], [1e30, -1e30, 1.0], [1e30, 1.0, 2.0], [1e30, 2e30, 3e30], [3e38, 3e38, 3e38], [3e38, -3e38, 0.0], [1e20, -1e20, 3.0],
    [2e19, 1.0, -2e19], [-1e30, -1e30, -1e30], [-3e38, -math.inf, -3e38], [1e-20, -1e-20, 3e-20], [1e-40, 0.0, 2e-40], [90.0, -90.0, 110.0],
)  # fmt: skip
STATISTICS: dict[str, Function] = {
    "var": lambda x: x.var(-1), "std": lambda x: x.std(-1), "std of all": lambda x: x.std(), "var of columns": lambda x: x.var(0),
    "std without correction": lambda x: x.std(-1, correction=0), "var_mean": lambda x: torch.var_mean(x, -1)[0],
}  # fmt: skip
OF_LARGE: dict[str, Function] = {
    **STATISTICS, "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1), "norm of 1": lambda x: x.norm(1, dim=-1), "mse": lambda x: F.mse_loss(x, x.flip(0)),
    "mse of elements": lambda x: F.mse_loss(x, x.flip(0), reduction="none"), "glu": lambda x: F.glu(torch.cat([x.flip(1), x], -1)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.long)), "amax": lambda x: x.amax(-1), "l1": lambda x: F.l1_loss(x, x.flip(0)),
    "hypot": lambda x: torch.hypot(x, x.flip(1)), "logaddexp": lambda x: torch.logaddexp(x, x.flip(1)), "lerp": lambda x: torch.lerp(x, x.flip(1), 0.3),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(1).sigmoid(), reduction="none"),
    "silu": F.silu, "logsigmoid": F.logsigmoid, "mish": F.mish, "tanhshrink": F.tanhshrink, "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_LARGE)
def test_of_large_numbers(name: str, dtype: torch.dtype) -> None:
    """Nothing in between overflows, or is lost, where eager's does not."""
    compiled = fusewright.compile(OF_LARGE[name])
    for row in LARGE:
        if name in STATISTICS and len(set(row)) == 1:
            continue  # what is left of equal numbers is the rounding of their mean
        for tangent in (1.0,) if name in STATISTICS else (1.0, -1e30):
            for repeats in (1, 16):  # the last few elements, and whole vectors
                x = torch.tensor([row, [1.0, 2.0, 4.0]], dtype=torch.float64).to(dtype).repeat(1, repeats)
                agree(OF_LARGE[name], compiled, x, tangent, large=True)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_large_bfloat16(name: str) -> None:
    compiled = fusewright.compile(STATISTICS[name])
    for row in LARGE:
        x = torch.tensor([row, [1.0, 2.0, 4.0]] * 8).bfloat16().repeat(1, 16)
        precise = STATISTICS[name](x.double()).bfloat16()
        torch.testing.assert_close(compiled(x), precise, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [F.silu, F.mish, F.gelu, F.softplus, F.elu, F.hardswish, F.logsigmoid],
    ids=lambda function: function.__name__,
)
def test_a_gradient_of_halves_is_rounded_once(function: Function, dtype: torch.dtype) -> None:
    """Its steps are those of one kernel: the slope at -20 is no half, its product with a large tangent is."""
    x = torch.linspace(-30, 30, 1024).to(dtype)
    (_, gradient), (_, wanted) = both(fusewright.compile(function), x, 700.0), both(function, x, 700.0)
    atol = 700 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(gradient, wanted, rtol=2 * torch.finfo(dtype).eps, atol=atol)


def test_an_epsilon_that_a_half_does_not_hold_keeps_its_value() -> None:
    """Eager rounds it to 0, and divides by that."""
    x = torch.tensor([[0.0, -0.0, 3.0]], dtype=torch.float16)
    assert torch.nn.functional.normalize(x, dim=0)[0, 0].isnan()
    found = fusewright.compile(lambda x: torch.nn.functional.normalize(x, dim=0))(x)
    torch.testing.assert_close(found, torch.nn.functional.normalize(x.double(), dim=0).half(), rtol=0, atol=0)


def test_what_has_a_kernel_of_its_own_is_recorded_whole() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        name.partition("::")[2].partition(".")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU")
    ]
    operators = [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in names]
    assert torch.ops.aten.silu_backward.default in operators
    whole = {str(one) for one in operators if not facts(one).composite}
    assert whole == {str(one) for one in operators} - {"aten.native_channel_shuffle.default"}
