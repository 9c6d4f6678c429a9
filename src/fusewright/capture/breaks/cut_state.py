"""Where a path behind a graph break stands, and which functions it may call on the way.

Takes nothing; gives `State`, and whether a function works on numbers and strings only. No torch.
"""

from __future__ import annotations

import collections
import types

from fusewright.base.records import dataclass, replace

CONTAINERS = (list, dict, set, collections.deque, str)
OUTPUT_MODULES = frozenset({"logging", "warnings"})


@dataclass(slots=True)
class State:
    """Where a path stands: the next instruction, and the stack and the plain variables as expressions.

    scalars, texts  the expressions that are known to be numbers, or strings
    fresh           those that the eager step has given, or that were computed from its result
    """

    index: int
    stack: list[str | None]
    variables: dict[int, str]
    scalars: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()

    def copy(self) -> State:
        return replace(self, stack=list(self.stack), variables=dict(self.variables))


def is_quiet(function: object) -> bool:
    """A builtin of numbers, strings and containers, or output: with numbers and strings for arguments, nothing for a
    graph."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.FunctionType):
        return function.__module__.split(".")[0] in OUTPUT_MODULES
    if isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        return type(owner) in CONTAINERS or (
            isinstance(owner, types.ModuleType) and owner.__name__ in ("builtins", "math", "time")
        )
    return function in (int, float, bool, str) if isinstance(function, type) else False
