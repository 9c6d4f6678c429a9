"""A value in generated code.

Takes nothing; defines `Value`. Always holds: `text` is a name, or a text without effects that may be repeated.
"""

from __future__ import annotations

from fusewright.base.records import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """dims: block dimensions ("x", "y", "r") that it varies along; level: 0 outside of loops, 1 inside of one."""

    text: str
    dims: frozenset[str]
    level: int = 0
