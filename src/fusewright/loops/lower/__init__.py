"""Lowering: from a graph of ATen calls to loops over buffers. Importing the operator files fills the table of rows."""

from fusewright.loops.lower import (
    activations,
    convolution,
    extern_details,
    factories,
    indexing,
    interpolation,
    losses,
    norms,
    pointwise,
    pooling,
    random,
    reductions,
    scans,
    shape,
    views,
)
from fusewright.loops.lower.driver import lower

__all__ = [
    "activations",
    "convolution",
    "extern_details",
    "factories",
    "indexing",
    "interpolation",
    "losses",
    "lower",
    "norms",
    "pointwise",
    "pooling",
    "random",
    "reductions",
    "scans",
    "shape",
    "views",
]
