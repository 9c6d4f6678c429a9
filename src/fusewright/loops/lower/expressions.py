"""Tools on loop expressions: terse constructors, index substitution, and what an expression costs to recompute.

Takes and gives `loops.ir` expressions. Always holds: walks memoise by identity (an expression is a DAG), and a symbol
that is bound inside a `Load` stands for one expression only, however often the load is rewritten (see `Binder`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fusewright.base.records import dataclass
from fusewright.loops import ir
from fusewright.loops.ir import Apply, CheckedIndex, Constant, Expression, IndexValue, Load, LocalValue, Masked
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr, substitute, symbol

HALF = (torch.bfloat16, torch.float16)
Number = bool | int | float
Operand = Expression | Number
Bindings = tuple[tuple[Expr, Expression], ...]
"""Symbols of an index and the int64 expressions whose values they take (see `ir.Load`)."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed: narrower floats are widened to float32."""
    return torch.float32 if dtype in HALF or dtype in ir.FLOAT8 else dtype


def rounded(value: Expression, dtype: torch.dtype) -> Expression:
    """What memory of `dtype` would hold of `value`, in the dtype that it is computed in. What was computed is compared
    with what was stored: a maximum equals one of its elements."""
    exact = isinstance(value, Apply) and value.op == "cast" and value.args[0].dtype == dtype
    return value if exact or compute_dtype(dtype) == dtype else ir.cast(ir.cast(value, dtype), value.dtype)


def widen(value: Expression) -> Expression:
    return ir.cast(value, compute_dtype(value.dtype))


# --- constructors ----------------------------------------------------------------------------------------------------


def index_of(value: Expression) -> Dim | None:
    """The index whose value an int64 expression is, if it is one: then it is known without computing."""
    if isinstance(value, IndexValue):
        return value.index
    return int(value.value) if isinstance(value, Constant) and value.dtype is torch.int64 else None


_INDEX_ARITHMETIC: dict[str, Callable[[Dim, Dim], Dim]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "minimum": sizes.minimum, "maximum": sizes.maximum,
}  # fmt: skip
_INDEX_DIVISION: dict[str, Callable[[Dim, Dim], Dim]] = {"floor_divide": operator.floordiv, "remainder": operator.mod}
_INDEX_QUESTIONS: dict[str, Callable[[Dim, Dim], bool | None]] = {
    "eq": sizes.known_eq,
    "lt": sizes.known_lt,
    "le": sizes.known_le,
    "gt": lambda a, b: sizes.known_lt(b, a),
    "ge": lambda a, b: sizes.known_le(b, a),
}


def apply(op: str, *args: Expression, dtype: torch.dtype) -> Expression:
    """`ir.apply`, folded where the result is an index or a truth that is known: masks and positions are mostly
    arithmetic on indices."""
    folded = _fold(op, args)
    return ir.apply(op, *args, dtype=dtype) if folded is None else folded


def masked(mask: Expression, body: Expression, other: Expression) -> Expression:
    if isinstance(mask, Constant):
        return body if mask.value else other
    return ir.masked(mask, body, other)


def _fold(op: str, args: tuple[Expression, ...]) -> Expression | None:
    if len(args) == 2:
        a, b = args
        if a.dtype is torch.int64:
            left, right = index_of(a), index_of(b)
            return None if left is None or right is None else _fold_indices(op, left, right)
        if a.dtype is torch.bool and op in ("logical_and", "logical_or"):
            absorbing = op == "logical_or"
            for known, other in ((a, b), (b, a)):
                if isinstance(known, Constant):
                    return known if known.value is absorbing else other
    elif op == "logical_not" and isinstance(args[0], Constant):
        return ir.constant(not args[0].value, torch.bool)
    elif op == "where" and isinstance(args[0], Constant):
        return args[1] if args[0].value else args[2]
    elif op == "neg" and args[0].dtype is torch.int64:
        index = index_of(args[0])
        return None if index is None else ir.index_value(-index)
    return None


def _fold_indices(op: str, left: Dim, right: Dim) -> Expression | None:
    if op in _INDEX_ARITHMETIC:
        return ir.index_value(_INDEX_ARITHMETIC[op](left, right))
    if op in _INDEX_DIVISION and sizes.known_lt(0, right):
        return ir.index_value(_INDEX_DIVISION[op](left, right))
    if op in _INDEX_QUESTIONS:
        known = _INDEX_QUESTIONS[op](left, right)
        return None if known is None else ir.constant(known, torch.bool)
    return None


def _operands(operands: tuple[Operand, ...]) -> tuple[Expression, ...]:
    """Numbers become constants, and sizes values, of the dtype of the first expression among the operands."""
    dtype = next(operand.dtype for operand in operands if isinstance(operand, Expression))
    return tuple(
        operand
        if isinstance(operand, Expression)
        else index_as(operand, dtype)
        if isinstance(operand, Expr)
        else ir.constant(operand, dtype)
        for operand in operands
    )


def _arithmetic(op: str) -> Callable[..., Expression]:
    def build(*operands: Operand) -> Expression:
        values = _operands(operands)
        return apply(op, *values, dtype=values[0].dtype)

    return build


def _predicate(op: str) -> Callable[..., Expression]:
    def build(*operands: Operand) -> Expression:
        return apply(op, *_operands(operands), dtype=torch.bool)

    return build


add = _arithmetic("add")
sub = _arithmetic("sub")
mul = _arithmetic("mul")
div = _arithmetic("div")
minimum = _arithmetic("minimum")
maximum = _arithmetic("maximum")
power = _arithmetic("pow")
fused_multiply_add = _arithmetic("fma")
neg = _arithmetic("neg")
absolute = _arithmetic("abs")
exp = _arithmetic("exp")
expm1 = _arithmetic("expm1")
log = _arithmetic("log")
log1p = _arithmetic("log1p")
sqrt = _arithmetic("sqrt")
rsqrt = _arithmetic("rsqrt")
reciprocal = _arithmetic("reciprocal")
tanh = _arithmetic("tanh")
sigmoid = _arithmetic("sigmoid")
erf = _arithmetic("erf")
floor = _arithmetic("floor")
rint = _arithmetic("round")
fmin = _arithmetic("fmin")
fmax = _arithmetic("fmax")
eq = _predicate("eq")
ne = _predicate("ne")
lt = _predicate("lt")
le = _predicate("le")
gt = _predicate("gt")
ge = _predicate("ge")
isnan = _predicate("isnan")
isinf = _predicate("isinf")
both = _predicate("logical_and")
either = _predicate("logical_or")
invert = _predicate("logical_not")


def where(condition: Expression, chosen: Operand, other: Operand) -> Expression:
    a, b = _operands((chosen, other))
    return apply("where", condition, a, b, dtype=a.dtype)


def index_as(index: Dim, dtype: torch.dtype) -> Expression:
    """The value of an index in `dtype`."""
    return ir.cast(ir.index_value(index), dtype)


def accumulator(dtype: torch.dtype) -> Expression:
    """The accumulator inside a reduction's or a scan's `finish`."""
    return ir.local_value("acc", dtype)


def replace_accumulator(finish: Expression, value: Expression) -> Expression:
    """`finish` of an accumulation over one value."""
    match finish:
        case LocalValue():
            return value
        case Apply():
            return apply(finish.op, *(replace_accumulator(arg, value) for arg in finish.args), dtype=finish.dtype)
        case Masked():
            mask, body, other = (replace_accumulator(part, value) for part in (finish.mask, finish.body, finish.other))
            return masked(mask, body, other)
    return finish


def all_of(conditions: list[Expression]) -> Expression | None:
    """Conjunction; None when there is nothing to check."""
    result: Expression | None = None
    for condition in conditions:
        result = condition if result is None else both(result, condition)
    return result


# --- substitution ----------------------------------------------------------------------------------------------------


class Binder:
    """Hands out the symbols of indirect indices: one symbol for each (expression, upper bound), and never one for
    two."""

    __slots__ = ("_symbols",)

    def __init__(self) -> None:
        self._symbols: dict[tuple[Expression, Dim | None], Expr] = {}

    def bind(self, value: Expression, extent: Dim | None) -> Expr:
        """The symbol that stands for `value`, an int64 expression known to lie in 0 .. extent - 1 (any value if extent
        is None)."""
        key = (value, extent)
        found = self._symbols.get(key)
        if found is None:
            name = f"j{len(self._symbols)}"
            found = symbol(name, None) if extent is None else symbol(name, 0, extent - 1)
            self._symbols[key] = found
        return found

    def rebind(self, old: Expr, value: Expression) -> Expr:
        """A symbol with the range of `old` that stands for `value`."""
        upper = old.upper  # type: ignore[attr-defined]
        return self.bind(value, None if upper is None else upper + 1)


def substitute_expression(expression: Expression, mapping: Mapping[Expr, Dim], binder: Binder) -> Expression:
    """`expression` with loop variables replaced by other indices."""
    if not mapping:
        return expression
    if type(expression) is Load and not expression.bindings:  # a view, mostly
        return ir.load(expression.buffer, substitute(expression.index, mapping), expression.dtype)
    return _Substitution(mapping, binder).visit(expression)


class _Substitution:
    """One substitution, in which each shared node is rebuilt once."""

    __slots__ = ("binder", "mapping", "memo")

    def __init__(self, mapping: Mapping[Expr, Dim], binder: Binder) -> None:
        self.mapping = mapping
        self.binder = binder
        self.memo: dict[Expression, Expression] = {}

    def visit(self, node: Expression) -> Expression:
        found = self.memo.get(node)
        if found is None:
            found = self.memo[node] = self.rebuild(node)
        return found

    def rebuild(self, node: Expression) -> Expression:
        match node:
            case Constant() | LocalValue():
                return node
            case IndexValue():
                return ir.index_value(substitute(node.index, self.mapping))
            case Load():
                inner: Mapping[Expr, Dim] = self.mapping
                bindings = []
                for bound, value in node.bindings:
                    new_value = self.visit(value)
                    new_bound = bound if new_value is value else self.binder.rebind(bound, new_value)
                    bindings.append((new_bound, new_value))
                    if new_bound is not bound:
                        inner = {**inner, bound: new_bound}
                return ir.load(node.buffer, substitute(node.index, inner), node.dtype, tuple(bindings))
            case Apply():
                args = tuple([self.visit(arg) for arg in node.args])
                return node if args == node.args else apply(node.op, *args, dtype=node.dtype)
            case Masked():
                return masked(self.visit(node.mask), self.visit(node.body), self.visit(node.other))
            case CheckedIndex():
                return ir.checked_index(self.visit(node.value), node.extent, node.wrap)
        raise TypeError(f"not a loop expression: {node!r}")


# --- inspection ------------------------------------------------------------------------------------------------------


def children(node: Expression) -> tuple[Expression, ...]:
    match node:
        case Apply():
            return node.args
        case Load():
            return tuple(value for _, value in node.bindings)
        case Masked():
            return node.mask, node.body, node.other
        case CheckedIndex():
            return (node.value,)
    return ()


def walk(expression: Expression) -> Iterator[Expression]:
    """Every distinct node, each once."""
    seen = {expression}
    stack = [expression]
    while stack:
        node = stack.pop()
        yield node
        for child in children(node):
            if child not in seen:
                seen.add(child)
                stack.append(child)


def loaded_buffers(expression: Expression) -> set[str]:
    return {node.buffer for node in walk(expression) if isinstance(node, Load)}


FREE_OPERATIONS = frozenset({"cast", "bitcast"})
EXPENSIVE_OPERATIONS = frozenset(
    "pow exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh "
    "sigmoid erf erfc "
    "erfinv lgamma digamma hypot fmod remainder floor_divide trunc_divide".split()
)
MODERATE_OPERATIONS = frozenset({"div", "sqrt", "rsqrt", "reciprocal", "nextafter"})


@dataclass(frozen=True, slots=True)
class Cost:
    """loads: distinct loads; nodes: distinct nodes; work: about the number of simple vector instructions."""

    loads: int
    nodes: int
    work: int

    @property
    def expensive(self) -> bool:
        return self.work >= 16


MAX_SUMMED, MAX_SUMMED_LOADS = 4, 16
"""Points of a sum that is written out, and what it may load."""


def without_loop(
    kind: ir.ReductionKind, expression: Expression, reduced: Sequence[ir.Axis], binder: Binder | None
) -> Expression | None:
    """What a reduction gives as an expression, where it needs no loop. With a binder, also the sum over very few
    points."""
    if not reduced:
        return of_one(kind, expression)
    found = one_term(expression, reduced) if kind == "sum" else None
    if found is None and kind == "sum" and binder is not None:
        found = summed(expression, reduced, binder)
    return found


def summed(expression: Expression, reduced: Sequence[ir.Axis], binder: Binder) -> Expression | None:
    """The sum over very few points, written out: a GPU has a lane for each point of a reduction, and here little to do
    for it. None where that is too much."""
    extents = [axis.extent for axis in reduced if isinstance(axis.extent, int)]
    points = math.prod(extents)
    if len(extents) < len(reduced) or points > MAX_SUMMED or points * cost(expression).loads > MAX_SUMMED_LOADS:
        return None
    places = itertools.product(*map(range, extents))
    terms = [
        substitute_expression(expression, {axis.symbol: at for axis, at in zip(reduced, place)}, binder)
        for place in places
    ]
    return of_one("sum", functools.reduce(add, terms))


@dataclass(frozen=True, slots=True)
class Marked:
    """`value` where the index `place` is `number` and `rest` is true, 0 elsewhere; cast to each of `casts` in turn."""

    place: Expr
    number: Expression
    rest: Expression
    value: Expression
    casts: tuple[torch.dtype, ...]


def marked(expression: Expression) -> Marked | None:
    """The parts of an expression that is not 0 at one place at most, of each row: the gradient of a loss at its class,
    or a class as ones and zeros. What it is made of does not depend on the place."""
    casts: list[torch.dtype] = []
    while isinstance(expression, Apply) and expression.op == "cast":
        casts.insert(0, expression.dtype)
        expression = expression.args[0]
    true: Expression = ir.constant(True, torch.bool)
    hit, value = expression, true
    if isinstance(expression, Apply) and expression.op == "where":
        hit, value, other = expression.args
        if not isinstance(other, Constant) or other.value != 0:
            return None
    if hit.dtype is not torch.bool:
        return None
    parts = list(_conjuncts(hit))
    for part in parts:
        if isinstance(part, Apply) and part.op == "eq":
            for index, number in (part.args, part.args[::-1]):
                if isinstance(index, IndexValue) and isinstance(index.index, sizes.Symbol):
                    others = [other for other in parts if other is not part]
                    if all(is_free_of(one, index.index) for one in (number, value, *others)):
                        return Marked(
                            index.index, number, functools.reduce(both, others, true), value, tuple(casts)
                        )
    return None


def _conjuncts(condition: Expression) -> Iterator[Expression]:
    if isinstance(condition, Apply) and condition.op == "logical_and":
        for part in condition.args:
            yield from _conjuncts(part)
    else:
        yield condition


def is_free_of(expression: Expression, place: Expr) -> bool:
    """Whether the expression is the same at each `place`."""
    return not any(
        place in sizes.free_symbols(node.index) for node in walk(expression) if isinstance(node, (Load, IndexValue))
    )


def one_term(expression: Expression, reduced: Sequence[ir.Axis]) -> Expression | None:
    """The sum over an axis of what is not 0 at one place of it at most: what is there, if the place exists."""
    found = marked(expression) if len(reduced) == 1 else None
    if found is None or found.place is not reduced[0].symbol:
        return None
    number, value = found.number, found.value
    exists = both(ge(number, 0), lt(number, index_as(reduced[0].extent, number.dtype)))
    term = where(both(exists, found.rest), value, ir.constant(0, value.dtype))
    return of_one("sum", functools.reduce(ir.cast, found.casts, term))


def of_one(kind: ir.ReductionKind, expression: Expression) -> Expression:
    """A reduction of one element. Eager's sums begin with 0: -0.0 becomes 0.0."""
    if kind in ("argmax", "argmin"):
        return ir.constant(0, torch.int64)
    return add(expression, 0.0) if kind == "sum" and expression.dtype.is_floating_point else expression


def cost(expression: Expression) -> Cost:
    loads = nodes = work = 0
    for node in walk(expression):
        nodes += 1
        if isinstance(node, Load):
            loads += 1
        elif isinstance(node, Apply):
            op = node.op
            work += (
                0
                if op in FREE_OPERATIONS
                else 16
                if op in EXPENSIVE_OPERATIONS
                else 4
                if op in MODERATE_OPERATIONS
                else 1
            )
        elif isinstance(node, (Masked, CheckedIndex)):
            work += 1
    return Cost(loads, nodes, work)
