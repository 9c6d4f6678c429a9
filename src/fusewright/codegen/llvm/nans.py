"""Which kernels round to bfloat16 without asking for NaN, and which maxima need not find it.

Takes a kernel's stages; says whether every NaN in them has its low 16 bits clear or is the processor's own: such a NaN
stays one when half a unit is added to its bits and the low half is cut off. Always holds: what may make other bits
(float32 in memory, float16 whose fraction reaches below those 16 bits, library functions, reinterpreted integers, NaN
written as a constant) is answered by no.

A maximum that propagates NaN takes four instructions a vector, one that passes over it takes one. The sum of
exponentials below a maximum is NaN wherever its row holds one: where all that is stored and depends on the maximum is
NaN with that sum, the sum finds it.
"""

from __future__ import annotations

import math

import torch

from fusewright.codegen.analysis import Shape, StageView, reductions_of, same_walk, scans_of, walk
from fusewright.loops.ir import Apply, Constant, Expression, Load, LocalValue
from fusewright.schedule.plan import Define, Reduce, ScanStep, Store

# Operations whose float results are NaN only as a NaN operand handed on or as the processor's default, and which are
# inline code.
_HANDED_ON = frozenset(
    """add sub mul div fma neg abs minimum maximum fmin fmax where sqrt rsqrt reciprocal floor ceil round trunc frac
    copysign exp exp2 expm1 sigmoid tanh erf log""".split()
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


# NaN wherever one of the operands is.
_SPREADS = frozenset(
    {"add", "sub", "mul", "div", "fma", "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "log"}
)


def passed_over(shape: Shape) -> frozenset[str]:
    """Names of maxima that may be those of the numbers alone."""
    found: set[str] = set()
    for number, view in enumerate(shape.views):
        for top in reductions_of(view.stage):
            if top.kind == "max" and top.value.dtype.is_floating_point:
                later = shape.views[number + 1 :]
                total = next((name for other in later if (name := _total_below(view, top, other))), None)
                if total is not None and _nan_with(shape, later, top.local, total):
                    found.add(top.local)
    return frozenset(found)


def _total_below(view: StageView, top: Reduce, other: StageView) -> str | None:
    """The name of a sum of `exp(v - top)` in a stage that walks the values whose maximum `top` is."""
    defined = {
        statement.local: statement.value for statement in other.stage.statements if isinstance(statement, Define)
    }
    for total in reductions_of(other.stage):
        value = total.value
        power = defined.get(value.name) if isinstance(value, LocalValue) else value
        if total.kind == "sum" and isinstance(power, Apply) and power.op == "exp" and isinstance(power.args[0], Apply):
            below = power.args[0]
            is_below = below.op == "sub" and isinstance(below.args[1], LocalValue) and below.args[1].name == top.local
            if (
                is_below
                and below.args[0] == top.value
                and same_walk(view, other)
                and total.value.dtype is top.value.dtype
            ):
                return total.local
    return None


def _nan_with(shape: Shape, views: list[StageView], top: str, total: str) -> bool:
    """Whether what leaves the kernel and depends on `top` is NaN wherever `total` is."""
    scratch = {buffer.name for buffer in shape.kernel.scratch}
    tainted: set[str] = {top}  # names and buffers
    nan = {total}

    def depends(expr: Expression) -> bool:
        return any(
            (isinstance(below, LocalValue) and below.name in tainted)
            or (isinstance(below, Load) and below.buffer in tainted)
            for below in walk([expr])
        )

    def is_nan(expr: Expression) -> bool:
        if isinstance(expr, LocalValue):
            return expr.name in nan
        if not isinstance(expr, Apply) or not expr.dtype.is_floating_point:
            return False
        if expr.op == "cast":
            return expr.args[0].dtype.is_floating_point and is_nan(expr.args[0])
        return expr.op in _SPREADS and any(map(is_nan, expr.args))

    for view in views:
        for statement in view.stage.statements:
            if isinstance(statement, Store) and any(depends(value) for _, value in statement.bindings):
                return False
            if isinstance(statement, Define) and is_nan(statement.value):
                nan.add(statement.local)
            elif not depends(statement.value):
                continue
            elif isinstance(statement, Define):
                tainted.add(statement.local)
            elif isinstance(statement, ScanStep) or (isinstance(statement, Reduce) and statement.local != total):
                return False
            elif isinstance(statement, Store) and not is_nan(statement.value):
                if statement.buffer not in scratch:
                    return False
                tainted.add(statement.buffer)
    return True
