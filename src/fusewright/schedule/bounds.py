"""Whether a plan's kernels and library calls touch only what lies inside their buffers, for all sizes that the guards
admit.

Takes a `Plan`, and what is known of its sizes; gives the accesses for which that could not be shown, each with the
condition on sizes that would do. Always holds: what is not listed was proved: wherever it is performed, 0 <= index <
elements of the buffer. Indices that are known at run time only are bounded by the check that gives them
(`CheckedIndex`), or by their own arithmetic. What is a proof: sizes/proofs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from fusewright.base.records import dataclass, field
from fusewright.loops.externs import references
from fusewright.loops.ir import (
    Apply,
    Axis,
    Buffer,
    BufferRef,
    CheckedIndex,
    Constant,
    Expression,
    IndexValue,
    Load,
    LocalValue,
    Masked,
    Store,
)
from fusewright.schedule.axes import covers, decompose
from fusewright.schedule.plan import (
    Attention,
    Define,
    Kernel,
    Operand,
    Plan,
    Product,
    Reduce,
    RunExtern,
    RunKernel,
    ScanStep,
    roots,
)
from fusewright.sizes.algebra import interval, is_at_least_zero
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols, maximum, minimum, product, substitute
from fusewright.sizes.proofs import Facts, View, certain, lowest, not_empty, prove
from fusewright.sizes.strides import only_term, steps_along, term_quotient

Cases = tuple[Facts, ...]
"""What may hold: the facts of one of these."""
Range = tuple[Dim | None, Dim | None]
"""(least, most) of an integer; None: not known."""

MOST_CASES = 8
MOST_FAILURES = 16
"""Searches for a proof without success in one plan. Each takes long, and a kernel over images whose sizes nothing ties
to each other has one for each access."""


@dataclass(frozen=True, slots=True)
class Unproved:
    """An access that may lie outside its buffer. where: the kernel or the library call; index: the element; room: how
    many there are; missing: what would have to be at least 0, over sizes alone if it can be said so."""

    where: str
    buffer: str
    index: Dim
    room: Dim
    missing: Dim

    def __str__(self) -> str:
        return f"{self.where}: {self.buffer}[{self.index}] of {self.room} elements"


@dataclass(frozen=True, slots=True)
class Known:
    """What the guards say of sizes. holds: whether they decide that a size expression is at least 0; facts: those that
    they state to be; simplify: an expression with the equalities among them applied; multiples: sizes that are a
    number times another size."""

    holds: Callable[[Dim], bool] = lambda d: False
    facts: Facts = ()
    simplify: Callable[[Dim], Dim] = lambda d: d
    multiples: Mapping[Expr, Dim] = field(default_factory=dict)

    def about(self, d: Dim) -> Facts:
        """The facts that bear on `d`, by symbols in common."""
        symbols = set(free_symbols(d))
        found: list[Dim] = []
        for _ in range(2):
            found = [fact for fact in self.facts if not symbols.isdisjoint(free_symbols(fact))]
            symbols.update(symbol for fact in found for symbol in free_symbols(fact))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Shown:
    """What became of a plan's accesses. accesses: how many there are, kernels' and library calls'; unproved: those that
    may lie outside."""

    accesses: int
    unproved: tuple[Unproved, ...]


def text(shown: Shown) -> str:
    lines = [f"{shown.accesses} accesses, {len(shown.unproved)} of which are not shown to lie inside"]
    return "\n".join([*lines, *(f"{one}, if {one.missing} >= 0" for one in shown.unproved)])


def show(plan: Plan, known: Known | None = None) -> Shown:
    """`known`: of the sizes; nothing but their ranges if not given."""
    return _Checker(plan, known or Known()).run()


@dataclass(slots=True)
class _Checker:
    """The state of one check of a plan."""

    plan: Plan
    known: Known
    unproved: dict[Unproved, None] = field(default_factory=dict)
    rooms: dict[str, Dim] = field(default_factory=dict)
    answers: dict[tuple[Dim, Dim, Cases], Dim | None] = field(default_factory=dict)
    held: dict[str, Range] = field(default_factory=dict)
    views: dict[Facts, View] = field(default_factory=dict)
    inside: set[tuple[Dim, Dim, Cases]] = field(default_factory=set)
    accesses: int = 0
    failures: int = 0

    def run(self) -> Shown:
        for step in self.plan.steps:
            if isinstance(step, RunExtern):
                for ref in references((step.extern.args, step.extern.kwargs)):
                    self.window(step.extern.name, ref)
            else:
                _OfKernel(self, self.plan.kernels[step.kernel], step).run()
        for output in self.plan.outputs:
            if output.ref is not None:
                self.window("output", output.ref)
        return Shown(self.accesses, tuple(self.unproved))

    def room(self, name: str) -> Dim:
        found = self.rooms.get(name)
        if found is None:
            found = self.rooms[name] = self.plan.buffers[name].span()
        return found

    def window(self, where: str, ref: BufferRef) -> None:
        """A library operator, or whoever is given a view, may touch all of it."""
        if any(size == 0 for size in ref.shape):
            return
        last: Dim = ref.offset
        for size, stride in zip(ref.shape, ref.stride):
            last = last + (size - 1) * stride
        runs = tuple(size - 1 for size in ref.shape if not isinstance(size, int))
        room = self.room(ref.buffer)
        self.accesses += 2
        self.require(ref.offset, (runs,), where, ref.buffer, ref.offset, room)
        self.require(room - 1 - last, (runs,), where, ref.buffer, last, room)

    def access(self, where: str, buffer: str, index: Dim, room: Dim, cases: Cases) -> None:
        self.accesses += 1
        key = (index, room, cases)
        if key in self.inside:  # of another layer of the model, say
            return
        ends = [d for d in (index, room - 1 - index) if not is_at_least_zero(d)]
        if not ends or self.is_in_each_dimension(buffer, index, room, cases):
            self.inside.add(key)
        else:
            for d in ends:
                self.require(d, cases, where, buffer, index, room)

    def require(self, d: Dim, cases: Cases, where: str, buffer: str, index: Dim, room: Dim) -> None:
        if is_at_least_zero(d) or is_at_least_zero(d := self.known.simplify(d)):
            return
        key = (d, room, cases)
        if key not in self.answers:
            self.answers[key] = self.missing(d, cases)
        missing = self.answers[key]
        if missing is not None:
            self.unproved[Unproved(where, buffer, index, room, missing)] = None

    def is_in_each_dimension(self, name: str, index: Dim, room: Dim, cases: Cases) -> bool:
        """Whether an index is made of steps along the buffer's dimensions that plainly stay within each: a question to
        each size, where the whole is one to products of them."""
        buffer = self.plan.buffers.get(name)  # none of what a kernel keeps for itself
        if buffer is None or buffer.dtype.is_complex or room != self.room(name):
            return False
        return _is_in_each_dimension(buffer, index, cases)

    def holds(self, name: str) -> Range:
        """Between which bounds the integers in a temporary lie: those that the plan's kernels store there, if they fill
        it."""
        if name not in self.held:
            self.held[name] = None, None  # what is stored may be read from the same buffer
            self.held[name] = self.stored(name)
        return self.held[name]

    def stored(self, name: str) -> Range:
        found: list[Range] = []
        filled = False
        for step in self.plan.steps:
            if isinstance(step, RunExtern):
                if name in (*step.extern.outputs, *step.extern.mutates):
                    return None, None
                continue
            kernel = self.plan.kernels[step.kernel]
            if name not in kernel.written:
                continue
            inside = _OfKernel(self, kernel, step)
            for stage in kernel.stages:
                axes = (*kernel.outer, *stage.axes)
                for statement in stage.statements:
                    if isinstance(statement, Define):
                        inside.defined[statement.local] = statement.value
                    elif isinstance(statement, Store) and statement.buffer == name:
                        if statement.mode != "write":
                            return None, None
                        found.append(inside.range(statement.value))
                        place = (
                            None
                            if statement.bindings
                            else decompose(statement.index, tuple(axis.symbol for axis in axes))
                        )
                        filled = filled or (
                            place is not None and covers(place, [axis.extent for axis in axes], self.room(name))
                        )
        if not filled or self.plan.buffers[name].role not in ("temporary", "output"):
            return None, None
        least, most = found[0]
        for other in found[1:]:
            least, most = _union((least, most), other)
        plain = all(d is None or free_symbols(d) <= self.plan.size_symbols.keys() for d in (least, most))
        return (least, most) if plain else (None, None)

    def missing(self, d: Dim, cases: Cases) -> Dim | None:
        """None where `d` is at least 0 in all cases; else what would have to be."""
        for facts in cases:
            if self.proved(d, facts, search=False):
                continue
            least = lowest(d, self.plan.size_symbols)
            if free_symbols(least) <= self.plan.size_symbols.keys() and self.known.holds(least):
                return None
            if not (self.proved(d, facts) or self.proved(least, facts)):
                return least
        return None

    def proved(self, d: Dim, facts: Facts, search: bool = True) -> bool:
        if search and self.failures >= MOST_FAILURES:
            return False
        facts = (*facts, *self.known.about(d))
        if facts not in self.views:
            self.views[facts] = View(facts, self.plan.size_symbols, self.known.multiples)
        view = self.views[facts]
        found = prove(view.of(d), view.facts, search=search) or (search and prove(d, facts))
        self.failures += search and not found
        return found


class _OfKernel:
    """The accesses of one kernel."""

    def __init__(self, checker: _Checker, kernel: Kernel, step: RunKernel) -> None:
        self.checker, self.kernel = checker, kernel
        self.rooms: dict[str, tuple[Dim, ...]] = {scratch.name: (scratch.size,) for scratch in kernel.scratch}
        if kernel.product is not None:
            self.rooms |= {name: tuple(map(checker.room, buffers)) for name, buffers in kernel.product.chosen}
        self.given = () if step.when is None else certain(step.when)
        self.defined: dict[str, Expression] = {}  # locals that stand for an expression where they are visible
        self.positions: dict[str, Dim] = {}  # locals that hold a place in loops, and how many places there are
        self.seen: set[tuple[Expression, Cases]] = set()
        self.symbols: frozenset[Expr] = frozenset()

    def run(self) -> None:
        kernel = self.kernel
        if kernel.product is not None:
            self.product(kernel.product)
        if kernel.attention is not None:
            self.attention(kernel.attention)
        for stage in kernel.stages:
            cases = self.enter(*kernel.outer, *stage.axes)
            if not cases:
                continue
            for statement in stage.statements:
                for root in roots(statement):
                    self.visit(root, cases)
                if isinstance(statement, Store):
                    self.bindings(statement.bindings, cases)
                    self.access(
                        statement.buffer,
                        statement.index,
                        self.with_checks(statement.bindings, cases),
                        statement.bindings,
                    )
                elif isinstance(statement, Define):
                    self.defined[statement.local] = statement.value
                elif isinstance(statement, Reduce) and statement.kind in ("argmax", "argmin"):
                    self.positions[statement.local] = product(axis.extent for axis in stage.axes)
                elif isinstance(statement, ScanStep) and statement.position is not None:
                    self.positions[statement.position] = stage.axes[0].extent

    def enter(self, *axes: Axis) -> Cases:
        """What holds inside of these loops; nothing is performed in a loop that never runs."""
        if any(axis.extent == 0 for axis in axes):
            return ()
        for axis in axes:
            symbol = axis.symbol
            upper = symbol.upper if isinstance(symbol, Symbol) and symbol.lower == 0 else None
            if upper is None or (upper is not axis.extent - 1 and upper != axis.extent - 1):
                self.refuse("", symbol, axis.extent)
        self.symbols = frozenset(axis.symbol for axis in axes) | frozenset(self.kernel.sizes)
        self.seen.clear()
        found = list(self.given)
        for extent in dict.fromkeys(axis.extent for axis in axes):
            found.extend(not_empty(extent))
        return (tuple(found),)

    def refuse(self, buffer: str, index: Dim, room: Dim) -> None:
        self.checker.unproved[Unproved(self.kernel.name, buffer, index, room, -1)] = None

    def access(self, buffer: str, index: Dim, cases: Cases, bindings: tuple[tuple[Expr, Expression], ...] = ()) -> None:
        bound = {symbol for symbol, _ in bindings}
        rooms = self.rooms.get(buffer) or (self.checker.room(buffer),)
        for number, room in enumerate(rooms):
            # Of several, each is the room of one batch.
            at = substitute(index, {self.kernel.outer[0].symbol: number}) if len(rooms) > 1 else index
            if not free_symbols(at) <= self.symbols | bound:
                self.refuse(buffer, at, room)
            else:
                self.checker.access(self.kernel.name, buffer, at, room, cases)

    # --- expressions --------------------------------------------------------------------------------------------------

    def visit(self, root: Expression, cases: Cases) -> None:
        pending = [(root, cases)]
        while pending:
            entry = pending.pop()
            if entry in self.seen:
                continue
            self.seen.add(entry)
            node, cases = entry
            if isinstance(node, Apply):
                pending.extend((arg, cases) for arg in node.args)
            elif isinstance(node, Load):
                if node.bindings:
                    pending.extend((value, cases) for _, value in node.bindings)
                    self.bindings(node.bindings, cases)
                self.access(node.buffer, node.index, self.with_checks(node.bindings, cases), node.bindings)
            elif isinstance(node, CheckedIndex):
                pending.append((node.value, cases))
            elif isinstance(node, Masked):
                pending.append((node.mask, cases))
                pending.append((node.body, both(cases, self.holding(node.mask, True))))
                pending.append((node.other, both(cases, self.holding(node.mask, False))))

    def bindings(self, bindings: tuple[tuple[Expr, Expression], ...], cases: Cases) -> None:
        """Each value lies in the range that its symbol says."""
        for symbol, value in bindings:
            assert isinstance(symbol, Symbol)
            least, most = self.range(value)
            for wanted, below, above in ((symbol.lower, symbol.lower, least), (symbol.upper, most, symbol.upper)):
                if wanted is None:
                    continue
                if below is None or above is None:
                    self.refuse("", symbol, 0)
                else:
                    self.checker.require(above - below, cases, self.kernel.name, "", symbol, 0)

    def with_checks(self, bindings: tuple[tuple[Expr, Expression], ...], cases: Cases) -> Cases:
        """A checked index that passed shows that its dimension is not empty."""
        for _, value in bindings:
            if isinstance(value, CheckedIndex) and not isinstance(value.extent, int):
                cases = both(cases, (tuple(not_empty(value.extent)),))
        return cases

    def resolved(self, node: Expression) -> Expression:
        while isinstance(node, LocalValue) and node.name in self.defined:
            node = self.defined[node.name]
        return node

    def index(self, node: Expression) -> Dim | None:
        """The index whose value an integer expression is."""
        node = self.resolved(node)
        if isinstance(node, IndexValue):
            return node.index
        return node.value if isinstance(node, Constant) and type(node.value) is int else None

    def holding(self, mask: Expression, truth: bool) -> Cases:
        """What holds where the mask is `truth`."""
        mask = self.resolved(mask)
        if isinstance(mask, Constant):
            return ((),) if bool(mask.value) is truth else ()
        if not isinstance(mask, Apply):
            return ((),)
        if mask.op == "logical_not":
            return self.holding(mask.args[0], not truth)
        if mask.op in ("logical_and", "logical_or"):
            left, right = (self.holding(arg, truth) for arg in mask.args)
            return both(left, right) if (mask.op == "logical_and") is truth else either(left, right)
        compare = _COMPARISONS.get(mask.op)
        if compare is None:
            return ((),)
        a, b = (self.index(arg) for arg in mask.args)
        return ((),) if a is None or b is None else compare(a, b)[0 if truth else 1]

    def range(self, node: Expression) -> Range:
        """Between which bounds an integer lies."""
        node = self.resolved(node)
        index = self.index(node)
        if index is not None:
            return index, index
        if isinstance(node, CheckedIndex):
            return 0, node.extent - 1
        if isinstance(node, LocalValue):
            count = self.positions.get(node.name)
            return (None, None) if count is None else (0, count - 1)
        if isinstance(node, Masked):
            return _union(self.range(node.body), self.range(node.other))
        if isinstance(node, Load):
            return (
                self.checker.holds(node.buffer)
                if node.dtype is torch.int64
                else _OF_DTYPES.get(node.dtype, (None, None))
            )
        if isinstance(node, Apply) and node.op in _RANGES and (node.dtype is torch.int64 or node.op not in _MAY_WRAP):
            return _RANGES[node.op](*(self.range(arg) for arg in node.args))
        if isinstance(node, Apply) and node.op == "where":
            return _union(self.range(node.args[1]), self.range(node.args[2]))
        if (
            isinstance(node, Apply)
            and node.op == "cast"
            and node.dtype is torch.int64
            and node.args[0].dtype in _INTEGERS
        ):
            return self.range(node.args[0])
        return None, None

    # --- products and attention ---------------------------------------------------------------------------------------

    def product(self, found: Product, *more: Axis) -> None:
        if found.softmax is not None:
            self.product(found.softmax.scores, Axis(found.k, found.length))
        for part in () if found.chain is None else found.chain.parts:
            self.product(part, Axis(found.k, found.length))
        for one in found.besides:
            self.product(one, *more)
        cases = self.enter(*self.kernel.outer, *more, Axis(found.k, found.length))
        for side in (found.left, found.right):
            self.operand(side, cases)

    def operand(self, side: Operand, cases: Cases) -> None:
        if side.value is not None:
            self.visit(side.value, cases)
            return
        inside = tuple(d for outer, inner, extent in side.checks for d in (outer + inner, extent - 1 - outer - inner))
        self.access(side.buffer, side.outer + side.inner, both(cases, (inside,)))

    def attention(self, found: Attention) -> None:
        cases = self.enter(*self.kernel.outer)
        cases = both(cases, (tuple(not_empty(found.columns)),))
        for rows in found.operands:
            first, last = rows.outer, rows.outer + found.features - 1
            if rows is found.mask:
                last = rows.outer + found.columns - 1
            elif rows is found.key or rows is found.value:
                last = last + rows.step * (found.columns - 1)
            self.access(rows.buffer, first, cases)
            self.access(rows.buffer, last, cases)


def _is_in_each_dimension(buffer: Buffer, index: Dim, cases: Cases) -> bool:
    dims = [(size, stride) for size, stride in zip(buffer.shape, buffer.stride, strict=True) if size != 1]
    steps = steps_along(index, (stride for _, stride in dims))
    if steps is None or not all(is_at_least_zero(stride) for _, stride in dims):
        return False
    left = {stride: -at for stride, at in steps.items()}
    for size, stride in dims:
        left[stride] = left[stride] + size - 1
    for longer, stride in pairwise(steps):  # a loop may run over dimensions that follow each other
        ratio = term_quotient(only_term(longer), only_term(stride)) if steps[longer] == 0 else None
        if ratio is not None:
            left[stride], left[longer] = left[stride] + left[longer] * ratio, 0
    ends = [end for end in (*steps.values(), *left.values()) if not is_at_least_zero(end)]
    return all(any(is_at_least_zero(end - fact) for fact in facts) for facts in cases for end in ends)


# --- what is known ---------------------------------------------------------------------------------------------------


def both(left: Cases, right: Cases) -> Cases:
    if len(left) * len(right) > MOST_CASES:
        return left
    return tuple((*a, *(fact for fact in b if fact not in a)) for a in left for b in right)


def either(left: Cases, right: Cases) -> Cases:
    found = tuple(dict.fromkeys((*left, *right)))
    return found if len(found) <= MOST_CASES else ((),)


_COMPARISONS: dict[str, Callable[[Dim, Dim], tuple[Cases, Cases]]] = {
    # What holds where it is true, and where it is false.
    "lt": lambda a, b: (((b - a - 1,),), ((a - b,),)),
    "le": lambda a, b: (((b - a,),), ((a - b - 1,),)),
    "gt": lambda a, b: (((a - b - 1,),), ((b - a,),)),
    "ge": lambda a, b: (((a - b,),), ((b - a - 1,),)),
    "eq": lambda a, b: (((a - b, b - a),), ((a - b - 1,), (b - a - 1,))),
    "ne": lambda a, b: (((a - b - 1,), (b - a - 1,)), ((a - b, b - a),)),
}

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_OF_DTYPES: dict[torch.dtype, Range] = {
    torch.bool: (0, 1),
    **{dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _INTEGERS[1:]},
}


def _union(a: Range, b: Range) -> Range:
    return _lift(minimum, a[0], b[0]), _lift(maximum, a[1], b[1])


def _lift(operator: Callable[[Dim, Dim], Dim], a: Dim | None, b: Dim | None) -> Dim | None:
    return None if a is None or b is None else operator(a, b)


def _first(operator: Callable[[Dim, Dim], Dim], a: Dim | None, b: Dim | None) -> Dim | None:
    """Of a bound that one operand is enough for."""
    return b if a is None else a if b is None else operator(a, b)


def _remainder(a: Range, b: Range) -> Range:
    least, most = b
    return (0, most - 1) if least is not None and most is not None and interval(least)[0] > 0 else (None, None)


def _scaled(a: Range, b: Range) -> Range:
    if a[0] is not None and a[0] is a[1]:
        a, b = b, a
    factor = b[0]
    if not isinstance(factor, int) or factor != b[1] or factor < 0:
        return None, None
    return None if a[0] is None else a[0] * factor, None if a[1] is None else a[1] * factor


_MAY_WRAP = frozenset({"add", "sub", "mul"})
_RANGES: dict[str, Callable[..., Range]] = {
    "minimum": lambda a, b: (_lift(minimum, a[0], b[0]), _first(minimum, a[1], b[1])),
    "maximum": lambda a, b: (_first(maximum, a[0], b[0]), _lift(maximum, a[1], b[1])),
    "add": lambda a, b: (_lift(lambda x, y: x + y, a[0], b[0]), _lift(lambda x, y: x + y, a[1], b[1])),
    "sub": lambda a, b: (_lift(lambda x, y: x - y, a[0], b[1]), _lift(lambda x, y: x - y, a[1], b[0])),
    "mul": _scaled,
    "remainder": _remainder,
}
