"""fusewright: a just-in-time compiler for PyTorch programs. `model = fusewright.compile(model)`."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 15):
    raise ImportError(f"fusewright runs on Python 3.11 to 3.14; this is {sys.version.split()[0]}")

from fusewright import _native  # noqa: F401  (first: it refuses subinterpreters, where importing torch hangs)
from fusewright.api import (
    aot,
    compile,
    compile_,
    export,
    get_default_backend,
    hlo,
    list_backends,
    load,
    load_package,
    package,
    register_backend,
    reset,
    save,
    set_default_backend,
    set_logs,
    set_stance,
    stablehlo,
    to_onnx,
)
from fusewright.base import options as _options
from fusewright.base.errors import (
    BackendError,
    CacheWarning,
    CollectiveMismatch,
    DynamicMarkError,
    ExportError,
    FusewrightError,
    GraphBreakError,
    InternalErrorWarning,
    OptionError,
    OptionWarning,
    OutOfBoundsError,
    ProgramFileError,
    ProgramInputError,
    RecompileError,
    RecompileLimitWarning,
)
from fusewright.base.options import config
from fusewright.decorators import (
    allow_in_graph,
    assume_constant_result,
    cudagraph_mark_step_begin,
    disable,
    graph_break,
    is_compiling,
    is_exporting,
    nested_compile_region,
    substitute_in_graph,
    wrap_numpy,
)
from fusewright.tensor_marks import mark_dynamic, mark_static, maybe_mark_dynamic
from fusewright.tools import logs as _logs

if TYPE_CHECKING:  # these are imported when they are asked for, by _LAZY: a start does without them
    from fusewright.exporting.dims import Dim
    from fusewright.tools.bench import benchmark
    from fusewright.tools.bundle import load_cache_artifacts, save_cache_artifacts
    from fusewright.tools.check import check
    from fusewright.tools.explain import explain
    from fusewright.tools.minify import minify
    from fusewright.tools.patching import patch
    from fusewright.tools.report import report

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CacheWarning",
    "CollectiveMismatch",
    "Dim",
    "DynamicMarkError",
    "ExportError",
    "FusewrightError",
    "GraphBreakError",
    "InternalErrorWarning",
    "OptionError",
    "OptionWarning",
    "OutOfBoundsError",
    "ProgramFileError",
    "ProgramInputError",
    "RecompileError",
    "RecompileLimitWarning",
    "allow_in_graph",
    "aot",
    "assume_constant_result",
    "benchmark",
    "check",
    "compile",
    "compile_",
    "config",
    "cudagraph_mark_step_begin",
    "disable",
    "explain",
    "export",
    "get_default_backend",
    "graph_break",
    "hlo",
    "is_compiling",
    "is_exporting",
    "list_backends",
    "load",
    "load_cache_artifacts",
    "load_package",
    "mark_dynamic",
    "mark_static",
    "maybe_mark_dynamic",
    "minify",
    "nested_compile_region",
    "package",
    "patch",
    "register_backend",
    "report",
    "reset",
    "save",
    "save_cache_artifacts",
    "set_default_backend",
    "set_logs",
    "set_stance",
    "stablehlo",
    "substitute_in_graph",
    "to_onnx",
    "wrap_numpy",
]


_LAZY = {
    "Dim": "fusewright.exporting.dims",
    "benchmark": "fusewright.tools.bench",
    "check": "fusewright.tools.check",
    "explain": "fusewright.tools.explain",
    "minify": "fusewright.tools.minify",
    "load_cache_artifacts": "fusewright.tools.bundle",
    "save_cache_artifacts": "fusewright.tools.bundle",
    "patch": "fusewright.tools.patching",
    "report": "fusewright.tools.report",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fusewright' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_LAZY[name]), name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if _logs.help_wanted():
    _logs.print_help()
    raise SystemExit  # who asks for help wants to read it, not to wait for what the program prints after it

if _options.environment("FUSEWRIGHT_REPLACE_TORCH_COMPILE"):
    __getattr__("patch")()
