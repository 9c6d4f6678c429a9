"""Lowering: from a graph of ATen calls to loops over buffers. Importing the operator files fills the table of rows."""

from fusewright.loops.lower import (
    activations,
    collectives,
    convolution,
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
    skinny_gemm,
    views,
)
from fusewright.loops.lower.driver import lower

__all__ = [
    "activations",
    "collectives",
    "convolution",
    "factories",
    "skinny_gemm",
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
