"""Marks on functions and tensors: what a user says about them, kept where capture finds it.

Takes nothing; gives the registries that `decorators` writes and `capture` reads, and the names of the attributes that
PyTorch's own decorators set. Always holds: a registered callable is kept alive, so that its id stays its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from fusewright.base.records import dataclass

DISABLED = "_fusewright_disable"  # on a wrapper: True, or the reason
EAGER_FRAME = "_fusewright_eager_frame"  # on a function: its own frame is never compiled, what it calls is
NATIVE = "_fusewright_native"  # on a function of ours: it runs on traced tensors as torch functions do, not interpreted
CONSTANT = "_dynamo_marked_constant"  # PyTorch's name, which torch.compiler.assume_constant_result sets as well

# Attributes that mark_dynamic and its kin leave on a tensor: PyTorch's names, which fusewright's own functions set as
# well.
DYNAMIC = "_dynamo_dynamic_indices"
MAYBE_DYNAMIC = "_dynamo_weak_dynamic_indices"
UNBACKED = "_dynamo_unbacked_indices"
STATIC = "_dynamo_static_indices"
RANGES = "_dynamo_dynamic_range"


@dataclass(frozen=True, slots=True)
class DimRange:
    """The sizes that dimension `dim` of a marked tensor may have; None: no bound. The fields are those of PyTorch's own
    record."""

    dim: int
    min: int | None
    max: int | None


ALLOWED: dict[int, Callable[..., Any]] = {}
"""Callables that run natively on traced tensors (allow_in_graph), by id."""

SUBSTITUTES: dict[int, tuple[Callable[..., Any], types.FunctionType]] = {}
"""id → (original, what is captured in its place)."""
