"""Symbolic integers: sizes, strides and index expressions, and what is known about them.

Takes symbols (a tensor's size, a loop variable) and integers; gives `Dim = int | Expr`, where a constant is always a
plain int.
Always holds: expressions are immutable and hash-consed, so `==` is identity (ask `known_eq` for equality of values);
the `known_*` questions never guess: None means "cannot tell". Divisors are taken to be non-zero; division rounds
towards minus infinity, as Python's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from fusewright.base.records import dataclass
from fusewright.sizes import algebra
from fusewright.sizes.algebra import (
    add,
    floor_div,
    interval,
    loop_symbol,
    modulo,
    multiply,
    product,
    split_atom,
)
from fusewright.sizes.arithmetic import INFINITY, monomial_quotient, shared_atoms
from fusewright.sizes.forms import (
    Choice,
    Dim,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Monomial,
    Sum,
    Symbol,
    free_symbols,
    intern,
    sort_key,
    symbol,
    term_key,
)

__all__ = [
    "Dim",
    "Expr",
    "FloorDiv",
    "Max",
    "Min",
    "Mod",
    "Relation",
    "Sum",
    "Symbol",
    "Term",
    "bounds",
    "ceil_div",
    "coefficient",
    "eliminate",
    "evaluate",
    "floor_div",
    "free_symbols",
    "from_tuples",
    "is_multiple",
    "known",
    "known_eq",
    "known_le",
    "known_lt",
    "loop_symbol",
    "maximum",
    "minimum",
    "modulo",
    "product",
    "sort_key",
    "substitute",
    "symbol",
    "term_key",
    "to_tuples",
    "total",
]


Expr.algebra = algebra


def total(dims: Iterable[Dim]) -> Dim:
    """The sum of `dims`."""
    result: Dim = 0
    for d in dims:
        result = add(result, d)
    return result


def bounds(d: Dim) -> tuple[int | None, int | None]:
    """(lower, upper) that the value certainly keeps; None where unbounded."""
    low, high = interval(d)
    return (None if low == -INFINITY else int(low)), (None if high == INFINITY else int(high))


def known_eq(a: Dim, b: Dim) -> bool | None:
    """Whether a == b for every value of the symbols (True), for none (False), or one cannot tell (None)."""
    if a is b:
        return True
    difference = a - b
    if isinstance(difference, int):
        return difference == 0
    low, high = interval(difference)
    if low > 0 or high < 0:
        return False
    if low == high == 0:
        return True
    shared = math.gcd(*(count for _, count in difference.terms))
    return False if difference.constant % shared else None


def known_le(a: Dim, b: Dim) -> bool | None:
    difference = b - a
    low, high = interval(difference)
    return True if low >= 0 else False if high < 0 else None


def known_lt(a: Dim, b: Dim) -> bool | None:
    return known_le(a + 1, b)


def minimum(a: Dim, b: Dim) -> Dim:
    return _choose(Min, (a, b), known_le)


def maximum(a: Dim, b: Dim) -> Dim:
    return _choose(Max, (a, b), lambda x, y: known_le(y, x))


def ceil_div(a: Dim, b: Dim) -> Dim:
    """a / b rounded up, for b > 0."""
    return floor_div(add(a, add(b, -1)), b)


def _choose(kind: type[Choice], candidates: Sequence[Dim], beats: Callable[[Dim, Dim], bool | None]) -> Dim:
    flat: list[Dim] = []
    for candidate in candidates:
        flat.extend(candidate.operands if type(candidate) is kind else (candidate,))
    kept: list[Dim] = []
    for candidate in flat:
        if any(beats(other, candidate) for other in kept):
            continue
        kept = [other for other in kept if not beats(candidate, other)]
        kept.append(candidate)
    if len(kept) == 1:
        return kept[0]
    operands = tuple(sorted(kept, key=lambda d: (isinstance(d, int), sort_key(d))))

    def build() -> Expr:
        made = kind()
        made.operands = operands
        return made

    return intern((kind, operands), build)


def is_multiple(d: Dim, k: int) -> bool:
    """Whether `d` is certainly a multiple of `k` (k > 0)."""
    if isinstance(d, int):
        return d % k == 0
    if d.constant % k:
        return False
    return all(_is_product_multiple(monomial, k // math.gcd(count, k)) for monomial, count in d.terms)


def _is_product_multiple(monomial: Monomial, k: int) -> bool:
    return k == 1 or any(not isinstance(atom, (Symbol, FloorDiv)) and _is_atom_multiple(atom, k) for atom in monomial)


def _is_atom_multiple(atom: Expr, k: int) -> bool:
    if isinstance(atom, Mod):
        return is_multiple(atom.left, k) and is_multiple(atom.right, k)
    return all(is_multiple(child, k) for child in atom._children())


def coefficient(d: Dim, sym: Expr) -> Dim | None:
    """The stride of `d` in `sym`: c when d == c*sym + rest with neither holding sym (0 when absent); None when not
    affine."""
    if isinstance(d, int):
        return 0
    if sym not in free_symbols(d):
        return 0
    scale, rest = split_atom(d, sym)
    if scale is None or sym in free_symbols(scale) or sym in free_symbols(rest):
        return None
    return scale


def substitute(d: Dim, mapping: Mapping[Expr, Dim]) -> Dim:
    """`d` with symbols replaced, simplified afresh. The ranges of the symbols that stay are not touched."""
    if isinstance(d, int) or not mapping or free_symbols(d).isdisjoint(mapping):
        return d
    if isinstance(d, Symbol):
        return mapping.get(d, d)
    if isinstance(d, Sum):
        return total(
            [
                d.constant,
                *(
                    multiply(product(substitute(atom, mapping) for atom in monomial), count)
                    for monomial, count in d.terms
                ),
            ]
        )
    children = [substitute(child, mapping) for child in d._children()]
    return _REBUILD[type(d)](*children)


def split_factor(d: Expr, number: int, may_go: Callable[[Expr], bool]) -> tuple[Monomial, Dim]:
    """The common factors of all terms that may go, and `d` without them and without the number. The constant beside
    terms is rounded down."""
    common = () if d.constant else tuple(filter(may_go, shared_atoms(d.terms)))
    if not common and number == 1:
        return (), d
    terms = total(product(monomial_quotient(monomial, common) or ()) * (times // number) for monomial, times in d.terms)
    return common, terms + d.constant // number


def tightened(d: Dim) -> Dim:
    """What is at least 0 where `d` is, and says the most: sums of terms are multiples of what divides all of them."""
    return d if isinstance(d, int) else split_factor(d, math.gcd(*(times for _, times in d.terms)), lambda _: False)[1]


Term = tuple[Monomial, int]


def greatest_term(zero: Expr) -> Term:
    """The term of a sum that `eliminate` replaces: the most deeply nested one, so that it stands inside of no other;
    then by degree."""
    return max(zero.terms, key=lambda term: (max(map(_nesting, term[0])), len(term[0]), term_key(term)))


def _nesting(d: Dim) -> int:
    """How many divisions and choices lie within one another."""
    if isinstance(d, (int, Symbol)):
        return 0
    if isinstance(d, Sum):
        return max((_nesting(atom) for monomial, _ in d.terms for atom in monomial), default=0)
    return 1 + max(map(_nesting, d._children()))


@lru_cache(1 << 14)  # sizes have parts in common, and each question of a capture begins with it
def eliminate(d: Dim, zero: Expr, term: Term) -> Dim:
    """`d`, where `zero` is known to be 0 and `term` is its `greatest_term`: multiples of the term give way to the
    others, also inside divisions and choices."""
    if isinstance(d, int):
        return d
    if not isinstance(d, (Symbol, Sum)):
        children = d._children()
        changed = [eliminate(child, zero, term) for child in children]
        if any(new != old for new, old in zip(changed, children)):
            return eliminate(_REBUILD[type(d)](*changed), zero, term)
    if isinstance(d, Sum):
        parts = [
            multiply(product(eliminate(atom, zero, term) for atom in monomial), count) for monomial, count in d.terms
        ]
        d = total([d.constant, *parts])
        if isinstance(d, int):
            return d
    greatest, factor = term
    for monomial, count in d.terms:
        left_over = monomial_quotient(monomial, greatest)
        if left_over is not None and count % factor == 0:
            return eliminate(d - multiply(product(left_over), count // factor) * zero, zero, term)
    return d


def evaluate(d: Dim, values: Mapping[Expr, int]) -> int:
    """The integer value of `d`. Raises KeyError for a symbol without a value, ZeroDivisionError as Python does."""
    if isinstance(d, int):
        return d
    if isinstance(d, Symbol):
        return values[d]
    if isinstance(d, Sum):
        result = d.constant
        for monomial, count in d.terms:
            result += count * math.prod(evaluate(atom, values) for atom in monomial)
        return result
    return _EVALUATE[type(d)](*(evaluate(child, values) for child in d._children()))


def _fold(operator: Callable[[Dim, Dim], Dim]) -> Callable[..., Dim]:
    def fold(*operands: Dim) -> Dim:
        result = operands[0]
        for operand in operands[1:]:
            result = operator(result, operand)
        return result

    return fold


_REBUILD: dict[type, Callable[..., Dim]] = {FloorDiv: floor_div, Mod: modulo, Min: _fold(minimum), Max: _fold(maximum)}
_EVALUATE: dict[type, Callable[..., int]] = {FloorDiv: lambda a, b: a // b, Mod: lambda a, b: a % b, Min: min, Max: max}
_OPERATOR_NAMES: dict[type, str] = {FloorDiv: "//", Mod: "%", Min: "min", Max: "max"}
_OPERATORS: dict[str, Callable[[Dim, Dim], Dim]] = {
    "+": add,
    "*": multiply,
    "//": floor_div,
    "%": modulo,
    "min": minimum,
    "max": maximum,
}


def to_tuples(d: Dim) -> object:
    """`d` as nested tuples of binary operators: ("+", ("*", ("sym", "i0"), 768), ("sym", "i1")); an int stays an int.

    Operators: + * // % min max. For programs in C, and as a key that outlives the process.
    """
    if isinstance(d, int):
        return d
    if isinstance(d, Symbol):
        return ("sym", d.name)
    if isinstance(d, Sum):
        parts: list[object] = []
        for monomial, count in d.terms:
            factors = [to_tuples(atom) for atom in monomial]
            parts.append(_nest("*", factors if count == 1 else [*factors, count]))
        return _nest("+", parts if d.constant == 0 else [*parts, d.constant])
    return _nest(_OPERATOR_NAMES[type(d)], [to_tuples(child) for child in d._children()])


def _nest(operator: str, operands: Sequence[object]) -> object:
    result = operands[0]
    for operand in operands[1:]:
        result = (operator, result, operand)
    return result


def from_tuples(tree: object, symbols: Mapping[str, Dim] | None = None) -> Dim:
    """The inverse of `to_tuples`. `symbols` gives the symbol, or the value, of each name; a name that it lacks gets an
    unbounded one."""
    if isinstance(tree, int):
        return tree
    if not isinstance(tree, (tuple, list)) or not tree:
        raise ValueError(f"not a size: {tree!r}")
    if tree[0] == "sym":
        found = (symbols or {}).get(tree[1])
        return symbol(tree[1], None) if found is None else found
    _, left, right = tree
    return _OPERATORS[tree[0]](from_tuples(left, symbols), from_tuples(right, symbols))


# --- relations -------------------------------------------------------------------------------------------------------

RelationOp = Literal["==", "!=", "<", "<="]
_NEGATIONS: dict[str, tuple[str, bool]] = {
    "==": ("!=", False),
    "!=": ("==", False),
    "<": ("<=", True),
    "<=": ("<", True),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


@dataclass(frozen=True, slots=True)
class Relation:
    """left op right, over symbolic integers."""

    op: RelationOp
    left: Dim
    right: Dim

    def negated(self) -> Relation:
        op, swap = _NEGATIONS[self.op]
        return Relation(op, self.right, self.left) if swap else Relation(op, self.left, self.right)  # type: ignore

    def holds(self, values: Mapping[Expr, int]) -> bool:
        """Whether it holds for these values of the symbols."""
        return _COMPARE[self.op](evaluate(self.left, values), evaluate(self.right, values))

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}"


def known(relation: Relation) -> bool | None:
    """Whether the relation always holds (True), never holds (False), or one cannot tell (None)."""
    if relation.op == "==":
        return known_eq(relation.left, relation.right)
    if relation.op == "!=":
        equal = known_eq(relation.left, relation.right)
        return None if equal is None else not equal
    return (known_lt if relation.op == "<" else known_le)(relation.left, relation.right)
