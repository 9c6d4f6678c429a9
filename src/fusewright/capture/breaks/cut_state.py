"""Where a path behind a graph break stands, and which instructions and functions it may meet on the way.

Takes nothing; gives `State`, tables of instructions, and whether a function is one of numbers and strings. No torch.
"""

from __future__ import annotations

import collections
import types

from fusewright._native import isinstance
from fusewright.base.records import dataclass, replace

CONTAINERS = (list, dict, set, collections.deque, str)
MAY_FAIL = frozenset({"/", "//", "%", "**", "<<", ">>", "@", "&", "|", "^"})
# Operators that give a number for numbers, by how many they take; and what gives a string.
ARITHMETIC = {"COMPARE_OP": 2, "COMPARE_OP_BOOL": 2, "BINARY_OP": 2, "UNARY_NOT": 1, "UNARY_NEGATIVE": 1, "TO_BOOL": 1}
TEXT = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE", "BUILD_STRING"})
GIVES_NUMBER: tuple[object, ...] = (round, abs, min, max, int, float, bool)
GIVES_TEXT: tuple[object, ...] = (str, repr, format)
# Conditional jumps that ask for a truth value: whether the value stays on the stack when they jump, and on which truth
# they do.
BRANCHES: dict[str, tuple[bool, bool]] = {
    "POP_JUMP_IF_TRUE": (False, True),
    "POP_JUMP_IF_FALSE": (False, False),
    "JUMP_IF_TRUE_OR_POP": (True, True),
    "JUMP_IF_FALSE_OR_POP": (True, False),
}
# How cleanup code leaves a frame: the exception that was handled, and the handler's name, are put back.
TIDYING = frozenset(
    {"NOP", "COPY", "SWAP", "POP_TOP", "POP_EXCEPT", "LOAD_CONST", "STORE_FAST", "DELETE_FAST", "RERAISE"}
)
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
