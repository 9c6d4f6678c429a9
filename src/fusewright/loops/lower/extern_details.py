"""Operators that say something of a library call that was emitted before them.

Takes the call's result and gives it back. Always holds: no call changes but the one that made the result.
"""

from __future__ import annotations

import torch

from fusewright.base.records import replace
from fusewright.graph.skinny_gemm import SKINNY_GEMM
from fusewright.loops.ir import BufferRef, Extern, SkinnyGemm
from fusewright.loops.lower import extern, liveness
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.registry import lowers
from fusewright.loops.lower.values import Value, window

aten = torch.ops.aten


@lowers(SKINNY_GEMM._schema.name, view=True)
def skinny_gemm(call: Call, product: Value, x: Value, weight: Value, bias: Value | None, most: int) -> Value:
    """A skinny product (graph/skinny_gemm.py): its call has a second way."""
    operations, ref = call.lowering.program.operations, window(product)
    made = operations[-1] if operations else None
    if ref is None or not isinstance(made, Extern) or made.outputs != (ref.buffer,) or made.mutates:
        return product
    target = aten.mm.default if bias is None else aten.addmm.default
    args = extern.references(call.lowering, (x, weight) if bias is None else (bias, x, weight))
    # Behind what the operands may have taken to store.
    operations.remove(made)
    operations.append(replace(made, skinny=SkinnyGemm(most, target, args)))
    return product


@lowers("_c10d_functional::wait_tensor", view=True)
def wait_tensor(call: Call, tensor: Value) -> Value:
    """The result of the collective itself: PyTorch knows what to wait for by its memory, so it must be no copy."""
    lowering = call.lowering
    ref = lowering.reference(tensor)
    operations = lowering.program.operations
    begun = next((k for k, one in enumerate(operations) if isinstance(one, Extern) and ref.buffer in one.outputs), None)
    kept: tuple[BufferRef, ...] = ()
    if begun is not None:
        collective = operations[begun]
        assert isinstance(collective, Extern)
        kept = tuple(liveness.references(collective.args))
        operations[begun] = replace(collective, keeps=kept)
    lowering.emit(
        Extern(
            lowering.operation_name(), call.target, (ref,), (), (None,),
            placement="returned", mutates=(ref.buffer,), ordered=True, locations=lowering.locations,
            keeps=kept,
        )
    )  # fmt: skip
    return tensor
