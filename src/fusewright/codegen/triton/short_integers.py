"""Integers of 64 bits whose values fit 32: computed in 32, which a GPU does several times faster.

Takes expressions of a kernel that counts in 32 bits; gives values of 32 bits, or None where a value may not fit. Always
holds: a conversion from a float is one of 32 bits only where the float is held between two numbers, or the integer
between two that are not negative, where both kinds (the processor's saturate) give the same.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fusewright.codegen.triton import indices, operations
from fusewright.codegen.triton.operations import Style
from fusewright.codegen.triton.positions import grouped
from fusewright.codegen.triton.values import Emitter, Value
from fusewright.loops.ir import Apply, Constant, Expression, IndexValue
from fusewright.sizes import expressions as sizes

_TYPES = frozenset({torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool})
_END = 1 << 31
_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_CHOICES = {"minimum": min, "maximum": max}
Range = tuple[int, int]


def apply(emitter: Emitter, expr: Apply, style: Style) -> Value | None:
    """The value of an operation on such integers, or one that gives one; None for any other."""
    if fits(expr):
        found = emitter.short(expr)
        return emitter.bind(f"({found.text}).to(tl.int64)", found.dims, found.level) if found.dims else None
    if (expr.op not in operations.COMPARISONS and expr.op != "cast") or not all(map(fits, expr.args)):
        return None
    values = [emitter.short(arg) for arg in expr.args]
    dims = frozenset[str]().union(*(value.dims for value in values))
    if not dims:
        return None
    text = operations.apply(expr, [grouped(value.text) for value in values], style)
    return emitter.bind(text, dims, emitter.level_of(*values))


def fits(expr: Expression) -> bool:
    return expr.dtype is torch.int64 and _range(expr) is not None


def value(emitter: Emitter, expr: Expression) -> Value:
    """An integer that fits, in 32 bits; or what `_clamped` has looked through: a float, or the larger of it and a
    number."""
    match expr:
        case Constant(value=number):
            return Value(str(number), indices.NOTHING)
        case IndexValue(index=index):
            return emitter.index(emitter.flat(index))
        case Apply(op="cast", args=(argument,)):
            source = emitter.evaluate(argument)
            return emitter.bind(f"{source.text}.to(tl.int32)", source.dims, source.level)
        case Apply(args=(a, b)):
            left, right = emitter.short(a), emitter.short(b)
            dims, level = left.dims | right.dims, emitter.level_of(left, right)
            if expr.op in _INFIX:
                return emitter.bind(f"{grouped(left.text)} {_INFIX[expr.op]} {grouped(right.text)}", dims, level)
            return emitter.bind(f"tl.{expr.op}({left.text}, {right.text})", dims, level)
    raise AssertionError(expr)


@lru_cache(maxsize=1024)
def _range(expr: Expression) -> Range | None:
    """The least and the largest value, where 32 bits hold them and each step towards them."""
    found: Range | None = None
    match expr:
        case IndexValue(index=index):
            low, high = sizes.bounds(index)
            found = None if low is None or high is None else (low, high)
        case Constant(value=int(number)):
            found = number, number
        case Apply(op="cast", args=(argument,)) if argument.dtype in _TYPES:
            found = -_END, _END - 1
        case Apply(op="cast", args=(argument,)) if argument.dtype.is_floating_point:
            found = _held(argument)
        case Apply(op="minimum" | "maximum" | "add" | "sub" | "mul" as op, args=(a, b)):
            left, right = _range(a), _range(b)
            found = _clamped(expr) if left is None or right is None else _combined(op, left, right)
    return found if found is not None and -_END <= found[0] and found[1] < _END else None


def _held(expr: Expression) -> Range | None:
    """The whole numbers between which a float is held; NaN is, too."""
    match expr:
        case Apply(op="floor" | "ceil" | "round" | "trunc", args=(inner,)):
            return _held(inner)
        case Apply(op="fmin", args=(Apply(op="fmax", args=(_, Constant(value=least))), Constant(value=most))):
            return (math.floor(least), math.ceil(most)) if -_END < least <= most < _END else None
    return None


def _clamped(expr: Apply) -> Range | None:
    """The numbers between which a converted float is held."""
    match expr:
        case Apply(
            op="minimum",
            args=(
                Apply(op="maximum", args=(Apply(op="cast", args=(source,)), Constant(value=int(least)))),
                Constant(value=int(most)),
            ),
        ) if source.dtype.is_floating_point and 0 <= least <= most:
            return least, most
    return None


def _combined(op: str, a: Range, b: Range) -> Range:
    if op in _CHOICES:
        return _CHOICES[op](a[0], b[0]), _CHOICES[op](a[1], b[1])
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    products = [x * y for x in a for y in b]
    return min(products), max(products)
