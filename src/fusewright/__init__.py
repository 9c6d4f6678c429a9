"""fusewright: a just-in-time compiler for PyTorch programs. `model = fusewright.compile(model)`."""

import importlib
from typing import TYPE_CHECKING, Any

from fusewright import _native  # noqa: F401  (first: it refuses subinterpreters, where importing torch hangs)
from fusewright.api import (
    aot,
    compile,
    compile_,
    explain,
    export,
    list_backends,
    load,
    register_backend,
    reset,
    save,
    set_logs,
    set_stance,
)
from fusewright.base import options
from fusewright.base.errors import (
    BackendError,
    CacheWarning,
    DynamicMarkError,
    ExportError,
    FusewrightError,
    GraphBreakError,
    InternalErrorWarning,
    OptionError,
    OptionWarning,
    ProgramFileError,
    ProgramInputError,
    RecompileError,
    RecompileLimitWarning,
)
from fusewright.decorators import (
    allow_in_graph,
    assume_constant_result,
    disable,
    graph_break,
    is_compiling,
    substitute_in_graph,
)
from fusewright.exporting.dims import Dim
from fusewright.tensor_marks import mark_dynamic, mark_static, maybe_mark_dynamic

if TYPE_CHECKING:  # these are imported when they are asked for, by _LAZY: a start does without the tools
    from fusewright.tools.bench import benchmark
    from fusewright.tools.check import check
    from fusewright.tools.patching import patch

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CacheWarning",
    "Dim",
    "DynamicMarkError",
    "ExportError",
    "FusewrightError",
    "GraphBreakError",
    "InternalErrorWarning",
    "OptionError",
    "OptionWarning",
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
    "disable",
    "explain",
    "export",
    "graph_break",
    "is_compiling",
    "list_backends",
    "load",
    "mark_dynamic",
    "mark_static",
    "maybe_mark_dynamic",
    "patch",
    "register_backend",
    "reset",
    "save",
    "set_logs",
    "set_stance",
    "substitute_in_graph",
]


_LAZY = {
    "benchmark": "fusewright.tools.bench",
    "check": "fusewright.tools.check",
    "patch": "fusewright.tools.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fusewright' has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_LAZY[name]), name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if options.environment("FUSEWRIGHT_REPLACE_TORCH_COMPILE"):
    __getattr__("patch")()
