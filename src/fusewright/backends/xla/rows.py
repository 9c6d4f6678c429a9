"""The whole table of rows: importing this imports every family."""

from fusewright.backends.xla import moves, pointwise, products, reductions, windows
from fusewright.backends.xla.table import ROWS

__all__ = ["ROWS", "moves", "pointwise", "products", "reductions", "windows"]
