"""Which kernels round to bfloat16 without asking for NaN.

Takes a kernel's stages; says whether every NaN in them has its low 16 bits clear or is the processor's own: such a NaN stays one when half
a unit is added to its bits and the low half is cut off. Always holds: what may make other bits (float32 in memory, float16 whose fraction
reaches below those 16 bits, library functions, reinterpreted integers, NaN written as a constant) is answered by no.
"""

from __future__ import annotations

import math

import torch

from fusewright.codegen.llvm.analysis import Shape, scans_of
from fusewright.loops.ir import Apply, Constant, Expression, Load

# Operations whose float results are NaN only as a NaN operand handed on or as the processor's default, and which are inline code.
_HANDED_ON = frozenset(
    """add sub mul div fma neg abs minimum maximum fmin fmax where sqrt rsqrt reciprocal floor ceil round trunc frac copysign
    exp exp2 expm1 sigmoid tanh erf log""".split()
)
_INLINE_ONLY_IN_FLOAT32 = frozenset({"exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "log"})


def rounds_as_they_are(shape: Shape) -> bool:
    if any(scan.kind == "logaddexp" for view in shape.views for scan in scans_of(view.stage)):  # a library function
        return False
    scratch = {scratch.name for scratch in shape.kernel.scratch}
    return all(_is_plain(expr, scratch) for view in shape.views for expr in view.expressions())


def _is_plain(expr: Expression, scratch: set[str]) -> bool:
    dtype = expr.dtype
    if not dtype.is_floating_point:
        return not dtype.is_complex
    if isinstance(expr, Load):
        return dtype is torch.bfloat16 or expr.buffer in scratch
    if isinstance(expr, Constant):
        return not math.isnan(expr.value)
    if not isinstance(expr, Apply):
        return True
    if expr.op == "cast":
        return dtype is not torch.float16 and expr.args[0].dtype is not torch.float16
    return expr.op in _HANDED_ON and (dtype is torch.float32 or expr.op not in _INLINE_ONLY_IN_FLOAT32)
