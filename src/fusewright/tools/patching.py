"""`fusewright.patch`: programs and libraries that call `torch.compile` get fusewright, without an edit.

Takes nothing; replaces `torch.compile`, `nn.Module.compile` and the functions of `torch.compiler` until it is undone.
Always holds: what is replaced is written in one table; the last patch that is undone restores what was there before the
first one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from fusewright import api, decorators
from fusewright.base.errors import warn_once
from fusewright.base.options import CAPTURE_OPTIONS, OPTIONS
from fusewright.tools import bundle

PEER_BACKENDS = {"inductor": None, "fusewright": None}
"""Backends that mean: the compiler's own. None is the default backend."""
PEER_CONFIG = "torch._dynamo.config"
PEER_OPTIONS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
"""Settings of PyTorch's capture that are options of ours: what a library has set there counts."""

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""What Lightning calls instead of the module. It compiles them where it meets PyTorch's own wrapper."""


def _arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of torch.compile as ours. Options of other compilers are left out, and a warning says which."""
    given = dict(arguments)
    given.pop("shapes_spec", None)  # it saves recompiles, and changes no result
    backend, options = given.get("backend"), dict(given.get("options") or {})
    options.pop("guard_filter_fn", None)  # every check is kept
    if isinstance(backend, str):
        given["backend"] = backend = PEER_BACKENDS.get(backend, backend)
    if not callable(backend):
        known = CAPTURE_OPTIONS if backend else OPTIONS
        unknown = {name for name, value in options.items() if name not in known or not _fits(name, value)}
        if unknown:
            names = ", ".join(sorted(unknown))
            warn_once(f"fusewright leaves out options of torch.compile that it does not have: {names}")
        theirs = sys.modules.get(PEER_CONFIG)
        options = {name: value for name, value in options.items() if name not in unknown}
        options |= {name: True for name in PEER_OPTIONS if getattr(theirs, name, False) is True}
    if backend and not callable(backend):
        given["mode"] = None  # PyTorch's own backends leave modes unread as well
    given["options"] = options or None
    return given


def _fits(name: str, value: Any) -> bool:
    return OPTIONS[name].type in (type(value), float)


def _compile(model: Any = None, **arguments: Any) -> Any:
    """torch.compile, replaced by fusewright (fusewright.patch)."""
    given = _arguments(arguments)
    compiled = api.compile(model, **given)
    for name, base in ((name, base) for name in STEPS for base in _learners() if isinstance(model, base)):
        if getattr(type(model), name, None) is not getattr(base, name, None):
            setattr(compiled, name, api.compile(getattr(compiled, name), **given))
    return compiled


def _learners() -> tuple[type, ...]:
    """Lightning's class of modules, where it is imported."""
    packages: list[Any] = [sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    return tuple(package.LightningModule for package in packages if hasattr(package, "LightningModule"))


def _compile_module(self: torch.nn.Module, **arguments: Any) -> None:
    """nn.Module.compile, replaced by fusewright (fusewright.patch)."""
    api.compile_(self, **_arguments(arguments))


def _set_default_backend(backend: Any) -> None:
    """torch.compiler.set_default_backend, replaced by fusewright (fusewright.patch)."""
    api.set_default_backend(PEER_BACKENDS.get(backend, backend) if isinstance(backend, str) else backend)


def _list_backends(exclude_tags: Any = ()) -> list[str]:
    """torch.compiler.list_backends, replaced by fusewright (fusewright.patch)."""
    return api.list_backends()


REPLACED: list[tuple[Any, str, Any]] = [
    (torch, "compile", _compile),
    (torch.nn.Module, "compile", _compile_module),
    (torch.compiler, "compile", _compile),
    (torch.compiler, "list_backends", _list_backends),
    (torch.compiler, "reset", api.reset),
    (torch.compiler, "set_stance", api.set_stance),
    (torch.compiler, "disable", decorators.disable),
    (torch.compiler, "allow_in_graph", decorators.allow_in_graph),
    (torch.compiler, "assume_constant_result", decorators.assume_constant_result),
    (torch.compiler, "substitute_in_graph", decorators.substitute_in_graph),
    (torch.compiler, "nested_compile_region", decorators.nested_compile_region),
    (torch.compiler, "cudagraph_mark_step_begin", decorators.cudagraph_mark_step_begin),
    (torch.compiler, "wrap_numpy", decorators.wrap_numpy),
    (torch.compiler, "set_default_backend", _set_default_backend),
    (torch.compiler, "get_default_backend", api.get_default_backend),
    (torch.compiler, "save_cache_artifacts", bundle.save_cache_artifacts),
    (torch.compiler, "load_cache_artifacts", bundle.load_cache_artifacts),
]
"""Whose attribute, its name, and what stands there while a patch is active."""

_lock = threading.Lock()
_active: set[Patch] = set()
_originals: list[tuple[Any, str, Any]] = []


class Patch:
    """Replaces torch.compile from its making until `undo`, or the end of a with-block."""

    def __init__(self) -> None:
        with _lock:
            if not _active:
                for owner, name, ours in REPLACED:
                    if name in vars(owner):  # another release of PyTorch may lack it
                        _originals.append((owner, name, vars(owner)[name]))
                        setattr(owner, name, ours)
            _active.add(self)

    def undo(self) -> None:
        """Puts PyTorch's own functions back, when no other patch is active. What was compiled stays compiled."""
        with _lock:
            _active.discard(self)
            while _originals and not _active:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator: replaced while the function runs."""
        self.undo()

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Patch():
                return function(*args, **kwargs)

        return run


def patch() -> Patch:
    """From now on `torch.compile`, `nn.Module.compile` and `torch.compiler.*` are fusewright's, for libraries as well.

    A context manager, a decorator, and an object with `undo()`. The backend "inductor" is fusewright's own then; other
    backends get the graphs that fusewright captures. Options that fusewright does not have are left out with a warning.
    Names that a module has imported before (`from torch import compile`) stay PyTorch's.
    """
    return Patch()
