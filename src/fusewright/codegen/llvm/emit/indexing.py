"""Index arithmetic: a symbolic index as a scalar or a vector of integers, and how it moves along the vector axis.

Takes `Dim`s in normalised axes and a `Context`; gives values. Always holds: scalar partial sums are computed in the
outermost scope that knows their terms; vectors are computed in i32 where the ranges of all divided parts and of the
result prove that it suffices, else in i64.

`bound` maps symbols of indirect indexing to run-time values.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Scope, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.types import type_text
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

Bound = Mapping[Expr, Value]
Term = tuple[tuple[Expr, ...], int]
Part = tuple[Scope, Value]
NONE: Bound = {}


class Indexer:
    def __init__(self, b: FunctionBuilder) -> None:
        self.b = b

    # --- scalars

    def scalar(self, ctx: Context, d: Dim, bound: Bound = NONE) -> Value:
        """The i64 value of `d` in a context without lanes."""
        value, constant = self.scalar_parts(ctx, d, bound)
        if value is None:
            return self.b.const(constant, "i64")
        return value if constant == 0 else self._at(value.home, "add nsw", value, constant)

    def _at(self, scope: Scope | None, opcode: str, value: Value, constant: int) -> Value:
        b = self.b
        if scope is None:
            return b.op(opcode, value, b.const(constant, "i64"))
        key = ("constant", opcode, value.text, constant)
        found = scope.memo.get(key)
        if found is None:
            saved, b.scope = b.scope, scope
            found = scope.memo[key] = b.op(opcode, value, b.const(constant, "i64"))
            b.scope = saved
        return found

    def scalar_parts(self, ctx: Context, d: Dim, bound: Bound = NONE) -> tuple[Value | None, int]:
        """(value without the constant, constant)."""
        if isinstance(d, int):
            return None, d
        b = self.b
        groups, late = self._by_level(ctx, d, bound)
        result: Value | None = None
        done: tuple[object, ...] = ("index",)
        saved = b.scope
        for level in sorted(groups):
            done = (*done, *groups[level])
            b.scope = ctx.chain[level]
            found = b.scope.memo.get(done)
            if found is None:
                found = b.scope.memo[done] = self._sum(ctx, result, groups[level], NONE)
            result = found
        b.scope = saved
        if late:
            result = self._sum(ctx, result, late, bound)
        return result, d.constant

    def parts(self, ctx: Context, d: Dim, bound: Bound = NONE) -> tuple[list[Part], int]:
        """(the sum of the terms that become known in each scope of the chain, outermost first; constant), for a context
        without lanes."""
        if isinstance(d, int):
            return [], d
        b = self.b
        groups, bound_terms = self._by_level(ctx, d, bound)
        homes = {id(scope): level for level, scope in enumerate(ctx.chain)}
        bounds: dict[int, list[Term]] = {}
        for monomial, count in bound_terms:
            bounds.setdefault(max(self._home(ctx, atom, bound, homes) for atom in monomial), []).append(
                (monomial, count)
            )
        found: list[Part] = []
        constant = d.constant
        saved = b.scope
        for level in sorted({*groups, *bounds}):
            b.scope = ctx.chain[level]
            terms = groups.get(level, [])
            late = bounds.get(level, [])
            values = tuple(bound[symbol].text for symbol in bound) if late else ()
            key = ("part", *terms, *late, *values)
            result = b.scope.memo.get(key)
            if result is None:
                result = b.scope.memo[key] = self._sum(ctx, None, [*terms, *late], bound if late else NONE)
            if result.home is None:  # the index of a loop that is written out
                constant += int(result.text)
            else:
                found.append((b.scope, result))
        b.scope = saved
        return found, constant

    def _home(self, ctx: Context, atom: Expr, bound: Bound, homes: Mapping[int, int]) -> int:
        """The level at which all that an atom is computed from is known."""

        def level(symbol: Expr) -> int:
            value = bound.get(symbol)
            if value is None:
                return ctx.level(symbol)
            return 0 if value.home is None else homes.get(id(value.home), len(ctx.chain) - 1)

        return max(map(level, sizes.free_symbols(atom)), default=0)

    def _by_level(self, ctx: Context, d: Expr, bound: Bound) -> tuple[dict[int, list[Term]], list[Term]]:
        """The terms of `d` by the level at which they are known, and those that need values of indirect indexing."""
        groups: dict[int, list[Term]] = {}
        late: list[Term] = []
        for monomial, count in d.terms:
            symbols = set().union(*(sizes.free_symbols(atom) for atom in monomial))
            if bound and not symbols.isdisjoint(bound):
                late.append((monomial, count))
            else:
                groups.setdefault(max(map(ctx.level, symbols), default=0), []).append((monomial, count))
        return groups, late

    def _sum(self, ctx: Context, result: Value | None, terms: list[Term], bound: Bound) -> Value:
        b = self.b
        for monomial, count in terms:
            term: Value | None = None
            for atom in monomial:
                value = self.atom(ctx, atom, bound)
                term = value if term is None else b.op("mul nsw", term, value)
            assert term is not None
            if count != 1:
                term = b.op("mul nsw", term, b.const(count, "i64"))
            result = term if result is None else b.op("add nsw", result, term)
        assert result is not None
        return result

    def atom(self, ctx: Context, atom: Expr, bound: Bound) -> Value:
        if atom in bound:
            return bound[atom]
        if isinstance(atom, sizes.Symbol):
            return ctx.chain[ctx.level(atom)].values[atom]
        b = self.b
        symbols = sizes.free_symbols(atom)
        free = symbols.isdisjoint(bound)
        saved = b.scope
        if free:
            b.scope = ctx.chain[max(map(ctx.level, symbols), default=0)]
            found = b.scope.memo.get(atom)
            if found is not None:
                b.scope = saved
                return found
        operands = [self.scalar(ctx, child, bound) for child in atom._children()]
        result = self._combine(atom, operands)
        if free:
            b.scope.memo[atom] = result
        b.scope = saved
        return result

    def _combine(self, atom: Expr, operands: list[Value]) -> Value:
        """FloorDiv, Mod, Min or Max of values of one type."""
        b = self.b
        if isinstance(atom, (sizes.Min, sizes.Max)):
            result = operands[0]
            for other in operands[1:]:
                result = b.intrinsic("smin" if isinstance(atom, sizes.Min) else "smax", result, other)
            return result
        assert isinstance(atom, (sizes.FloorDiv, sizes.Mod))
        left, right = b.match(*operands)
        quotient_wanted = isinstance(atom, sizes.FloorDiv)
        low, _ = sizes.bounds(atom.left)
        divisor_low, _ = sizes.bounds(atom.right)
        if divisor_low is None or divisor_low <= 0:
            # A symbolic divisor that may be 0 belongs to an empty tensor, whose loops do not run; the instruction may
            # still be hoisted.
            zero = b.const(0, right.type)
            right = b.select(b.compare("icmp eq", right, zero), b.const(1, right.type), right)
        if low is not None and low >= 0 and divisor_low is not None and divisor_low >= 0:
            return b.op("udiv" if quotient_wanted else "urem", left, right)
        zero, one = b.const(0, left.type), b.const(1, left.type)
        remainder = b.op("srem", left, right)
        wrong = b.op(
            "and", b.compare("icmp slt", b.op("xor", remainder, right), zero), b.compare("icmp ne", remainder, zero)
        )
        if quotient_wanted:
            quotient = b.op("sdiv", left, right)
            return b.select(wrong, b.op("sub", quotient, one), quotient)
        return b.select(wrong, b.op("add", remainder, right), remainder)

    # --- vectors

    def iota(self, lanes: int, type_: str, step: int = 1) -> Value:
        text = "<" + ", ".join(f"{type_} {i * step}" for i in range(lanes)) + ">"
        return Value(text, type_, lanes)

    def base(self, ctx: Context) -> Value:
        """The vector axis' value in lane 0."""
        assert ctx.vector is not None
        return self.scalar(ctx.uniform, ctx.vector + ctx.offset)

    def _axis_lanes(self, ctx: Context, type_: str) -> Value:
        b = self.b
        scope = ctx.chain[ctx.lane_level()]
        key = ("lanes of the axis", type_)
        found = scope.memo.get(key)
        if found is None:
            saved, b.scope = b.scope, scope
            base = self.base(ctx)
            base = base if type_ == "i64" else b.convert("trunc", base, type_)
            found = scope.memo[key] = b.op("add", base, self.iota(ctx.lanes, type_))
            b.scope = saved
        return found

    def lanes(self, ctx: Context, d: Dim, bound: Bound = NONE) -> Value:
        """The i32 or i64 values of `d` in all lanes; a scalar i64 if it does not vary."""
        if not self.varies(ctx, d, bound):
            return self.scalar(ctx.uniform, d, bound)
        type_ = "i32" if not (bound and not sizes.free_symbols(d).isdisjoint(bound)) and fits_i32(d) else "i64"
        return self._lanes(ctx, d, bound, type_)

    def lanes_of_type(self, ctx: Context, d: Dim, type_: str) -> Value:
        """The values of `d` in all lanes, or a scalar; in i32 only if `fits_i32(d)`."""
        return self._lanes(ctx, d, NONE, type_)

    def lanes_i64(self, ctx: Context, d: Dim, bound: Bound = NONE) -> Value:
        value = self.lanes(ctx, d, bound)
        return value if value.type == "i64" else self.b.convert("sext", value, "i64")

    def varies(self, ctx: Context, d: Dim, bound: Bound) -> bool:
        symbols = sizes.free_symbols(d)
        return (ctx.vector is not None and ctx.vector in symbols) or any(
            s in bound and bound[s].lanes > 1 for s in symbols
        )

    def _lanes(self, ctx: Context, d: Dim, bound: Bound, type_: str) -> Value:
        b = self.b
        if isinstance(d, int):
            return b.const(d, type_)
        if not self.varies(ctx, d, bound):
            value = self.scalar(ctx.uniform, d, bound)
            return value if type_ == "i64" else b.convert("trunc", value, type_)
        still: Dim = d.constant
        result: Value | None = None
        for monomial, count in d.terms:
            term_dim: Dim = sizes.product(monomial) * count
            if not self.varies(ctx, term_dim, bound):
                still = still + term_dim
                continue
            term: Value | None = None
            for atom in monomial:
                value = self._atom_lanes(ctx, atom, bound, type_)
                term = value if term is None else b.op("mul", term, value)
            assert term is not None
            if count != 1:
                term = b.op("mul", term, b.const(count, type_))
            result = term if result is None else b.op("add", result, term)
        assert result is not None
        if isinstance(still, int) and still == 0:
            return result
        return b.op("add", result, self._lanes(ctx, still, bound, type_))

    def _atom_lanes(self, ctx: Context, atom: Expr, bound: Bound, type_: str) -> Value:
        b = self.b
        if atom in bound:
            return bound[atom]
        if atom is ctx.vector:
            return self._axis_lanes(ctx, type_)
        if not self.varies(ctx, atom, bound):
            value = self.scalar(ctx.uniform, atom, bound)
            return value if type_ == "i64" else b.convert("trunc", value, type_)
        return self._combine(atom, b.match(*(self._lanes(ctx, child, bound, type_) for child in atom._children())))

    # --- movement along the vector axis

    def stride(self, ctx: Context, d: Dim, bound: Bound) -> Dim | None:
        """c such that lane k of `d` is lane 0 plus k*c, for the lanes of this context; None if there is none or it
        cannot be told.

        Beside affine indices this sees through `// k` and `% k` where the vector, which starts at a multiple of its
        length, lies within one block.
        """
        if any(symbol in bound and bound[symbol].lanes > 1 for symbol in sizes.free_symbols(d)):
            return None
        axis = ctx.vector
        if isinstance(d, int) or axis is None or axis not in sizes.free_symbols(d):
            return 0
        plain = sizes.coefficient(d, axis)
        if plain is not None:
            return plain
        found: Dim = 0
        for monomial, count in d.terms:
            varying = [atom for atom in monomial if axis in sizes.free_symbols(atom)]
            if not varying:
                continue
            if len(varying) > 1:
                return None
            step = self._atom_stride(ctx, varying[0], axis)
            if step is None:
                return None
            found = found + sizes.product(atom for atom in monomial if atom is not varying[0]) * (count * step)
        return found

    def _atom_stride(self, ctx: Context, atom: Expr, axis: Expr) -> int | None:
        if atom is axis:
            return 1
        if not isinstance(atom, (sizes.FloorDiv, sizes.Mod)) or not isinstance(atom.right, int):
            return None
        step = sizes.coefficient(atom.left, axis)
        if not isinstance(step, int) or step <= 0:
            return None
        span = ctx.lanes * step
        if atom.right <= 0 or atom.right % span or not sizes.is_multiple(atom.left - axis * step, span):
            return None
        return 0 if isinstance(atom, sizes.FloorDiv) else step

    def first_lane(self, ctx: Context, d: Dim, bound: Bound) -> tuple[list[Part], int]:
        """Lane 0 of `d`, as `parts`; only for a `d` that has a stride."""
        axis = ctx.vector
        if ctx.offset and axis is not None and axis in sizes.free_symbols(d):
            d = sizes.substitute(d, {axis: axis + ctx.offset}) if sizes.coefficient(d, axis) is not None else d
            if sizes.coefficient(d, axis) is None:
                bound = {**bound, axis: self.base(ctx)}
        return self.parts(ctx.uniform, d, bound)


def fits_i32(d: Dim) -> bool:
    """Whether i32 arithmetic gives `d`: the result and whatever is divided or compared must fit; sums and products may
    wrap on the way."""
    low, high = sizes.bounds(d)
    if low is None or high is None or low < -(1 << 31) or high >= 1 << 31:
        return False
    return isinstance(d, int) or all(_parts_fit(atom) for monomial, _ in d.terms for atom in monomial)


def _parts_fit(atom: Expr) -> bool:
    if isinstance(atom, sizes.Symbol):
        low, high = sizes.bounds(atom)
        return low is not None and high is not None and -(1 << 31) <= low and high < 1 << 31
    return all(fits_i32(child) for child in atom._children())


def vector_of_pointers(b: FunctionBuilder, memory: str, pointer: str, index: Value) -> Value:
    """The addresses of `pointer`[index] for an integer vector."""
    wide = index if index.type == "i64" else b.convert("sext", index, "i64")
    return b.value(
        f"getelementptr {memory}, ptr {pointer}, {type_text('i64', wide.lanes)} {wide.text}", "ptr", wide.lanes
    )
