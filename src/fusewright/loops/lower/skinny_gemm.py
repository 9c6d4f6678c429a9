"""Matrix products with a second way for few rows (graph/skinny_gemm.py): the extern that makes the product is told of
it.

Takes and gives the product. Always holds: the product's operator is the one that was emitted last, or nothing happens.
"""

from __future__ import annotations

import torch

from fusewright.base.records import replace
from fusewright.graph.skinny_gemm import SKINNY_GEMM
from fusewright.loops.ir import Extern, SkinnyGemm
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.extern import references
from fusewright.loops.lower.registry import lowers
from fusewright.loops.lower.values import Value, window

aten = torch.ops.aten


@lowers(SKINNY_GEMM._schema.name, view=True)
def skinny_gemm(call: Call, product: Value, x: Value, weight: Value, bias: Value | None, most: int) -> Value:
    operations, ref = call.lowering.program.operations, window(product)
    made = operations[-1] if operations else None
    if ref is None or not isinstance(made, Extern) or made.outputs != (ref.buffer,) or made.mutates:
        return product
    target = aten.mm.default if bias is None else aten.addmm.default
    args = references(call.lowering, (x, weight) if bias is None else (bias, x, weight))
    # Behind what the operands may have taken to store.
    operations.remove(made)
    operations.append(replace(made, skinny=SkinnyGemm(most, target, args)))
    return product
