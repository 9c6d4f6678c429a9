"""fusewright: a just-in-time compiler for PyTorch programs. `model = fusewright.compile(model)`."""

from fusewright import _native  # noqa: F401  (first: it refuses subinterpreters, where importing torch hangs)
from fusewright.api import (
    aot,
    compile,
    compile_,
    explain,
    export,
    list_backends,
    load,
    minify,
    register_backend,
    reset,
    save,
    set_logs,
    set_stance,
)
from fusewright.base.errors import (
    BackendError,
    CacheWarning,
    DynamicMarkError,
    ExportError,
    FusewrightError,
    GraphBreakError,
    InternalErrorWarning,
    OptionError,
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
    "ProgramFileError",
    "ProgramInputError",
    "RecompileError",
    "RecompileLimitWarning",
    "allow_in_graph",
    "aot",
    "assume_constant_result",
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
    "minify",
    "register_backend",
    "reset",
    "save",
    "set_logs",
    "set_stance",
    "substitute_in_graph",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
