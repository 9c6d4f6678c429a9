"""A kernel's structure without its names: two kernels with equal signatures have the same code.

Takes a `Kernel`; gives a hashable tuple. Always holds: buffers, scratch, locals and symbols of indirect indexing appear as numbers in
order of first use, and so do numbers that are given as arguments; axes and sizes appear as themselves (symbols are hash-consed, and
schedules name axes alike).
"""

from __future__ import annotations

from collections.abc import Hashable

from fusewright.graph import sizes
from fusewright.graph.sizes import Dim, Expr
from fusewright.loops.ir import Apply, CheckedIndex, Constant, Expression, IndexValue, Load, LocalValue, Masked, Store, is_argument
from fusewright.schedule.plan import Kernel, Product, Reduce, ScanStep


class _Numberer:
    def __init__(self, kernel: Kernel) -> None:
        self.names: dict[str, int] = {name: i for i, name in enumerate(kernel.buffers)}
        for scratch in kernel.scratch:
            self.name(scratch.name)
        self.locals: dict[str, int] = {}
        self.bound: dict[Expr, Dim] = {}
        for position, size in enumerate(kernel.sizes):
            if is_argument(size):
                self.bound[size] = sizes.symbol(f"#argument{position}", 0, None)
        self.nodes: dict[Expression, int] = {}
        self.rows: list[Hashable] = []

    def name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def local(self, name: str | None) -> int:
        return -1 if name is None else self.locals.setdefault(name, len(self.locals))

    def dim(self, d: Dim) -> Dim:
        return sizes.substitute(d, self.bound) if self.bound else d

    def bindings(self, bindings: tuple[tuple[Expr, Expression], ...]) -> Hashable:
        numbers: list[Hashable] = []
        for symbol, value in bindings:
            numbers.append(self.node(value))
            if symbol not in self.bound:
                low, high = sizes.bounds(symbol)
                self.bound[symbol] = sizes.symbol(f"#{len(self.bound)}", low, high)
            numbers.append(str(self.bound[symbol]))
        return tuple(numbers)

    def node(self, expr: Expression) -> int:
        found = self.nodes.get(expr)
        if found is None:
            row = self._row(expr)
            found = self.nodes[expr] = len(self.rows)
            self.rows.append(row)
        return found

    def _row(self, expr: Expression) -> Hashable:
        if isinstance(expr, Apply):
            return ("apply", expr.op, expr.dtype, *(self.node(arg) for arg in expr.args))
        if isinstance(expr, Load):
            bound = self.bindings(expr.bindings)
            return ("load", expr.dtype, self.name(expr.buffer), self.dim(expr.index), bound)
        if isinstance(expr, Constant):
            return ("constant", expr.dtype, expr.value.hex() if isinstance(expr.value, float) else int(expr.value))
        if isinstance(expr, IndexValue):
            return ("index", self.dim(expr.index))
        if isinstance(expr, LocalValue):
            return ("local", expr.dtype, self.local(expr.name))
        if isinstance(expr, Masked):
            return ("masked", self.node(expr.mask), self.node(expr.body), self.node(expr.other))
        assert isinstance(expr, CheckedIndex)
        return ("checked", self.node(expr.value), self.dim(expr.extent), expr.wrap)


def _product(number: _Numberer, product: Product) -> Hashable:
    sides = [
        (number.name(side.buffer), side.dtype, side.outer, side.inner, side.checks)
        if side.value is None
        else (number.node(side.value), side.dtype)
        for side in (product.left, product.right)
    ]
    chosen = ((number.name(name), *map(number.name, buffers)) for name, buffers in product.chosen)
    return (number.local(product.local), *sides, product.k, product.length, product.full, *chosen)


def signature(kernel: Kernel) -> Hashable:
    number = _Numberer(kernel)
    product = None if kernel.product is None else _product(number, kernel.product)
    stages: list[Hashable] = []
    for stage in kernel.stages:
        statements: list[Hashable] = []
        for statement in stage.statements:
            if isinstance(statement, Store):
                bound = number.bindings(statement.bindings)
                place = (number.name(statement.buffer), number.dim(statement.index), statement.mode, bound)
                statements.append(("store", number.node(statement.value), place))
            elif isinstance(statement, Reduce):
                statements.append(("reduce", statement.kind, number.node(statement.value), number.local(statement.local)))
            elif isinstance(statement, ScanStep):
                places = (number.local(statement.local), number.local(statement.position))
                statements.append(("scan", statement.kind, number.node(statement.value), places))
            else:
                statements.append(("define", number.node(statement.value), number.local(statement.local)))
        stages.append((tuple((axis.symbol, axis.extent) for axis in stage.axes), tuple(statements)))
    return (
        tuple((axis.symbol, axis.extent) for axis in kernel.outer),
        tuple(stages),
        tuple(number.rows),
        kernel.dtypes,
        frozenset(number.name(name) for name in kernel.written),
        tuple(map(number.dim, kernel.sizes)),
        tuple((scratch.dtype, scratch.size) for scratch in kernel.scratch),
        tuple((number.name(read), number.name(written)) for read, written in kernel.inplace),
        product,
    )
