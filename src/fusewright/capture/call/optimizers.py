"""What `torch.optim` is wrapped in: decorators that would break the graph for the sake of another compiler, and
profiling.

Takes calls of PyTorch's own wrapper functions, known by their code objects; gives what the wrapped function gives.
Always holds: the optimizers themselves are interpreted as any other Python; nothing here knows an optimizer by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import _use_grad_for_differentiable

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.capture.border.native import unwatched
from fusewright.operators.decompositions.fused_optimizers import FUSED_NAMES, FUSED_OPTIMIZERS
from fusewright.sizes.symfloat import float_of_tensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Wrapper = Callable[["Tracer", types.FunctionType, Args, Kwargs], Any]
Row = Callable[["Tracer", Args, Kwargs], Any]


def _nothing() -> None:
    """Stands for the function that a decorator is applied to, to learn the decorator's code object."""


def _original(tracer: Tracer, fn: types.FunctionType) -> Any:
    """The function that a wrapper stands for, as the wrapper's own cell holds it."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
    return tracer.world.load_cell(cells["func" if "func" in cells else "fn"])


def _with_grad_mode(tracer: Tracer, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    """`step` of an optimizer: gradients are followed only if the optimizer is differentiable."""
    world = tracer.world
    before = torch.is_grad_enabled()
    differentiable = world.truth(world.getitem(world.getattr(args[0], "defaults"), "differentiable"))
    original = _original(tracer, fn)
    tracer.call(torch._C._set_grad_enabled, (differentiable,))
    try:
        return tracer.call(original, args, kwargs)
    finally:
        tracer.call(torch._C._set_grad_enabled, (before,))


def _without_wrapper(tracer: Tracer, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    """A function that PyTorch hides from its own compiler: what it means here is decided by the function itself."""
    return tracer.call(_original(tracer, fn), args, kwargs)


WRAPPERS: dict[types.CodeType, Wrapper] = {
    _use_grad_for_differentiable(_nothing).__code__: _with_grad_mode,
    _disable_dynamo(_nothing).__code__: _without_wrapper,
}


def _value(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A step count as the number that eager reads from its tensor, without reading it now."""
    (value,) = (*args, *kwargs.values())
    if not isinstance(value, torch.Tensor):
        return value
    return number_of(tracer, value)


def number_of(tracer: Tracer, tensor: torch.Tensor) -> Any:
    """A number that an optimizer reads from a tensor. Graphs at torch level have none: there PyTorch's own functions
    would compute with the tensor itself, in another precision than eager."""
    if tracer.recorder.level != "aten":
        if tracer.recorder.changes_level:
            tracer.recorder.lacks_form("data-dependent-scalar", "a number that an optimizer reads from a tensor")
        return tensor
    return float_of_tensor(tracer.recorder, tensor)


def asks(tracer: Tracer) -> bool:
    """Whether PyTorch's own optimizers read a tensor: they compute with the number, and choose by it."""
    frame = tracer.frame
    return frame is not None and frame.function.__globals__.get("__name__", "").startswith("torch.optim.")


def _no_annotation(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """record_function inside a graph marks nothing; should the program leave it eagerly (an exception), it has nothing
    to end."""
    unwatched(torch.autograd.profiler.record_function.__init__, *args, **kwargs)
    args[0].run_callbacks_on_exit = False


def _as_list(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """PyTorch's own compiler stacks the numbers of a list into one tensor; here each stays the number that it is in
    eager."""
    (value,) = (*args, *kwargs.values())
    return value


def _by_device_and_dtype(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch._C._group_tensors_by_device_and_dtype(tensorlistlist, with_indices): {(device, dtype): (lists, indices)},
    by the first list."""
    lists, with_indices = (*args, *kwargs.values(), False)[:2]
    if not lists or not lists[0]:  # which is refused
        return tracer.world.torch_call(torch._C._group_tensors_by_device_and_dtype, args, kwargs)
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for index, first in enumerate(lists[0]):
        parts, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for part, whole in zip(parts, lists, strict=True):
            if whole:
                part.append(whole[index])
        if with_indices:
            indices.append(index)
    return groups


def _fused(function: Callable[..., Any], operator: Any) -> Row:
    """An update of a fused optimizer: the operator's own signature would fix a rate that changes."""

    def run(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        if tracer.recorder.level != "aten" or not any(
            isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values())
        ):
            return tracer.world.torch_call(function, args, kwargs)
        overload = operator.tensor_lr if isinstance(kwargs.get("lr"), torch.Tensor) else operator.default
        record = FUSED_OPTIMIZERS[overload]
        return unwatched(tracer.recorder.call, lambda: record(tracer.recorder, args, kwargs), (), {})

    return run


ROWS: list[tuple[Any, Row]] = [
    (torch._C._group_tensors_by_device_and_dtype, _by_device_and_dtype),
    *((getattr(torch, name), _fused(getattr(torch, name), getattr(torch.ops.aten, name))) for name in FUSED_NAMES),
]
NAMED_ROWS: dict[tuple[str, str], Row] = {
    ("torch.optim.optimizer", "_stack_if_compiling"): _as_list,
    ("torch.optim.optimizer", "_get_value"): _value,
    ("torch.autograd.profiler", "record_function.__init__"): _no_annotation,
}
