"""Operators whose result has a size that depends on data: nonzero, boolean masks, unique, repeat_interleave, item() of
an integer.

Takes such an operator while a graph is recorded, where the options allow it; gives results whose unknown sizes are
*unbacked* symbols of the capture's ShapeEnv: they have no example value, so nothing can be asked about them that would
choose between two programs.
Always holds: at ATen level the node that a symbol's value is read from carries meta[GIVES]: (symbol, dimension, which
of its results), or (symbol, None, None) on a node that reads the number which a one-element tensor holds; such a node
is never removed or merged. At torch level the size is read from the call's result (record/torch_level.py). What is
taken for granted of a symbol is in `env.assertions()`, and checked at run time: at ATen level before anything depends
on it (backends/parts.py), at torch level by a node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.operators import known_sizes
from fusewright.operators.data_dependent import GIVES, MASKS
from fusewright.operators.host_draws import HOST_DRAW, limits
from fusewright.operators.meta_kernels import fake_kernel, infer
from fusewright.operators.rules.common import fresh
from fusewright.operators.schema import argument
from fusewright.operators.shape_rules import result_device
from fusewright.record.traced_tensor import TracedTensor, version_of
from fusewright.record.unknown_shape import UnknownShape
from fusewright.sizes.expressions import Dim, Relation, bounds, product
from fusewright.sizes.symint import size_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides, held_number

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


def records(func: OpOverload, args: tuple[object, ...]) -> bool:
    """Whether the operator has a row here for these arguments."""
    if func is aten.index.Tensor:
        return any(isinstance(index, torch.Tensor) and index.dtype in MASKS for index in args[1])  # type: ignore
    return func in _ROWS


def record(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The operator's results, recorded with symbols for their sizes, or else with the sizes that they have at the call
    at hand, which the graph checks; NotImplemented for one whose sizes do not depend on data, or are not taken for
    granted. Raises GraphBreak where a gradient would have to pass through an unknown size."""
    if not recorder.data_shapes:
        row = _FOR_CALL.get(func, _extension_for_call)
        return row(recorder, func, args, kwargs)
    if not records(func, args):
        return NotImplemented if fake_kernel(func) is None else _of_extension(recorder, func, args, kwargs)
    if recorder.env is None:
        raise GraphBreak("data-dependent-shape", f"{func} gives a shape that depends on data")
    return (_masked_index if func is aten.index.Tensor else _ROWS[func])(recorder, func, args, kwargs)


def _of_extension(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """An operator of a library's whose own shape function may ask for a new size (`torch.library.get_ctx()`)."""
    env = recorder.env
    if env is None:
        return NotImplemented
    kinds: Any = recorder.convert(list(args))[1]  # type: ignore[attr-defined]
    named = {name: recorder.convert(value)[1] for name, value in kwargs.items()}  # type: ignore[attr-defined]
    before, env.may_give = len(env.unbacked), True
    try:
        types: Any = infer(func, tuple(kinds), named, result_device(args, kwargs), env)
    finally:
        env.may_give = False
    new = env.unbacked[before:]
    if not new:
        return NotImplemented
    several = isinstance(types, tuple)
    places = [
        (symbol, dim, which if several else None)
        for which, kind in enumerate(types if several else (types,))
        for dim, symbol in enumerate(kind.shape if isinstance(kind, TensorType) else ())
        if symbol in new
    ]
    if len(new) != 1 or not places:
        raise GraphBreak("data-dependent-shape", f"{func} gives several such sizes, or computes with one")
    return _give(recorder, func, args, kwargs, types, places[0])


def number_of(recorder: Recorder, tensor: TracedTensor) -> torch.SymInt:
    """The integer that a one-element tensor holds, as an unbacked symbol."""
    env = recorder.env
    assert env is not None
    known = _known(recorder, tensor)
    if isinstance(known, torch.SymInt):
        return known
    least, most = limits(*tensor.node.args[:2]) if tensor.node.target is HOST_DRAW else (None, None)  # type: ignore
    symbol = env.create_unbacked(least, most)
    if recorder.level == "torch":  # the node of the call gives it
        return size_of(symbol, env)  # type: ignore[return-value]
    recorder.node_of(aten._local_scalar_dense.default, (tensor.node,), {}, symbol).meta[GIVES] = (symbol, None, None)
    size = size_of(symbol, env)
    recorder.read_sizes[tensor.node] = (version_of(tensor), size)
    return size  # type: ignore[return-value]


def _known(recorder: Recorder, tensor: TracedTensor) -> object:
    """What was read from the tensor before, if it was not written to since."""
    found = recorder.read_sizes.get(tensor.node) if tensor.node is not None else None
    return found[1] if found is not None and found[0] == version_of(tensor) else None


def _most(shape: tuple[Dim, ...]) -> int | None:
    return bounds(product(shape))[1]


def _give(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any, gives: Any
) -> Any:
    node, results = recorder.record_as(func, args, kwargs, types)
    if node is None:
        return results
    node.meta[GIVES] = gives
    return results


def _nonzero(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    source = args[0]
    known = _known(recorder, source)
    if isinstance(known, torch.Tensor) and not version_of(known):  # type: ignore[arg-type]
        return recorder.dispatch(aten.clone.default, (known,), {})  # each call gives a tensor of its own
    type_ = source.tensor_type
    symbol = recorder.env.create_unbacked(0, _most(type_.shape))  # type: ignore[union-attr]
    result = TensorType((symbol, type_.ndim), (1, symbol), torch.int64, type_.device)
    made = _give(recorder, func, args, kwargs, result, (symbol, 0, None))
    if source.node is not None:
        recorder.read_sizes[source.node] = (version_of(source), made)
    return made


def _masked_index(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Indexing by masks is indexing by the places where they hold."""
    source, indices = args
    expanded: list[Any] = []
    axis = 0
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in MASKS:
            expanded.append(index)
            axis += 1
            continue
        kind = index.tensor_type if isinstance(index, TracedTensor) else None  # type: ignore[attr-defined]
        if kind is None or kind.ndim == 0:
            raise GraphBreak("data-dependent-shape", "a mask of no dimensions")
        selected = source.tensor_type.shape[axis : axis + kind.ndim]
        same = [recorder.env.guard(Relation("==", *pair)) for pair in zip(selected, kind.shape)]  # type: ignore
        if not all(same) or len(selected) != kind.ndim:
            raise GraphBreak("data-dependent-shape", "a mask of another shape than what it selects from")
        places = recorder.dispatch(aten.nonzero.default, (index,), {})
        if isinstance(places, UnknownShape):
            raise GraphBreak("data-dependent-shape", f"{func} gives a shape that depends on data")
        columns: Any = recorder.dispatch(aten.unbind.int, (places, 1), {})
        expanded += columns
        axis += kind.ndim
    return recorder.dispatch(func, (source, expanded), kwargs)


def _masked_select(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if args[1].dtype is not torch.bool:
        raise GraphBreak("operator-failed", f"{func} takes a mask of bool, got {args[1].dtype}")
    both: Any = recorder.dispatch(aten.broadcast_tensors.default, (list(args),), {}) if _differ(*args) else args
    source, mask = both
    return _masked_index(recorder, aten.index.Tensor, (source, [mask]), {})


def _differ(a: TracedTensor, b: TracedTensor) -> bool:
    return a.tensor_type.shape != b.tensor_type.shape


def _counted(*results: Callable[[TensorType, Dim, Callable[[str], Any]], TensorType]) -> Any:
    """A row: `results` give each result's type from the argument's, the unknown size and the other arguments by
    name."""

    def row(recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        names = [a.name for a in func._schema.arguments]
        source = args[0]
        type_ = source.tensor_type

        def asked(name: str) -> Any:
            return argument(func, args, kwargs, names.index(name))

        least = 1 if func in _AT_LEAST_ONE and bounds(product(type_.shape))[0] else 0
        symbol = recorder.env.create_unbacked(least, None if func in _UNLIMITED else _most(type_.shape))  # type: ignore
        types = tuple(result(type_, symbol, asked) for result in results)
        several = len(types) > 1
        return _give(recorder, func, args, kwargs, types if several else types[0], (symbol, 0, 0 if several else None))

    return row


def _flat(type_: TensorType, size: Dim, asked: Callable[[str], Any]) -> TensorType:
    return fresh((size,), type_)


def _inverse(type_: TensorType, size: Dim, asked: Callable[[str], Any]) -> TensorType:
    return fresh(type_.shape if asked("return_inverse") else (0,), type_, torch.int64)


def _counts(type_: TensorType, size: Dim, asked: Callable[[str], Any]) -> TensorType:
    return fresh((size,) if asked("return_counts") else (0,), type_, torch.int64)


def _repeated(type_: TensorType, size: Dim, asked: Callable[[str], Any]) -> TensorType:
    return TensorType((size,), contiguous_strides((size,)), type_.dtype, type_.device)


def _bins(type_: TensorType, size: Dim, asked: Callable[[str], Any]) -> TensorType:
    weights = asked("weights")
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return TensorType((size,), (1,), dtype, type_.device)


def _nonzero_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    (source,) = args
    if not isinstance(source, TracedTensor) or recorder.speculation is None or not source.ndim:
        return NotImplemented
    known = _known(recorder, source)
    if isinstance(known, torch.Tensor) and not version_of(known):  # type: ignore[arg-type]
        return recorder.dispatch(aten.clone.default, (known,), {})  # each call gives a tensor of its own
    count = recorder.speculation.count_of(source)
    if count is None:
        return NotImplemented
    call = recorder.dispatch
    made: Any = call(aten.nonzero_static.default, (source,), {"size": count})
    # nonzero itself gives its places dimension by dimension, which the stride of a single dimension tells, too
    columns = call(aten.view.default, (made, (1, count)), {}) if source.ndim == 1 else call(aten.t.default, (made,), {})
    if source.ndim > 1:
        columns = call(aten.clone.default, (columns,), {"memory_format": torch.contiguous_format})
    made = call(aten.t.default, (columns,), {})
    recorder.read_sizes[source.node] = (version_of(source), made)
    return made


def _masked_select_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    if args[1].dtype is not torch.bool:  # an index would take numbers
        return NotImplemented
    both: Any = recorder.dispatch(aten.broadcast_tensors.default, (list(args),), {}) if _differ(*args) else args
    return _masked_index(recorder, aten.index.Tensor, (both[0], [both[1]]), {})


def _bincount_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Each number adds 1, or its weight, to its bin. (A negative one is an index out of range.)"""
    source = args[0]
    weights: Any = argument(func, args, kwargs, 1)
    least: Any = argument(func, args, kwargs, 2) or 0
    if not isinstance(source, TracedTensor) or source.ndim != 1 or source.numel() == 0:
        return NotImplemented
    if source.is_floating_point() or source.is_complex() or source.dtype is torch.bool:
        return NotImplemented
    call = recorder.dispatch
    numbers = call(aten._to_copy.default, (source,), {"dtype": torch.int64})
    largest, bins = call(aten.amax.default, (numbers,), {}), least
    few = recorder.read(call(aten.lt.Scalar, (largest, least), {})) if least > 0 else None
    if few is None or not held_number(few):
        value = recorder.read(largest)
        if value is None:
            return NotImplemented
        bins = max(held_number(value) + 1, least)
    dtype = torch.int64
    if weights is None:
        weights = call(aten.ones_like.default, (numbers,), {})
    else:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
        weights = call(aten._to_copy.default, (weights,), {"dtype": dtype})
    empty = call(aten.zeros.default, ([bins],), {"dtype": dtype, "device": source.device})
    return call(aten.scatter_add.default, (empty, 0, numbers, weights), {})


def _unique_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Of whole numbers: sorted, and then those that differ from the one before. (Of floats, -0 is 0.)"""
    source = args[0]
    if not isinstance(source, TracedTensor) or source.is_floating_point() or source.is_complex():
        return NotImplemented
    if source.numel() == 0:
        return NotImplemented
    call = recorder.dispatch
    flat = call(aten.reshape.default, (source, [-1]), {})
    ordered, order = call(aten.sort.stable, (flat,), {"stable": True, "dim": 0})
    size, device = source.numel(), source.device
    after, before = (call(aten.slice.Tensor, (ordered, 0, start, start + size - 1), {}) for start in (1, 0))
    one = call(aten.ones.default, ([1],), {"dtype": torch.bool, "device": device})
    first = call(aten.cat.default, ([one, call(aten.ne.Tensor, (after, before), {})],), {})
    found = call(aten.nonzero.default, (first,), {})
    if isinstance(found, UnknownShape):
        raise GraphBreak("data-dependent-shape", f"{func} gives a shape that depends on data")
    starts = call(aten.select.int, (found, 1, 0), {})
    values = call(aten.index_select.default, (ordered, 0, starts), {})
    inverse = counts = call(aten.zeros.default, ([0],), {"dtype": torch.int64, "device": device})
    if argument(func, args, kwargs, 2):
        number = call(aten.sub.Tensor, (call(aten.cumsum.default, (first, 0), {}), 1), {})
        places = call(aten.scatter.src, (call(aten.zeros_like.default, (order,), {}), 0, order, number), {})
        inverse = call(aten.reshape.default, (places, list(source.shape)), {})
    if argument(func, args, kwargs, 3):
        end = call(aten.full.default, ([1], size), {"dtype": torch.int64, "device": device})
        rest = call(aten.slice.Tensor, (starts, 0, 1, _LARGEST), {})
        counts = call(aten.sub.Tensor, (call(aten.cat.default, ([rest, end],), {}), starts), {})
    return values, inverse, counts


_LARGEST = (1 << 63) - 1
def _extension_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """An operator of a library's with one result, whose shape function asks for a new size."""
    if kwargs or recorder.env is None or recorder.speculation is None or fake_kernel(func) is None:
        return NotImplemented
    known = recorder.env.copy()
    known.may_give = True
    kinds: Any = recorder.convert(list(args))[1]  # type: ignore[attr-defined]
    type_: Any = infer(func, tuple(kinds), {}, result_device(args, kwargs), known)
    taken = known_sizes.arguments(func, args)
    if len(known.unbacked) == len(recorder.env.unbacked) or taken is None or not isinstance(type_, TensorType):
        return NotImplemented
    found = recorder.speculation.shape_of(func, args)
    if found is None:
        return NotImplemented
    shape, place = found
    result = TensorType(shape, contiguous_strides(shape), type_.dtype, type_.device)
    return recorder.record_as(known_sizes.OF_SIZE, (*taken, type_.dtype, list(shape), place), {}, result)[1]


def _masked_index_for_call(
    recorder: Recorder, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    return _masked_index(recorder, func, args, kwargs) if records(func, args) else NotImplemented


_FOR_CALL: dict[OpOverload, Callable[[Recorder, OpOverload, tuple[Any, ...], dict[str, Any]], object]] = {
    aten.index.Tensor: _masked_index_for_call,
    aten.nonzero.default: _nonzero_for_call,
    aten.masked_select.default: _masked_select_for_call,
    aten.bincount.default: _bincount_for_call,
    aten._unique2.default: _unique_for_call,
}
_UNLIMITED = frozenset({aten.repeat_interleave.Tensor, aten.bincount.default})
_AT_LEAST_ONE = frozenset({aten._unique2.default})
_ROWS: dict[OpOverload, Callable[[Recorder, OpOverload, tuple[Any, ...], dict[str, Any]], object]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _counted(_flat, _inverse, _counts),
    aten.repeat_interleave.Tensor: _counted(_repeated),
    aten.bincount.default: _counted(_bins),
}
