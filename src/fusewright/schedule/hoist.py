"""Moves out of inner loops what does not depend on them.

Takes a kernel's stages; gives stages that compute the same, with invariant subexpressions named once for each outer
point. Always holds: only what was computed unconditionally in the loop is moved, and nothing is moved out of a loop
that may be empty. A code generator could find most of these itself, but not the loads (a store in the loop might alias
them).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusewright.base.records import dataclass, field, replace
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Constant, Expression, IndexValue, Load, LocalValue, Masked, Store
from fusewright.schedule.plan import Define, Reduce, Stage, Statement
from fusewright.sizes.expressions import Expr, free_symbols, known_le


@dataclass(slots=True)
class _Hoister:
    """lasting: locals that later stages see. moved: invariant expressions that have a name already."""

    written: Collection[str]
    lasting: set[str] = field(default_factory=set)
    moved: dict[Expression, LocalValue] = field(default_factory=dict)
    fresh: list[Define] = field(default_factory=list)
    inner: frozenset[Expr] = frozenset()
    known: dict[Expression, bool] = field(default_factory=dict)
    rebuilt: dict[Expression, Expression] = field(default_factory=dict)

    def enter(self, inner: Collection[Expr]) -> None:
        self.inner = frozenset(inner)
        self.known, self.rebuilt, self.fresh = {}, {}, []

    def invariant(self, node: Expression) -> bool:
        found = self.known.get(node)
        if found is None:
            found = self.known[node] = self._invariant(node)
        return found

    def _invariant(self, node: Expression) -> bool:
        if isinstance(node, Apply):
            safe = (
                node.dtype.is_floating_point
                or node.op == "cast"
                or ("div" not in node.op and node.op not in ("remainder", "fmod"))
            )
            return safe and all(self.invariant(arg) for arg in node.args)
        if isinstance(node, Load):
            return (
                not node.bindings
                and node.buffer not in self.written
                and self.inner.isdisjoint(free_symbols(node.index))
            )
        if isinstance(node, LocalValue):
            return node.name in self.lasting
        if isinstance(node, IndexValue):
            return self.inner.isdisjoint(free_symbols(node.index))
        return isinstance(node, Constant)

    def rewrite(self, node: Expression) -> Expression:
        """The expression with its largest invariant parts replaced by names."""
        found = self.rebuilt.get(node)
        if found is None:
            found = self.rebuilt[node] = self._rewrite(node)
        return found

    def _rewrite(self, node: Expression) -> Expression:
        if isinstance(node, (Apply, Load)) and self.invariant(node) and not _is_constant(node):
            name = self.moved.get(node)
            if name is None:
                name = self.moved[node] = ir.local_value(f"h{len(self.moved)}", node.dtype)
                self.fresh.append(Define(name.name, node))
                self.lasting.add(name.name)
            return name
        if isinstance(node, Apply):
            args = tuple(self.rewrite(arg) for arg in node.args)
            return node if args == node.args else ir.apply(node.op, *args, dtype=node.dtype)
        if isinstance(node, Masked):  # its parts are conditional; the mask is not
            mask = self.rewrite(node.mask)
            return node if mask is node.mask else ir.masked(mask, node.body, node.other)
        return node


def _is_constant(node: Expression) -> bool:
    """Arithmetic on constants and indices alone needs no name."""
    if isinstance(node, Apply):
        return all(_is_constant(arg) for arg in node.args)
    return isinstance(node, (Constant, IndexValue))


def hoist(stages: Sequence[Stage], written: Collection[str]) -> list[Stage]:
    """`written`: every buffer and scratch that the kernel stores to (loads of those stay where they are)."""
    hoister = _Hoister(written)
    result: list[Stage] = []
    for stage in stages:
        statements: tuple[Statement, ...] = stage.statements
        if stage.axes and all(known_le(1, axis.extent) is True for axis in stage.axes):
            hoister.enter([axis.symbol for axis in stage.axes])
            statements = tuple(replace(statement, value=hoister.rewrite(statement.value)) for statement in statements)
            if hoister.fresh:
                fresh = tuple(hoister.fresh)
                if result and not result[-1].axes:
                    result[-1] = Stage((), (*result[-1].statements, *fresh))
                else:
                    result.append(Stage((), fresh))
        for statement in statements:
            if isinstance(statement, Reduce) or (isinstance(statement, Define) and not stage.axes):
                hoister.lasting.add(statement.local)
        result.append(Stage(stage.axes, statements))
    return result


def stored(stages: Sequence[Stage]) -> set[str]:
    return {statement.buffer for stage in stages for statement in stage.statements if isinstance(statement, Store)}
