"""One kernel as Triton text.

Takes a scheduled `Kernel` and a `Processor`; gives `KernelText`. Always holds: every statement of a stage is emitted in
its order; a value is computed once for each place where it can be reused (text decides: equal text is an equal value),
and outside of a loop when it does not depend on the loop; a load is never reused across a store to its memory.

A block has up to two dimensions. Values keep the shape that they vary along (a row's mean is [X, 1]) and broadcast
where they meet. A stage whose row fits one block is straight code, so that what one stage loads or stores serves the
next one from registers; row memory (`Scratch`) then needs no memory at all. Otherwise the stage is a loop over blocks
of the row, and what stages share goes through memory, with a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusewright.base.records import dataclass, field
from fusewright.codegen.analysis import Shape, StageView, analyse, values_of, walk
from fusewright.codegen.device_kernel import Processor, Spill
from fusewright.codegen.triton import indices, online, operations, reductions, short_integers, unrolled
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.codegen.triton.operations import HALVES, Style
from fusewright.codegen.triton.positions import grouped, positions
from fusewright.codegen.triton.tiles import Tile, check_store, choose
from fusewright.codegen.triton.values import Value
from fusewright.loops.ir import (
    FLOAT8,
    Apply,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
)
from fusewright.schedule.plan import Define, Kernel, Reduce, ScanStep, Statement
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

LONGEST_INDEX = (1 << 31) - 1
EXACT, FAST = Style(), Style(fast=True)
PLANE = ("square", "product")
"""Kinds of tile whose blocks run along x and y."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """body: the function without its name, from the parameter list on. `spilled`: scratch that needs memory, in
    parameter order. scratch: bytes of a program that Triton itself uses. early: so many of the first lines
    of the body touch no memory."""

    parameters: tuple[str, ...]
    body: tuple[str, ...]
    spills: tuple[Spill, ...]
    grid: Dim
    tile: Tile | ProductTile
    checks: bool
    scratch: int = 0
    early: int = 0


class NeedsMemory(Exception):
    """Row memory that cannot stay in registers."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch


def emit_kernel(
    kernel: Kernel, processor: Processor, scalars: frozenset[str], wide: bool, tile: Tile | None, again: frozenset[str]
) -> KernelText:
    """scalars: buffers that are passed by value (scalars in CPU memory); wide: 64-bit indices; again: buffers that
    other kernels read too. Raises Unsupported."""
    shape = analyse(kernel)
    tile = choose(shape, processor) if tile is None else tile
    spilled: list[str] = []
    while True:
        try:
            return Emitter(kernel, shape, tile, scalars, wide, tuple(spilled), again).run()
        except NeedsMemory as need:
            spilled.append(need.scratch)


@dataclass(slots=True)
class Emitter:
    kernel: Kernel
    shape: Shape
    tile: Tile | ProductTile
    scalars: frozenset[str]
    wide: bool
    spilled: tuple[str, ...]
    again: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)  # parameter of each buffer
    lines: list[list[str]] = field(default_factory=lambda: [[], []])  # by level
    known: list[dict[str, Value]] = field(default_factory=lambda: [{}, {}])  # text -> value, by level
    loads: dict[str, list[str]] = field(default_factory=dict)  # texts of loads, by the memory that they read
    stored: dict[tuple[str, Dim], Value] = field(default_factory=dict)
    unsynchronised: set[str] = field(default_factory=set)
    locals: dict[str, Value] = field(default_factory=dict)
    bound: dict[Expr, Value] = field(default_factory=dict)
    memo: dict[tuple[Expression, str], Value] = field(default_factory=dict)
    masks: list[Value] = field(default_factory=list)
    count: int = 0
    level: int = 0
    checks: bool = False
    looped: bool = False
    style: Style = EXACT
    # what is rounded to a half before anything else is made of it, in a kernel that is exact
    rounded: frozenset[Expression] = frozenset()
    view: StageView | None = None
    mapping: dict[Expr, Dim] = field(default_factory=dict)
    outer_mapping: dict[Expr, Dim] = field(default_factory=dict)
    row: Value | None = None  # the flat position along the row, of the current stage
    row_mask: Value | None = None
    row_exists: Value | None = None  # asked before a row that may be empty: what it would read there may be no memory
    row_symbol: Expr | None = None
    rows_made: dict[Dim, tuple[Expr, Value, Value | None]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    early: int = 0  # the first lines that touch no memory
    streamed: frozenset[str] = frozenset()

    @property
    def index_type(self) -> str:
        return "tl.int64" if self.wide else "tl.int32"

    def run(self) -> KernelText:
        kernel = self.kernel
        written = [
            dtype
            for name, dtype in zip(kernel.buffers, kernel.dtypes)
            if name in kernel.written and dtype.is_floating_point
        ]
        self.style = Style(fast=bool(written) and all(dtype in HALVES for dtype in written))
        if not self.style.fast:
            self.rounded = operations.rounded([value for stage in kernel.stages for value in values_of(stage)])
        for number, (name, dtype) in enumerate(zip(kernel.buffers, kernel.dtypes)):
            self.names[name] = f"out{number}" if name in kernel.written else f"in{number}"
            self.dtypes[name] = dtype
        for number, name in enumerate(self.spilled):
            self.names[name] = f"spill{number}"
        for scratch in kernel.scratch:
            self.dtypes[scratch.name] = scratch.dtype
        self._programs()
        loops = self.tile.kind == "rows" and not self.tile.persistent
        pairs = {pair.first: pair for pair in online.pairs_of(self.shape)} if loops else {}
        done = {pair.second for pair in pairs.values()}
        if loops:
            self.streamed = reductions.streamed(self.shape, done) - self.again
        for place, view in enumerate(self.shape.views):
            if place not in done:
                self._stage(view, pairs.get(place))
        parameters = (*(self.names[name] for name in (*kernel.buffers, *self.spilled)), *map(str, kernel.sizes))
        spills = tuple(
            Spill(scratch.dtype, scratch.size * indices.total(self.shape.outer))
            for name in self.spilled
            for scratch in kernel.scratch
            if scratch.name == name
        )
        body = tuple(self.lines[0])
        return KernelText(parameters, body, spills, self._grid(), self.tile, self.checks, early=self.early)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _grid(self) -> Dim:
        tile = self._plain_tile
        grid = sizes.ceil_div(indices.total(tile.x_axes), tile.x)
        return grid * sizes.ceil_div(indices.total(tile.y_axes), tile.y) if tile.y_axes else grid

    @property
    def _plain_tile(self) -> Tile:
        assert isinstance(self.tile, Tile)
        return self.tile

    def _programs(self) -> None:
        """The positions that this program handles, and their masks."""
        tile = self._plain_tile
        out = self.lines[0]
        out.append(f"X: tl.constexpr = {tile.x}")
        program = f"tl.program_id(0){'.to(tl.int64)' if self.wide else ''}"
        if tile.y_axes:
            across, _ = self._size_text(sizes.ceil_div(indices.total(tile.x_axes), tile.x))
            out += [f"Y: tl.constexpr = {tile.y}", f"program = {program}"]
            column, row = ("[None, :]", " + tl.arange(0, Y)[:, None]") if tile.kind == "square" else ("", "")
            out.append(f"x = (program % ({across})) * X + tl.arange(0, X){column}")
            out.append(f"y = (program // ({across})) * Y{row}")
        else:
            out.append(f"x = {program} * X + tl.arange(0, X){'[:, None]' if tile.kind == 'rows' else ''}")
        for name, axes, block in (("x", tile.x_axes, tile.x), ("y", tile.y_axes, tile.y)):
            if not axes:
                continue
            extent = indices.total(axes)
            self.outer_mapping.update(indices.unflatten(axes, indices.flat_symbol(name, axes)))
            if not sizes.is_multiple(extent, block):
                text, _ = self._size_text(extent)
                out.append(f"{name}_mask = {name} < {text}")
                self.locals[f"{name}_mask"] = Value(f"{name}_mask", frozenset(name))

    def _size_text(self, d: Dim) -> tuple[str, frozenset[str]]:
        return indices.text_of(d, lambda symbol: (str(symbol), indices.NOTHING), lambda text, dims: f"({text})")

    def _full(self) -> frozenset[str]:
        """Block dimensions of the current stage."""
        if self.tile.kind == "flat":
            return frozenset("x")
        if self.tile.kind in PLANE:
            return frozenset("xy")
        return frozenset("xr") if self.row is not None else frozenset("x")

    def shape_text(self, dims: frozenset[str]) -> str:
        if self.tile.kind == "flat":
            return "[X]" if dims else "[]"
        if self.tile.kind in PLANE:
            return f"[{'Y' if 'y' in dims else '1'}, {'X' if 'x' in dims else '1'}]"
        return f"[{'X' if 'x' in dims else '1'}, {self.row_block() if 'r' in dims else '1'}]"

    def row_block(self) -> str:
        return f"{self.row.text.upper()}" if self.row is not None else "1"

    # --- names -------------------------------------------------------------------------------------------------------

    def bind(self, text: str, dims: frozenset[str], level: int) -> Value:
        """A name for the value of `text`; the same one for the same text."""
        for at in range(level + 1):
            found = self.known[at].get(text)
            if found is not None:
                return found
        name = f"v{self.count}"
        self.count += 1
        self.lines[level].append(f"{name} = {text}")
        value = self.known[level][text] = Value(name, dims, level)
        return value

    def level_of(self, *values: Value) -> int:
        return max((value.level for value in values), default=0)

    def flat(self, index: Dim) -> Dim:
        """An index of the kernel over the flat positions."""
        assert self.view is not None
        return sizes.substitute(self.view.dim(index), self.mapping)

    def index(self, index: Dim) -> Value:
        """The text of a flat index."""
        level = 0

        def name(symbol: Expr) -> tuple[str, frozenset[str]]:
            nonlocal level
            found = self.bound.get(symbol)
            if found is None and symbol is self.row_symbol:
                found = self.row
            if found is not None:
                level = max(level, found.level)
                return found.text, found.dims
            text = str(symbol)
            return text, frozenset(text) & self._full() if text in ("x", "y") else indices.NOTHING

        def bind(text: str, dims: frozenset[str]) -> str:
            return self.bind(text, dims, level).text

        text, dims = indices.text_of(index, name, bind)
        return Value(text, dims, level)

    # --- stages ------------------------------------------------------------------------------------------------------

    def _stage(self, view: StageView, pair: online.Pair | None) -> None:
        self.view = view
        self.memo.clear()
        self._synchronise(view)
        if not view.axes or self.tile.kind != "rows":
            self.row = self.row_mask = self.row_symbol = self.row_exists = None
            self.mapping = dict(self.outer_mapping)
            unrolled.statements(self, view.stage.statements)
            return
        extent = indices.total(view.axes)
        if self.tile.persistent:
            self._make_row(extent)
            self._enter_row(view, extent)
            self.run_statements(view.stage.statements)
            return
        self._loop(view, extent, pair)

    def _make_row(self, extent: Dim) -> None:
        """Positions along a row that is one block. All rows of a kernel have blocks of one size: Triton would lay out
        the long one as the short one where their values meet, and each warp would read all of it."""
        if extent in self.rows_made:
            return
        assert isinstance(extent, int)
        number = len(self.rows_made)
        name = f"r{number or ''}"
        block = self._plain_tile.r  # at least the longest row
        out = self.lines[0]
        out.append(f"{name.upper()}: tl.constexpr = {block}")
        out.append(f"{name} = tl.arange(0, {name.upper()})[None, :]{'.to(tl.int64)' if self.wide else ''}")
        mask = None
        if block != extent:
            out.append(f"{name}_mask = {name} < {extent}")
            mask = Value(f"{name}_mask", frozenset("r"))
        self.rows_made[extent] = (sizes.loop_symbol(name, extent), Value(name, frozenset("r")), mask)

    def _enter_row(self, view: StageView, extent: Dim) -> None:
        symbol, self.row, self.row_mask = self.rows_made[extent]
        self.row_symbol = symbol
        self.mapping = {**self.outer_mapping, **indices.unflatten(view.axes, symbol)}

    def _loop(self, view: StageView, extent: Dim, pair: online.Pair | None) -> None:
        """The stage (or a pair of them) as a loop over blocks of the row. Lines at level 0 that the body causes stand
        before the loop."""
        self.row_symbol = sizes.loop_symbol("r", extent)
        self.row = Value("r", frozenset("r"), 1)
        self.mapping = {**self.outer_mapping, **indices.unflatten(view.axes, self.row_symbol)}
        before, self.lines[1] = self.lines[0], []
        if not self.looped:
            self.looped = True
            before.append(f"R: tl.constexpr = {self._plain_tile.r}")
        text, _ = self._size_text(extent)
        whole = sizes.is_multiple(extent, self._plain_tile.r)
        self.row_mask = None if whole else Value("r_mask", frozenset("r"), 1)
        full = isinstance(extent, int) or sizes.known_le(1, extent) is True
        self.row_exists = None if full else Value(f"({text} > 0)", indices.NOTHING)
        self.level = 1
        if pair is None:
            self.run_statements(view.stage.statements)
        else:
            self.run_statements([one for one in view.stage.statements if not isinstance(one, Reduce)])
            online.begin(self, pair)
            online.body(self, pair)
        before.append(f"for base in range(0, {text}, R):")
        self.level = 0
        before.append(f"    r = base + tl.arange(0, R)[None, :]{'.to(tl.int64)' if self.wide else ''}")
        if not whole:
            before.append(f"    r_mask = r < {text}")
        before.extend(f"    {line}" for line in self.lines[1])
        self.known[1].clear()
        self.stored = {key: value for key, value in self.stored.items() if value.level == 0}
        self.locals = {name: value for name, value in self.locals.items() if value.level == 0}
        if pair is not None:
            online.close(self, pair)
            return
        for statement in view.stage.statements:
            if isinstance(statement, Reduce):
                self.locals[statement.local] = reductions.close(self, statement)

    def _synchronise(self, view: StageView) -> None:
        """A barrier where the stage may read memory that an earlier stage of this program wrote."""
        reads = {self.memory(expr.buffer) for expr in walk(values_of(view.stage)) if isinstance(expr, Load)}
        if reads & self.unsynchronised:
            self.lines[0].append("tl.debug_barrier()")
            self.unsynchronised.clear()

    def memory(self, buffer: str) -> str:
        """The name under which the memory of a buffer is known."""
        return self.shape.aliases.get(buffer, buffer)

    def run_statements(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            if isinstance(statement, Define):
                self.locals[statement.local] = self.evaluate(statement.value)
            elif isinstance(statement, Store):
                self._store(statement)
            elif isinstance(statement, Reduce):
                found = reductions.reduce(self, statement)
                if found is not None:
                    self.locals[statement.local] = found
            else:
                assert isinstance(statement, ScanStep)
                reductions.scan(self, statement)

    # --- values ------------------------------------------------------------------------------------------------------

    def evaluate(self, expr: Expression) -> Value:
        assert self.view is not None
        guarded = self.masks[-1].text if self.masks and self.view.facts(expr).effects else ""
        return self._once((expr, guarded), self._compute)

    def short(self, expr: Expression) -> Value:
        """An integer of which short_integers.fits says that 32 bits hold it, in as many."""
        guarded = self.masks[-1].text if self.masks else ""
        return self._once((expr, f"{guarded} short"), partial(short_integers.value, self))

    def _once(self, key: tuple[Expression, str], compute: Callable[[Expression], Value]) -> Value:
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = compute(key[0])
        return found

    def _compute(self, expr: Expression) -> Value:
        if isinstance(expr, Constant):
            return self.bind(operations.typed(expr), indices.NOTHING, 0)
        if isinstance(expr, LocalValue):
            return self.locals[expr.name]
        if isinstance(expr, Load):
            return self._load(expr)
        if isinstance(expr, IndexValue):
            value = self.index(self.flat(expr.index))
            text = (
                f"({value.text}).to(tl.int64)"
                if value.dims or not value.text.isdigit()
                else f"tl.full([], {value.text}, tl.int64)"
            )
            return self.bind(text, value.dims, value.level)
        if isinstance(expr, Masked):
            return self._masked(expr)
        if isinstance(expr, CheckedIndex):
            return self._checked(expr)
        assert isinstance(expr, Apply)
        return self._apply(expr)

    def _apply(self, expr: Apply) -> Value:
        style = FAST if expr in self.rounded else self.style
        argument = operations.one_plus_erf(expr) if style.fast else None
        if argument is not None:
            value = self.evaluate(argument)
            return self.bind(f"lib.fast_one_plus_erf({value.text})", value.dims, value.level)
        found = None if self.wide else short_integers.apply(self, expr, style)
        return self._plain(expr, style) if found is None else found

    def _plain(self, expr: Apply, style: Style) -> Value:
        """An operation in the types that it has."""
        loose = expr.op not in operations.TYPED_OPERANDS and any(not isinstance(arg, Constant) for arg in expr.args)
        texts: list[str] = []
        dims: frozenset[str] = indices.NOTHING
        level = 0
        for arg in expr.args:
            text = operations.literal(arg) if loose and isinstance(arg, Constant) else None
            if text is None:
                value = self.evaluate(arg)
                text, dims, level = value.text, dims | value.dims, max(level, value.level)
            texts.append(text)
        text = operations.apply(expr, texts, style)
        if text in texts:  # an identity, such as rounding an integer
            return Value(text, dims, level)
        return self.bind(text, dims, level)

    def _masked(self, expr: Masked) -> Value:
        mask = self.evaluate(expr.mask)
        body = self._under(mask, expr.body)
        assert self.view is not None
        other = expr.other
        if self.view.facts(other).effects:  # its loads may be out of range where the body's are not
            rest = self.bind(f"({mask.text} == 0)", mask.dims, mask.level)
            return self._choose(mask, body, self._under(rest, other))
        return self._choose(mask, body, self.evaluate(other))

    def _under(self, mask: Value, expr: Expression) -> Value:
        """The value where `mask` holds (and what guards the place already)."""
        outer = self.masks[-1] if self.masks else None
        inner = (
            mask
            if outer is None
            else self.bind(f"({outer.text} & {mask.text})", outer.dims | mask.dims, self.level_of(outer, mask))
        )
        self.masks.append(inner)
        found = self.evaluate(expr)
        self.masks.pop()
        return found

    def _choose(self, mask: Value, body: Value, other: Value) -> Value:
        dims = mask.dims | body.dims | other.dims
        return self.bind(f"tl.where({mask.text}, {body.text}, {other.text})", dims, self.level_of(mask, body, other))

    def _checked(self, expr: CheckedIndex) -> Value:
        value = self.evaluate(expr.value)
        extent = self.index(self.flat(expr.extent))
        level = self.level_of(value, extent)
        if expr.wrap:
            wrapped = f"tl.where({value.text} < 0, {value.text} + {extent.text}, {value.text})"
            value = self.bind(wrapped, value.dims, level)
        mask, _, mask_level = self.mask_text(value.dims)
        self.checks = True
        inside = f"({value.text} >= 0) & ({value.text} < {extent.text}){f' | (({mask}) == 0)' if mask else ''}"
        level, check = max(level, mask_level), f'tl.device_assert({inside}, "index out of range")'
        if check not in self.known[level]:
            self.known[level][check] = value
            self.lines[level].append(check)
        return value

    # --- memory ------------------------------------------------------------------------------------------------------

    def mask_text(self, dims: frozenset[str], guarded: bool = True) -> tuple[str, frozenset[str], int]:
        """(mask of the positions that exist along `dims` and are guarded now, its dimensions, its level)."""
        parts: list[Value] = [
            self.locals[f"{name}_mask"] for name in "xy" if name in dims and f"{name}_mask" in self.locals
        ]
        row = self.row_mask if "r" in dims else self.row_exists
        if row is not None:
            parts.append(row)
        if guarded and self.masks:
            parts.append(self.masks[-1])
        found: frozenset[str] = frozenset().union(*(part.dims for part in parts))
        return " & ".join(part.text for part in parts), found, self.level_of(*parts)

    def pointer(self, buffer: str, index: Value, dims: frozenset[str], offset: int = 0) -> str:
        """`name + index + offset` in the shape of `dims`."""
        place = grouped(index.text)
        if index.dims != dims:
            spread = f"{place} + tl.zeros({self.shape_text(dims)}, {self.index_type})"
            place = f"tl.broadcast_to({index.text}, {self.shape_text(dims)})" if index.dims else spread
        text = f"{self.names[buffer]} + {place}"
        return f"{self.bind(text, dims, index.level).text} + {offset}" if offset else text

    def _bindings(self, bindings: tuple[tuple[Expr, Expression], ...]) -> None:
        for symbol, expr in bindings:
            value = self.evaluate(expr)
            narrow = f"{value.text}.to(tl.int32)"
            self.bound[symbol] = value if self.wide else self.bind(narrow, value.dims, value.level)

    def _address(self, buffer: str, index: Dim) -> tuple[Value, int]:
        """The flat index of an access and what is to be added; into a spilled row, that of this program's part."""
        index, offset = unrolled.parted(self.tile, index)
        if buffer in self.spilled:
            size = next(scratch.size for scratch in self.kernel.scratch if scratch.name == buffer)
            for axis, position in positions(self.shape.outer):
                index = index + sizes.substitute(axis.symbol, self.outer_mapping) * position * size
        return self.index(index), offset

    def _load(self, expr: Load) -> Value:
        buffer = expr.buffer
        if buffer in self.scalars:
            text = self.names[buffer]
            return (
                self.bind(f"({text} != 0)", indices.NOTHING, 0)
                if expr.dtype is torch.bool
                else Value(text, indices.NOTHING)
            )
        self._bindings(expr.bindings)
        flat = self.flat(expr.index)
        if not expr.bindings:
            found = self.stored.get((buffer, flat))
            if found is not None:
                return found
        if buffer not in self.names:
            raise NeedsMemory(buffer)
        index, offset = self._address(buffer, flat)
        mask, mask_dims, mask_level = self.mask_text(index.dims)
        dims = index.dims | mask_dims
        if dims != index.dims:
            mask, mask_dims, mask_level = self.mask_text(dims)
        written = self.memory(buffer) in self.shape.aliases.values()
        level = max(index.level, mask_level, self.level if written else 0)
        other = "0.0" if expr.dtype in FLOAT8 else "0"  # Triton converts no integer to these
        hint = ', eviction_policy="evict_first"' if "r" in dims and self.memory(buffer) in self.streamed else ""
        pointer = self.pointer(buffer, index, dims, offset)
        text = f"tl.load({pointer}{f', {mask}, other={other}' if mask else ''}{hint})"
        self.loads.setdefault(self.memory(buffer), []).append(text)
        return self.bind(text, dims, level)

    def _store(self, store: Store) -> None:
        self._bindings(store.bindings)
        value = self.evaluate(store.value)
        flat = self.flat(store.index)
        memory = self.memory(store.buffer)
        self._forget(memory)
        if store.buffer not in self.names:  # row memory in registers
            self.stored[store.buffer, flat] = value
            return
        index, offset = self._address(store.buffer, flat)
        dims = index.dims | value.dims if store.mode == "write" else self._full()
        mask, mask_dims, _ = self.mask_text(dims)
        if mask_dims - dims:
            dims = dims | mask_dims
            mask, _, _ = self.mask_text(dims)
        pointer = self.pointer(store.buffer, index, dims, offset)
        text = value.text
        if value.dims != dims and dims:
            text = f"tl.broadcast_to({text}, {self.shape_text(dims)})"
        tail = f", {mask}" if mask else ""
        if store.mode == "write":
            self.lines[self.level].append(f"tl.store({pointer}, {text}{tail})")
            if not store.bindings:
                self.stored[store.buffer, flat] = value
        else:
            check_store(store.mode, self.dtypes[store.buffer])
            tail = f", mask={mask}" if mask else ""
            self.lines[self.level].append(f'tl.atomic_{store.mode}({pointer}, {text}{tail}, sem="relaxed")')
        self.unsynchronised.add(memory)

    def _forget(self, memory: str) -> None:
        """What was known about the content of a piece of memory."""
        for text in self.loads.pop(memory, ()):
            for known in self.known:
                known.pop(text, None)
        for key in [key for key in self.stored if self.memory(key[0]) == memory]:
            del self.stored[key]
        assert self.view is not None
        for expr, guarded in [key for key in self.memo if memory in self.view.facts(key[0]).volatile]:
            del self.memo[expr, guarded]

    def filled(self, value: Value) -> Value:
        """The value in the full shape of the stage."""
        dims = self._full()
        if value.dims == dims:
            return value
        return self.bind(f"tl.broadcast_to({value.text}, {self.shape_text(dims)})", dims, value.level)
