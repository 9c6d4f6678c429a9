"""Who reads and writes what, and in which order operations must stay.

Takes a `LoopProgram`; gives `Dependencies` over the operations that are alive, duplicates merged. Always holds: the
program's order is a valid order, and an edge always leads from an earlier operation to a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from fusewright.base.records import dataclass, replace
from fusewright.loops import ir
from fusewright.loops.externs import is_check, may_raise
from fusewright.loops.ir import (
    BufferRef,
    Expression,
    Extern,
    LoopProgram,
    Operation,
    Output,
    Pointwise,
    Reduction,
    Scan,
)
from fusewright.schedule.expressions import Rewriter, Survey, survey
from fusewright.schedule.plan import Kernel, RunExtern, Step
from fusewright.sizes.expressions import Dim, Expr


@dataclass(slots=True)
class Touch:
    """What one operation reads and writes. `survey` is None for an extern."""

    reads: frozenset[str]
    writes: frozenset[str]
    survey: Survey | None


@dataclass(slots=True)
class Dependencies:
    """predecessors[k]: positions of the operations that must run before operation k (direct ones). kept: buffers that
    outlive the program (outputs, inputs that are written). shared: see `shared_memory`. readers: positions that read
    each buffer; writers: positions that write it."""

    operations: list[Operation]
    touches: list[Touch]
    predecessors: list[frozenset[int]]
    kept: frozenset[str]
    readers: dict[str, list[int]]
    writers: dict[str, list[int]]
    shared: dict[str, frozenset[str]]


Loops = Pointwise | Reduction | Scan
Bindings = tuple[tuple[Expr, Expression], ...]


def roots(operation: Loops) -> Iterator[Expression]:
    """The expressions of a loop operation."""
    if isinstance(operation, Pointwise):
        for store in operation.stores:
            yield store.value
            for _, value in store.bindings:
                yield value
    else:
        yield operation.value
        yield operation.finish


def buffer_refs(argument: Any) -> Iterator[BufferRef]:
    """The tensors among nested extern arguments."""
    if isinstance(argument, BufferRef):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from buffer_refs(item)


def extern_reads(extern: Extern) -> list[str]:
    skinny = () if extern.skinny is None else extern.skinny.args
    given = (extern.args, tuple(value for _, value in extern.kwargs), skinny, extern.keeps)
    return [ref.buffer for ref in buffer_refs(given)]


def used_buffers(
    inputs: Iterable[str], outputs: Iterable[Output], kernels: Mapping[str, Kernel], steps: Iterable[Step]
) -> set[str]:
    """The buffers that a plan of these speaks of."""
    used = set(inputs)
    for output in outputs:
        used.add(output.buffer if output.ref is None else output.ref.buffer)
    for kernel in kernels.values():
        used.update(kernel.buffers)
    for step in steps:
        if isinstance(step, RunExtern):
            used.update(extern_reads(step.extern))
            used.update(name for name in (*step.extern.outputs, *step.extern.mutates) if name is not None)
    return used


@lru_cache(maxsize=1 << 10)
def _returns_alias(target: torch._ops.OpOverload) -> bool:
    """Whether some result of the operator shares memory with an argument (an in-place operator returns its
    argument)."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def shared_memory(operations: Iterable[Operation]) -> dict[str, frozenset[str]]:
    """The buffers whose memory a returned result of an extern may be: who reads the result reads those too, and keeps
    them alive."""
    shared: dict[str, frozenset[str]] = {}
    for operation in operations:
        if isinstance(operation, Extern) and operation.placement == "returned" and _returns_alias(operation.target):
            bases = {*extern_reads(operation), *operation.mutates}
            for name in tuple(bases):
                bases |= shared.get(name, frozenset())
            for output in operation.outputs:
                if output is not None:
                    shared[output] = frozenset(bases) - {output}
    return shared


def touch(operation: Operation, shared: Mapping[str, frozenset[str]]) -> Touch:
    """Names in `shared` count with the buffers whose memory they are."""
    entry = _touch(operation)
    if shared:
        for name in entry.reads & shared.keys():
            entry.reads |= shared[name]
        for name in entry.writes & shared.keys():
            entry.writes |= shared[name]
    return entry


def _touch(operation: Operation) -> Touch:
    if isinstance(operation, Extern):
        writes = [name for name in operation.outputs if name is not None]
        return Touch(frozenset(extern_reads(operation)), frozenset([*writes, *operation.mutates]), None)
    found = survey(roots(operation))
    if isinstance(operation, Pointwise):
        written = [store.buffer for store in operation.stores]
        for store in operation.stores:
            found.dims[store.index] = None
        accumulated = [store.buffer for store in operation.stores if store.mode != "write"]
    else:
        written = [operation.buffer]
        found.dims[operation.index] = None
        accumulated = []
        if isinstance(operation, Scan) and operation.position_buffer is not None:
            written.append(operation.position_buffer)
    return Touch(frozenset([load.buffer for load in found.loads] + accumulated), frozenset(written), found)


def output_buffers(program: LoopProgram) -> set[str]:
    names = set()
    for output in program.outputs:
        if output.kind == "buffer":
            names.add(output.buffer)
        elif output.kind == "view" and output.ref is not None:
            names.add(output.ref.buffer)
    return names


def analyse(program: LoopProgram) -> Dependencies:
    """Dead operations dropped, duplicates merged, edges drawn."""
    operations = list(program.operations)
    shared = shared_memory(operations)
    touches = [touch(operation, shared) for operation in operations]
    kept = output_buffers(program)
    for name in tuple(kept):
        kept |= shared.get(name, frozenset())
    for entry in touches:
        kept.update(name for name in entry.writes if program.buffers[name].role in ("input", "constant", "output"))
    operations, touches = _merge_duplicates(program, operations, touches, kept, shared)
    operations, touches = _drop_dead(operations, touches, kept)
    outside = frozenset(name for name, buffer in program.buffers.items() if buffer.role in ("input", "constant"))
    return _edges(operations, touches, frozenset(kept), shared, outside)


def _drop_dead(
    operations: list[Operation], touches: list[Touch], kept: set[str]
) -> tuple[list[Operation], list[Touch]]:
    needed = set(kept)
    alive: list[int] = []
    for position in range(len(operations) - 1, -1, -1):
        operation, entry = operations[position], touches[position]
        effect = isinstance(operation, Extern) and (operation.ordered or bool(operation.mutates) or not entry.writes)
        if effect or not entry.writes.isdisjoint(needed):
            needed |= entry.reads
            alive.append(position)
    alive.reverse()
    return [operations[k] for k in alive], [touches[k] for k in alive]


def _merge_duplicates(
    program: LoopProgram,
    operations: list[Operation],
    touches: list[Touch],
    kept: set[str],
    shared: Mapping[str, frozenset[str]],
) -> tuple[list[Operation], list[Touch]]:
    """An operation that computes what an earlier one already stored into another temporary disappears; its readers read
    that one.

    Only operations whose reads and writes have a single writer in the whole program take part, so no write can lie
    between the two.
    """
    writers: dict[str, int] = {}
    for entry in touches:
        for name in entry.writes:
            writers[name] = writers.get(name, 0) + 1
    renamed: dict[str, str] = {}
    seen: dict[Any, str] = {}
    out_operations: list[Operation] = []
    out_touches: list[Touch] = []
    for operation, entry in zip(operations, touches):
        if renamed and not entry.reads.isdisjoint(renamed):
            operation = rename_reads(operation, renamed)
            entry = touch(operation, shared)
        result = _only_result(operation)
        if (
            result is not None
            and writers[result] == 1
            and all(_written_once(program, writers, read) for read in entry.reads)
        ):
            name = result
            buffer = program.buffers[name]
            key = (_key(operation), buffer.dtype, buffer.shape, buffer.stride, buffer.device)
            earlier = seen.get(key)
            if earlier is not None and name not in kept and buffer.role == "temporary":
                renamed[name] = earlier
                continue
            if earlier is None and buffer.role in ("temporary", "output"):
                seen[key] = name
        out_operations.append(operation)
        out_touches.append(entry)
    return out_operations, out_touches


def _written_once(program: LoopProgram, writers: dict[str, int], name: str) -> bool:
    return writers.get(name, 0) <= (1 if program.buffers[name].role in ("temporary", "output") else 0)


def _only_result(operation: Operation) -> str | None:
    """The only buffer written by a plain loop operation."""
    if isinstance(operation, Pointwise):
        store = operation.stores[0]
        return store.buffer if len(operation.stores) == 1 and store.mode == "write" and not store.bindings else None
    if isinstance(operation, Reduction):
        return operation.buffer
    return None


def _key(operation: Operation) -> tuple[Any, ...]:
    if isinstance(operation, Pointwise):
        return ("pointwise", operation.axes, operation.stores[0].index, operation.stores[0].value)
    assert isinstance(operation, Reduction)
    return (operation.kind, operation.axes, operation.reduced, operation.index, operation.value, operation.finish)


def rename_reads(operation: Operation, renamed: dict[str, str]) -> Operation:
    """`operation` reading other buffers (of the same layout) instead."""
    if isinstance(operation, Extern):

        def renamed_ref(argument: Any) -> Any:
            if isinstance(argument, BufferRef):
                return replace(argument, buffer=renamed.get(argument.buffer, argument.buffer))
            if isinstance(argument, (tuple, list)):
                return type(argument)(renamed_ref(item) for item in argument)
            return argument

        skinny = operation.skinny
        skinny = None if skinny is None else replace(skinny, args=renamed_ref(skinny.args))
        kwargs = tuple((k, renamed_ref(v)) for k, v in operation.kwargs)
        keeps = renamed_ref(operation.keeps)
        return replace(operation, args=renamed_ref(operation.args), kwargs=kwargs, skinny=skinny, keeps=keeps)

    return with_loads(
        operation, renamed, lambda node, index, bindings: ir.load(renamed[node.buffer], index, node.dtype, bindings)
    )


def with_loads(
    operation: Loops, buffers: Container[str], load: Callable[[ir.Load, Dim, Bindings], Expression]
) -> Loops:
    """The operation with what `load` gives, for a load and its rewritten index, in the place of loads of `buffers`."""

    def rewritten(node: ir.Load) -> Expression | None:
        if node.buffer not in buffers:
            return None
        bindings, index = rewriter.bindings(node.bindings, node.index)
        return load(node, index, bindings)

    rewriter = Rewriter(dim=lambda d: d, load=rewritten, local=lambda node: node, bind=lambda old, value: old)
    if isinstance(operation, Pointwise):
        stores = tuple(
            replace(
                store,
                value=rewriter.visit(store.value),
                bindings=tuple((s, rewriter.visit(v)) for s, v in store.bindings),
            )
            for store in operation.stores
        )
        return replace(operation, stores=stores)
    return replace(operation, value=rewriter.visit(operation.value), finish=rewriter.visit(operation.finish))


def _edges(
    operations: list[Operation],
    touches: list[Touch],
    kept: frozenset[str],
    shared: dict[str, frozenset[str]],
    outside: frozenset[str],
) -> Dependencies:
    """`outside`: buffers that exist before the call. They are written to after every check before them has passed, one
    inside a loop too, and every operator that may fail: such a call is repeated eagerly, and must not have changed
    anything."""
    checks: list[int] = []
    last_writer: dict[str, int] = {}
    readers_since: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    writers: dict[str, list[int]] = {}
    last_ordered = -1
    predecessors: list[frozenset[int]] = []
    for position, (operation, entry) in enumerate(zip(operations, touches)):
        before: set[int] = set()
        for name in entry.reads:
            if name in last_writer:
                before.add(last_writer[name])
            readers.setdefault(name, []).append(position)
        for name in entry.writes:
            if name in last_writer:
                before.add(last_writer[name])
            before.update(readers_since.get(name, ()))
            writers.setdefault(name, []).append(position)
        if not outside.isdisjoint(entry.writes):
            before.update(checks)
        fails = may_raise(operation.target) if isinstance(operation, Extern) else entry.survey and entry.survey.checks
        if fails or is_check(operation):
            checks.append(position)
        if isinstance(operation, Extern) and operation.ordered:
            if last_ordered >= 0:
                before.add(last_ordered)
            last_ordered = position
        for name in entry.reads:
            readers_since.setdefault(name, []).append(position)
        for name in entry.writes:
            last_writer[name] = position
            readers_since[name] = []
        before.discard(position)
        predecessors.append(frozenset(before))
    return Dependencies(operations, touches, predecessors, kept, readers, writers, shared)
