"""Inputs that are replaced by a changed copy of themselves are changed where they are.

Takes and gives a `LoopProgram`. A write to part of an input (one row of a key-value cache) comes as a copy of the
input, stores into the copy, and at the end a copy back: three passes over memory of which a row was meant. Always
holds: nothing but that first copy reads what the input held; the indices of the stores are checked by an operation of
their own, so that a call that fails such a check has not begun to write (`fuse` keeps the two apart).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from fusewright.base.records import replace
from fusewright.loops import ir
from fusewright.loops.externs import is_check
from fusewright.loops.ir import Buffer, CheckedIndex, Expression, Load, LoopProgram, Operation, Pointwise, Store
from fusewright.schedule.dependencies import Touch, output_buffers, rename_reads, roots, shared_memory, touch
from fusewright.schedule.expressions import survey
from fusewright.sizes.expressions import Dim, free_symbols
from fusewright.sizes.tensor_type import contiguous_strides


def write_in_place(program: LoopProgram) -> LoopProgram:
    operations = program.operations
    updates = [
        (position, found)
        for position, found in enumerate(map(_copied, operations))
        if found and _is_input(program, found[1])
    ]
    if not updates:
        return program
    shared = shared_memory(operations)
    outside = {*output_buffers(program), *shared, *(name for names in shared.values() for name in names)}
    uses = _Uses([touch(operation, shared) for operation in operations])
    renamed: dict[str, str] = {}
    gone: set[int] = set()
    for end, (changed, target) in updates:
        start = _start(program, uses, changed, target, end)
        if start is not None and changed not in outside and target not in shared:
            renamed[changed] = target
            gone |= {start, end}
    if not renamed:
        return program
    made = replace(program, operations=[], buffers=dict(program.buffers), makers=dict(program.makers))
    for position, operation in enumerate(operations):
        if position in gone:
            continue
        if isinstance(operation, Pointwise) and any(store.buffer in renamed for store in operation.stores):
            operation = _checked_before(made, operation)
            stores = tuple(replace(store, buffer=renamed.get(store.buffer, store.buffer)) for store in operation.stores)
            operation = replace(operation, stores=stores)
        made.operations.append(operation)
    made.operations = [rename_reads(operation, renamed) for operation in made.operations]
    return made


class _Uses:
    """Which operations read and write each buffer, by position."""

    def __init__(self, touches: Iterable[Touch]) -> None:
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        for position, entry in enumerate(touches):
            for name in entry.reads:
                self.readers.setdefault(name, []).append(position)
            for name in entry.writes:
                self.writers.setdefault(name, []).append(position)


def _start(program: LoopProgram, uses: _Uses, changed: str, target: str, end: int) -> int | None:
    """The position of the copy that `changed` starts as, if it can be `target` itself. end: of the copy back."""
    operations = program.operations
    copy, original = program.buffers[changed], program.buffers[target]
    writers = uses.writers.get(changed, [])
    if (
        copy.role != "temporary"
        or _memory(copy) != _memory(original)
        or uses.writers[target] != [end]
        or len(writers) < 2
    ):
        return None
    start, first = writers[:2]
    if uses.readers.get(target) != [start] or _copied(operations[start]) != (target, changed) or writers[-1] > end:
        return None
    if not all(_may_write(operations[position]) for position in writers[1:]):
        return None
    if any(map(is_check, operations[first:])):
        return None  # a call that fails it is repeated eagerly: see `dependencies._edges`
    both = (operations[start], operations[end])
    return start if all(_is_whole(one, original) for one in both if isinstance(one, Pointwise)) else None


def _is_whole(copy: Pointwise, buffer: Buffer) -> bool:
    """Whether the copy's loops go through the buffer's elements by its own strides."""
    moving = [
        (size, step) for size, step in zip(buffer.shape, buffer.stride) if not (isinstance(size, int) and size == 1)
    ]
    index = sum((axis.symbol * step for axis, (_, step) in zip(copy.axes, moving)), cast(Dim, 0))
    return [axis.extent for axis in copy.axes] == [size for size, _ in moving] and copy.stores[0].index == index


def _memory(buffer: Buffer) -> tuple[object, ...]:
    return buffer.shape, buffer.stride, buffer.dtype, buffer.device


def _is_input(program: LoopProgram, name: str) -> bool:
    return program.buffers[name].role == "input"


def _copied(operation: Operation) -> tuple[str, str] | None:
    """(from, to) of an operation that copies elements to the same places of another buffer, and does nothing else."""
    if not isinstance(operation, Pointwise) or len(operation.stores) != 1:
        return None
    (store,) = operation.stores
    value = store.value
    if (
        not isinstance(value, Load)
        or value.bindings
        or store.bindings
        or store.mode != "write"
        or value.index != store.index
    ):
        return None
    return value.buffer, store.buffer


def _may_write(operation: Operation) -> bool:
    """Whether the indices of its stores are all that an operation checks."""
    if not isinstance(operation, Pointwise):
        return False
    return survey(roots(operation)).checks == len(
        {value for value in _indices(operation) if isinstance(value, CheckedIndex)}
    )


def _indices(operation: Pointwise) -> list[Expression]:
    return [value for store in operation.stores for _, value in store.bindings]


def _checked_before(program: LoopProgram, operation: Pointwise) -> Pointwise:
    """The operation with indices that an operation before it, which is added to the program, has checked."""
    known: dict[Expression, Expression] = {}
    like = program.buffers[operation.stores[0].buffer]
    for value in dict.fromkeys(_indices(operation)):
        if not isinstance(value, CheckedIndex):
            continue
        used = {symbol for d in survey([value]).dims for symbol in free_symbols(d)}
        axes = tuple(axis for axis in operation.axes if axis.symbol in used)
        shape = tuple(axis.extent for axis in axes)
        stride = contiguous_strides(shape)
        name = f"{like.name}_at{len(program.buffers)}"
        program.buffers[name] = Buffer(name, shape, stride, value.dtype, like.device, "temporary")
        if like.name in program.makers:
            program.makers[name] = program.makers[like.name]
        place: Dim = sum((axis.symbol * step for axis, step in zip(axes, stride, strict=True)), 0)
        program.operations.append(Pointwise(operation.name, axes, (Store(name, place, value),), operation.locations))
        known[value] = ir.load(name, place, value.dtype)
    stores = [
        replace(store, bindings=tuple((symbol, known.get(value, value)) for symbol, value in store.bindings))
        for store in operation.stores
    ]
    return replace(operation, stores=tuple(stores))
