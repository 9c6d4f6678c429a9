"""What code generation needs to know about a kernel before it writes anything.

Takes a `Kernel`; gives a `Shape`: its axes after normalisation (axes of extent 1 dropped, the axes of lone pointwise
stages made parallel, axes split where an index divides by a constant, adjacent axes merged where every access walks
them as one), and facts about each expression. Always holds: normalisation is a change of loop variables only; indices
are read through `Shape.dim`, expressions are never rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusewright.base.records import dataclass, field
from fusewright.loops.ir import (
    Apply,
    Axis,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
)
from fusewright.schedule.plan import Define, Kernel, Reduce, ScanStep, Stage
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

_TRAPPING = frozenset({"floor_divide", "trunc_divide", "remainder", "fmod", "div"})


@dataclass(frozen=True, slots=True)
class Facts:
    """deps: loop symbols, size symbols and local names that the value depends on. effects: touches memory or may report
    a failure, so that it must stay under its mask. volatile: memory written by this kernel that it reads.
    """

    deps: frozenset[object]
    effects: bool
    volatile: frozenset[str]


@dataclass(frozen=True, slots=True)
class Access:
    """One distinct memory access of a stage. `bound`: its bindings."""

    buffer: str
    index: Dim
    store: bool
    bound: tuple[tuple[Expr, Expression], ...]
    mode: str = "write"


def children(expr: Expression) -> tuple[Expression, ...]:
    if isinstance(expr, Apply):
        return expr.args
    if isinstance(expr, Masked):
        return (expr.mask, expr.body, expr.other)
    if isinstance(expr, CheckedIndex):
        return (expr.value,)
    if isinstance(expr, Load):
        return tuple(value for _, value in expr.bindings)
    return ()


def walk(roots: Sequence[Expression]) -> Iterator[Expression]:
    """Every expression below `roots`, once."""
    seen: set[Expression] = set()
    pending = list(roots)
    while pending:
        expr = pending.pop()
        if expr not in seen:
            seen.add(expr)
            yield expr
            pending.extend(children(expr))


def tree_size(root: Expression) -> int:
    """Nodes of the expression written out as a tree, shared parts as often as they are used."""
    counts: dict[Expression, int] = {}

    def count(expr: Expression) -> int:
        found = counts.get(expr)
        if found is None:
            found = counts[expr] = 1 + sum(count(child) for child in children(expr))
        return found

    return count(root)


def values_of(stage: Stage) -> list[Expression]:
    """The expressions that a stage evaluates, bindings of stores included."""
    found: list[Expression] = []
    for statement in stage.statements:
        found.append(statement.value)
        if isinstance(statement, Store):
            found.extend(value for _, value in statement.bindings)
    return found


def is_pointwise(stage: Stage) -> bool:
    return all(isinstance(statement, (Define, Store)) for statement in stage.statements)


@dataclass(slots=True)
class StageView:
    """One stage with its axes normalised. `mapping`: the kernel's loop symbols in terms of the axes here (stages may
    share symbols, so each has its own).
    """

    stage: Stage
    axes: list[Axis]
    aliases: dict[str, str]
    mapping: dict[Expr, Dim] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    _dims: dict[Dim, Dim] = field(default_factory=dict)
    _facts: dict[Expression, Facts] = field(default_factory=dict)

    def dim(self, d: Dim) -> Dim:
        """An index of the kernel in the normalised axes."""
        if isinstance(d, int):
            return d
        found = self._dims.get(d)
        if found is None:
            found = self._dims[d] = sizes.substitute(d, self.mapping)
        return found

    def change(self, new: dict[Expr, Dim]) -> None:
        for key, value in self.mapping.items():
            self.mapping[key] = sizes.substitute(value, new)
        for key, value in new.items():
            self.mapping.setdefault(key, value)
        self._dims.clear()

    def indices(self) -> set[Dim]:
        """Every index of the stage, normalised."""
        found: set[Dim] = set()
        for expr in walk(values_of(self.stage)):
            if isinstance(expr, (Load, IndexValue)):
                found.add(self.dim(expr.index))
        found.update(self.dim(s.index) for s in self.stage.statements if isinstance(s, Store))
        return found

    def expressions(self) -> Iterator[Expression]:
        """Every expression that the stage evaluates, once."""
        return walk(values_of(self.stage))

    def facts(self, expr: Expression) -> Facts:
        found = self._facts.get(expr)
        if found is None:
            found = self._facts[expr] = self._find_facts(expr)
        return found

    def _find_facts(self, expr: Expression) -> Facts:
        deps: set[object] = set()
        volatile: set[str] = set()
        effects = False
        for child in children(expr):
            below = self.facts(child)
            deps |= below.deps
            volatile |= below.volatile
            effects = effects or below.effects
        if isinstance(expr, Load):
            bound = {symbol for symbol, _ in expr.bindings}
            deps |= sizes.free_symbols(self.dim(expr.index)) - bound
            effects = True
            if expr.buffer in self.aliases:
                volatile.add(self.aliases[expr.buffer])
        elif isinstance(expr, IndexValue):
            deps |= sizes.free_symbols(self.dim(expr.index))
        elif isinstance(expr, CheckedIndex):
            deps |= sizes.free_symbols(self.dim(expr.extent))
            effects = True
        elif isinstance(expr, LocalValue):
            deps.add(expr.name)
        elif isinstance(expr, Apply) and expr.op in _TRAPPING and not expr.args[0].dtype.is_floating_point:
            effects = effects or not isinstance(expr.args[1], Constant)
        return Facts(frozenset(deps), effects, frozenset(volatile))


def same_walk(first: StageView, second: StageView) -> bool:
    """Whether equal expressions in both stages are equal values at equal points."""
    return first.axes == second.axes and first.mapping == second.mapping


@dataclass(slots=True)
class Shape:
    """A kernel normalised. `aliases`: buffer -> the name under which writes to its memory are counted, for buffers
    whose memory the kernel writes.
    """

    kernel: Kernel
    outer: list[Axis]
    views: list[StageView]
    aliases: dict[str, str]


def analyse(kernel: Kernel) -> Shape:
    aliases = {name: name for name in kernel.written}
    for read, written in kernel.inplace:
        aliases[read] = aliases.setdefault(written, written)
    for scratch in kernel.scratch:
        aliases[scratch.name] = scratch.name
    views = [StageView(stage, list(stage.axes), aliases) for stage in kernel.stages if stage.statements]
    shape = Shape(kernel, list(kernel.outer), views, aliases)
    if len(views) == 1 and is_pointwise(views[0].stage) and not kernel.scratch:
        shape.outer += views[0].axes
        views[0].axes = []
    for transform in (_drop_single, _split, _merge):
        transform(shape.outer, views)
        for view in views:
            transform(view.axes, [view])
    for view in views:
        view._facts.clear()
        view.accesses = _accesses(view)
    return shape


def _change(views: list[StageView], new: dict[Expr, Dim]) -> None:
    for view in views:
        view.change(new)


def _indices(views: list[StageView]) -> set[Dim]:
    return set().union(*(view.indices() for view in views))


def _drop_single(axes: list[Axis], views: list[StageView]) -> None:
    single = [axis for axis in axes if isinstance(axis.extent, int) and axis.extent == 1]
    if single:
        _change(views, {axis.symbol: 0 for axis in single})
        axes[:] = [axis for axis in axes if axis not in single]


def _atoms(d: Dim) -> Iterator[Expr]:
    if isinstance(d, int):
        return
    for monomial, _ in d.terms:
        for atom in monomial:
            yield atom
            if isinstance(atom, (sizes.FloorDiv, sizes.Mod, sizes.Min, sizes.Max)):
                for child in atom._children():
                    yield from _atoms(child)


def _split_candidates(indices: set[Dim], symbol: Expr, extent: int) -> list[int]:
    """Block lengths by which some index divides `symbol`, largest first."""
    found: set[int] = set()
    for d in indices:
        if sizes.coefficient(d, symbol) is not None:
            continue
        for atom in _atoms(d):
            if isinstance(atom, (sizes.FloorDiv, sizes.Mod)) and isinstance(atom.right, int):
                scale = sizes.coefficient(atom.left, symbol)
                if isinstance(scale, int) and scale and atom.right % scale == 0:
                    block = abs(atom.right // scale)
                    if 1 < block < extent and extent % block == 0:
                        found.add(block)
    return sorted(found, reverse=True)


def _split(axes: list[Axis], views: list[StageView]) -> None:
    """i becomes i1 * k + i0 where an index holds i // k or i % k and k divides the extent, if that makes more indices
    affine."""
    position = 0
    while position < len(axes):
        axis = axes[position]
        if isinstance(axis.extent, int):
            indices = _indices(views)
            bent = sum(sizes.coefficient(d, axis.symbol) is None for d in indices)
            for block in _split_candidates(indices, axis.symbol, axis.extent) if bent else []:
                high = sizes.loop_symbol(f"{axis.symbol}h", axis.extent // block)
                low = sizes.loop_symbol(f"{axis.symbol}l", block)
                new = {axis.symbol: high * block + low}
                after = [sizes.substitute(d, new) for d in indices]
                if sum(any(sizes.coefficient(d, s) is None for s in (high, low)) for d in after) < bent:
                    _change(views, new)
                    axes[position : position + 1] = [Axis(high, axis.extent // block), Axis(low, block)]
                    break
            else:
                position += 1
        else:
            position += 1


def _merge(axes: list[Axis], views: list[StageView]) -> None:
    """Axes a, b next to each other become one where every index has them as a * extent(b) + b."""
    position = len(axes) - 2
    while position >= 0:
        a, b = axes[position], axes[position + 1]
        if all(_walks_as_one(d, a, b) for d in _indices(views)):
            extent = a.extent * b.extent
            joined = sizes.loop_symbol(f"{a.symbol}{b.symbol}", extent)
            _change(views, {a.symbol: 0, b.symbol: joined})
            axes[position : position + 2] = [Axis(joined, extent)]
            position = min(position, len(axes) - 2)
        else:
            position -= 1


def _walks_as_one(d: Dim, a: Axis, b: Axis) -> bool:
    slow, fast = sizes.coefficient(d, a.symbol), sizes.coefficient(d, b.symbol)
    if slow is None or fast is None:
        return False
    return slow == fast * b.extent if isinstance(slow, int) else slow is fast * b.extent


def _accesses(view: StageView) -> list[Access]:
    found: dict[tuple[object, ...], Access] = {}
    for expr in walk(values_of(view.stage)):
        if isinstance(expr, Load):
            access = Access(expr.buffer, view.dim(expr.index), False, expr.bindings)
            found.setdefault((access.buffer, access.index, False), access)
    for statement in view.stage.statements:
        if isinstance(statement, Store):
            access = Access(statement.buffer, view.dim(statement.index), True, statement.bindings, statement.mode)
            found.setdefault((access.buffer, access.index, True), access)
    return list(found.values())


def reductions_of(stage: Stage) -> list[Reduce]:
    return [statement for statement in stage.statements if isinstance(statement, Reduce)]


def scans_of(stage: Stage) -> list[ScanStep]:
    return [statement for statement in stage.statements if isinstance(statement, ScanStep)]
