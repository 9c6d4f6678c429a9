"""With which dtypes loops compute, and in which one an elementwise operator does: PyTorch's type promotion, on values
and Python numbers.

Takes operators and operands; gives dtypes. The rule (docs "tensor attributes", `c10::ResultTypeState`): tensors with
dimensions decide, tensors without dimensions only if they are of a higher category (bool < int < float), Python numbers
likewise below them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower.expressions import compute_dtype, index_as
from fusewright.loops.lower.registry import Fallback
from fusewright.loops.lower.values import Value
from fusewright.operators.rules.common import holds
from fusewright.sizes.expressions import Expr

COMPUTABLE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
    }
)  # fmt: skip
_WITH_COMPLEX = COMPUTABLE | {torch.complex64, torch.complex128}
_CONVERSIONS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})


def computable_dtypes(target: object, device: torch.device) -> frozenset[torch.dtype]:
    """The dtypes of arguments and results with which loops can express an operator."""
    if target is torch.ops.aten.complex.default:
        return _WITH_COMPLEX
    return COMPUTABLE | ir.FLOAT8 if target in _CONVERSIONS and _converts_float8(device) else COMPUTABLE


@lru_cache
def _converts_float8(device: torch.device) -> bool:
    """Whether the processor has instructions for it (Triton has none for older ones)."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def refuse_checked(self: Value, value: Any) -> None:
    """Raises Fallback where eager makes a number of `value`, a tensor without dimensions, and an error of one that the
    dtype of `self` cannot hold."""
    if not isinstance(value, Value) or torch.bool in (self.dtype, value.dtype):
        return
    given, held = _range(value.dtype), _range(self.dtype)
    to_integer = value.dtype.is_floating_point and not self.dtype.is_floating_point
    if isinstance(value.expression, ir.Constant):
        given = float(value.expression.value), float(value.expression.value)
        if self.dtype.is_floating_point and not math.isfinite(given[0]):
            return
        to_integer = False
    if to_integer or not (held[0] <= given[0] and given[1] <= held[1]):
        raise Fallback(f"a number of {value.dtype} that {self.dtype} may not hold")


def _range(dtype: torch.dtype) -> tuple[float, float]:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(limits.min), float(limits.max)


def category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def number_dtype(number: object) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, (int, Expr)):
        return torch.int64
    if isinstance(number, float):
        return torch.get_default_dtype()
    raise Fallback(f"an operand of type {type(number).__name__}")


def number(value: Any, dtype: torch.dtype, into: torch.dtype | None = None) -> Expression:
    """A Python number or a size converted to `dtype` as eager does where it writes numbers into tensors. `into`: the
    tensor's dtype, if computing has another."""
    if isinstance(value, Expr):
        return index_as(value, dtype)
    if not isinstance(value, (bool, int, float)):
        raise Fallback(f"a number of type {type(value).__name__}")
    if not holds(into or dtype, value):
        raise Fallback("a number outside the range of its dtype")
    return ir.constant(value, dtype)


def promoted_dtype(operands: Iterable[Any]) -> torch.dtype:
    """`torch.result_type` of the operands (Values, Python numbers, sizes; None is skipped)."""
    ranked: list[torch.dtype | None] = [None, None, None]  # tensors, tensors without dimensions, numbers
    for operand in operands:
        if operand is None:
            continue
        rank = (0 if operand.ndim else 1) if isinstance(operand, Value) else 2
        own = operand.dtype if isinstance(operand, Value) else number_dtype(operand)
        known = ranked[rank]
        ranked[rank] = own if known is None else torch.promote_types(known, own)
    result: torch.dtype | None = None
    for dtype in ranked:
        if dtype is not None and (result is None or category(dtype) > category(result)):
            result = dtype
    if result is None:
        raise Fallback("no operands")
    return result


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """What operators that always give floats compute integers in."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def computing(operands: Iterable[Any], as_float: bool = False) -> torch.dtype:
    """The dtype to compute in: promoted, made a float if `as_float`, half types widened to float32."""
    dtype = promoted_dtype(operands)
    return compute_dtype(float_dtype(dtype) if as_float else dtype)
