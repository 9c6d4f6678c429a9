"""Which operators cannot be recorded as they come, and which graph break each of them is.

Takes an operator with its arguments. Always holds: nothing is recorded here, so a refusal leaves the graph as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.graph.nodes import leaves
from fusewright.operators.overlap import shares_in_part, shares_memory, view_chain
from fusewright.operators.rules.common import holds
from fusewright.operators.schema import argument, facts
from fusewright.record.special_operators import SCALAR_READ
from fusewright.record.traced_tensor import DATA_METHODS, TracedTensor, check_window
from fusewright.sizes.expressions import Dim, Relation, known_le
from fusewright.sizes.strides import shares_elements
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder
    from fusewright.sizes.shape_env import ShapeEnv

aten = torch.ops.aten

# Operators whose result would need the data. The rest of them carry a tag (data_dependent_output,
# dynamic_output_shape).
BREAKS: dict[OpOverload, tuple[str, str]] = {
    aten._local_scalar_dense.default: SCALAR_READ,
    aten.item.default: SCALAR_READ,
    aten.is_nonzero.default: ("data-dependent-scalar", "a Python bool is read from a tensor"),
    aten.set_.source_Tensor: ("inplace-metadata", "set_"),
    aten.set_.source_Storage_storage_offset: ("inplace-metadata", "set_"),
    aten.resize_as_.default: ("inplace-metadata", "resize_as_"),
}

# Operators whose gradient PyTorch computes by other formulas where a tensor subclass has a part: its layout is not
# eager's.
OTHER_GRADIENT: frozenset[OpOverload] = frozenset({aten.ormqr.default})


@functools.cache
def _sparse_flags(func: OpOverload) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.name in ("sparse", "sparse_grad"))


def _has_sparse_gradient(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the operator's gradient, if one is asked for, is a sparse tensor: no type of the graph's says so."""
    flags = _sparse_flags(func)
    if not any(argument(func, args, kwargs, index) is True for index in flags):
        return False
    return any(
        isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()
        for value in (*args, *kwargs.values())
    )


# Operators whose meta kernels take operands of any types, and what their other kernels ask of all of them.
_ONE_TYPE = frozenset({aten.mm.default, aten.addmm.default, aten.mv.default, aten.convolution.default})
_FLOATS = frozenset({aten.native_batch_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default})


def _refuses_types(func: OpOverload, args: tuple[object, ...]) -> bool:
    """Whether eager's kernel has no such combination of types, which a graph would find out too late: when statistics
    and caches have been written to."""
    if func is aten.embedding.default:
        return getattr(args[1], "dtype", None) not in (torch.int64, torch.int32)
    if func not in _ONE_TYPE and func not in _FLOATS:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    types = {tensor.dtype for tensor in tensors}
    if func in _FLOATS:
        return not all(type_.is_floating_point for type_ in types)
    numbers = all(type_.is_floating_point or type_.is_complex for type_ in types)
    return len(types) > 1 or torch.bool in types or not (numbers or tensors[0].device.type == "cpu")


_FROM_ANYWHERE = frozenset(
    "copy copy_ _to_copy set_ index _unsafe_index index_put index_put_ _unsafe_index_put _index_put_impl "
    "_index_put_impl_ _ctc_loss _pack_padded_sequence _pad_packed_sequence".split()
)
"""Operators that take tensors of several devices. Lists of tensors are taken one by one (`_foreach_add`)."""


@functools.cache
def _takes_one_device(func: OpOverload) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return func.namespace == "aten" and name not in _FROM_ANYWHERE and not name.startswith("_foreach_")


def _refuses_devices(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether eager's kernel would find its operands on several devices. A number of the CPU is no matter, but then its
    kernel decides."""
    first: torch.device | None = None
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and (item.device.type != "cpu" or item.ndim):
                if first is None:
                    first = item.device
                elif item.device != first:
                    return _takes_one_device(func)
    return False


# Operators that write a number as it is, and its position.
_WRITES_NUMBER: dict[OpOverload, int] = {
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.fill.Scalar, aten.fill_.Scalar), 1),
    **dict.fromkeys((aten.new_full.default, aten.masked_fill.Scalar, aten.masked_fill_.Scalar), 2),
    **dict.fromkeys((aten.scatter.value, aten.scatter_.value), 3),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar), 3),
}


def _refuses_number(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the dtype does not hold the number, which a kernel would say at each call, or never where nobody asks for
    the result. (An unsigned type takes the negative of what it holds.)"""
    place = _WRITES_NUMBER.get(func)
    number = None if place is None else argument(func, args, kwargs, place)
    dtype = kwargs.get("dtype") or getattr(args[0], "dtype", None) if number is not None else None
    if type(number) not in (int, float) or not isinstance(dtype, torch.dtype):
        return False
    wraps = type(number) is int and not dtype.is_signed
    return not holds(dtype, abs(number) if wraps else number)  # type: ignore[arg-type]


@functools.cache
def _refusal(func: OpOverload) -> tuple[str, str] | None:
    """The graph break that this operator may need: (code, detail)."""
    tags = func.tags
    found = BREAKS.get(func)
    if found is None and torch.Tag.data_dependent_output in tags:
        found = ("data-dependent-scalar", f"{func} gives a Python value")
    if found is None and torch.Tag.dynamic_output_shape in tags:
        found = ("data-dependent-shape", f"{func} gives a shape that depends on data")
    if found is None and torch.Tag.inplace_view in tags:
        found = ("inplace-metadata", str(func))
    return found


@functools.cache
def _shares_nothing(func: OpOverload) -> bool:
    """Whether no other operand may be what the operator writes to: an index says where it writes, or it joins them."""
    by_index = any(argument.name in ("index", "indices") for argument in func._schema.arguments)
    return by_index or func.overloadpacket is aten.cat


def _at_most(env: ShapeEnv | None, one: Dim, other: Dim) -> bool | None:
    return known_le(one, other) if env is None else env.guard(Relation("<=", one, other))


def check_memory(recorder: Recorder, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raises GraphBreak for a write whose order would show, and for a window that reaches outside of its tensor."""
    for index in facts(func).written:
        target = argument(func, args, kwargs, index)
        if type(target) is not TracedTensor:
            continue
        # What is written to a part of a tensor must be seen through all of it, and through the views between.
        types = [target.tensor_type]
        if recorder.level == "aten":
            types += [node.meta["type"] for node in view_chain(target.node)]
        examples = {} if recorder.env is None else recorder.env.examples
        if any(isinstance(type_, TensorType) and shares_elements(type_, examples) for type_ in types):
            raise GraphBreak("operator-failed", f"{func} writes to a tensor whose elements share memory")
        if recorder.level == "aten":
            operands = [value for value in leaves((args, kwargs)) if type(value) is TracedTensor]
            read = [value.node for value in operands if value is not target]
            if read and shares_in_part(target.node, read, functools.partial(_at_most, recorder.env)):
                raise GraphBreak("operator-failed", f"{func} writes to memory that another operand shares in part")
            cut_off = any(node.target is aten.detach.default for node in view_chain(target.node))
            if cut_off and target.input_storage and any(one.requires_grad for one in operands):
                raise GraphBreak("operator-failed", f"{func} gives a gradient to a tensor with an input's memory")
            if _shares_nothing(func) and (len(read) < len(operands) - 1 or shares_memory(target.node, read)):
                raise GraphBreak("operator-failed", f"{func} writes to memory that another operand shares")
    if func is aten.as_strided.default:
        check_window(*(argument(func, args, kwargs, index) for index in range(4)))  # type: ignore[arg-type]


def check(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    gradients: Literal["aten", "torch"] | None,
) -> tuple[str, str] | None:
    """Raises GraphBreak where the traced gradient would be another one; gives the graph break that the operator is
    unless a result of unknown shape will do. `gradients`: the level at which they are recorded; None: they are off."""
    if gradients is not None:
        if func in OTHER_GRADIENT and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
            raise GraphBreak("operator-failed", f"the gradient of {func} is another one where it is traced")
        if gradients == "aten" and _has_sparse_gradient(func, args, kwargs):
            raise GraphBreak("unsupported-tensor", f"the gradient of {func} is sparse")
    if _refuses_types(func, args):
        raise GraphBreak("operator-failed", f"{func} of operands of these types")
    if _refuses_devices(func, args, kwargs):
        raise GraphBreak("operator-failed", f"{func} of operands on several devices")
    if _refuses_number(func, args, kwargs):
        raise GraphBreak("operator-failed", f"{func} of a number that the dtype does not hold")
    if func is aten.index.Tensor:
        indices: tuple[object, ...] = args[1]  # type: ignore[assignment]
        if not any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return None
    if func is aten._ctc_loss.default:
        return None  # the lengths are Python numbers
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    return _refusal(func)


def called(
    recorder: Recorder, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Callable[..., object]:
    """`fn`, or what is called in its place: the refusal of TracedTensor that stands for it, or the overload that these
    arguments choose. (PyTorch writes the arguments' text into a message for each overload that does not fit.)"""
    if type(fn) is OpOverloadPacket:
        recorder.resolving = True
        try:
            return getattr(fn, torch._C._jit_resolve_packet(fn._qualified_op_name, *args, **kwargs))  # type: ignore
        except RuntimeError:
            return fn  # which says itself that none fits
        finally:
            recorder.resolving = False
    if not args or not isinstance(args[0], TracedTensor):
        return fn
    try:
        return DATA_METHODS.get(fn, fn)  # type: ignore[return-value]
    except TypeError:  # not hashable, so none of ours
        return fn
