"""The public functions: `compile` and what stands around it.

Takes what users write; gives compiled functions and modules. The compiler itself is imported by the first
`compile` call, so that `import fusewright` stays cheap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.base import marks, options as option_tables
from fusewright.base.errors import OptionError, near_misses
from fusewright.base.events import STREAM
from fusewright.process import PROCESS


class _Lazy:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from fusewright import compiler, module as modules
else:
    compiler, modules = _Lazy("fusewright.compiler"), _Lazy("fusewright.module")
aot_backend, registry = _Lazy("fusewright.backends.aot"), _Lazy("fusewright.backends.registry")
debug_folder = _Lazy("fusewright.tools.debug_folder")
xla = _Lazy("fusewright.backends.xla.backend")
trace, archive = _Lazy("fusewright.exporting.trace"), _Lazy("fusewright.exporting.archive")
packaging, packaged = _Lazy("fusewright.exporting.package"), _Lazy("fusewright.exporting.packaged")
onnx_programs = _Lazy("fusewright.exporting.onnx_programs")
logs, served_cases = _Lazy("fusewright.tools.logs"), _Lazy("fusewright.tools.served_cases")
progress = _Lazy("fusewright.tools.progress")

MANY_OBJECTS = 10_000
"""A walk over so many costs more than a millisecond."""

Callee = TypeVar("Callee", bound=Callable[..., Any])
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class CompileArguments(TypedDict, total=False):
    """What `compile` takes besides the model."""

    fullgraph: bool
    dynamic: bool | None
    backend: str | Callable[..., Any] | None
    mode: Mode | None
    options: Mapping[str, Any] | None
    name: str | None
    disable: bool
    recompile_limit: int | None
    isolate_recompiles: bool
    shapes_spec: Any


@contextlib.contextmanager
def _no_collections(imports: bool = False) -> Iterator[None]:
    """What is made meanwhile stays (the compiler's import: 100,000 objects; a captured program), and on its account
    Python's collector would walk the whole heap, several times. imports: nothing of the program's runs meanwhile, so
    what is made, if it is much, goes to the oldest generation unseen, and what is young of the program's goes along."""
    collects, before = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # (the last question walks through all that is frozen: a second for ten million objects)
            if imports and gc.get_count()[0] - before > MANY_OBJECTS > gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@overload
def compile(model: Callee, **arguments: Unpack[CompileArguments]) -> Callee: ...


@overload
def compile(model: None = None, **arguments: Unpack[CompileArguments]) -> Callable[[Callee], Callee]: ...


def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: Any = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Any = None,
) -> Any:
    """Compiles a function, a method or an nn.Module; without `model`, gives a decorator.

    Lazy: nothing is compiled before the first call. A module comes back as a module that shares the original's state; a
    function as a function. What cannot be compiled runs eagerly with the same result.

    - `fullgraph`: raise GraphBreakError at the first graph break, instead of running that part eagerly
    - `dynamic`: None: sizes are static until they change; True: symbolic from the start; False: never symbolic
    - `backend`: "native" (default), another name of `list_backends()`, or a callable backend(gm, example_inputs)
    - `mode`: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    - `options`: typed options (fusewright.base.options.OPTIONS); they refine the mode
    - `name`: stands before the function's name in logs and reports
    - `disable`: return `model` as it is
    - `recompile_limit`: versions kept for one function before new cases run eagerly (8)
    - `isolate_recompiles`, `shapes_spec`: of torch.compile; versions are always apart, an OptionError says what to use

    Raises OptionError for a wrong argument, naming the value and the choices.
    """
    given: dict[str, Any] = {
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "backend": backend,
        "mode": mode,
        "options": options,
        "name": name,
        "recompile_limit": recompile_limit,
    }
    settings = option_tables.settings(**given)
    if shapes_spec is not None:
        raise OptionError(
            "compile takes no shapes_spec: use fusewright.mark_dynamic(tensor, dim, min=, max=), or dynamic="
        )
    if model is None:
        return functools.partial(compile, disable=disable, **given)
    if isinstance(model, type):
        raise OptionError(
            f"compile takes an instance or a function, got the class {model.__qualname__}: compile an instance of it"
        )
    if not (callable(model) or isinstance(model, classmethod)):
        raise OptionError(
            f"compile takes a function, a method or an nn.Module instance, got {type(model).__name__}: {model!r:.80}"
        )
    with _no_collections(imports=True):
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # the compiler's import makes tensors
            _subscribe()
            # This resolves the backend, so that a wrong name fails here and not at the first call.
            made = compiler.Compiler(settings, _listener(settings))
        if disable or option_tables.environment("FUSEWRIGHT_DISABLE"):
            return model
        return _compile_callable(model, made)


@functools.cache
def _subscribe() -> None:
    """Honours FUSEWRIGHT_LOGS, once in a process, and FUSEWRIGHT_DEBUG at each compile."""
    if option_tables.environment("FUSEWRIGHT_LOGS"):
        logs.set_logs_from_environment()
    if option_tables.environment("FUSEWRIGHT_PROGRESS"):
        progress.start()
    PROCESS.before_compile = _follow_debug


_debugging: list[Any] = []


def _follow_debug() -> None:
    """Subscribes and unsubscribes as FUSEWRIGHT_DEBUG says now: a running program may set it."""
    if bool(_debugging) == option_tables.environment("FUSEWRIGHT_DEBUG"):
        return
    if _debugging:
        STREAM.subscribers[:] = [one for one in STREAM.subscribers if one not in _debugging]
        _debugging.clear()
    else:
        _debugging.extend((debug_folder.of_process(), served_cases.listen))
        STREAM.subscribers.extend(_debugging)


def _listener(settings: Any) -> Any:
    """Who hears the events of this compile only."""
    if not settings["trace.enabled"] or option_tables.environment("FUSEWRIGHT_DEBUG"):
        return None
    return debug_folder.of_process()


def _compile_callable(model: Any, made: Any) -> Any:
    model = _original(model)
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        made.skip(
            getattr(model, "original_name", None) or model.name, "torchscript", "it is compiled by TorchScript already"
        )
        return model
    if isinstance(model, torch.nn.Module):
        return modules.compiled_module(model, made.wrap, functools.partial(_recompile, made.settings))
    if isinstance(model, types.FunctionType):
        return made.wrap(model)
    if isinstance(model, (classmethod, staticmethod)):
        return type(model)(_compile_callable(model.__func__, made))
    if isinstance(model, functools.partial):
        return functools.partial(_compile_callable(model.func, made), *model.args, **model.keywords)
    method, owner = (
        (model.__func__, model.__self__) if isinstance(model, types.MethodType) else (type(model).__call__, model)
    )
    method = _original(method)
    if isinstance(method, types.FunctionType):
        return types.MethodType(made.wrap(method), owner)

    def call_object(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call_object.__name__ = call_object.__qualname__ = type(model).__name__
    is_cached = isinstance(model, functools._lru_cache_wrapper)
    # The attributes of any other object are its state, of which a copy would grow old.
    functools.update_wrapper(call_object, model, updated=("__dict__",) if is_cached else ())
    if is_cached:
        vars(call_object).update(cache_info=model.cache_info, cache_clear=model.cache_clear)
    return made.wrap(call_object)


def _original(model: Any) -> Any:
    """What the user wrote, behind compiling and disabling wrappers: the outermost `compile` counts."""
    if isinstance(model, types.MethodType):
        function = _original(model.__func__)
        return model if function is model.__func__ else types.MethodType(function, model.__self__)
    while True:
        namespace = getattr(model, "__dict__", {})
        if type(model) is types.FunctionType and not _made_here(model):
            return model  # functools.wraps copies the marks to a wrapper of the program's
        if isinstance(model, compiler.CompiledFunction) or marks.DISABLED in namespace:
            model = model.__wrapped__
        elif type(model).__module__ == "torch._dynamo.eval_frame" or "_torchdynamo_orig_callable" in namespace:
            model = (
                namespace["_torchdynamo_orig_callable"]
                if "_torchdynamo_orig_callable" in namespace
                else model._orig_mod
            )
        elif hasattr(type(model), "_fusewright_original"):
            model = model._fusewright_original
        else:
            return model


def _made_here(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).startswith(("fusewright.", "torch."))


def _recompile(settings: Any, model: Any) -> Any:
    return _compile_callable(model, compiler.Compiler(settings, _listener(settings)))


def compile_again(model: Any) -> Any:
    """A compile of its own of what `compile` takes, or of something compiled, under the settings of that (breaks are no
    errors)."""
    settings = _settings_of(model)
    return compile(model) if settings is None else _recompile(dataclasses.replace(settings, fullgraph=False), model)


def _settings_of(model: Any) -> Any:
    caller = getattr(model, "_fusewright_caller", None) or getattr(model, "__dict__", {}).get("_compiled_call_impl")
    if caller is not None:
        owner = getattr(getattr(caller, "wrap", None), "__self__", None)  # PyTorch keeps its own compiled call there
        return getattr(owner, "settings", None)
    function = model.__func__ if isinstance(model, types.MethodType) else model
    miss: Any = getattr(function, "miss", None)
    return miss.__self__.settings if isinstance(function, compiler.CompiledFunction) else None


def compile_(module: torch.nn.Module, **arguments: Unpack[CompileArguments]) -> None:
    """Compiles `module` in place: its own calls run compiled code from now on (as `torch.nn.Module.compile` does).

    Takes the arguments of `compile`. The module keeps its identity, class and state. Copies of it, and what is
    unpickled, are not compiled, nor is a `__call__` of its class's own: what that calls of nn.Module's is.
    Raises OptionError when `module` is not an nn.Module.
    """
    if not isinstance(module, torch.nn.Module):
        raise OptionError(f"compile_ takes an nn.Module, got {type(module).__name__}")
    original = _original(module)
    twin = compile(original, **arguments)
    if twin is not original:
        twin._fusewright_caller.in_place = True
        original.__dict__["_compiled_call_impl"] = twin._fusewright_caller  # the slot that nn.Module.__call__ looks at


def reset() -> None:
    """Clears everything compiled in this process (not the disk cache)."""
    PROCESS.reset()


class set_stance:
    """Sets how compiled functions behave: "default"; "force_eager" (run everything eagerly); "eager_on_recompile" (use
    what is compiled, run new cases eagerly); "fail_on_recompile" (raise RecompileError); "eager_then_compile" and
    "aot_eager_then_compile" (run the first call of each function eagerly).

    As a function it lasts until the next call; as a context manager or a decorator it is undone at the end.
    """

    def __init__(
        self, stance: str = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: Any = None
    ) -> None:
        if skip_guard_eval_unsafe:
            raise OptionError("set_stance: guards are never left out, as results could be wrong")
        if force_backend is not None:
            raise OptionError("set_stance takes no force_backend: use set_default_backend before compile()")
        if stance not in option_tables.STANCES:
            raise OptionError(f"unknown stance {stance!r}: {near_misses(str(stance), option_tables.STANCES)}")
        self._stance, self._previous = stance, PROCESS.stance
        PROCESS.set_stance(stance)

    def __enter__(self) -> set_stance:
        return self

    def __exit__(self, *exc_info: object) -> None:
        PROCESS.set_stance(self._previous)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        stance = self._stance
        PROCESS.set_stance(self._previous)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            previous = PROCESS.stance
            PROCESS.set_stance(stance)
            try:
                return fn(*args, **kwargs)
            finally:
                PROCESS.set_stance(previous)

        return run


def set_default_backend(backend: str | Callable[..., Any] | None) -> None:
    """Sets the backend of later `compile` calls that name none; None goes back to "native" (or FUSEWRIGHT_BACKEND).

    Raises OptionError for an unknown name.
    """
    if backend is not None:
        registry.resolve(backend)
    option_tables.set_default_backend(backend)


def get_default_backend() -> str | Callable[..., Any]:
    """The backend of `compile` where none is named."""
    backend: str | Callable[..., Any] = option_tables.default_backend()
    return backend


def list_backends() -> list[str]:
    """The names that `compile(backend=...)` accepts, sorted."""
    return registry.list_backends()


def register_backend(compiler: Any = None, name: str | None = None, *, tracing_context: bool = False) -> Any:
    """Decorator: registers `compiler(gm, example_inputs)` as a backend; see backends.registry.register_backend."""
    return registry.register_backend(compiler, name, tracing_context=tracing_context)


def aot(fw_compiler: Any, bw_compiler: Any = None, partition: Any = None) -> Any:
    """A backend for `compile(backend=...)` made of compilers of functional ATen graphs: fw_compiler(gm, example_inputs)
    for the forward, bw_compiler for the backward (default: the same), and a partition of the joint graph; see
    backends.aot.aot."""
    return aot_backend.aot(fw_compiler, bw_compiler, partition)


def export(model: Any, args: Any = None, kwargs: Any = None, *, dynamic_shapes: Any = None) -> Any:
    """Captures `model` whole, as a program that can be saved, loaded and run elsewhere: an ExportedProgram.

    args, kwargs    example arguments; no value of theirs becomes part of the program
    dynamic_shapes  which sizes may change, by argument: {"x": {0: fusewright.Dim("batch", max=256)}}; also a tuple or a
                    list in the order of the arguments, nested as they are, and torch.export's own Dim

    An example's size of 1 does not fix a named size. Raises GraphBreakError where the program cannot be captured whole,
    and ExportError, naming the dimension and the line, for a size that the program does not leave free. Also takes a
    torch.export.ExportedProgram, without arguments.
    """
    with _no_collections():
        return trace.export(_original(model), args, kwargs, dynamic_shapes=dynamic_shapes)


def save(program: Any, file: Any) -> None:
    """Writes an exported program to a path, or to a file that is open for writing bytes: docs/export-format.md."""
    archive.save(program, file)


def load(file: Any) -> Any:
    """The exported program of a path, an open file or bytes. Nothing of the file is executed. Raises ProgramFileError,
    which names the part, for a file that is damaged."""
    return archive.load(file)


def stablehlo(f: Any, *args: Any) -> str:
    """What backend "xla" gives to XLA for this call of `f`, as StableHLO. Needs jax."""
    return _xla_text(f, args, "stablehlo")


def hlo(f: Any, *args: Any, optimized: bool = False) -> str:
    """The same as HLO; `optimized`: after XLA's own passes, fusion among them. Needs jax."""
    return _xla_text(f, args, "optimized" if optimized else "hlo")


def _xla_text(f: Any, args: tuple[Any, ...], kind: str) -> str:
    texts = xla.Texts(kind)
    with torch.no_grad():
        compile(f, backend=texts.backend, fullgraph=True)(*args)
    return "\n".join(texts.texts)


def package(
    program: Any,
    file: Any,
    *,
    targets: str | tuple[str, ...] = ("native",),
    options: Mapping[str, Any] | None = None,
    sign_key: Any = None,
    standalone: bool = False,
) -> None:
    """Writes an exported program, or several by name that share their weights, with the machine code that runs it, to a
    path or to a file that is open for writing bytes: docs/export.md.

    targets   processors to compile for: "native", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"; for programs on a
              GPU architectures: "native" (this machine's), "sm_80", "sm_90", ...
    options   of the compile, as `compile` takes them
    sign_key  an Ed25519 private key (of the package cryptography, or 32 bytes) to sign the file with
    standalone  every step is a generated kernel: the file runs without Python and PyTorch too (docs/export.md)

    The code is for inference on CPUs. Raises ExportError for a program that has none.
    """
    with _no_collections():
        packaging.package(program, file, targets, options, sign_key, standalone)


def load_package(file: Any, *, verify_key: Any = None, target: str | None = None) -> Any:
    """The programs of a package, ready to be called: from a path, an open file or bytes. Nothing is captured or
    compiled, unless no code in the file runs on this machine.

    verify_key  an Ed25519 public key (or its 32 bytes): a package that was not signed by it is refused
    target      whose code to use; by default the best that runs here

    The file's machine code runs in this process: load packages only from those whom you trust. Raises ProgramFileError,
    which names the part, for a file that is damaged.
    """
    return packaged.load_package(file, verify_key, target)


def to_onnx(program: Any, path: Any) -> None:
    """Writes an exported program as an ONNX model. Sizes that may change stay so, under their names.

    Needs the packages onnx and onnxscript (`pip install fusewright[onnx]`): OptionError without them. Raises
    ExportError for a program that writes to buffers or inputs, which ONNX models do not.
    """
    onnx_programs.to_onnx(program, path)


def set_logs(**artifacts: Any) -> None:
    """Turns log artifacts on or off: `set_logs(graph_breaks=True, recompiles=True)`; a logging level may be given
    instead of True.

    Artifacts: see fusewright.tools.logs.ARTIFACTS. Records go to loggers `fusewright.<artifact>`.
    """
    logs.set_logs(**artifacts)
