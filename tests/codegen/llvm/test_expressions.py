"""Every elementwise operation on every dtype that it is said to support, against eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fusewright.codegen.llvm.capabilities import BOOL, FLOATS, INTEGERS, SUPPORTED, supports
from fusewright.codegen.llvm.emit.expressions import EMITTERS
from fusewright.loops.ir import OPERATIONS
from tests.codegen.llvm.harness import elementwise

COUNT = 203  # several vectors and a tail for every width
EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign,
    "minimum": torch.minimum, "maximum": torch.maximum, "fmin": torch.fmin, "fmax": torch.fmax, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
    "le": torch.le, "gt": torch.gt, "ge": torch.ge, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor, "logical_not": torch.logical_not, "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor, "bitwise_not": torch.bitwise_not, "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "frac": torch.frac, "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite, "signbit": torch.signbit,
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}  # fmt: skip
PREDICATES = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "isnan",
    "isinf",
    "isfinite",
    "signbit",
}
DTYPES = [torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def sample(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(COUNT, generator=generator) < 0.5
    if dtype.is_floating_point:
        values = torch.randn(COUNT, generator=generator, dtype=torch.float64) * 4
        values[: 8 + seed] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 2.5, -2.5, 1e-40, math.nan, 1.0])[
            : 8 + seed
        ]
        return values.to(dtype).roll(3 * seed)
    info = torch.iinfo(dtype)
    values = torch.randint(max(info.min, -100), min(info.max, 100), (COUNT,), generator=generator)
    values[:2] = torch.tensor([info.min, info.max])
    return values.to(dtype).roll(seed)


CASES = [(op, dtype) for op in EAGER for dtype in DTYPES if supports(op, dtype)]


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_as_eager(op: str, dtype: torch.dtype) -> None:
    arguments = [sample(dtype, seed) for seed in range(OPERATIONS[op])]
    if op in ("floor_divide", "trunc_divide", "remainder", "fmod"):
        arguments[1] = torch.where(arguments[1] == 0, 3, arguments[1]).to(dtype)
        if dtype in FLOATS:
            arguments = [
                a[torch.isfinite(arguments[0]) & torch.isfinite(arguments[1]) & (arguments[1].abs() > 1e-6)]
                for a in arguments
            ]
    if op.startswith("shift"):
        arguments[1] = (arguments[1].to(torch.int64).abs() % 80).to(dtype)  # beyond every width
    result = torch.bool if op in PREDICATES else dtype
    expected = EAGER[op](*arguments)
    got = elementwise(op, arguments, result)
    assert elementwise.status == 0  # type: ignore[attr-defined]
    torch.testing.assert_close(got, expected.to(result), equal_nan=True, rtol=1e-6, atol=0)


def test_every_operation_has_an_emitter_and_a_row() -> None:
    assert set(SUPPORTED) == set(OPERATIONS)
    assert set(EMITTERS) == set(OPERATIONS)


@pytest.mark.parametrize("op", ["floor_divide", "trunc_divide", "remainder", "fmod"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_a_zero_divisor_is_reported_and_does_not_trap(op: str, dtype: torch.dtype) -> None:
    divisor = torch.full((COUNT,), 3, dtype=dtype)
    elementwise(op, [sample(dtype, 0), divisor], dtype)
    assert elementwise.status == 0  # type: ignore[attr-defined]
    divisor[COUNT - 1] = 0
    got = elementwise(op, [sample(dtype, 0), divisor], dtype)
    assert elementwise.status != 0  # type: ignore[attr-defined]
    assert got[-1] == 0


def test_the_overflowing_quotient_does_not_trap() -> None:
    smallest = torch.full((COUNT,), torch.iinfo(torch.int64).min)
    minus = torch.full((COUNT,), -1)
    assert torch.equal(elementwise("floor_divide", [smallest, minus], torch.int64), smallest)
    assert torch.equal(elementwise("remainder", [smallest, minus], torch.int64), torch.zeros(COUNT, dtype=torch.int64))


CONVERTED = [*DTYPES, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("source", CONVERTED, ids=str)
@pytest.mark.parametrize("target", CONVERTED, ids=str)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        return
    values = sample(torch.float32 if source in (torch.bfloat16, torch.float16) else source, 0).to(source)
    if source.is_floating_point and target in INTEGERS:
        values[20:28] = torch.tensor([300.0, -1.0, 3e9, -3e9, 1e19, 4294967295.0, 2147483648.0, 70000.0]).to(source)
    got = elementwise("cast", [values], target)
    torch.testing.assert_close(got, values.to(target), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_halves_round_to_nearest_even(target: torch.dtype) -> None:
    bits = torch.arange(0x3F000000, 0x47800000, 3331, dtype=torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    values = torch.cat([bits, ties, ties | 0x10000]).view(torch.float32)
    assert torch.equal(elementwise("cast", [values], target), values.to(target))
    assert torch.isnan(elementwise("cast", [torch.full((40,), math.nan)], target)).all()


def test_where_and_bitcast() -> None:
    mask, a, b = sample(torch.bool, 0), sample(torch.float32, 1), sample(torch.float32, 0)
    torch.testing.assert_close(
        elementwise("where", [mask, a, b], torch.float32), torch.where(mask, a, b), equal_nan=True, rtol=0, atol=0
    )
    assert torch.equal(elementwise("bitcast", [a], torch.int32), a.view(torch.int32))
    half = a.to(torch.bfloat16)
    assert torch.equal(elementwise("bitcast", [half], torch.int16), half.view(torch.int16))


def test_capabilities_deny_what_makes_no_sense() -> None:
    assert not supports("exp", torch.int32)
    assert not supports("bitwise_and", torch.float32)
    assert not any(supports("sub", dtype) for dtype in BOOL)
    with pytest.raises(KeyError):
        supports("no_such_operation", torch.float32)
