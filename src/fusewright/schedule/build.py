"""From a group of nests to a `Kernel`: canonical loops, statements with values forwarded in locals or row memory.

Takes a `Group`; gives a `Kernel`. Always holds: loop symbols are o0.. and i0.., locals v0.. and r0.., scratch s0..,
indirect symbols j0.. in order of appearance, so that equal work on other buffers gives an equal kernel up to buffer
names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch

from fusewright.base.records import dataclass, field
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Axis, Buffer, Constant, Expression, Load, LocalValue, Pointwise, Scan, Store
from fusewright.schedule.align import window
from fusewright.schedule.axes import (
    Access,
    Nest,
    Recipe,
    coalesced,
    covers,
    is_zero,
    merge_axes,
    place_in_block,
    strides_of,
)
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.fuse import Group
from fusewright.schedule.hoist import hoist, stored
from fusewright.schedule.options import ScheduleOptions
from fusewright.schedule.plan import Define, Kernel, Reduce, ScanStep, Scratch, Stage, Statement, roots
from fusewright.schedule.split import ELEMENTARY
from fusewright.schedule.stages import StagePlan, Stager, Unit, elementwise
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols, loop_symbol, product, substitute, symbol

CHEAP = frozenset("add sub mul neg abs minimum maximum where cast".split())
"""Operations that are cheaper to do again than a round trip through memory."""
ON_A_GPU = CHEAP | ELEMENTARY | {"div"}
"""The same for a processor that waits for memory: also functions of some ten instructions and more."""


@dataclass(slots=True)
class _Stored:
    """A store whose form is not settled: which locals, row memory and buffers it must fill is known when all readers
    have been seen."""

    buffer: str
    access: Access
    nest: Nest
    stage: int
    index: Dim
    value: Expression
    mode: str
    bindings: tuple[tuple[Expr, Expression], ...]
    forward: Expression | None = None  # how later statements name the value
    local: str | None = None
    scratch: _Row | None = None
    to_memory: bool = False


@dataclass(slots=True)
class _Row:
    """A buffer that became private to an outer point. With `levels`, its inner (stride, extent), an element's digits
    over them are counted in the strides `compact`; without, the row is a copy of the buffer's elements from `base`
    on."""

    scratch: Scratch
    base: Dim
    levels: list[tuple[Dim, Dim]] | None = None
    compact: Sequence[int] = ()

    def index(self, nest: Nest, access: Access, inner: Sequence[Expr]) -> Dim | None:
        """Where in row memory the access goes, or None if that cannot be expressed."""
        offset, coefficients = nest.table[access.index]
        if self.levels is None:
            # a reduction's epilogue runs outside of its inner loops
            moving = coefficients[nest.outer :] if inner else ()
            return _rebuild_index(offset - self.base, moving, tuple(inner))
        placed = place_in_block(
            self.levels, strides_of((offset, coefficients), nest.extents, nest.outer), offset - self.base
        )
        if placed is None:
            return None
        digits, where = placed
        index: Dim = 0
        for digit, stride in zip(digits, self.compact):
            index = index + digit * stride
        for axis, (level, multiplier) in where.items():
            index = index + inner[axis - nest.outer] * (multiplier * self.compact[level])
        return index


@lru_cache(maxsize=1 << 14)
def _rebuild_index(offset: Dim, coefficients: tuple[Dim, ...], symbols: tuple[Expr, ...]) -> Dim:
    index = offset
    for coefficient, sym in zip(coefficients, symbols, strict=True):
        if not is_zero(coefficient):
            index = index + sym * coefficient
    return index


@lru_cache(maxsize=1 << 10)
def _symbols(prefix: str, extents: tuple[Dim, ...]) -> tuple[Expr, ...]:
    return tuple(loop_symbol(f"{prefix}{k}", extent) for k, extent in enumerate(extents))


@dataclass(slots=True)
class _Emitter:
    """The state of one kernel's making."""

    group: Group
    internal: Collection[str]
    buffers: Mapping[str, Buffer]
    options: ScheduleOptions
    stages: list[StagePlan]
    outer: tuple[Expr, ...]
    items: list[list[_Stored | Reduce | ScanStep]] = field(default_factory=list)
    stored: dict[str, list[_Stored]] = field(default_factory=dict)
    rows: dict[str, _Row | None] = field(default_factory=dict)
    results: dict[int, LocalValue] = field(default_factory=dict)
    scratch: list[Scratch] = field(default_factory=list)
    bound: dict[tuple[Expression, int | None, Dim | None], Expr] = field(default_factory=dict)
    reads: dict[str, torch.dtype] = field(default_factory=dict)
    locals: int = 0
    accumulators: int = 0
    lasting: set[str] = field(default_factory=set)  # locals that later stages see
    room: int = 0

    def run(self) -> list[Stage]:
        self.room = self.options.scratch_bytes
        for number, stage in enumerate(self.stages):
            self.items.append([])
            for unit in stage.units:
                self._unit(number, stage, unit)
        result = []
        for number, stage in enumerate(self.stages):
            inner = _symbols("i", stage.inner)
            statements: list[Statement] = []
            for item in self.items[number]:
                if isinstance(item, _Stored):
                    statements.extend(self._settle(item, inner))
                else:
                    statements.append(item)
            if statements:
                result.append(
                    Stage(tuple(Axis(sym, extent) for sym, extent in zip(inner, stage.inner)), tuple(statements))
                )
        return result

    # --- one unit -----------------------------------------------------------------------------------------------------

    def _unit(self, number: int, stage: StagePlan, unit: Unit) -> None:
        nest, operation = unit.nest, unit.nest.operation
        inner = _symbols("i", stage.inner)
        symbols = self.outer + inner
        if unit.role == "finish":  # the nest's inner axes do not exist here, and nothing depends on them
            inner, symbols = (), self.outer
        width = nest.outer if unit.role == "finish" else len(nest.extents)
        accumulator: LocalValue | None = self.results.get(nest.position)

        def dim(index: Dim) -> Dim:
            vector = nest.table.get(index)
            if vector is not None:
                return _rebuild_index(vector[0], vector[1][:width], symbols)
            # A size that is itself an index (a number that the loops compute with) stands in the table too, as its own
            # base.
            axes = [sym for sym in free_symbols(index) if sym in nest.table and nest.table[sym][0] == 0]
            places = {sym: nest.table[sym][1][:width] for sym in axes}
            mapping: dict[Expr, Dim] = {sym: _rebuild_index(0, place, symbols) for sym, place in places.items()}
            return substitute(index, mapping)

        def load(node: Load) -> Expression | None:
            return self._forwarded(node, nest, number, inner)

        def local(node: LocalValue) -> Expression:
            if node.name == "acc" and accumulator is not None:
                return accumulator
            raise ValueError(f"{operation.name}: the local value {node.name!r} is not defined here")

        rewriter = Rewriter(dim, load, local, self._bind)
        items = self.items[number]
        if isinstance(operation, Pointwise):
            stores = [access for access in nest.accesses if access.store]
            for store, access in zip(operation.stores, stores):
                bindings, index = rewriter.bindings(store.bindings, dim(store.index))
                value = rewriter.visit(store.value)
                self._store(number, nest, access, Store(access.buffer, index, value, store.mode, bindings))
            return
        stores = [access for access in nest.accesses if access.store]

        def finish(access: Access, value: Expression) -> None:
            self._store(number, nest, access, Store(access.buffer, dim(operation.index), value))

        if unit.role == "finish":
            finish(stores[0], rewriter.visit(operation.finish))
            return
        name = f"r{self.accumulators}"
        self.accumulators += 1
        value = rewriter.visit(operation.value)
        positional = operation.kind in ("argmax", "argmin")
        accumulator = self.results[nest.position] = ir.local_value(
            name, torch.int64 if positional else operation.value.dtype
        )
        if not isinstance(operation, Scan):
            items.append(Reduce(name, operation.kind, value))
            self.lasting.add(name)
            return
        position = f"{name}_position" if operation.position_buffer is not None else None
        items.append(ScanStep(name, operation.kind, value, position))
        finish(stores[0], rewriter.visit(operation.finish))
        if position is not None:
            finish(stores[1], ir.local_value(position, torch.int64))

    def _bind(self, old: Expr, value: Expression) -> Expr:
        assert isinstance(old, Symbol)
        key = (value, old.lower, old.upper)
        found = self.bound.get(key)
        if found is None:
            found = self.bound[key] = symbol(f"j{len(self.bound)}", old.lower, old.upper)
        return found

    def _store(self, stage: int, nest: Nest, access: Access, store: Store) -> None:
        """`store`: rewritten for the group's loops."""
        # so that a forwarded value is rounded as a stored one
        value = ir.cast(store.value, self.buffers[store.buffer].element)
        item = _Stored(store.buffer, access, nest, stage, store.index, value, store.mode, store.bindings)
        item.to_memory = store.buffer not in self.internal or store.mode != "write"
        if isinstance(value, (LocalValue, Constant)):
            item.forward = value
        self.items[stage].append(item)
        self.stored.setdefault(access.buffer, []).append(item)

    def _forwarded(self, node: Load, nest: Nest, stage: int, inner: Sequence[Expr]) -> Expression | None:
        """How a load is served without reading the buffer; None where it must be read."""
        items = [
            item
            for item in self.stored.get(node.buffer, ())
            if item.nest.position < nest.position and item.mode == "write"
        ]
        if not items:
            self.reads.setdefault(node.buffer, node.dtype)
            return None
        access = Access(node.buffer, node.index, True, False)
        for item in items:
            visible = item.stage == stage or not self.stages[item.stage].inner
            if visible and elementwise(item.nest, item.access, nest, access):
                return ir.cast(self._name(item), node.dtype)
        constant = len(items) == 1 and isinstance(items[0].value, Constant) and self._fills(items[0])
        if constant or (len(items) == 1 and self._repeatable(items[0], nest, access, stage)):
            return ir.cast(items[0].value, node.dtype)
        row = self._row(node.buffer)
        index = row.index(nest, access, inner) if row is not None else None
        if row is not None and index is not None:
            for item in items:
                item.scratch = row
            return ir.load(row.scratch.name, index, node.dtype)
        for item in items:
            item.to_memory = True
        self.reads.setdefault(node.buffer, node.dtype)
        return None

    def _fills(self, item: _Stored) -> bool:
        """Whether a store writes every element of its buffer (a scatter writes some)."""
        nest, access = item.nest, item.access
        return access.affine and covers(nest.table[access.index], nest.extents, self.buffers[item.buffer].span())

    def _name(self, item: _Stored) -> Expression:
        """The local (or the expression as simple as one) that holds a stored value."""
        if item.forward is None:
            item.local = f"v{self.locals}"
            self.locals += 1
            item.forward = ir.local_value(item.local, item.value.dtype)
            if not self.stages[item.stage].inner:
                self.lasting.add(item.local)
        return item.forward

    def _repeatable(self, item: _Stored, nest: Nest, access: Access, stage: int) -> bool:
        """Whether computing the value again in a later stage with the same inner loops is cheaper than keeping the
        row."""
        if (
            item.scratch is not None
            or self.stages[item.stage].inner != self.stages[stage].inner
            or not elementwise(item.nest, item.access, nest, access)
        ):
            return False
        found = survey([item.value])
        cheap, most = (CHEAP, 5) if self.options.lanes == 1 else (ON_A_GPU, 10)
        if found.nodes > most or len(found.loads) > 1 or found.masks or any(load.bindings for load in found.loads):
            return False
        if any(load.buffer in self.group.written for load in found.loads):
            return False  # it may have been overwritten since
        stack: list[Expression] = [item.value]
        while stack:
            node = stack.pop()
            if isinstance(node, LocalValue) and node.name not in self.lasting:
                return False
            if isinstance(node, Apply):
                if node.op not in cheap:
                    return False
                stack.extend(node.args)
            elif not isinstance(node, (LocalValue, Constant, Load)):
                return False
        return True

    def _row(self, name: str) -> _Row | None:
        """Row memory for an internal buffer, if the row is small."""
        if name in self.rows:
            return self.rows[name]
        row = self.rows[name] = self._make_row(name) if name in self.internal else None
        if row is not None:
            self.scratch.append(row.scratch)
            assert isinstance(row.scratch.size, int)
            self.room -= row.scratch.size * row.scratch.dtype.itemsize
        return row

    def _make_row(self, name: str) -> _Row | None:
        touching = self.group.touching[name]
        if not all(access.affine for _, access in touching):
            return None
        dtype = self.buffers[name].element
        label = f"s{len(self.scratch)}"
        writers = [(nest, access) for nest, access in touching if access.store]
        filled = sum(estimate(product(nest.extents[nest.outer :])) for nest, _ in writers)
        found = window([(nest.table[access.index], nest.extents, nest.outer) for nest, access in touching])
        if found is not None:
            low, high = found
            size = high - low + 1
            if isinstance(size, int) and size <= 2 * filled and size * dtype.itemsize <= self.room:
                return _Row(Scratch(label, dtype, size), low)
        if len(writers) > 1:
            return None
        nest, access = writers[0]
        vector = nest.table[access.index]
        levels = coalesced(strides_of(vector, nest.extents, nest.outer))
        compact: list[int] = []
        total = 1
        for _, extent in levels:
            if not isinstance(extent, int):
                return None
            compact.append(total)
            total *= extent
        if total * dtype.itemsize > self.room:
            return None
        return _Row(Scratch(label, dtype, total), vector[0], levels, compact)

    def _settle(self, item: _Stored, inner: Sequence[Expr]) -> list[Statement]:
        """The statements that a store turned out to need."""
        statements: list[Statement] = []
        value = item.value
        several = item.scratch is not None and item.to_memory
        if several and item.local is None and not isinstance(value, (LocalValue, Constant)):
            item.local = f"v{self.locals}"
            self.locals += 1
        if item.local is not None:
            statements.append(Define(item.local, value))
            value = ir.local_value(item.local, value.dtype)
        if item.scratch is not None:
            index = item.scratch.index(item.nest, item.access, inner)
            assert index is not None, "a store fits the row that was made for it"
            statements.append(Store(item.scratch.scratch.name, index, value))
        if item.to_memory:
            statements.append(Store(item.buffer, item.index, value, item.mode, item.bindings))  # type: ignore[arg-type]
        return statements


def _order_outer(group: Group, internal: Collection[str]) -> None:
    """Outer axes in the memory order of the kernel's main store."""
    if len(group.outer) < 2:
        return
    stores = [
        (nest.points(), -nest.position, nest, access)
        for nest in group.nests
        for access in nest.accesses
        if access.store and access.affine and access.buffer not in internal
    ]
    if not stores:
        return
    _, _, nest, access = max(stores, key=lambda item: item[:2])
    coefficients = nest.table[access.index][1]
    order = sorted(range(len(group.outer)), key=lambda k: -abs(estimate(coefficients[k])))
    if order != list(range(len(order))):
        recipe = Recipe(tuple((e,) for e in group.outer), tuple((k, 0) for k in order))
        for item in group.nests:
            item.transform(recipe)
        group.outer = recipe.outer_extents()


def build_kernel(
    group: Group,
    name: str,
    internal: Collection[str],
    buffers: Mapping[str, Buffer],
    sizes: Collection[Expr],
    options: ScheduleOptions,
) -> Kernel:
    """The kernel of a group. `internal`: buffers that nothing outside the group needs. `sizes`: the program's size
    symbols."""
    _order_outer(group, internal)
    merge_axes(group.nests, 0, len(group.outer))
    group.outer = group.nests[0].extents[: group.nests[0].outer]
    outer = _symbols("o", group.outer)
    emitter = _Emitter(group, internal, buffers, options, Stager(group.nests).run(), outer)
    stages = emitter.run()
    if any(stage.axes for stage in stages):
        stages = hoist(stages, stored(stages))
    written: dict[str, torch.dtype] = {}
    scratch_names = {scratch.name for scratch in emitter.scratch}
    for stage in stages:
        for statement in stage.statements:
            if isinstance(statement, Store) and statement.buffer not in scratch_names:
                written.setdefault(statement.buffer, buffers[statement.buffer].element)
    touched = list(dict.fromkeys([*emitter.reads, *written]))
    return Kernel(
        name=name,
        outer=tuple(Axis(sym, extent) for sym, extent in zip(outer, group.outer)),
        stages=tuple(stages),
        buffers=tuple(touched),
        dtypes=tuple(buffers[buffer].element for buffer in touched),
        written=frozenset(written),
        sizes=sizes_used(group.outer, stages, emitter.scratch, sizes) if sizes else (),
        scratch=tuple(emitter.scratch),
        locations=tuple(dict.fromkeys(location for nest in group.nests for location in nest.operation.locations)),
        origins=tuple(nest.operation.name for nest in group.nests),
    )


def sizes_used(
    outer: Sequence[Dim], stages: Sequence[Stage], scratch: Sequence[Scratch], sizes: Collection[Expr]
) -> tuple[Expr, ...]:
    """The program's size symbols that stand anywhere in the kernel. In order of first use, so that kernels which differ
    in their sizes alone share code."""
    dims: list[Dim] = [*outer, *(item.size for item in scratch)]
    for stage in stages:
        dims.extend(axis.extent for axis in stage.axes)
        for statement in stage.statements:
            if isinstance(statement, Store):
                dims.append(statement.index)
        dims.extend(survey(value for statement in stage.statements for value in roots(statement)).dims)
    used = dict.fromkeys(sym for dim in dims for sym in sorted(free_symbols(dim), key=str))
    return tuple(sym for sym in used if sym in sizes)
