"""A kernel's structure without its names: two kernels with equal signatures have the same code.

Takes a `Kernel`; gives a hashable tuple. Always holds: buffers, scratch, locals and symbols of indirect indexing appear
as numbers in order of first use, and so do numbers that are given as arguments, and sizes if asked (`by_place`: whoever
shares the code must then write its own sizes in what the code says of them); axes appear as themselves (symbols are
hash-consed, and schedules name axes alike).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from fusewright.loops.ir import (
    Apply,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
    is_argument,
)
from fusewright.schedule.plan import Attention, Axis, Kernel, Places, Product, Reduce, ScanStep, Softmax
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr


class _Numberer:
    def __init__(self, kernel: Kernel, by_place: bool) -> None:
        self.names: dict[str, int] = {name: i for i, name in enumerate(kernel.buffers)}
        for scratch in kernel.scratch:
            self.name(scratch.name)
        self.locals: dict[str, int] = {}
        self.bound: dict[Expr, Dim] = {}
        for position, size in enumerate(kernel.sizes):
            if is_argument(size):
                self.bound[size] = sizes.symbol(f"#argument{position}", 0, None)
            elif by_place:
                self.bound[size] = sizes.symbol(f"#size{position}", *sizes.bounds(size))
        self.nodes: dict[Expression, int] = {}
        self.rows: list[Hashable] = []

    def name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def local(self, name: str | None) -> int:
        return -1 if name is None else self.locals.setdefault(name, len(self.locals))

    def dim(self, d: Dim) -> Dim:
        return sizes.substitute(d, self.bound) if self.bound else d

    def axis(self, axis: Axis) -> Hashable:
        """An axis, whose symbol knows the extent."""
        known: Any = axis.symbol
        upper = self.dim(known.upper)
        if upper != known.upper:
            self.bound[known] = sizes.symbol(known.name, known.lower, upper)
        return self.dim(known), self.dim(axis.extent)

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
        (number.name(side.buffer), side.dtype, number.dim(side.outer), number.dim(side.inner), side.checks)
        if side.value is None
        else (number.node(side.value), side.dtype)
        for side in (product.left, product.right)
    ]
    chosen = ((number.name(name), *map(number.name, buffers)) for name, buffers in product.chosen)
    inner: Hashable = None if product.softmax is None else _softmax(number, product.softmax)
    if product.chain is not None:
        parts = tuple(_product(number, part) for part in product.chain.parts)
        inner = ("chain", *parts, *_places(number, product.chain.places))
    besides = tuple(_product(number, one) for one in product.besides)
    facts = (product.k, product.length, product.full, product.most)
    return (number.local(product.local), *sides, *facts, inner, besides, *chosen)


def _softmax(number: _Numberer, softmax: Softmax) -> Hashable:
    places = _places(number, softmax.places)
    scores = _product(number, softmax.scores)
    return scores, number.node(softmax.score), number.local(softmax.most), number.local(softmax.total), *places


def _places(number: _Numberer, places: Places) -> tuple[Hashable, ...]:
    seen = None if places.seen is None else number.node(places.seen)
    return number.dim(places.least), number.dim(places.end), seen


def _attention(number: _Numberer, attention: Attention) -> Hashable:
    operands = (attention.query, attention.key, attention.value, attention.mask, attention.result)
    places = [
        None if rows is None else (number.name(rows.buffer), rows.dtype, number.dim(rows.outer), number.dim(rows.step))
        for rows in operands
    ]
    return (
        *places,
        number.dim(attention.columns),
        attention.features,
        attention.scale,
        attention.causal,
        attention.many,
    )


def signature(kernel: Kernel, by_place: bool = False) -> Hashable:
    number = _Numberer(kernel, by_place)
    outer = tuple(map(number.axis, kernel.outer))
    product = None if kernel.product is None else _product(number, kernel.product)
    attention = None if kernel.attention is None else _attention(number, kernel.attention)
    stages: list[Hashable] = []
    for stage in kernel.stages:
        axes = tuple(map(number.axis, stage.axes))
        statements: list[Hashable] = []
        for statement in stage.statements:
            if isinstance(statement, Store):
                bound = number.bindings(statement.bindings)
                place = (number.name(statement.buffer), number.dim(statement.index), statement.mode, bound)
                statements.append(("store", number.node(statement.value), place))
            elif isinstance(statement, Reduce):
                statements.append(
                    ("reduce", statement.kind, number.node(statement.value), number.local(statement.local))
                )
            elif isinstance(statement, ScanStep):
                places = (number.local(statement.local), number.local(statement.position))
                statements.append(("scan", statement.kind, number.node(statement.value), places))
            else:
                statements.append(("define", number.node(statement.value), number.local(statement.local)))
        stages.append((axes, tuple(statements)))
    return (
        outer,
        tuple(stages),
        tuple(number.rows),
        kernel.dtypes,
        frozenset(number.name(name) for name in kernel.written),
        tuple(map(number.dim, kernel.sizes)),
        tuple((scratch.dtype, number.dim(scratch.size)) for scratch in kernel.scratch),
        tuple((number.name(read), number.name(written)) for read, written in kernel.inplace),
        product,
        attention,
    )
