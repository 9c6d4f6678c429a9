"""PyTorch's own callables: which are recorded, which answer natively, which are interpreted, which break the graph.

Takes a callable of PyTorch; gives the rule for it. Always holds: a function that reads or changes a setting of PyTorch
has a row here; a C function without a row is a graph break.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import logging
import operator
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import now, torch
from fusewright.base.signals import GraphBreak, Retry, UserException
from fusewright.capture.border.looked_up import as_written
from fusewright.capture.border.native import native, unwatched
from fusewright.capture.border.native_ready import for_native
from fusewright.capture.border.values import context, module as modules, tensor as tensors
from fusewright.capture.border.values.constant import PLACEMENTS
from fusewright.capture.call import (
    attention as call_attention,
    autograd as call_autograd,
    collectives as call_collectives,
    marked as call_marked,
    transforms as call_transforms,
    triton_kernels,
)
from fusewright.operators import decompositions
from fusewright.record.torch_level import checking

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Policy = Callable[["Tracer", Any, Args, Kwargs], Any]
Row = Callable[["Tracer", Args, Kwargs], Any]

# Modules of C functions that are tensor operators.
_OPERATOR_MODULES = frozenset({
    "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch._C._sparse", "torch._C._nested",
    "torch._C._VariableFunctions",
})  # fmt: skip

# Python functions of these modules run natively on traced tensors: they take tensors and constants and keep no state.
_NATIVE_MODULES = frozenset({
    "torch.functional", "torch.nn.functional", "torch._tensor", "torch.special", "torch.linalg", "torch.fft",
    "torch._jit_internal",
    "torch._ops", "torch.overrides", "torch._linalg_utils", "torch._lowrank", "torch._refs",
    "torch._decomp.decompositions", "torch._VF",
    "torch.masked._ops", "torch.signal.windows.windows", "torch.library",
    "torch._library.custom_ops",
    "torch.distributed.tensor._api", "torch.nested", "torch.nested._internal.nested_tensor",
})  # fmt: skip
_NATIVE_PACKAGES = ("torch._refs.", "torch._prims", "torch._decomp")

_REFUSED_MODULES = {
    "torch.serialization": "untraceable-call",
    "torch._tensor_str": "print-tensor",
    "torch.autograd": "autograd-call",
    "torch._functorch.vmap": "functorch-transform",
    "torch.func": "functorch-transform",
    "torch.distributed.distributed_c10d": "distributed-call",
    "torch.cuda.random": "random-state",
    "torch.multiprocessing": "untraceable-call",
    "torch._dynamo.decorators": "untraceable-call",
    "torch._dynamo.eval_frame": "untraceable-call",
}

NATIVE_CLASSES: frozenset[type] = frozenset({torch.Size, torch.device, torch.finfo, torch.iinfo})

LEGACY_TENSOR_TYPES: frozenset[type] = frozenset(
    found
    for name, found in vars(torch).items()
    if name.endswith("Tensor") and name != "Tensor" and type(found).__name__ == "tensortype"
)


def _run_native(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """A torch function written in Python that takes tensors."""
    if fn.__globals__.get("__name__") == "torch._tensor":
        tensors.refuse_method(fn.__name__)
    # a distance to measure a loss by: it is called
    if any(isinstance(value, _OF_THE_PROGRAM) for value in (*args, *kwargs.values())):
        return tracer.inline(fn, args, kwargs)
    return tracer.world.torch_call(fn, args, kwargs)


_OF_THE_PROGRAM = (types.FunctionType, types.MethodType, torch.nn.Module, functools.partial)


def _run_our_own(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Methods of our stand-ins and generators: part of the border itself."""
    return native(fn, *args, **kwargs)


def _refuse(code: str) -> Policy:
    def refused(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
        raise GraphBreak(code, f"{fn.__module__}.{fn.__qualname__}")

    return refused


_REFUSED: dict[str, Policy] = {module: _refuse(code) for module, code in _REFUSED_MODULES.items()}
_LOGGING_METHODS = frozenset({"debug", "info", "warning", "warn", "error", "critical", "log", "exception"})


def _logging(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Logging of constants is done after the graph; of anything else, in a graph break."""
    if fn.__name__ not in _LOGGING_METHODS or fn.__name__ == "exception" or "exc_info" in kwargs:
        return tracer.inline(fn, args, kwargs)
    shown = args[1:] if isinstance(args[0], logging.Logger) else args
    for value in (*shown, *kwargs.values()):
        # handlers are given the object, and format it as they like
        if type(value) not in _FIXED and type(value) is not tuple:
            raise GraphBreak("untraceable-call", f"logging of a {tracer.world.type_of(value).__qualname__}")
    return tracer.world.effects.defer(fn, args, kwargs)


def defer_output(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> None:
    """Notes an output call (print, warning, log record), if what it shows cannot change until the end of the frame."""
    world = tracer.world
    shown = tuple(_fixed(world, value) for value in args)
    stack = tracer.stack()
    keywords = {name: _fixed(world, value) for name, value in kwargs.items()}
    world.effects.defer(fn, shown, keywords, str(stack[-1]) if stack else "")


_FIXED = (
    str,
    int,
    float,
    bool,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.SymInt,
    torch.Size,
    type,
    types.FunctionType,
)


def _fixed(world: Any, value: Any) -> Any:
    """What output shows of a value, as it is now."""
    if type(value) in _FIXED or isinstance(value, type):
        return value
    if isinstance(value, torch.Tensor):
        raise GraphBreak("print-tensor", "a tensor turned into text")
    return world.format(value, 1, "")


# What runs while a program is captured. Public functions (decorators, marks) have rows of their own.
_OF_CAPTURE = tuple(f"fusewright.{room}." for room in ("capture", "graph", "operators", "record", "sizes"))
# What stands for Python code of a program's.
_INTERPRETED = frozenset({
    "fusewright.operators.higher_order", "fusewright.operators.decompositions.attention_modules",
    "fusewright.operators.decompositions.flex_attention",
})  # fmt: skip


def policy(origin: str) -> Policy | None:
    """The rule for Python functions of the module `origin`; None: interpret."""
    if origin.startswith("torch"):
        if origin in _NATIVE_MODULES or origin.startswith(_NATIVE_PACKAGES):
            return _run_native
        if origin in call_transforms.MODULES:
            return call_transforms.transform
        return _REFUSED.get(origin) or call_autograd.POLICIES.get(origin) or call_marked.POLICIES.get(origin)
    if origin.startswith("fusewright."):
        return _run_our_own if origin.startswith(_OF_CAPTURE) and origin not in _INTERPRETED else None
    if origin == "logging":
        return _logging
    return None


# C functions that answer from a setting that a capture is guarded on (STATE), from their arguments, or that never
# change.
_ANSWERS = frozenset({
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "is_autocast_cache_enabled", "get_default_dtype",
    "is_any_autocast_enabled",
    "_is_any_autocast_enabled", "_get_deterministic_algorithms", "_is_deterministic_algorithms_warn_only_enabled",
    "_get_deterministic_algorithms_warn_only", "get_num_threads", "_get_float32_matmul_precision",
    "_is_torch_function_enabled",
    "_len_torch_function_stack", "_len_torch_dispatch_stack", "_is_torch_function_mode_enabled",
    "_is_torch_function_all_disabled",
    "_functorch_interpreter_stack", "maybe_current_level", "_is_functorch_wrapped_tensor",
    "is_functorch_wrapped_tensor",
    "_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic", "_jit_is_script_object",
    "is_scripting",
    "is_autocast_available", "_is_autocast_available", "_cuda_isInBadFork", "_cuda_getDeviceCount", "_cuda_isBuilt",
    "_has_mkldnn",
    "_get_privateuse1_backend_name", "_accelerator_getAccelerator",
    "_mps_is_available", "_is_key_in_tls", "_are_functorch_transforms_active",
})  # fmt: skip

# C functions that answer from other settings: a guard asks them again.
_ASKED_AGAIN = frozenset({
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "_get_tracing_state", "_is_tracing", "_get_cudnn_enabled",
    "_get_mkldnn_enabled",
    "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_sdp_priority_order",
    "_get_overrideable_sdp_enabled",
    "_get_overlap_policy",
    "_jit_get_profiling_executor",
})  # fmt: skip

# C functions that change a setting; World restores it at the end of the attempt, finish replays what is left at its
# end.
_SETTERS = frozenset({
    "_set_grad_enabled", "set_autocast_enabled", "set_autocast_dtype", "autocast_increment_nesting",
    "autocast_decrement_nesting",
    "clear_autocast_cache",
    "set_autocast_cache_enabled", "set_autocast_cpu_enabled", "set_autocast_cpu_dtype", "set_autocast_gpu_dtype",
})  # fmt: skip
_OF_PROCESS = frozenset(write.__name__ for _, write in context.SETTINGS)

# Operators whose answer is not a tensor and that are no part of a graph.
_QUERIES = frozenset({
    "is_floating_point", "is_complex", "numel", "is_same_size", "result_type", "can_cast", "promote_types",
    "is_signed", "is_conj",
    "is_neg", "is_inference",
    "get_device", "is_storage", "_is_zerotensor", "is_vulkan_available", "_has_compatible_shallow_copy_type",
})  # fmt: skip


def call_c_function(tracer: Tracer, fn: Any, origin: str, args: Args, kwargs: Kwargs) -> Any:
    """A builtin function of one of torch's C modules."""
    name = fn.__name__
    if origin in _OPERATOR_MODULES:
        return call_operator(tracer, fn, args, kwargs)
    if name in _SETTERS or name in _OF_PROCESS:
        if name == "_set_grad_enabled" and args[0]:
            tracer.world.requires_grad_matters = True
            if tracer.world.wrappers.without_history:
                raise Retry(no_gradients=False)
        tracer.world.settings_changed |= name in _OF_PROCESS
        # At torch level the settings are nodes of the graph; at ATen level their effect is in what is recorded.
        return (
            tracer.world.torch_call(fn, args, kwargs)
            if tracer.recorder.level == "torch"
            else native(fn, *args, **kwargs)
        )
    if name in _ANSWERS or (args and isinstance(args[0], PLACEMENTS)):
        return native(fn, *args, **kwargs)
    if name in _ASKED_AGAIN and not args and not kwargs:
        answer = native(fn)
        tracer.world.guard_answer(fn, (), answer)
        return answer
    if args and type(args[0]) is torch._C._InferenceMode:
        return inference_guard(tracer, name, args[0], args[1:])
    raise GraphBreak("untraceable-call", f"{origin}.{name}")


def call_operator(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.add` and the like."""
    if fn.__name__ in _QUERIES:
        return native(fn, *args, **kwargs)
    if fn.__name__ == "is_nonzero":
        raise GraphBreak("data-dependent-branch", "torch.is_nonzero")
    return tracer.world.torch_call(fn, args, kwargs)


def _module_attribute(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`torch.NAME` of a module that PyTorch loads when it is first asked for (flex_attention asks for one). Loading is
    no effect that a program can tell: eager does it as well, once."""
    (name,) = args
    if name not in vars(now).get("_lazy_modules", ()):
        return tracer.inline(vars(now)["__getattr__"], args, kwargs)
    module = unwatched(importlib.import_module, f"torch.{name}")
    return tracer.world.load(module, tracer.world.constant(module, name))


def _always(answer: object) -> Row:
    return lambda tracer, args, kwargs: answer


def _is_exporting(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    return tracer.options.exporting


def _state_context(code: str, what: str) -> Row:
    def refused(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        raise GraphBreak(code, what)

    return refused


def _inference_mode(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """What `with torch.inference_mode()` enters. The compiled code runs under it as a whole, which is right where only
    its own tensors escape (attempt.py looks)."""
    if not tracer.world.may_infer or len(args) != 1 or args[0] is not True or kwargs:
        raise GraphBreak("inference-mode", "torch.inference_mode inside compiled code")
    return native(torch._C._InferenceMode, True)


def inference_guard(tracer: Tracer, name: str, guard: Any, args: Args) -> Any:
    """A method of that object."""
    world = tracer.world
    if name == "__enter__":
        world.inference_guards.append(guard)
        world.infers = True
    elif name == "__exit__" and world.inference_guards and world.inference_guards[-1] is guard:
        world.inference_guards.pop()
    else:
        raise GraphBreak("inference-mode", f"{name} of an inference mode")
    return native(getattr(guard, name), *((None, None, None) if args else ()))


def _query(fn: Callable[..., Any]) -> Row:
    return lambda tracer, args, kwargs: native(fn, *(for_native(tracer.world, value) for value in args), **kwargs)


def _enter_function_mode(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """What `with mode` of a program's own torch function mode calls. (A device, which is one too, has another.)"""
    raise GraphBreak("open-context", f"{tracer.world.type_of(args[0]).__qualname__}, which sees each torch function")


def _current_gpu(tracer: Tracer) -> int:
    """The current GPU's number, which a guard asks for again: contexts that change it are graph breaks."""
    found = native(torch.cuda.current_device)
    tracer.world.guard_answer(torch.cuda.current_device, (), found)
    return found  # type: ignore[no-any-return]


def _of_gpu(fn: Callable[..., Any]) -> Row:
    """A question about a GPU, by default the current one, whose answer never changes."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        (device,) = (*args, *kwargs.values()) or (None,)
        named = isinstance(device, int) or (
            isinstance(device, (str, torch.device)) and torch.device(device).index is not None
        )
        return native(fn, device if named else _current_gpu(tracer))

    return call


def _is_tensor(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return tracer.call(builtins.isinstance, ((*args, *kwargs.values())[0], torch.Tensor))


def _check_tensor(position: int) -> Row:
    """torch._check_tensor_all: an assertion in the graph. When it fails, the call is repeated eagerly, for eager's own
    error."""

    def check(tracer: Tracer, args: Args, kwargs: Kwargs) -> None:
        condition = args[position] if len(args) > position else kwargs.get("cond")
        world = tracer.world
        if not isinstance(condition, torch.Tensor) or condition.dtype is not torch.bool:
            raise UserException(TypeError("cond must be a tensor of dtype torch.bool"))
        if condition.device.type != "cpu":
            # on a GPU a failed assertion ends the process
            raise GraphBreak("data-dependent-branch", "a check of a tensor's values")
        held = world.torch_call(torch._C.TensorBase.all, (condition,), {})
        world.torch_call(torch._assert_async, checking(tracer.recorder.level, held), {})

    return check


def _check(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch._check of a size: stated, and so learnt; of one that depends on data it is checked at run time, where a
    call that fails it is repeated eagerly for eager's own error. What fails now is interpreted."""
    condition = args[0] if args else kwargs.get("cond")
    if isinstance(condition, torch.SymBool):
        condition = condition.node.expect_true("", 0)
    if condition is True:
        return None
    check: Any = torch._check
    return tracer.inline(
        check, (condition, *args[1:]), {name: value for name, value in kwargs.items() if name != "cond"}
    )


def _check_is_size(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    size = args[0] if args else kwargs.get("i")
    if not isinstance(size, torch.SymInt):
        check: Any = torch._check_is_size
        return tracer.inline(check, args, kwargs)
    most = kwargs.get("max")
    for condition in (size >= 0, True if most is None else size <= most):
        _check(tracer, (condition,), {})
    return None


def _interpreted(find: Callable[[Any], types.FunctionType], module: str) -> Row:
    """A function of a module whose other functions are refused."""
    return lambda tracer, args, kwargs: tracer.inline(find(sys.modules[module]), args, kwargs)


def _checking(fn: Any) -> Row:
    """A function of PyTorch's that reads a tensor in order to raise: the interpreter makes that a check in the
    graph."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        return (
            tracer.inline(fn, args, kwargs)
            if tracer.recorder.level == "aten"
            else tracer.world.torch_call(fn, args, kwargs)
        )

    return call


def _graph_break(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    raise GraphBreak("explicit-graph-break", str(kwargs.get("msg", kwargs.get("reason", args[0] if args else ""))))


def _call_compiled_module(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    return modules.call_module(tracer.world, _original(tracer, args), args[1:], kwargs)


def _original(tracer: Tracer, args: Args) -> Any:
    """The module that a compiled one was made from (its class is its own, so the guard on it finds the module)."""
    original = args[0]._fusewright_original
    return tracer.world.load(original, tracer.world.constant(original, "original"))


def _follow_class(tracer: Tracer, args: Args, kwargs: Kwargs) -> bool:
    """The class of a module that stands for another one is as it shall be before anything is captured of it."""
    _original(tracer, args)  # its class is guarded
    if args[0]._fusewright_follow():
        raise Retry()
    return False


def _call_optimized_module(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A module that torch.compile has compiled: the module that it was made from."""
    return tracer.call(tracer.world.getattr(args[0], "_orig_mod"), args[1:], kwargs)


def _nothing(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """A context manager that does nothing."""
    return tracer.call(contextlib.nullcontext, ())


def _call_disabled_module(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    name, reason = type(args[0]._fusewright_original).__qualname__, args[0]._fusewright_reason
    raise GraphBreak("disabled-function", f"a {name} ({reason})" if reason else f"a {name}")


# By module and qualified name, so that modules which PyTorch loads late are not imported for their sake.
NAMED_ROWS: dict[tuple[str, str], Row] = {
    **call_autograd.NAMED_ROWS,
    ("torch.compiler", "is_compiling"): _always(True),
    ("torch.compiler", "is_dynamo_compiling"): _always(True),
    ("torch.compiler", "is_exporting"): _is_exporting,
    ("torch._dynamo.external_utils", "is_compiling"): _always(True),
    ("torch._dynamo", "is_compiling"): _always(True),
    ("torch._utils_internal", "is_compiling"): _always(True),
    ("torch._dynamo.decorators", "graph_break"): _graph_break,
    # torch.compile, once used, counts the modules that are made; its books are no concern of the program.
    ("torch._dynamo.mutation_guard", "GenerationTracker.tag"): _always(None),
    ("torch._dynamo.decorators", "mark_static"): call_marked.mark_static,
    ("torch._dynamo.decorators", "mark_static_address"): _always(None),
    ("torch._dynamo.decorators", "mark_dynamic"): _always(
        None
    ),  # what is computed inside is as dynamic as what it comes from
    ("torch._dynamo.decorators", "maybe_mark_dynamic"): _always(None),
    ("torch._dynamo.decorators", "mark_unbacked"): _always(None),
    ("torch.compiler", "cudagraph_mark_step_begin"): _always(None),
    ("fusewright.decorators", "is_compiling"): _always(True),
    ("fusewright.decorators", "is_exporting"): _is_exporting,
    ("fusewright.decorators", "cudagraph_mark_step_begin"): _always(None),
    ("fusewright.decorators", "graph_break"): _graph_break,
    ("fusewright.module", "CompiledModuleBase.__call__"): _call_compiled_module,
    ("fusewright.module", "DisabledModuleBase.__call__"): _call_disabled_module,
    ("fusewright.module", "TwinBase._fusewright_follow"): _follow_class,
    ("fusewright.tensor_marks", "mark_dynamic"): _always(None),
    ("fusewright.tensor_marks", "maybe_mark_dynamic"): _always(None),
    ("fusewright.tensor_marks", "mark_static"): call_marked.mark_static,
    ("torch._jit_internal", "is_scripting"): _always(False),
    ("torch.jit._trace", "is_tracing"): _always(False),
    ("torch.jit._script", "is_scripting"): _always(False),
    **call_attention.NAMED_ROWS,
    **call_collectives.NAMED_ROWS,
    **triton_kernels.NAMED_ROWS,
    # Settings of torch.compile say nothing about what a program computes.
    ("torch._dynamo.decorators", "error_on_graph_break"): _nothing,
    ("torch._dynamo.decorators", "patch_dynamo_config"): _nothing,
    ("torch._dynamo.decorators", "DynamoConfigPatchProxy.__enter__"): _always(None),
    ("torch._dynamo.decorators", "DynamoConfigPatchProxy.__exit__"): _always(None),
    ("torch._dynamo.eval_frame", "OptimizedModule.__call__"): _call_optimized_module,
    ("torch._dynamo.eval_frame", "OptimizedModule.__getattr__"): _interpreted(
        lambda module: module.OptimizedModule.__getattr__, "torch._dynamo.eval_frame"
    ),
    ("torch._VF", "VFModule.__getattr__"): lambda tracer, args, kwargs: native(
        getattr, torch._C._VariableFunctions, args[1]
    ),
    ("torch.overrides", "TorchFunctionMode.__init__"): _always(None),
    ("torch.overrides", "TorchFunctionMode.__enter__"): _enter_function_mode,
    ("torch", "is_tensor"): _is_tensor,
    ("torch", "__getattr__"): _module_attribute,
    ("torch", "_check"): _check,
    ("torch", "_check_is_size"): _check_is_size,
    ("torch", "_check_tensor_all"): _check_tensor(0),
    ("torch", "_check_tensor_all_with"): _check_tensor(1),
    ("torch", "is_storage"): _always(False),
    ("torch.fx._symbolic_trace", "is_fx_tracing"): _always(False),
    ("torch.fx._symbolic_trace", "is_fx_symbolic_tracing"): _always(False),
    ("torch.cuda", "is_available"): _query(torch.cuda.is_available),
    ("torch.cuda", "device_count"): _query(torch.cuda.device_count),
    ("torch.cuda", "current_device"): lambda tracer, args, kwargs: _current_gpu(tracer),
    ("torch.cuda", "get_device_capability"): _of_gpu(torch.cuda.get_device_capability),
    ("torch.cuda", "get_device_name"): _of_gpu(torch.cuda.get_device_name),
    ("torch.cuda", "get_device_properties"): _of_gpu(torch.cuda.get_device_properties),
    ("torch.backends.cuda", "is_built"): _query(torch.backends.cuda.is_built),
    ("torch", "get_default_device"): _query(torch.get_default_device),
    ("torch", "get_float32_matmul_precision"): _query(torch.get_float32_matmul_precision),
    ("torch", "are_deterministic_algorithms_enabled"): _query(torch.are_deterministic_algorithms_enabled),
    ("torch.amp.autocast_mode", "is_autocast_available"): _query(torch.amp.autocast_mode.is_autocast_available),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.forward"): _state_context(
        "distributed-call", "DistributedDataParallel"
    ),
    ("torch.autograd.profiler", "record_function.__init__"): lambda tracer, args, kwargs: tracer.world.setattr(
        args[0], "name", args[1]
    ),
    ("torch.autograd.profiler", "record_function.__enter__"): lambda tracer, args, kwargs: args[0],
    ("torch.autograd.profiler", "record_function.__exit__"): _always(None),
}


def _one_hot(fn: Any, tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """PyTorch's kernel looks at the classes, its form for tracing does not: that is a check in the graph. (On a GPU the
    device asserts.)"""
    world = tracer.world
    made = world.torch_call(fn, args, kwargs)
    if tracer.recorder.level != "aten":
        return made
    # the form for tracing keeps the classes' layout
    made = world.torch_call(torch._C.TensorBase.contiguous, (made,), {})
    classes = args[0] if args else kwargs.get("self", kwargs.get("tensor"))
    if world.recorder_owns(classes) and classes.device.type == "cpu":  # type: ignore[union-attr]
        fit = tracer.call(
            operator.and_, (tracer.call(torch.ge, (classes, 0)), tracer.call(torch.lt, (classes, made.shape[-1])))
        )
        world.torch_call(torch._assert_async, (world.torch_call(torch._C.TensorBase.all, (fit,), {}),), {})
    return made


def _einsum(fn: Any, tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """In which order more than two operands are contracted, and so how the result is laid out, is a setting that
    PyTorch's own Python reads."""
    operands = args[1] if len(args) == 2 and type(args[1]) in (list, tuple) else args
    is_listed = len(args) == 2 and operands is args and not isinstance(args[1], torch.Tensor)  # in an object of its own
    if is_listed or sum(isinstance(value, torch.Tensor) for value in operands) > 2:
        for name in ("enabled", "strategy"):
            found = native(getattr, torch.backends.opt_einsum, name)
            tracer.world.guard_answer(getattr, (torch.backends.opt_einsum, name), found)
    return tracer.world.torch_call(fn, args, kwargs)


def _decomposed(fn: Any, decomposition: Callable[..., Any]) -> Row:
    """The row of a function that may be recorded as other operators."""

    def call(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        written = as_written(tracer.world, fn)
        made = decomposition(tracer.recorder, tracer.world.torch_call, args, kwargs) if written else None
        return tracer.world.torch_call(fn, args, kwargs) if made is None else made

    return call


def _written_out(function: Any) -> Row:
    """The row of a function that is interpreted as `function`."""
    return lambda tracer, args, kwargs: tracer.inline(function, args, kwargs)


ROWS: list[tuple[Any, Row]] = [
    (torch._C._log_api_usage_once, _always(None)),
    *call_collectives.ROWS,
    *call_autograd.ROWS,
    (torch.nn.functional.one_hot, functools.partial(_one_hot, torch.nn.functional.one_hot)),
    (torch.einsum, functools.partial(_einsum, torch.einsum)),
    *((fn, _decomposed(fn, row)) for fn, row in decompositions.FUNCTIONS.items()),
    *((fn, _written_out(row)) for fn, row in decompositions.INTERPRETED.items()),
    (torch.nn.functional.gaussian_nll_loss, _checking(torch.nn.functional.gaussian_nll_loss)),
    (torch.Size.numel, lambda tracer, args, kwargs: native(torch.Size.numel, *args)),
    (torch._C._InferenceMode, _inference_mode),
    # Methods of symbolic numbers are written in Python, and part of the border.
    *(
        (method, _query(method))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
        for name, method in vars(kind).items()
        if isinstance(method, types.FunctionType) and name != "__init__"
    ),
]
