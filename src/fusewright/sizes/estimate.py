"""What an unknown size is taken to be, wherever only an estimate is needed.

Takes a size, and what the capture saw of its symbols; gives a number. Always holds: an estimate decides what is quick,
never what is right.

The rule: a symbol with an example counts as its example; another one as UNKNOWN, within its bounds. Passes over the
graph hand their examples in. Scheduling and code generation hand in none where a kernel's text would depend on them:
the same program then has the same kernels and the same rounding, whichever sizes come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from fusewright.sizes.expressions import Dim, Expr, Symbol, evaluate, free_symbols

UNKNOWN = 256

NO_EXAMPLES: Mapping[Expr, int] = MappingProxyType({})


def estimate(size: Dim, examples: Mapping[Expr, int] = NO_EXAMPLES) -> int:
    """The size where each symbol is what the example says, else UNKNOWN."""
    if isinstance(size, int):
        return size
    if not examples:
        return _without_examples(size)
    return _with(size, {sym: examples[sym] if sym in examples else _typical(sym) for sym in free_symbols(size)})


@lru_cache(maxsize=1 << 14)
def _without_examples(size: Expr) -> int:
    return _with(size, {sym: _typical(sym) for sym in free_symbols(size)})


def _with(size: Expr, values: Mapping[Expr, int]) -> int:
    try:
        return evaluate(size, values)
    except ZeroDivisionError:  # values that no call has together
        return UNKNOWN


def _typical(sym: Symbol) -> int:
    low = sym.lower or 0
    high = sym.upper if isinstance(sym.upper, int) else max(low, UNKNOWN)
    return min(max(UNKNOWN, low), high)
