"""Callables that the user has marked: disabled, native, constant, substituted; by fusewright's decorators or by
PyTorch's. Checkpoints are among what PyTorch keeps from its own compiler.

Takes a callable; gives the rule that its mark asks for. Always holds: PyTorch's compiler is looked at only if the
program has loaded it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fusewright._native import isinstance
from fusewright.base import marks
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values.constant import FROZEN_TYPES, is_constant
from fusewright.capture.border.values.symbolic import SYMBOLIC
from fusewright.capture.call.autograd import at_aten_level
from fusewright.sizes.symint import dim_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[["Tracer", Any, Args, Kwargs], Any]


def registered(fn: Any) -> Rule | None:
    """The rule of a callable in fusewright's registries."""
    if id(fn) in marks.SUBSTITUTES:
        return _substitute
    return run_natively if id(fn) in marks.ALLOWED else None


def _substitute(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    return tracer.inline(marks.SUBSTITUTES[id(fn)][1], args, kwargs)


def run_natively(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """allow_in_graph: the function itself runs on traced tensors. Objects that it makes could hold some of these where
    nobody looks."""
    result = tracer.world.torch_call(fn, args, kwargs)
    for part in tree_leaves(result):
        held = (isinstance(part, torch.Tensor) and not hasattr(part, "_is_param")) or tracer.world.outside(
            part
        ) is not None
        if not (held or is_constant(part) or type(part) in SYMBOLIC or type(part) in FROZEN_TYPES):
            raise GraphBreak("untraceable-call", f"{getattr(fn, '__qualname__', fn)} gives a {type(part).__qualname__}")
    return result


def of_function(fn: types.FunctionType) -> Rule | None:
    """The rule of a Python function with attributes (decorators leave some)."""
    attributes = fn.__dict__
    if marks.DISABLED in attributes or attributes.get("_torchdynamo_disable"):
        return _disabled
    if marks.NATIVE in attributes:
        return run_natively
    return constant_result if attributes.get(marks.CONSTANT) else by_torch(fn)


_HIDDEN = ("_init_group", "_fused_")


def _disabled(tracer: Tracer, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    reason = fn.__dict__.get(marks.DISABLED) or fn.__dict__.get("_torchdynamo_disable_msg")
    inner = fn.__dict__.get("_torchdynamo_orig_callable")
    if (
        isinstance(inner, types.FunctionType)
        and inner.__module__.startswith("torch.optim.")
        and inner.__name__.startswith(_HIDDEN)
    ):
        # PyTorch's compiler hides these parts of its optimizers from itself, for the whole process, when it is first
        # used.
        return tracer.call(tracer.world.load(inner, tracer.world.constant(inner, inner.__name__)), args, kwargs)
    if fn.__dict__.get("_torchdynamo_disable_recursive") is False and isinstance(inner, types.FunctionType):
        # its wrapper is PyTorch's, which leaves the frame itself to the compiler
        setattr(inner, marks.EAGER_FRAME, True)
    name = f"{fn.__module__}.{fn.__qualname__}"
    raise GraphBreak("disabled-function", f"{name} ({reason})" if isinstance(reason, str) else name)


def constant_result(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """assume_constant_result: the function is called really, once; what it gives counts as known."""
    world = tracer.world
    values = [_real(world, fn, value) for value in args]
    keywords = {name: _real(world, fn, value) for name, value in kwargs.items()}
    with _disable_current_modes():
        result = unwatched(fn, *values, **keywords)
    return world.load(result, world.constant(result, getattr(fn, "__name__", "constant")))


def _real(world: Any, fn: Any, value: Any) -> Any:
    if is_constant(value) or world.outside(value) is not None:
        return world.real_of(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_real(world, fn, element) for element in value)
    raise GraphBreak(
        "untraceable-call",
        f"{fn.__module__}.{fn.__qualname__} is marked with assume_constant_result, and an argument of it is computed "
        "inside",
    )


# PyTorch's registries.


def by_torch(fn: Any) -> Rule | None:
    """The rule of a callable that was given to torch.compiler.allow_in_graph or torch.compiler.substitute_in_graph."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None:
        return None
    if id(fn) in rules._allowed_callable_ids:
        return run_natively
    if id(fn) in rules._polyfilled_function_ids and _polyfill(fn) is not None:
        return _run_polyfill
    return None


def _polyfill(fn: Any) -> types.FunctionType | None:
    """What the user substitutes for `fn` (PyTorch's own substitutes are made for its own tracer)."""
    handlers = sys.modules["torch._dynamo.variables"].PolyfilledFunctionVariable._get_polyfill_handlers()
    substitute = getattr(handlers.get(fn), "__torch_dynamo_polyfill__", None)
    if isinstance(substitute, types.FunctionType) and not substitute.__module__.startswith("torch."):
        return substitute
    return None


def _run_polyfill(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    substitute = _polyfill(fn)
    assert substitute is not None
    return tracer.inline(substitute, args, kwargs)


# What PyTorch keeps from its own compiler.


def call_undisturbed(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function that PyTorch keeps from its own compiler (`torch._disable_dynamo`): checkpoint is known, others break
    the graph."""
    original = getattr(fn, "__wrapped__", None)
    if original is not None and original.__module__ == "torch.utils.checkpoint":
        if original.__qualname__ == "checkpoint":
            return _checkpoint(tracer, args, kwargs)
        raise GraphBreak("checkpoint", original.__qualname__)
    raise GraphBreak("disabled-function", f"{fn.__module__}.{fn.__qualname__}")


def call_checkpoint_module(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python functions of torch.utils.checkpoint."""
    if fn.__code__.co_qualname == "checkpoint":
        return _checkpoint(tracer, args, kwargs)
    if fn.__code__.co_qualname.startswith("checkpoint_sequential"):
        return tracer.inline(fn, args, kwargs)
    raise GraphBreak("checkpoint", f"torch.utils.checkpoint.{fn.__qualname__}")


class _Kept(torch.autograd.Function):
    """What a checkpoint keeps of its arguments."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> None:
        ctx.save_for_backward(*values)


def _checkpoint(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.utils.checkpoint.checkpoint: what is recorded inside is marked, and the backward computes it again (see
    autograd.partition)."""
    at_aten_level(tracer, "checkpoint", "torch.utils.checkpoint.checkpoint")
    options = dict(kwargs)
    reentrant = options.pop("use_reentrant", None)
    context, debug = options.pop("context_fn", None), options.pop("debug", False)
    for name in ("preserve_rng_state", "determinism_check", "early_stop"):
        options.pop(name, None)
    if reentrant is None or debug or (context is not None and getattr(context, "__name__", "") != "noop_context_fn"):
        raise GraphBreak("checkpoint", "checkpoint with context_fn or debug, or without use_reentrant")
    if reentrant and options:
        raise GraphBreak("checkpoint", "checkpoint(use_reentrant=True) with keyword arguments")
    function, *values = args
    recorder = tracer.recorder
    outer, enabled = recorder.recompute, torch.is_grad_enabled()
    recorder.recompute = True
    try:
        # Reentrant: without an argument that requires a gradient the result has no history at all.
        if reentrant and not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            torch._C._set_grad_enabled(False)
        kept = [value for value in values if isinstance(value, torch.Tensor) and value.is_inference()]
        if kept and torch.is_grad_enabled():  # which raises
            unwatched(_Kept.apply, torch.empty(0, device="cpu", requires_grad=True), *kept)
        return tracer.call(function, tuple(values), options)
    except GraphBreak as signal:
        raise GraphBreak("checkpoint", f"what is checkpointed breaks the graph: {signal.detail}") from signal
    finally:
        recorder.recompute = outer
        if torch.is_grad_enabled() is not enabled:
            torch._C._set_grad_enabled(enabled)


POLICIES: dict[str, Rule] = {"torch._compile": call_undisturbed, "torch.utils.checkpoint": call_checkpoint_module}
"""By the module of the function."""


# Marks on tensors that are made while capturing.


def mark_static(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """mark_static inside compiled code: the size becomes fixed, guarded. A class of modules is returned as it is."""
    tensor, index = args[0], kwargs.get("index", args[1] if len(args) > 1 else None)
    if not isinstance(tensor, torch.Tensor):
        return tensor
    env = tracer.recorder.env
    dims = range(tensor.dim()) if index is None else index if isinstance(index, (list, tuple)) else [index]
    for dim in dims:
        size = tensor.shape[dim]
        if isinstance(size, torch.SymInt) and env is not None:
            env.specialise(dim_of(size))
    return None
