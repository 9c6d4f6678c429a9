"""Operators that are not recorded as they come: what they say is known already, or they are recorded as something else.

Takes a recorder and an operator's arguments; gives its result. Always holds: what cannot be answered breaks the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload
from torch.torch_version import TorchVersion
from torch.utils import deterministic

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak
from fusewright.graph.builder import is_surely_dense
from fusewright.graph.known_values import LITERAL, NUMBER
from fusewright.operators import decompositions, messages
from fusewright.operators.host_draws import HOST_DRAW
from fusewright.operators.overlap import is_view_of
from fusewright.operators.rules.collectives import NAMESPACE
from fusewright.operators.rules.common import channels_last_strides
from fusewright.record import data_sizes
from fusewright.record.traced_tensor import TracedTensor, memory_root, move_metadata
from fusewright.sizes.expressions import Relation
from fusewright.sizes.symfloat import float_of_tensor
from fusewright.sizes.symint import dim_of, size_of
from fusewright.sizes.tensor_type import TensorType, held_number

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten
SCALAR_READ = ("data-dependent-scalar", "a Python number is read from a tensor")


def _resize(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """resize_ to the size that the tensor has: the factory functions' out= variants do so."""
    tensor = args[0]
    size = tuple(map(dim_of, args[1]))  # type: ignore[call-overload]
    if (
        not isinstance(tensor, TracedTensor)
        or kwargs.get("memory_format") is not None
        or size != tensor.tensor_type.shape
    ):
        raise GraphBreak("inplace-metadata", "resize_")
    return tensor


def _drop(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """The operator checks what the types already say."""


def _lift_fresh(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """A tensor that native code just made from Python data: a constant, copied at each run since the program may write
    to it."""
    tensor = args[0]
    if isinstance(tensor, TracedTensor):
        return tensor
    made = recorder.dispatch(aten.clone.default, (tensor,), {})
    if recorder.level == "aten":
        node: torch.fx.Node = made.node  # type: ignore[attr-defined]
        node.meta[LITERAL] = True
        if tensor.numel() == 1 and not tensor.is_complex():  # type: ignore[attr-defined]
            node.args[0].meta[NUMBER] = tensor.item()  # type: ignore[union-attr, attr-defined]
    return made


UNINITIALISED = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
})  # fmt: skip
"""Operators whose result nobody has written to."""


def filler_of(made: object) -> float | None:
    """What eager fills such a tensor with under deterministic algorithms, or None."""
    fills: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if not torch.are_deterministic_algorithms_enabled() or not fills:
        return None
    assert isinstance(made, torch.Tensor)
    if made.dtype.is_floating_point or made.dtype.is_complex:
        return float("nan")
    return 1 if made.dtype is torch.bool else torch.iinfo(made.dtype).max


def _read_scalar(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """A tensor where a number is wanted: its value where the graph knows it, else (`add_(gradient, alpha=rate)`) a
    float that is known at run time; whoever needs the value of that breaks the graph."""
    tensor = args[0]
    value = recorder.known_value(tensor)
    if value is not None:
        return value.item()
    if (
        isinstance(tensor, TracedTensor)
        and (recorder.data_numbers or tensor.node.target is HOST_DRAW)
        and recorder.env is not None
        and tensor.dtype in _INTEGERS
    ):
        return data_sizes.number_of(recorder, tensor)
    if not isinstance(tensor, TracedTensor) or not tensor.dtype.is_floating_point:
        value = recorder.read(tensor)
        if value is None:
            raise GraphBreak(*SCALAR_READ)
        return held_number(value)
    if recorder.level != "aten":
        recorder.lacks_form(*SCALAR_READ)
    return float_of_tensor(recorder, tensor)


def _pseudo_inverse(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """The one operator that is recorded whole although autocast casts inside its kernel."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # autocast is shut out here
        casts = torch.is_autocast_enabled(args[0].device.type)
    if casts:
        raise GraphBreak("operator-failed", "torch.linalg.pinv under autocast")
    return NotImplemented


def _answered_by(
    elements: OpOverload,
) -> Callable[[Recorder, tuple[object, ...], dict[str, object]], object]:
    """A question about all elements of two tensors, where its answer may be taken for granted; `elements`: the same
    about each."""

    def ask(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        one, other = args[:2]
        if recorder.speculation is None or not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return NotImplemented
        if one.dtype != other.dtype or one.device != other.device:
            return NotImplemented
        if elements is aten.eq.Tensor and one.shape != other.shape:
            return False
        each = recorder.dispatch(elements, args, kwargs)
        value = recorder.read(recorder.dispatch(aten.all.default, (each,), {}))
        return NotImplemented if value is None else bool(held_number(value))

    return ask


def _ctc_loss(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Of lengths in tensors, which the operator reads: they are numbers, where those are known or taken for granted."""
    lengths = [recorder.read(one) for one in args[2:4]]
    if not all(one is not None and one.ndim == 1 and one.dtype in _INTEGERS for one in lengths):
        return NotImplemented
    numbers = [one.tolist() for one in lengths if one is not None]
    return recorder.dispatch(aten._ctc_loss.default, (*args[:2], *numbers, *args[4:]), kwargs)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _resolved(form: OpOverload) -> Callable[[Recorder, tuple[object, ...], dict[str, object]], object]:
    """conj() and its kin give a view with a bit that kernels must heed; traced tensors have no such bit, so the values
    are computed. The node is marked: for the functionalise pass it still is a view."""

    def lazy(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        traced = recorder.dispatch(form, args, kwargs)
        if recorder.level == "aten" and isinstance(args[0], torch.Tensor):  # else the number of an operator
            traced.node.meta["lazy_view"] = True  # type: ignore[attr-defined]
        return traced

    return lazy


def _empty_strided(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """With gaps between its elements: a view of memory without. NotImplemented for any other."""
    size, stride = (tuple(map(dim_of, values)) for values in args[-2:])  # type: ignore[call-overload]
    if 0 in size or is_surely_dense(TensorType(size, stride, torch.float32, torch.device("cpu"))):
        return NotImplemented
    varying = [number for number in (*size, *stride) if not isinstance(number, int)]
    if not all(recorder.env is not None and recorder.env.guard(Relation("<", 0, number)) for number in varying):
        return NotImplemented
    if len(args) == 3:  # new_empty_strided
        of: Any = args[0]
        given = {name: one for name, one in kwargs.items() if one is not None}
        kwargs = {"dtype": of.dtype, "device": of.device} | given
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride))
    memory = recorder.dispatch(aten.empty.memory_format, ([size_of(length, recorder.env)],), kwargs)
    return recorder.dispatch(aten.as_strided.default, (memory, *args[-2:]), {})


def _view_in_place(
    func: OpOverload, form: OpOverload
) -> Callable[[Recorder, tuple[object, ...], dict[str, object]], object]:
    """x.squeeze_() and its kin: from now on the same object stands for the view."""

    def view_in_place(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        recorder.rebinds("a tensor that becomes its own view")
        traced = args[0]
        assert isinstance(traced, TracedTensor)
        if traced.is_input:
            raise GraphBreak("inplace-metadata", f"{func} on an input")
        if traced.requires_grad and not torch.is_grad_enabled():  # its history knows nothing of the view
            raise GraphBreak("inplace-metadata", f"{func} in no_grad on a tensor with a gradient")
        if traced.requires_grad and memory_root(traced).is_input:
            # eager refuses it if that input is a leaf, or a view of one
            raise GraphBreak("inplace-metadata", f"{func} on a view of an input that requires a gradient")
        if traced.requires_grad and any(is_view_of(user, traced.node) for user in traced.node.users):
            # autograd would make the views' histories anew, as windows of what the tensor was not when they were made
            raise GraphBreak("inplace-metadata", f"{func} on a tensor with views and a gradient")
        view = recorder.dispatch(form, args, kwargs)
        view.node.meta["in_place_view"] = True
        move_metadata(traced, func, args, kwargs)
        traced.node, traced.tensor_type, traced.input_storage = view.node, view.tensor_type, view.input_storage
        traced.reshaped = True
        return traced

    return view_in_place


# In-place operators that change sizes and strides, and the views that they turn their tensor into.
_IN_PLACE_VIEWS: dict[OpOverload, OpOverload] = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def _default_generator(
    form: OpOverload,
) -> Callable[[Recorder, tuple[object, ...], dict[str, object]], object]:
    """An overload with a generator that is given none draws from the default one, as the overload without it does."""

    def draw(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if kwargs.get("generator") is not None:
            return NotImplemented
        return recorder.dispatch(form, args, {name: value for name, value in kwargs.items() if name != "generator"})

    return draw


_WITH_GENERATOR = (
    (aten.rand.generator, aten.rand.default),
    (aten.randn.generator, aten.randn.default),
    (aten.randint.generator, aten.randint.default),
    (aten.randint.low_generator, aten.randint.low),
    (aten.randperm.generator, aten.randperm.default),
)


def _wait(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Waiting for a collective of this graph, once; for what is no collective's result there is nothing to do. What may
    be under way when the graph begins is not known."""
    (tensor,) = args
    if recorder.level != "aten" or not isinstance(tensor, TracedTensor):
        return NotImplemented
    if tensor.node in recorder.waited:
        return recorder.waited[tensor.node]
    if tensor.is_input:
        raise GraphBreak("distributed-call", "a wait for a collective that began before the graph")
    if tensor._base is not None:  # a view shares its memory
        _wait(recorder, (tensor._base,), kwargs)
        return tensor
    node: Any = tensor.node.args[0] if tensor.node.target is operator.getitem else tensor.node
    if getattr(node.target, "namespace", "") not in (NAMESPACE, messages.NAMESPACE):
        return tensor
    op = torch.ops._c10d_functional.wait_tensor.default
    made, result = recorder.record_as(op, args, kwargs, replace(tensor.tensor_type, requires_grad=False))
    recorder.waited[tensor.node] = result
    if made is not None:
        recorder.waited[made] = result
    return result


def _fill_masked(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """`x[mask] = number`: native code makes a tensor in CPU memory of the number, which a GPU's kernel would read."""
    target, indices, given, *more = args
    mask = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    if not (isinstance(target, TracedTensor) and isinstance(mask, TracedTensor)) or any(more) or kwargs:
        return NotImplemented
    value = recorder.known_value(given)
    if mask.dtype is not torch.bool or value is None or value.shape != () or value.is_complex():
        return NotImplemented
    if mask.ndim > target.ndim or any(one != other for one, other in zip(mask.shape, target.shape)):
        return NotImplemented  # which eager refuses: a mask is not broadcast
    shaped: Any = mask
    for _ in range(target.ndim - mask.ndim):
        shaped = recorder.dispatch(aten.unsqueeze.default, (shaped, -1), {})
    return recorder.dispatch(aten.masked_fill_.Scalar, (target, shaped, value.item()), {})


# Formulas of PyTorch that give the gradient to the elements of a mask by a product if the tensors are a subclass's, as
# traced ones are, and by masked_fill on a CPU: where the gradient is infinite they differ.
_GIVEN_TO_A_MASK = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})


def _made_zero(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Zeros without memory (the gradient of sgn): kernels read memory."""
    zeros: Any = recorder.dispatch(aten.zeros.default, args, kwargs)
    if zeros.node is not None:  # a torch-level graph holds none
        zeros.node.meta["zeros"] = True
    return zeros


def _make_dual(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Autograd answers it, except under inference mode, which torch.func.jvp of PyTorch before 2.12 does not leave."""
    raise GraphBreak("inference-mode", "forward-mode derivatives under inference mode")


def _batch_norm_backward(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """With copies of what is channels-last but for the step of a dimension of one element: one check of PyTorch's CPU
    kernel ignores that step and another does not, and elements are mixed up."""
    plain = []
    for tensor in args[:2]:
        kind: TensorType = tensor.tensor_type
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(kind.ndim)
        if kind.device.type == "cpu" and last is not None and 1 in kind.shape:
            canonical = kind.stride == channels_last_strides(kind.shape)
            if not canonical and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
                tensor = recorder.dispatch(aten.clone.default, (tensor,), {"memory_format": last})
        plain.append(tensor)
    if all(one is given for one, given in zip(plain, args)):
        return NotImplemented
    return recorder.dispatch(aten.native_batch_norm_backward.default, (*plain, *args[2:]), kwargs)


def _group_norm_backward(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """With a gradient of the input: over what is channels-last PyTorch's CPU kernel writes it though none is asked
    for, to no memory."""
    input, wanted = args[1], args[-1]
    if wanted[0] or input.device.type != "cpu" or input.ndim not in (4, 5):
        return NotImplemented
    operator = aten.native_group_norm_backward.default
    return (None, *recorder.dispatch(operator, (*args[:-1], [True, *wanted[1:]]), kwargs)[1:])


def _is_zero(value: object) -> bool:
    """Whether it is zeros without memory, or a view of them."""
    node = memory_root(value).node if isinstance(value, TracedTensor) else None
    return node is not None and "zeros" in node.meta


_OF_ZEROS: dict[OpOverload, Callable[[bool, bool], bool]] = {  # from which operands zeros without memory become such
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), operator.and_),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), operator.or_),
    **dict.fromkeys((aten.dot.default, aten.vdot.default, aten.linalg_cross.default), operator.or_),
    aten.div.Tensor: operator.gt,
}


def _met_by_zeros(func: OpOverload) -> Callable[[Recorder, tuple[Any, ...], dict[str, Any]], object]:
    """Zeros without memory stay zeros whatever they meet, and add nothing, which PyTorch's formulas of gradients and
    tangents rely on. In those a mask also keeps what is outside of it at 0."""

    def met(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        zero = [_is_zero(one) for one in args[:2]]
        if True in zero:
            plain = [recorder.dispatch(aten.zeros_like.default, (one,), {}) if _is_zero(one) else one for one in args]
            whole: Any = recorder.dispatch(func, tuple(plain), kwargs)
            if _OF_ZEROS[func](*zero):
                return _made_zero(recorder, (whole.shape,), {"dtype": whole.dtype, "device": whole.device})
            kept = args[zero.index(False)] if False in zero else None
            if func not in _SUMS or not isinstance(kept, TracedTensor):
                return whole
            kept = recorder.dispatch(aten.expand.default, (kept, whole.shape), {})
            kept = recorder.dispatch(aten._to_copy.default, (kept,), {"dtype": whole.dtype})
            factor = kwargs.get("alpha", 1) * _SUMS[func] if zero[0] else 1
            return kept if factor == 1 else recorder.dispatch(aten.mul.Scalar, (kept, factor), {})
        mask, value = args
        if (
            func is aten.mul.Tensor
            and recorder.lines.active
            and isinstance(mask, TracedTensor)
            and mask.dtype is torch.bool
            and mask.device.type == "cpu"
            and isinstance(value, TracedTensor)
            and getattr(torch._C._current_autograd_node(), "name", str)() in _GIVEN_TO_A_MASK
        ):
            return recorder.dispatch(aten.where.ScalarOther, (mask, value, 0), {})
        return NotImplemented

    return met


_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_COLLECTIVES = {
    getattr(getattr(torch.ops, NAMESPACE), name).default: _wait
    for name in ("wait_tensor", "_wrap_tensor_autograd")
    if torch.distributed.is_available() and hasattr(getattr(torch.ops, NAMESPACE), name)
}


def _of_undefined(func: OpOverload) -> Callable[..., Any]:
    """Where no gradient arrives, these are called without one, and give none."""
    return lambda recorder, args, kwargs: (None,) * len(func._schema.returns) if args[0] is None else NotImplemented


def _of_prims(prim: OpOverload) -> Callable[..., Any]:
    """What eager runs for a primitive of `torch._refs`, once its arguments are checked: schemas call views writes, and
    meta kernels do not tell strides."""

    def call(recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        kinds = {name: recorder.convert(value)[1] for name, value in kwargs.items()}
        recorder.infer(prim, recorder.convert(list(args))[1], kinds)
        return prim.impl_aten(*args, **kwargs)  # type: ignore[attr-defined]

    return call


_PRIMS = [
    one
    for one in vars(torch._prims).values()
    if isinstance(one, OpOverload) and any("Tensor" in str(argument.type) for argument in one._schema.arguments)
    if one is not torch.ops.prims.convert_element_type.default  # which is lowered
]
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
_CUDNN_GRID = (0, 0, True)  # bilinear, zeros around, aligned corners: all that cuDNN samples
SPECIAL: dict[OpOverload, Callable[[Recorder, tuple[object, ...], dict[str, object]], object]] = {
    aten._assert_tensor_metadata.default: _drop,
    **decompositions.OPERATORS,
    **_COLLECTIVES,
    **{prim: _of_prims(prim) for prim in _PRIMS},
    **{func: _view_in_place(func, form) for func, form in _IN_PLACE_VIEWS.items()},
    **{func: _default_generator(form) for func, form in _WITH_GENERATOR},
    aten.lift_fresh.default: _lift_fresh,
    aten._efficientzerotensor.default: _made_zero,
    aten._make_dual.default: _make_dual,
    **{func: _met_by_zeros(func) for func in _OF_ZEROS},
    aten.resize_.default: _resize,
    # Autograd answers it, except under inference mode, where nothing has a history.
    aten.detach_.default: lambda recorder, args, kwargs: args[0],
    aten.index_put_.default: _fill_masked,
    aten.empty_strided.default: _empty_strided,
    aten.new_empty_strided.default: _empty_strided,
    aten._local_scalar_dense.default: _read_scalar,
    aten.equal.default: _answered_by(aten.eq.Tensor),
    aten.allclose.default: _answered_by(aten.isclose.default),
    aten._ctc_loss.Tensor: _ctc_loss,
    aten.linalg_pinv.atol_rtol_tensor: _pseudo_inverse,
    aten._conj.default: _resolved(aten._conj_physical.default),
    aten._neg_view.default: _resolved(aten.neg.default),
    # With symbolic sizes some native code asks the dispatcher for them, and PyTorch writes a BatchNorm in evaluation
    # otherwise.
    aten._native_batch_norm_legit_no_training.default: lambda recorder, args, kwargs: recorder.dispatch(
        aten.native_batch_norm.default, (*args[:5], False, *args[5:]), kwargs
    ),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **{func: _of_undefined(func) for func in _ATTENTION_BACKWARD},
    # What PyTorch samples a grid by on a GPU is known by its general form alone: loops compute that, and its types are
    # known.
    aten.cudnn_grid_sampler.default: lambda recorder, args, kwargs: recorder.dispatch(
        aten.grid_sampler_2d.default, (*args, *_CUDNN_GRID), kwargs
    ),
    aten.cudnn_grid_sampler_backward.default: lambda recorder, args, kwargs: recorder.dispatch(
        aten.grid_sampler_2d_backward.default, (args[2], *args[:2], *_CUDNN_GRID, [True, True]), kwargs
    ),
    aten.size.default: lambda recorder, args, kwargs: list(args[0].size()),  # type: ignore[attr-defined]
    aten.size.int: lambda recorder, args, kwargs: args[0].size(args[1]),  # type: ignore[attr-defined]
    aten.sym_size.default: lambda recorder, args, kwargs: list(args[0].size()),  # type: ignore[attr-defined]
    aten.sym_size.int: lambda recorder, args, kwargs: args[0].size(args[1]),  # type: ignore[attr-defined]
    aten.stride.default: lambda recorder, args, kwargs: list(args[0].stride()),  # type: ignore[attr-defined]
    aten.stride.int: lambda recorder, args, kwargs: args[0].stride(args[1]),  # type: ignore[attr-defined]
    aten.sym_stride.default: lambda recorder, args, kwargs: list(args[0].stride()),  # type: ignore[attr-defined]
    aten.sym_stride.int: lambda recorder, args, kwargs: args[0].stride(args[1]),  # type: ignore[attr-defined]
    aten.numel.default: lambda recorder, args, kwargs: args[0].numel(),  # type: ignore[attr-defined]
    aten.sym_numel.default: lambda recorder, args, kwargs: args[0].numel(),  # type: ignore[attr-defined]
    aten.sym_storage_offset.default: lambda recorder, args, kwargs: args[0].storage_offset(),  # type: ignore
}

# Before PyTorch 2.13 products in C++ fix the sizes of what they flatten (seen in 2.11: a linear layer without bias over
# three dimensions).
_PRODUCTS_IN_C = (
    (torch._C._nn.linear, torch.matmul, methods.matmul) if TorchVersion(torch.__version__) >= "2.13" else ()
)

# What PyTorch's Python versions write as up to thirty operators, or otherwise than eager does (dropout of nothing gives
# the tensor itself; other classes than int64 are refused; a loss of one sample without a batch gets a dimension), while
# C++ takes symbolic sizes.
_SYMBOLIC_IN_C: frozenset[object] = frozenset({
    *_PRODUCTS_IN_C,
    torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.nn.functional.one_hot,
    torch.nn.functional.dropout, torch.dropout, torch.dropout_, torch.native_batch_norm,
    torch.nn.functional.multi_margin_loss, torch._C._nn.multi_margin_loss, aten.multi_margin_loss.default,
    torch.nn.functional.multilabel_margin_loss, torch._C._nn.multilabel_margin_loss,
    aten.multilabel_margin_loss_forward.default, torch.hardshrink, methods.hardshrink, torch._C._nn.softshrink,
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default,
    aten.upsample_trilinear3d.default,
})  # fmt: skip


def is_symbolic_in_c(fn: Callable[..., object]) -> bool:
    """Whether PyTorch's C++ version of a function takes symbolic sizes as they are."""
    try:
        return fn in _SYMBOLIC_IN_C
    except TypeError:  # not hashable
        return False
