"""Lowering: from a graph of ATen calls to loops over buffers."""

from fusewright.loops.lower import (
    pointwise,
    views,
)
from fusewright.loops.lower.driver import lower

__all__ = ["lower"]
