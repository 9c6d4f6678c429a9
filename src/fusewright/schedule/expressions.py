"""Walks over loop expressions: what an operation touches, and rewriting it with other indices.

Takes `loops.ir` expressions; gives `Survey`s and new expressions. Always holds: walks memoise by identity (an
expression is a DAG).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fusewright.base.records import dataclass, field
from fusewright.loops import ir
from fusewright.loops.ir import Apply, CheckedIndex, Constant, Expression, IndexValue, Load, LocalValue, Masked
from fusewright.sizes.expressions import Dim, Expr, substitute


@dataclass(slots=True)
class Survey:
    """loads: distinct loads in order of first meeting. dims: every index expression met. nodes: number of distinct
    nodes. masks: number of masked parts. checks: number of checked indices, and of integers' divisors that may be 0.
    locals: names of local values. applied: names of operations."""

    loads: list[Load] = field(default_factory=list)
    dims: dict[Dim, None] = field(default_factory=dict)
    nodes: int = 0
    masks: int = 0
    checks: int = 0
    locals: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)


_DIVISIONS = frozenset({"div", "floor_divide", "trunc_divide", "remainder", "fmod"})


def _may_divide_by_zero(node: Apply) -> bool:
    divisor = node.args[1]
    known = isinstance(divisor, Constant) and divisor.value != 0
    return not (known or node.dtype.is_floating_point or node.dtype.is_complex)


def survey(roots: Iterable[Expression]) -> Survey:
    found = Survey()
    stack = list(roots)
    stack.reverse()
    seen = set(stack)
    while stack:
        node = stack.pop()
        found.nodes += 1
        children: tuple[Expression, ...]
        if isinstance(node, Apply):
            found.applied.add(node.op)
            found.checks += node.op in _DIVISIONS and _may_divide_by_zero(node)
            children = node.args
        elif isinstance(node, Load):
            found.loads.append(node)
            found.dims[node.index] = None
            children = tuple(value for _, value in node.bindings)
        elif isinstance(node, Masked):
            found.masks += 1
            children = (node.mask, node.body, node.other)
        elif isinstance(node, IndexValue):
            found.dims[node.index] = None
            continue
        elif isinstance(node, CheckedIndex):
            found.checks += 1
            found.dims[node.extent] = None
            children = (node.value,)
        else:
            if isinstance(node, LocalValue):
                found.locals.add(node.name)
            continue
        for child in reversed(children):
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return found


class Rewriter:
    """Rebuilds expressions: `dim` maps every index, `load` may replace a load (None: keep it, with the mapped index),
    `local` maps the name of a local value. `bind` gives the symbol that stands for a rewritten indirect index."""

    __slots__ = ("bind", "dim", "load", "local", "memo")

    def __init__(
        self,
        dim: Callable[[Dim], Dim],
        load: Callable[[Load], Expression | None],
        local: Callable[[LocalValue], Expression],
        bind: Callable[[Expr, Expression], Expr],
    ) -> None:
        self.dim, self.load, self.local, self.bind = dim, load, local, bind
        self.memo: dict[Expression, Expression] = {}

    def visit(self, node: Expression) -> Expression:
        found = self.memo.get(node)
        if found is None:
            found = self.memo[node] = _REBUILD[type(node)](self, node)
        return found

    def bindings(
        self, pairs: tuple[tuple[Expr, Expression], ...], index: Dim
    ) -> tuple[tuple[tuple[Expr, Expression], ...], Dim]:
        """The rewritten bindings and index of an access (the index already mapped by `dim`)."""
        if not pairs:
            return pairs, index
        rebuilt = []
        renamed: dict[Expr, Expr] = {}
        for old, value in pairs:
            new_value = self.visit(value)
            new = self.bind(old, new_value)
            renamed[old] = new
            rebuilt.append((new, new_value))
        return tuple(rebuilt), substitute_symbols(index, renamed)


def substitute_symbols(index: Dim, renamed: dict[Expr, Expr]) -> Dim:
    return index if isinstance(index, int) else substitute(index, renamed)


def _load(rewriter: Rewriter, node: Load) -> Expression:
    replaced = rewriter.load(node)
    if replaced is not None:
        return replaced
    bindings, index = rewriter.bindings(node.bindings, rewriter.dim(node.index))
    return ir.load(node.buffer, index, node.dtype, bindings)


_REBUILD: dict[type, Callable[[Rewriter, Any], Expression]] = {
    Constant: lambda rewriter, node: node,
    LocalValue: lambda rewriter, node: rewriter.local(node),
    IndexValue: lambda rewriter, node: ir.index_value(rewriter.dim(node.index)),
    Load: _load,
    Apply: lambda rewriter, node: ir.apply(node.op, *[rewriter.visit(arg) for arg in node.args], dtype=node.dtype),
    Masked: lambda rewriter, node: ir.masked(
        rewriter.visit(node.mask), rewriter.visit(node.body), rewriter.visit(node.other)
    ),
    CheckedIndex: lambda rewriter, node: ir.checked_index(
        rewriter.visit(node.value), rewriter.dim(node.extent), node.wrap
    ),
}
