"""The operators that stand for Python's arithmetic on floats, as tables."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

aten = torch.ops.aten
UNARY: dict[str, tuple[torch._ops.OpOverload, Callable[..., float]]] = {
    "neg": (aten.neg.default, operator.neg),
    "abs": (aten.abs.default, operator.abs),
    "sqrt": (aten.sqrt.default, math.sqrt),
    "exp": (aten.exp.default, math.exp),
    "log": (aten.log.default, math.log),
    "cos": (aten.cos.default, math.cos),
    "sin": (aten.sin.default, math.sin),
    "tanh": (aten.tanh.default, math.tanh),
}
BINARY: dict[str, tuple[torch._ops.OpOverload, Callable[..., float]]] = {
    "add": (aten.add.Tensor, operator.add),
    "sub": (aten.sub.Tensor, operator.sub),
    "mul": (aten.mul.Tensor, operator.mul),
    "div": (aten.div.Tensor, operator.truediv),
    "pow": (aten.pow.Tensor_Tensor, operator.pow),
}
# Forms with one constant: on the right, and on the left (with the operands swapped, or in order).
CONSTANT_RIGHT = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "pow": aten.pow.Tensor_Scalar,
}
CONSTANT_LEFT = {
    "add": (True, aten.add.Tensor),
    "mul": (True, aten.mul.Tensor),
    "sub": (True, aten.rsub.Scalar),
    "pow": (False, aten.pow.Scalar),
}
RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPARED: dict[str, torch._ops.OpOverload] = {
    "==": aten.eq.Tensor,
    "!=": aten.ne.Tensor,
    "<": aten.lt.Tensor,
    "<=": aten.le.Tensor,
    ">": aten.gt.Tensor,
    ">=": aten.ge.Tensor,
}
RAISES = frozenset({"div", "pow", "sqrt", "exp", "log"})
"""Arithmetic that raises in Python for some numbers, where a tensor holds an infinity or no number."""
SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
MATH_FUNCTIONS: dict[object, str] = {getattr(math, name): name for name in ("sqrt", "exp", "log", "cos", "sin", "tanh")}
PYTHON_FORMS: dict[object, Callable[..., float]] = {
    **dict((*UNARY.values(), *BINARY.values())),
    aten.rsub.Scalar: lambda right, left: left - right,
    aten.pow.Tensor_Scalar: operator.pow,
    aten.pow.Scalar: operator.pow,
}
"""What Python computes where the graph has one of these operators."""
