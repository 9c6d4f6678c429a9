"""The transforms of `torch.func`: vmap, grad, jacrev and the rest, captured by running PyTorch's own implementation of
them.

Takes a call of a transform, or of a function that one has made. The user's function inside is interpreted; functorch's
layers lie above traced tensors, so what reaches the recorder are plain operators on whole batches, and those of the
gradients. Always holds: the user's function is entered by a trampoline, so that what it reads is guarded; neither a
tensor of an inner layer nor a function that holds some leaves the frame. A graph at torch level has no nodes for any of
this: where one is called, the frame is captured at ATen level.
"""

from __future__ import annotations

import traceback
import types
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import Trampoline, unwatched
from fusewright.capture.border.native_ready import for_native
from fusewright.capture.call.support import guard_saved_hooked

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

_APIS, _TRANSFORMS = "torch._functorch.apis", "torch._functorch.eager_transforms"
MODULES = (_APIS, _TRANSFORMS)
# Transforms that make a function of a function.
_MAKERS = frozenset(
    {
        (_APIS, "vmap"), (_APIS, "grad"), (_APIS, "grad_and_value"), (_TRANSFORMS, "jacrev"), (_TRANSFORMS, "jacfwd"),
        (_TRANSFORMS, "hessian"),
    }
)  # fmt: skip
_MADE = frozenset(
    {
        (_APIS, "vmap.<locals>.wrapped"), (_APIS, "grad.<locals>.wrapper"), (_APIS, "grad_and_value.<locals>.wrapper"),
        (_TRANSFORMS, "jacrev.<locals>.wrapper_fn"), (_TRANSFORMS, "jacfwd.<locals>.wrapper_fn"),
    }
)  # fmt: skip
_OF_VJP = (_TRANSFORMS, "_vjp_with_argnums.<locals>.wrapper")  # holds the tensors of its forward
_DIRECT = frozenset({(_TRANSFORMS, "vjp"), (_TRANSFORMS, "jvp"), _OF_VJP})


def transform(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a transform, or what one has made."""
    name = _name(fn)
    if name not in _MAKERS | _MADE | _DIRECT or (name == _OF_VJP and tracer.world.outside(fn) is not None):
        raise GraphBreak("functorch-transform", f"{fn.__module__}.{fn.__qualname__}")
    if tracer.recorder.level != "aten" and name not in _MAKERS:
        tracer.recorder.lacks_form("functorch-transform", f"{fn.__module__}.{fn.__qualname__}")
    fn = for_transform(tracer, fn) if name in _MADE else fn
    args = tuple(for_transform(tracer, value) for value in args)
    kwargs = {key: for_transform(tracer, value) for key, value in kwargs.items()}
    if name in _MAKERS:
        made = unwatched(fn, *args, **kwargs)
        _adopt(tracer, made)
        return made
    guard_saved_hooked(tracer.world)  # whatever takes gradients inside, a vmap of a grad too, complains of hooks
    try:
        return unwatched(tracer.recorder.call, fn, args, kwargs)
    except GraphBreak as signal:
        if _is_complaint(signal.__cause__):
            raise UserException(signal.__cause__) from None
        raise


def _is_complaint(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether vmap itself raised it, because of what it was given: sizes and places, which are guarded."""
    if type(error) is not ValueError or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == "torch._functorch.vmap"


def holds_tensors(fn: types.FunctionType) -> bool:
    """Whether a function that a transform has made holds tensors of this capture."""
    return fn.__globals__.get("__name__") == _TRANSFORMS and _name(fn) in _DIRECT


def _name(fn: types.FunctionType) -> tuple[str, str]:
    return fn.__globals__.get("__name__", ""), fn.__code__.co_qualname


def _is_made(value: object) -> bool:
    return isinstance(value, types.FunctionType) and _name(value) in _MADE


def for_transform(tracer: Tracer, value: Any) -> Any:
    """An argument for PyTorch's implementation: functions of the user's, wherever they hide, become trampolines."""
    world = tracer.world
    if _is_made(value):
        return value if world.outside(value) is None else _inside(tracer, value)
    if isinstance(value, (Trampoline, torch.Tensor, type)) or not callable(value):
        return for_native(world, value)
    return Trampoline(tracer, value)


def _inside(tracer: Tracer, made: types.FunctionType) -> types.FunctionType:
    """A function that a transform made before the capture, over what it was made of, loaded."""
    loaded = (tracer.world.load_cell(cell) for cell in made.__closure__ or ())
    cells = tuple(types.CellType(for_transform(tracer, content)) for content in loaded)
    return types.FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, cells)


def _adopt(tracer: Tracer, made: Any) -> None:
    """The function was made inside, and may leave the frame as any closure does."""
    if not _is_made(made):
        return
    for cell in made.__closure__ or ():
        tracer.adopt_cell(cell)
        _adopt(tracer, cell.cell_contents)
