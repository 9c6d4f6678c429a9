"""Waiting for a collective, as loops see it: a call that finishes what is in the collective's result already."""

from __future__ import annotations

from fusewright.base.records import replace
from fusewright.loops.ir import BufferRef, Extern
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.liveness import references
from fusewright.loops.lower.registry import lowers
from fusewright.loops.lower.values import Value


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
        kept = tuple(references(collective.args))
        operations[begun] = replace(collective, keeps=kept)
    lowering.emit(
        Extern(
            lowering.operation_name(), call.target, (ref,), (), (None,),
            placement="returned", mutates=(ref.buffer,), ordered=True, locations=lowering.locations,
            keeps=kept,
        )
    )  # fmt: skip
    return tensor
