"""Values that were only widened are stored as they were before.

Takes and gives a `LoopProgram`. Half-precision models compute norms and losses in float32, so temporaries hold halves
that were cast: twice the bytes, and no bit more. Always holds: what is read is the value that was stored, since the
cast stands behind the load instead; buffers that a library operator or the caller sees stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusewright.base.records import replace
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Buffer, Expression, Extern, Load, LoopProgram, Pointwise
from fusewright.schedule.dependencies import Bindings, output_buffers, shared_memory, touch, with_loads
from fusewright.sizes.expressions import Dim

NARROW = frozenset({torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32})


def store_narrow(program: LoopProgram, takes: Callable[[Buffer], bool]) -> LoopProgram:
    """The program with temporaries for which `takes` says so stored before they are widened."""
    operations = program.operations
    shared = shared_memory(operations)
    kept = {*output_buffers(program), *shared, *(name for names in shared.values() for name in names)}
    written: set[str] = set()
    for operation in operations:
        touched = touch(operation, shared)
        kept |= written & touched.writes
        written |= touched.writes
        if isinstance(operation, Extern):
            kept |= touched.reads | touched.writes

    narrow: dict[str, Expression] = {}
    for store in (one for operation in operations if isinstance(operation, Pointwise) for one in operation.stores):
        buffer, value = program.buffers[store.buffer], store.value
        if buffer.role != "temporary" or store.buffer in kept or store.mode != "write" or not takes(buffer):
            continue
        if isinstance(value, Apply) and value.op == "cast":
            (cast,) = value.args
            if cast.dtype in NARROW and cast.dtype.itemsize < value.dtype.itemsize:
                narrow[store.buffer] = cast
    if not narrow:
        return program
    buffers = {
        name: replace(buffer, dtype=narrow[name].dtype) if name in narrow else buffer
        for name, buffer in program.buffers.items()
    }
    return replace(program, operations=[_reading(one, narrow) for one in operations], buffers=buffers)


def _reading(operation: ir.Operation, narrow: Mapping[str, Expression]) -> ir.Operation:
    """The operation with these buffers narrow, where it stores and where it loads."""
    if isinstance(operation, Pointwise) and any(store.buffer in narrow for store in operation.stores):
        stores = (replace(one, value=narrow.get(one.buffer, one.value)) for one in operation.stores)
        operation = replace(operation, stores=tuple(stores))

    def load(node: Load, index: Dim, bindings: Bindings) -> Expression:
        return ir.cast(ir.load(node.buffer, index, narrow[node.buffer].dtype, bindings), node.dtype)

    return operation if isinstance(operation, Extern) else with_loads(operation, narrow.keys(), load)
