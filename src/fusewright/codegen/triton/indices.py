"""Index expressions as Triton text, over the flat positions that a program's blocks run along.

Takes `Dim`s over a kernel's axes; gives them over the flat symbols x, y and r, and as text. Always holds: `//` and `%`
of Triton truncate as C's do, so they are written only where the left operand is certainly not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.codegen.device_kernel import Unsupported
from fusewright.loops.ir import Axis
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr


def flat_symbol(name: str, axes: Sequence[Axis]) -> Expr:
    return sizes.loop_symbol(name, total(axes))


def total(axes: Sequence[Axis]) -> Dim:
    result: Dim = 1
    for axis in axes:
        result = result * axis.extent
    return result


def unflatten(axes: Sequence[Axis], flat: Expr) -> dict[Expr, Dim]:
    """Each axis in terms of the flat position over all of them, outermost first."""
    mapping: dict[Expr, Dim] = {}
    stride: Dim = 1
    for position in range(len(axes) - 1, -1, -1):
        axis = axes[position]
        value = flat if isinstance(stride, int) and stride == 1 else sizes.floor_div(flat, stride)
        mapping[axis.symbol] = value if position == 0 else sizes.modulo(value, axis.extent)
        stride = stride * axis.extent
    return mapping


Name = Callable[[Expr], tuple[str, frozenset[str]]]
Bind = Callable[[str, frozenset[str]], str]
NOTHING: frozenset[str] = frozenset()


def text_of(d: Dim, name: Name, bind: Bind) -> tuple[str, frozenset[str]]:
    """(text, block dimensions that it varies along). `name`: of a symbol; `bind`: gives a name to a quotient or
    remainder."""
    if isinstance(d, int):
        return str(d), NOTHING
    if isinstance(d, sizes.Symbol):
        return name(d)
    if isinstance(d, sizes.Sum) or len(d.terms) != 1 or d.terms[0] != ((d,), 1):
        return _sum(d, name, bind)
    if isinstance(d, (sizes.FloorDiv, sizes.Mod)):
        left, left_dims = text_of(d.left, name, bind)
        right, right_dims = text_of(d.right, name, bind)
        low, _ = sizes.bounds(d.left)
        least_divisor, _ = sizes.bounds(d.right)
        # A divisor of 0 divides nothing: the loops that it belongs to are empty.
        suffix = "_by_positive" if least_divisor is not None and least_divisor >= 0 else ""
        dims = left_dims | right_dims
        plain = low is not None and low >= 0
        if isinstance(d, sizes.FloorDiv):
            text = f"{_operand(left)} // {_operand(right)}" if plain else f"lib.floor_quotient{suffix}({left}, {right})"
        else:
            text = f"{_operand(left)} % {_operand(right)}" if plain else f"lib.floor_remainder{suffix}({left}, {right})"
        return bind(text, dims), dims
    if isinstance(d, (sizes.Min, sizes.Max)):
        function = "tl.minimum" if isinstance(d, sizes.Min) else "tl.maximum"
        text, dims = text_of(d.operands[0], name, bind)
        for operand in d.operands[1:]:
            more, more_dims = text_of(operand, name, bind)
            text, dims = f"{function}({text}, {more})", dims | more_dims
        return bind(text, dims), dims
    raise Unsupported(f"the index {d}")


def _operand(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _sum(d: Expr, name: Name, bind: Bind) -> tuple[str, frozenset[str]]:
    parts: list[str] = []
    dims: frozenset[str] = NOTHING
    for monomial, count in d.terms:
        factors = []
        for atom in monomial:
            text, found = text_of(atom, name, bind)
            factors.append(_operand(text))
            dims |= found
        if abs(count) != 1:
            factors.append(str(abs(count)))
        term = " * ".join(factors)
        if not parts:
            parts.append(f"0 - {term}" if count < 0 else term)
        else:
            parts.append(f"- {term}" if count < 0 else f"+ {term}")
    if d.constant:
        parts.append(f"- {-d.constant}" if d.constant < 0 else f"+ {d.constant}")
    return " ".join(parts), dims
