"""What positions are in a kernel's text.

Takes axes and texts; gives strides, and texts that may stand beside operators. Always holds: nothing here makes text
of its own.
"""

from __future__ import annotations

from fusewright.loops.ir import Axis
from fusewright.sizes.expressions import Dim


def grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def positions(axes: list[Axis]) -> list[tuple[Axis, Dim]]:
    """The outer axes with their strides in a row-major order."""
    found: list[tuple[Axis, Dim]] = []
    stride: Dim = 1
    for axis in reversed(axes):
        found.append((axis, stride))
        stride = stride * axis.extent
    return found
