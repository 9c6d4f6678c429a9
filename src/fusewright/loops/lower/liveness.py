"""Removes operations whose results nobody reads.

Takes a finished `LoopProgram`, changes it in place. Always holds: what writes an input, or has an effect beyond its
results, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusewright.base.records import replace
from fusewright.loops.ir import BufferRef, Extern, LoopProgram, Operation, Pointwise, Reduction, Scan
from fusewright.loops.lower.expressions import loaded_buffers


def reads(operation: Operation) -> set[str]:
    """The buffers that the operation reads."""
    match operation:
        case Pointwise():
            found: set[str] = set()
            for store in operation.stores:
                found |= loaded_buffers(store.value)
                for _, value in store.bindings:
                    found |= loaded_buffers(value)
            return found
        case Extern():
            few = () if operation.skinny is None else operation.skinny.args
            return {ref.buffer for ref in references((operation.args, operation.kwargs, few, operation.keeps))}
        case _:
            return loaded_buffers(operation.value) | loaded_buffers(operation.finish)


def writes(operation: Operation) -> set[str]:
    """The buffers that the operation writes."""
    match operation:
        case Pointwise():
            return {store.buffer for store in operation.stores}
        case Reduction():
            return {operation.buffer}
        case Scan():
            return {operation.buffer} | ({operation.position_buffer} if operation.position_buffer else set())
    return {name for name in operation.outputs if name is not None} | set(operation.mutates)


def references(tree: Any) -> Iterator[BufferRef]:
    if isinstance(tree, BufferRef):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from references(item)


def drop_dead_operations(program: LoopProgram) -> None:
    live = {name for name, buffer in program.buffers.items() if buffer.role in ("input", "constant")}
    live |= {output.buffer for output in program.outputs if output.buffer}
    kept: list[Operation] = []
    for operation in reversed(program.operations):
        effect = isinstance(operation, Extern) and (operation.ordered or bool(operation.mutates))
        if effect or writes(operation) & live:
            if isinstance(operation, Extern) and operation.placement == "returned":
                # A result that nobody reads may be missing (the workspace of an LSTM layer in inference).
                operation = replace(
                    operation, outputs=tuple(name if name in live else None for name in operation.outputs)
                )
            kept.append(operation)
            live |= reads(operation)
    program.operations = kept[::-1]
    used = set(program.inputs) | {output.buffer for output in program.outputs}
    used |= {name for name, buffer in program.buffers.items() if buffer.role in ("input", "constant")}
    for operation in program.operations:
        used |= reads(operation) | writes(operation)
    program.buffers = {name: buffer for name, buffer in program.buffers.items() if name in used}
