"""A value in generated code, and what its writers ask of the emitter of a kernel.

Takes nothing; defines `Value` and `Emitter`. Always holds: `text` is a name, or a text without effects that may be
repeated.
"""

from __future__ import annotations

from typing import Protocol

from fusewright.base.records import dataclass
from fusewright.loops.ir import Expression
from fusewright.sizes.expressions import Dim


@dataclass(frozen=True, slots=True)
class Value:
    """dims: block dimensions ("x", "y", "r") that it varies along; level: 0 outside of loops, 1 inside of one."""

    text: str
    dims: frozenset[str]
    level: int = 0


class Emitter(Protocol):
    """The emitter of one kernel (kernel.py)."""

    count: int
    level: int
    lines: list[list[str]]
    locals: dict[str, Value]
    row: Value | None
    row_mask: Value | None
    wide: bool

    def shape_text(self, dims: frozenset[str]) -> str: ...

    def row_block(self) -> str: ...

    def bind(self, text: str, dims: frozenset[str], level: int) -> Value: ...

    def level_of(self, *values: Value) -> int: ...

    def evaluate(self, expr: Expression) -> Value: ...

    def short(self, expr: Expression) -> Value: ...

    def flat(self, index: Dim) -> Dim: ...

    def index(self, index: Dim) -> Value: ...

    def filled(self, value: Value) -> Value: ...
