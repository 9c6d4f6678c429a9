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
from fusewright.loops.ir import Apply, Buffer, Expression, Extern, Load, LoopProgram, Pointwise, Store
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

    def widened(store: Store) -> bool:
        value, buffer = store.value, program.buffers[store.buffer]
        cast = isinstance(value, Apply) and value.op == "cast" and value.args[0].dtype in NARROW
        return (
            cast
            and buffer.role == "temporary"
            and store.buffer not in kept
            and store.mode == "write"
            and value.args[0].dtype.itemsize < value.dtype.itemsize
            and takes(buffer)
        )

    found = [operation.stores for operation in operations if isinstance(operation, Pointwise)]
    narrow = {store.buffer: store.value.args[0] for stores in found for store in stores if widened(store)}  # type: ignore[attr-defined]
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
