"""fusewright: a just-in-time compiler for PyTorch programs. `model = fusewright.compile(model)`."""

from fusewright.api import (
    aot,
    compile,
    compile_,
    disable,
    explain,
    graph_break,
    is_compiling,
    list_backends,
    register_backend,
    reset,
    set_logs,
    set_stance,
)
from fusewright.errors import (
    BackendError,
    FusewrightError,
    GraphBreakError,
    InternalErrorWarning,
    OptionError,
    RecompileError,
    RecompileLimitWarning,
)

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "FusewrightError",
    "GraphBreakError",
    "InternalErrorWarning",
    "OptionError",
    "RecompileError",
    "RecompileLimitWarning",
    "aot",
    "compile",
    "compile_",
    "disable",
    "explain",
    "graph_break",
    "is_compiling",
    "list_backends",
    "register_backend",
    "reset",
    "set_logs",
    "set_stance",
]
