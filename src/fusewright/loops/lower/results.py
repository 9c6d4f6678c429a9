"""What a graph returns: which memory it lies in, and with which strides it is shown.

Takes the output node and the values that its arguments became; gives windows on buffers. Always holds: results share
memory where eager's do, and their strides are the recorded ones, also along dimensions of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from fusewright.base.errors import CannotFunctionalise
from fusewright.base.records import replace
from fusewright.graph.builder import env_of
from fusewright.loops.ir import BufferRef, Extern, LoopProgram, Output
from fusewright.loops.lower.questions import memory_of
from fusewright.loops.lower.values import Value, is_empty, strided_load, window
from fusewright.sizes.tensor_type import TensorType, same_strides, with_sizes


def empty_view(
    environment: Mapping[Node, Any], node: Any, value: Any, reference: Callable[[Value], BufferRef]
) -> Value | None:
    """A returned view without elements as a window on the memory that it is a view of, which a program may reach from
    it (`as_strided`): no access says whose memory it is."""
    if not isinstance(value, Value) or not is_empty(value.shape) or not isinstance(node, Node):
        return None
    root = environment.get(memory_of(node))
    if not isinstance(root, Value) or root is value or root.dtype != value.dtype:
        return None
    own = reference(root)
    start = own.offset + (value.type.offset - root.type.offset)
    load = strided_load(own.buffer, value.shape, value.type.stride, start, own.dtype)
    return Value(value.type, load, value.locations)


def check_aliases(
    environment: Mapping[Node, Any],
    nodes: Sequence[Any],
    values: Sequence[Any],
    reference: Callable[[Value], BufferRef],
) -> None:
    """What shares memory in eager must be windows on one buffer: a view of an input, views of one result."""
    shared: dict[Node, set[str]] = {}
    for node, value in zip(nodes, values, strict=True):
        if not isinstance(node, Node) or not isinstance(value, Value) or is_empty(value.shape):
            continue
        root = memory_of(node)
        # the functionalise pass refuses other dtypes
        if getattr(root.meta.get("type"), "dtype", None) == value.dtype:
            shared.setdefault(root, set()).add(reference(value).buffer)
    for root, buffers in shared.items():
        own = _input_window(environment, root)
        if len(buffers) > 1 or (own is not None and own.buffer not in buffers):
            raise CannotFunctionalise(f"{root.name} is returned as a view that is no window on its memory")


def _input_window(environment: Mapping[Node, Any], root: Node) -> BufferRef | None:
    stored = environment[root] if root.op in ("placeholder", "get_attr") else None
    return window(stored) if isinstance(stored, Value) else None


def recorded_types(node: Node, count: int) -> Sequence[object]:
    """What the recorder said of each of the graph's results, in the sizes that the graph still has; None where it said
    nothing."""
    env, kinds = env_of(node.graph), node.meta.get("type")
    if not isinstance(kinds, tuple) or len(kinds) != count:
        return [None] * count
    return kinds if env is None else with_sizes(kinds, env.simplify)  # type: ignore[return-value]


def with_owners(
    program: LoopProgram, outputs: Sequence[Output], nodes: Sequence[Any], own: Sequence[bool]
) -> tuple[Output, ...]:
    """The results. `own`: which of their nodes are views of nothing: one that the plan makes in another shape is what
    the other views of its memory are views of."""
    owners: dict[str, set[Any]] = {}
    for output, node, is_own in zip(outputs, nodes, own):
        if is_own and output.ref is not None and program.buffers[output.buffer].role == "output":
            owners.setdefault(output.buffer, set()).add(node)

    def owned(output: Output, node: Any) -> Output:
        if len(owners.get(output.buffer, ())) != 1:
            return output
        buffer = program.buffers[output.buffer]
        whole = BufferRef(buffer.name, buffer.shape, buffer.stride, 0, buffer.dtype)
        return Output("view", buffer.name, output.ref or whole, own=node in owners[buffer.name])

    return tuple(map(owned, outputs, nodes))


def as_recorded(program: LoopProgram, recorded: object, ref: BufferRef) -> BufferRef:
    """`ref` with the recorded strides, where those of single elements differ: no pass need keep them, and kernels do
    not read them. Where others differ (the steps of a copy with gaps were not shown to keep its elements apart), it is
    refused. Memory that the plan makes is made with them, so that its own tensor can be given."""
    if not isinstance(recorded, TensorType) or recorded.stride == ref.stride or recorded.shape != ref.shape:
        return ref
    if not same_strides(recorded, replace(recorded, stride=ref.stride)):
        raise CannotFunctionalise(f"a result with strides {recorded.stride} is made with {ref.stride}")
    buffer = program.buffers[ref.buffer]
    by_library = any(
        isinstance(one, Extern) and one.placement == "returned" and ref.buffer in one.outputs
        for one in program.operations
    )
    if buffer.role == "temporary" and (buffer.shape, buffer.stride) == (ref.shape, ref.stride) and not by_library:
        program.buffers[ref.buffer] = replace(buffer, stride=recorded.stride)
    return replace(ref, stride=recorded.stride)
