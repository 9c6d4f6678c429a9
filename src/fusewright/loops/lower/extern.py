"""Calls of library operators: what has no loops, or is better served by a tuned library.

Takes resolved arguments; emits an `Extern` whose tensor arguments are strided windows on buffers, and gives the results
as values.
Always holds: the call means what eager means, and its results are buffers of their own (never an alias of an argument).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fusewright.base.location import Location
from fusewright.loops import externs
from fusewright.loops.ir import Buffer, BufferRef, Extern, Operation
from fusewright.loops.lower import registry
from fusewright.loops.lower.values import Value
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType


class Lowering(Protocol):
    """The walk over the graph (driver.py)."""

    locations: tuple[Location, ...]

    def new_buffer(self, type_: TensorType, role: Any = "temporary", exact: bool = False) -> Buffer: ...

    def emit(self, operation: Operation) -> None: ...

    def operation_name(self) -> str: ...

    def reference(self, value: Value) -> BufferRef: ...

    def buffer_value(self, type_: TensorType, buffer: Buffer) -> Value: ...


def call_extern(
    lowering: Lowering,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: Any,
    written: Sequence[Value] = (),
) -> Any:
    """Emits the call. `kind`: the type(s) of the result(s); an output that is no tensor is what its type says.
    `written`: arguments that the operator writes to though its schema may not say so."""
    target = without_alias(target)
    arguments = references(lowering, args)
    keywords = tuple((name, references(lowering, value)) for name, value in kwargs.items())
    kinds = kind if isinstance(kind, (tuple, list)) else (kind,)
    results: list[Any] = []
    outputs: list[str | None] = []
    for item in flatten_types(kinds):
        if isinstance(item, TensorType):
            buffer = lowering.new_buffer(item, exact=True)
            outputs.append(buffer.name)
            results.append(lowering.buffer_value(item, buffer))
        else:
            outputs.append(None)
            results.append(item)
    mutates = written_buffers(target, args, kwargs, lowering, written)
    lowering.emit(
        Extern(
            lowering.operation_name(), target, arguments, keywords, tuple(outputs),
            placement=(
                externs.placement(target, (arguments, keywords)) if len(outputs) == 1 and not mutates else "returned"
            ),
            mutates=mutates, ordered=bool(mutates) or is_ordered(target, args, kwargs, outputs),
            locations=lowering.locations,
        )
    )  # fmt: skip
    if not isinstance(kind, (tuple, list)):
        return results[0]
    return unflatten(kind, iter(results))


def flatten_types(kinds: Any) -> list[Any]:
    flat: list[Any] = []
    for kind in kinds:
        flat.extend(flatten_types(kind) if isinstance(kind, (tuple, list)) else (kind,))
    return flat


def unflatten(kinds: Any, results: Any) -> tuple[Any, ...]:
    return tuple(unflatten(kind, results) if isinstance(kind, (tuple, list)) else next(results) for kind in kinds)


def references(lowering: Lowering, arg: Any) -> Any:
    if isinstance(arg, Value):
        return lowering.reference(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(references(lowering, item) for item in arg)
    return arg


def without_alias(target: Any) -> Any:
    """The `_copy` variant of a view operator: a result that aliased a temporary would outlive its memory."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    returns = target._schema.returns
    aliases = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    if not aliases:
        return target
    namespace, _, name = target._schema.name.partition("::")
    copy = registry.operator(f"{namespace}::{name}_copy.{target._overloadname}")
    return target if copy is None else copy


def written_buffers(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lowering: Lowering, written: Sequence[Value]
) -> tuple[str, ...]:
    """Buffers that the operator writes in place, by its schema and by what its maker says."""
    values = list(written)
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        for position, argument in enumerate(target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            values.extend(item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Value))
    return tuple(dict.fromkeys(lowering.reference(value).buffer for value in values))


def is_ordered(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[str | None]) -> bool:
    """Random numbers and side effects keep their order."""
    if not isinstance(target, torch._ops.OpOverload) or not any(outputs) or target._schema.is_mutable:
        return True
    known = facts(target)
    if known.effect or not known.random:
        return known.effect
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # attention without dropout draws no numbers
            return bool(
                (args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)) != 0
            )
    return True
