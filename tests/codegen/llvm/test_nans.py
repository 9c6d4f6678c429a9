"""Rounding to bfloat16 keeps NaN, also where kernels do not ask for it: every bit pattern through operations of all kinds."""

from __future__ import annotations

import pytest
import torch

import fusewright
from fusewright.codegen.analysis import analyse
from fusewright.codegen.llvm.nans import rounds_as_they_are
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Expression
from fusewright.schedule.plan import Stage, Store
from fusewright.sizes.expressions import loop_symbol
from tests.codegen.llvm.harness import kernel_of, run_plan
from tests.codegen.llvm.test_large_reductions import planned
from tests.codegen.llvm.test_plans import PROCESSORS

BF16 = torch.bfloat16
PROGRAMS = {
    "copy": lambda x: (torch.where(x > 0, x, x.flip(0)), torch.where(x.isnan(), x, -x)),
    "arithmetic": lambda x: (x + 1, x * x, x - x, x / x, -x, x.abs(), torch.relu(x), x.clamp(-1, 1), torch.maximum(x, x.flip(0))),
    "functions": lambda x: (x.exp(), x.sigmoid(), x.tanh(), x.erf(), x.log(), x.sqrt(), x.rsqrt(), x.reciprocal(), x.exp2(), x.expm1()),
    "activations": lambda x: tuple(getattr(torch.nn.functional, name)(x) for name in ("silu", "gelu", "softplus", "mish", "elu", "hardswish")),
    "rounding": lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.frac(), torch.copysign(x, x.flip(0)), x.fmod(3), x.sin()),
    "rows": lambda x: (x.view(256, 256).softmax(-1), x.view(256, 256).cumsum(-1), x.view(256, 256) - x.view(256, 256).amax(-1, keepdim=True)),
    "library": lambda x: (x.log1p(), x.pow(1.5), x.atan2(x), x.logcumsumexp(0), x.lgamma(), x.asinh(), x.double().log2().to(BF16)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_bfloat16(name: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    counts = x.isnan() | (x.abs() < 1e4) & (x.abs() > 1e-4)
    program = PROGRAMS[name]
    for got, expected in zip(fusewright.compile(program)(x), program(x)):
        torch.testing.assert_close(got.view(-1)[counts], expected.view(-1)[counts], equal_nan=True)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, 0x7FFF8000, -0x7FFFFF])
def test_float32_with_any_payload(bits: int) -> None:
    x = torch.full((100,), bits, dtype=torch.int32).view(torch.float32)
    assert fusewright.compile(lambda x: x.to(BF16))(x).isnan().all()
    assert fusewright.compile(lambda x: torch.where(x > 0, 0, x).to(BF16))(x).isnan().all()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_bfloat16_is_rounded_as_eager_rounds(processor: str) -> None:
    """Subnormals, infinities and ties, in vectors by themselves, in pairs (many elements) and in what is left of them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    words = (torch.arange(2**16, dtype=torch.int64)[:, None] * 2**16 + low).flatten()
    y = torch.where(words < 2**31, words, words - 2**32).to(torch.int32).view(torch.float32)
    programs = [
        (lambda x: (x * 0.5, x * 1.5), x),
        (lambda x: x[:1003] * 0.5, x),
        (lambda y: y.to(BF16), y),
        (lambda y: y[:77].to(BF16), y),
    ]
    for function, values in programs:
        actual, status = run_plan(planned(function, values), [values.clone()], without=PROCESSORS[processor])
        expected = function(values)
        assert status == 0
        for got, wanted in zip(actual, expected if isinstance(expected, tuple) else (expected,)):
            nan = wanted.isnan()
            assert torch.equal(got.isnan(), nan)
            assert torch.equal(got[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


def _kernel(value: Expression, **loaded: torch.dtype) -> bool:
    i = loop_symbol("o0", 64)
    return rounds_as_they_are(
        analyse(kernel_of("k", [Axis(i, 64)], [Stage((), (Store("z", i, value),))], {**loaded, "z": BF16}, "z"))
    )


def test_what_may_make_other_bits() -> None:
    i = loop_symbol("o0", 64)
    half, float_, other = (ir.load("x", i, dtype) for dtype in (BF16, torch.float32, torch.float16))
    wide = ir.apply("cast", half, dtype=torch.float32)

    def narrow(value: Expression) -> Expression:
        return ir.apply("cast", value, dtype=BF16)

    assert _kernel(narrow(ir.apply("exp", wide, dtype=torch.float32)), x=BF16)
    assert not _kernel(narrow(float_), x=torch.float32)
    assert not _kernel(narrow(ir.apply("cast", other, dtype=torch.float32)), x=torch.float16)
    assert not _kernel(narrow(ir.apply("log1p", wide, dtype=torch.float32)), x=BF16)
    assert not _kernel(
        narrow(ir.apply("add", wide, ir.constant(float("nan"), torch.float32), dtype=torch.float32)), x=BF16
    )


def _powers(x: torch.Tensor, d: int) -> tuple[torch.Tensor, ...]:
    """The powers leave by themselves: rows with NaN are NaN throughout, though nothing divides by their sum."""
    powers = (x.float() - x.float().amax(d, keepdim=True)).exp()
    return powers, powers.sum(d)


def _top_too(x: torch.Tensor, d: int) -> tuple[torch.Tensor, ...]:
    top = x.float().amax(d, keepdim=True)
    powers = (x.float() - top).exp()
    return powers / powers.sum(d, keepdim=True), top


def _selected(x: torch.Tensor, d: int) -> tuple[torch.Tensor, ...]:
    powers = (x.float() - x.float().amax(d, keepdim=True)).exp()
    total = powers.sum(d, keepdim=True)
    return (torch.where(powers > 0.5, powers / total, 0.0),)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 5), (40, 128), (33, 1000), (128, 4100)])
@pytest.mark.parametrize("d", [0, 1])
def test_a_maximum_below_which_exponentials_are_summed(dtype: torch.dtype, shape: tuple[int, int], d: int) -> None:
    x = torch.randn(shape).to(dtype)
    lines = x if d else x.t()
    lines[0, 3], lines[1, -1], lines[2], lines[3] = float("nan"), float("inf"), -float("inf"), float("nan")
    lines[4, :2], lines[4, 2] = -float("inf"), float("nan")
    programs = [
        lambda x: (x.softmax(d), x.log_softmax(d)), lambda x: x.softmax(d), lambda x: x.log_softmax(d), lambda x: x.logsumexp(d),
        lambda x: (x * 2).softmax(d).sum(d), *(lambda x, f=f: f(x, d) for f in (_powers, _top_too, _selected)),
    ]  # fmt: skip
    for program in programs:
        torch.testing.assert_close(fusewright.compile(program)(x), program(x), equal_nan=True, rtol=2e-2 if dtype is BF16 else 1e-5, atol=1e-2 if dtype is BF16 else 1e-5)  # fmt: skip
