"""The whole table of rows: importing this imports every family."""

from fusewright.backends.xla import matrices, moves, ordering, pointwise, products, reductions, special, windows
from fusewright.backends.xla.table import ROWS

__all__ = ["ROWS", "matrices", "moves", "ordering", "pointwise", "products", "reductions", "special", "windows"]
