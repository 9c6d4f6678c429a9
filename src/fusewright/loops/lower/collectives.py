"""Waiting for a collective, as loops see it: a call that finishes what is in the collective's result already."""

from __future__ import annotations

from fusewright.loops.ir import Extern
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.liveness import references
from fusewright.loops.lower.registry import lowers
from fusewright.loops.lower.values import Value


@lowers("_c10d_functional::wait_tensor", view=True)
def wait_tensor(call: Call, tensor: Value) -> Value:
    """The result of the collective itself: PyTorch knows what to wait for by its memory, so it must be no copy."""
    lowering = call.lowering
    ref = lowering.reference(tensor)
    begun = (one for one in reversed(lowering.program.operations) if isinstance(one, Extern))
    collective = next((one for one in begun if ref.buffer in one.outputs), None)
    lowering.emit(
        Extern(
            lowering.operation_name(), call.target, (ref,), (), (None,),
            placement="returned", mutates=(ref.buffer,), ordered=True, locations=lowering.locations,
            keeps=() if collective is None else tuple(references(collective.args)),
        )
    )  # fmt: skip
    return tensor
