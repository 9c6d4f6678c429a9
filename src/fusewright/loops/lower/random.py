"""Random truths as arithmetic on an element's position: the generator of `operators/philox.py`, in int64 expressions.

Takes the seed and the draw; gives a lazy value. Always holds: bit for bit the operator's own result on tensors; words
are kept in int64 without their upper halves, so that a product of two is a 32-bit multiplication to the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Expression
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.registry import lowers
from fusewright.loops.lower.values import Value, flat_index
from fusewright.operators.philox import MULTIPLIER, ROUNDS, WEYL, WORD, threshold
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import contiguous_strides


def _integer(op: str, left: Expression, right: Expression | int) -> Expression:
    return ir.apply(op, left, ir.constant(right, torch.int64) if isinstance(right, int) else right, dtype=torch.int64)


@lowers("fusewright::bernoulli")
def bernoulli(call: Call, seed: Value, draw: int, p: float, size: Sequence[Dim]) -> Value:
    word = seed.expression
    position = ir.index_value(flat_index(call.axes, contiguous_strides(tuple(size))))
    # On a GPU the draw is part of the kernel's text.
    number = ir.index_value(call.argument(draw)) if seed.type.device.type == "cpu" else ir.constant(draw, torch.int64)
    high = _integer("add", _integer("shift_right", word, 32), _integer("mul", number, WEYL))
    key = _integer("bitwise_and", word, WORD)
    left = _integer("bitwise_and", position, WORD)
    right = _integer("bitwise_and", _integer("bitwise_xor", _integer("shift_right", position, 32), high), WORD)
    for _ in range(ROUNDS):
        product = _integer("mul", left, MULTIPLIER)
        upper = _integer("bitwise_and", _integer("shift_right", product, 32), WORD)
        left = _integer("bitwise_xor", _integer("bitwise_xor", upper, key), right)
        right = _integer("bitwise_and", product, WORD)
        key = _integer("bitwise_and", _integer("add", key, WEYL), WORD)
    return call.result(ir.apply("lt", left, ir.constant(threshold(p), torch.int64), dtype=torch.bool))
