"""The forms of symbolic integers: what an expression is made of, how it prints, and in which order forms stand.

Takes names, ranges and operands; gives the one object of that form. Import from `sizes/expressions.py`, which adds the
operators and the questions.
Always holds: a constant is a plain int, never an Expr; expressions are immutable and hash-consed, so two equal forms
are one object and `==` is identity. Nothing here simplifies: `sizes/algebra.py` chooses the form.

An expression is a sum of products: `Sum` has integer coefficients over monomials, a monomial is a sorted tuple of
atoms, and an atom is a Symbol, FloorDiv, Mod, Min or Max.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol

from fusewright.sizes.arithmetic import Bound, Interval


class Algebra(Protocol):
    """What the operators of an expression mean (`sizes/algebra.py`)."""

    def add(self, a: Dim, b: Dim, /) -> Dim: ...

    def multiply(self, a: Dim, b: Dim, /) -> Dim: ...

    def floor_div(self, a: Dim, k: Dim, /) -> Dim: ...

    def modulo(self, a: Dim, k: Dim, /) -> Dim: ...


class Expr:
    """A symbolic integer. Compare with `known_eq` and its kin for values; `==` asks only whether the forms are the
    same."""

    __slots__ = ("__weakref__", "_interval", "_key", "_symbols", "_text")
    algebra: ClassVar[Algebra]
    _interval: Interval
    _key: tuple[int, int, str]
    _symbols: frozenset[Symbol]
    _text: str

    # What an atom looks like as a sum; `Sum` overrides both.
    @property
    def terms(self) -> tuple[tuple[Monomial, int], ...]:
        return (((self,), 1),)

    @property
    def constant(self) -> int:
        return 0

    def __add__(self, other: Dim) -> Dim:
        return self.algebra.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return self.algebra.add(self, self.algebra.multiply(other, -1))

    def __rsub__(self, other: Dim) -> Dim:
        return self.algebra.add(other, self.algebra.multiply(self, -1))

    def __mul__(self, other: Dim) -> Dim:
        return self.algebra.multiply(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self.algebra.multiply(self, -1)

    def __pos__(self) -> Expr:
        return self

    def __floordiv__(self, other: Dim) -> Dim:
        return self.algebra.floor_div(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return self.algebra.floor_div(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return self.algebra.modulo(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return self.algebra.modulo(other, self)

    def __pow__(self, power: int) -> Dim:
        if power < 0:
            raise ValueError("a symbolic integer has no negative powers")
        result: Dim = 1
        for _ in range(power):
            result = self.algebra.multiply(self, result)
        return result

    def __bool__(self) -> bool:
        raise TypeError(f"the symbolic integer {self} has no truth value; ask known_eq(x, 0)")

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    def __reduce__(self) -> str:
        raise TypeError("symbolic integers are not pickled; use to_tuples")

    def __repr__(self) -> str:
        try:
            return self._text
        except AttributeError:
            self._text = self._print()
            return self._text

    __str__ = __repr__

    def _print(self) -> str:
        raise NotImplementedError

    def _children(self) -> tuple[Dim, ...]:
        raise NotImplementedError


Dim = int | Expr
Monomial = tuple[Expr, ...]

_interned: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()
_intern_lock = threading.RLock()
# kept: what is asked of a size in between would else be found out again each time
_recent: deque[Expr] = deque(maxlen=1 << 12)


def intern(key: tuple[object, ...], build: Callable[[], Expr]) -> Expr:
    found = _interned.get(key)
    if found is None:
        with _intern_lock:
            found = _interned.get(key)
            if found is None:
                found = _interned[key] = build()
                _recent.append(found)
    return found


class Symbol(Expr):
    """A named unknown with lower <= value <= upper; None means unbounded, and `upper` may be symbolic (a loop's extent
    - 1)."""

    __slots__ = ("lower", "name", "upper")
    name: str
    lower: int | None
    upper: Dim | None

    def _print(self) -> str:
        return self.name

    def _children(self) -> tuple[Dim, ...]:
        return ()


class Sum(Expr):
    """constant + sum of coefficient * monomial, with at least one monomial; never a single monomial atom alone."""

    __slots__ = ("_apart", "_constant", "_least", "_terms")
    _apart: Interval
    _constant: int
    _least: Bound
    _terms: tuple[tuple[Monomial, int], ...]

    @property
    def terms(self) -> tuple[tuple[Monomial, int], ...]:
        return self._terms

    @property
    def constant(self) -> int:
        return self._constant

    def _print(self) -> str:
        text = ""
        for monomial, coefficient_ in self._terms:
            factors = [_factor_text(atom) if len(monomial) > 1 or coefficient_ != 1 else str(atom) for atom in monomial]
            if abs(coefficient_) != 1:
                factors.append(str(abs(coefficient_)))
            sign = (" - " if coefficient_ < 0 else " + ") if text else ("-" if coefficient_ < 0 else "")
            text += sign + "*".join(factors)
        if self._constant:
            text += f" {'-' if self._constant < 0 else '+'} {abs(self._constant)}"
        return text

    def _children(self) -> tuple[Dim, ...]:
        return tuple(atom for monomial, _ in self._terms for atom in monomial)


class Binary(Expr):
    """An atom over two operands."""

    __slots__ = ("left", "right")
    left: Dim
    right: Dim

    def _children(self) -> tuple[Dim, ...]:
        return self.left, self.right


class FloorDiv(Binary):
    """left // right, not simplifiable further."""

    __slots__ = ()

    def _print(self) -> str:
        return f"{_operand_text(self.left)}//{_operand_text(self.right)}"


class Mod(Binary):
    """left % right, not simplifiable further."""

    __slots__ = ()

    def _print(self) -> str:
        return f"{_operand_text(self.left)}%{_operand_text(self.right)}"


class Choice(Expr):
    """An atom over a sorted tuple of at least two different operands, at most one of them an int (the last)."""

    __slots__ = ("operands",)
    operands: tuple[Dim, ...]

    def _children(self) -> tuple[Dim, ...]:
        return self.operands


class Min(Choice):
    """The least of the operands."""

    __slots__ = ()

    def _print(self) -> str:
        return f"min({', '.join(map(str, self.operands))})"


class Max(Choice):
    """The greatest of the operands."""

    __slots__ = ()

    def _print(self) -> str:
        return f"max({', '.join(map(str, self.operands))})"


def _operand_text(d: Dim) -> str:
    return str(d) if isinstance(d, (Symbol, Choice)) or (isinstance(d, int) and d >= 0) else f"({d})"


def _factor_text(atom: Expr) -> str:
    return f"({atom})" if isinstance(atom, Binary) else str(atom)


def sort_key(d: Dim) -> tuple[int, int, str]:
    """A total, run-to-run deterministic order of dims (not an order of values): ints, symbols (i2 before i10),
    compounds."""
    if isinstance(d, int):
        return (0, d, "")
    try:
        return d._key
    except AttributeError:
        pass
    if isinstance(d, Symbol):
        d._key = (1, len(d.name), f"{d.name}[{d.lower}:{d.upper}]")
    else:
        # The text alone could be shared by symbols of one name and different ranges.
        ranges = "".join(sort_key(s)[2] for s in sorted(free_symbols(d), key=sort_key))
        d._key = (2, len(str(d)), f"{d} {ranges}")
    return d._key


def term_key(term: tuple[Monomial, int]) -> tuple[tuple[int, int, str], ...]:
    """A total order of a sum's terms, by their monomials."""
    return tuple(sort_key(atom) for atom in term[0])


def free_symbols(d: Dim) -> frozenset[Symbol]:
    """The symbols that occur in `d` (not those of their ranges)."""
    if isinstance(d, int):
        return frozenset()
    try:
        return d._symbols
    except AttributeError:
        pass
    if isinstance(d, Symbol):
        d._symbols = frozenset((d,))
    else:
        d._symbols = frozenset().union(*(free_symbols(child) for child in d._children()))
    return d._symbols


def symbol(name: str, lower: int | None = 0, upper: Dim | None = None) -> Symbol:
    """The symbol of this name and range (one object for each combination)."""

    def build() -> Symbol:
        made = Symbol()
        made.name, made.lower, made.upper = name, lower, upper
        return made

    return intern((Symbol, name, lower, upper), build)  # type: ignore[return-value]


def binary(kind: type[Binary], left: Dim, right: Dim) -> Expr:
    def build() -> Expr:
        made = kind()
        made.left, made.right = left, right
        return made

    return intern((kind, left, right), build)
