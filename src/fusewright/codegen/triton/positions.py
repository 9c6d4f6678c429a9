"""What positions and short integers are in a kernel's text.

Takes axes and expressions; gives strides, and whether 32 bits hold a value. Always holds: nothing here makes text of
its own.
"""

from __future__ import annotations

import torch

from fusewright.loops.ir import Apply, Axis, Constant, Expression, IndexValue
from fusewright.sizes.expressions import Dim

SHORT = frozenset({torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool})
"""Types whose values 32 bits hold."""


def is_short(expr: Expression) -> bool:
    """Whether an integer surely fits 32 bits (an index does where the kernel counts in 32 bits)."""
    match expr:
        case IndexValue():
            return True
        case Constant(value=value):
            return expr.dtype is torch.int64 and -(1 << 31) <= value < 1 << 31
        case Apply(op="cast", args=(argument,)):
            return expr.dtype is torch.int64 and argument.dtype in SHORT
    return False


def grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def positions(axes: list[Axis]) -> list[tuple[Axis, Dim]]:
    """The outer axes with their strides in a row-major order."""
    found: list[tuple[Axis, Dim]] = []
    stride: Dim = 1
    for axis in reversed(axes):
        found.append((axis, stride))
        stride = stride * axis.extent
    return found
