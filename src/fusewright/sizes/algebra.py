"""The algebra beneath `sizes/expressions.py`: the forms of symbolic integers, how they are built, and the ranges of
their values.

Takes symbols (a tensor's size, a loop variable) and integers; gives `Dim = int | Expr`. Import from `sizes`, which adds
    the questions.
Always holds: a constant is a plain int, never an Expr; expressions are immutable and hash-consed, so two equal forms
are one object and `==` is identity; no simplification changes the value for any assignment that respects the symbols'
ranges and makes every divisor non-zero. Division and modulo are Python's (towards minus infinity).

An expression is a sum of products: `Sum` has integer coefficients over monomials, a monomial is a sorted tuple of
atoms, and an atom is a Symbol, FloorDiv, Mod, Min or Max. `known_*` never guess: None means "cannot tell".
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from fusewright.sizes import arithmetic as plain
from fusewright.sizes.arithmetic import INFINITY, Bound, Interval, interval_product, shared_atoms


class Expr:
    """A symbolic integer. Compare with `known_eq` and its kin for values; `==` asks only whether the forms are the
    same."""

    __slots__ = ("__weakref__", "_interval", "_key", "_symbols", "_text")
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
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return add(self, multiply(other, -1))

    def __rsub__(self, other: Dim) -> Dim:
        return add(other, multiply(self, -1))

    def __mul__(self, other: Dim) -> Dim:
        return multiply(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return multiply(self, -1)

    def __pos__(self) -> Expr:
        return self

    def __floordiv__(self, other: Dim) -> Dim:
        return floor_div(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floor_div(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return modulo(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return modulo(other, self)

    def __pow__(self, power: int) -> Dim:
        if power < 0:
            raise ValueError("a symbolic integer has no negative powers")
        result: Dim = 1
        for _ in range(power):
            result = multiply(self, result)
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

    def _find_interval(self) -> Interval:
        raise NotImplementedError


Dim = int | Expr
Monomial = tuple[Expr, ...]

_interned: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()
_intern_lock = threading.RLock()
_recent: deque[Expr] = deque(
    maxlen=1 << 12
)  # kept: what is asked of a size in between would else be found out again each time


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

    def _find_interval(self) -> Interval:
        low = -INFINITY if self.lower is None else self.lower
        high = INFINITY if self.upper is None else interval(self.upper)[1]
        return low, high


class Sum(Expr):
    """constant + sum of coefficient * monomial, with at least one monomial; never a single monomial atom alone."""

    __slots__ = ("_constant", "_terms")
    _constant: int
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

    def _find_interval(self) -> Interval:
        low: Bound = plain.least(self._constant)
        high: Bound = plain.most(self._constant)
        for monomial, coefficient_ in self._terms:
            low_term, high_term = interval_product(
                [(coefficient_, coefficient_), *(interval(atom) for atom in monomial)]
            )
            low, high = plain.least(low + plain.least(low_term)), plain.most(high + plain.most(high_term))
        shared = shared_atoms(self._terms) if len(self._terms) > 1 else ()
        if shared:  # a*b - a is a*(b - 1): above 0 when b is above 1, which the terms apart do not show
            counts = {plain.monomial_quotient(monomial, shared) or (): count for monomial, count in self._terms}
            quotient = _sum(counts, counts.pop((), 0))
            low_product, high_product = interval_product([interval(quotient), *(interval(atom) for atom in shared)])
            low = max(low, plain.least(plain.least(low_product) + plain.least(self._constant)))
            high = min(high, plain.most(plain.most(high_product) + plain.most(self._constant)))
        atoms = _replaceable(self._terms)
        if atoms:
            low = max(low, _tighten(self, atoms, want_high=False))
            high = min(high, _tighten(self, atoms, want_high=True))
        return low, high


class _Binary(Expr):
    """An atom over two operands."""

    __slots__ = ("left", "right")
    left: Dim
    right: Dim

    def _children(self) -> tuple[Dim, ...]:
        return self.left, self.right


class FloorDiv(_Binary):
    """left // right, not simplifiable further."""

    __slots__ = ()

    def _print(self) -> str:
        return f"{_operand_text(self.left)}//{_operand_text(self.right)}"

    def _find_interval(self) -> Interval:
        low, high = interval(self.left)
        divisor_low, divisor_high = interval(self.right)
        if divisor_low <= 0 <= divisor_high:
            if divisor_low < 0:
                return -INFINITY, INFINITY
            divisor_low = 1  # a divisor is never zero
            divisor_high = max(divisor_high, 1)
        corners = [plain.floor_corner(a, b) for a in (low, high) for b in (divisor_low, divisor_high)]
        return min(corners), max(corners)


class Mod(_Binary):
    """left % right, not simplifiable further."""

    __slots__ = ()

    def _print(self) -> str:
        return f"{_operand_text(self.left)}%{_operand_text(self.right)}"

    def _find_interval(self) -> Interval:
        divisor_low, divisor_high = interval(self.right)
        low: Bound = 0 if divisor_low >= 0 else divisor_low + 1
        high: Bound = 0 if divisor_high <= 0 else divisor_high - 1
        left_low, left_high = interval(self.left)
        if left_low >= 0 and divisor_low >= 0:
            high = min(high, left_high)
        return low, high


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

    def _find_interval(self) -> Interval:
        intervals = [interval(operand) for operand in self.operands]
        return min(low for low, _ in intervals), min(high for _, high in intervals)


class Max(Choice):
    """The greatest of the operands."""

    __slots__ = ()

    def _print(self) -> str:
        return f"max({', '.join(map(str, self.operands))})"

    def _find_interval(self) -> Interval:
        intervals = [interval(operand) for operand in self.operands]
        return max(low for low, _ in intervals), max(high for _, high in intervals)


# --- printing and order ----------------------------------------------------------------------------------------------


def _operand_text(d: Dim) -> str:
    return str(d) if isinstance(d, (Symbol, Choice)) or (isinstance(d, int) and d >= 0) else f"({d})"


def _factor_text(atom: Expr) -> str:
    return f"({atom})" if isinstance(atom, _Binary) else str(atom)


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


# --- construction ----------------------------------------------------------------------------------------------------


def symbol(name: str, lower: int | None = 0, upper: Dim | None = None) -> Symbol:
    """The symbol of this name and range (one object for each combination)."""

    def build() -> Symbol:
        made = Symbol()
        made.name, made.lower, made.upper = name, lower, upper
        return made

    return intern((Symbol, name, lower, upper), build)  # type: ignore[return-value]


def loop_symbol(name: str, extent: Dim) -> Symbol:
    """A loop variable that runs over 0 .. extent - 1."""
    return symbol(name, 0, extent - 1)


def _binary(kind: type[_Binary], left: Dim, right: Dim) -> Expr:
    def build() -> Expr:
        made = kind()
        made.left, made.right = left, right
        return made

    return intern((kind, left, right), build)


def _sum(terms: Mapping[Monomial, int], constant: int) -> Dim:
    """The canonical form of constant + terms; the monomials must be sorted already."""
    present = [(monomial, count) for monomial, count in terms.items() if count]
    if not present:
        return constant
    if constant == 0 and len(present) == 1 and present[0][1] == 1 and len(present[0][0]) == 1:
        return present[0][0][0]
    if len(present) > 1:
        joined = _join_division(terms, constant)
        if joined is not None:
            return joined
        present.sort(key=term_key)
    frozen = tuple(present)

    def build() -> Sum:
        made = Sum()
        made._terms, made._constant = frozen, constant
        return made

    return intern((Sum, frozen, constant), build)


def _join_division(terms: Mapping[Monomial, int], constant: int) -> Dim | None:
    """c*(x % k) + c*k*(x // k) is c*x. None when no such pair is present."""
    for monomial, count in terms.items():
        if not count or len(monomial) != 1 or type(monomial[0]) is not Mod:
            continue
        remainder = monomial[0]
        quotient = floor_div(remainder.left, remainder.right)
        if isinstance(quotient, int):
            continue
        whole = multiply(multiply(quotient, remainder.right), count)
        if isinstance(whole, int) or not whole.terms or any(terms.get(m) != c for m, c in whole.terms):
            continue
        rest = dict(terms)
        rest[monomial] = 0
        for m, _ in whole.terms:
            rest[m] = 0
        return add(_sum(rest, constant - whole.constant), multiply(remainder.left, count))
    return None


def _all_terms(d: Dim) -> tuple[tuple[Monomial, int], ...]:
    """The terms, and the constant as the coefficient of the empty monomial."""
    return (((), d),) if isinstance(d, int) else (*d.terms, ((), d.constant))


def add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int):
        if isinstance(b, int):
            return a + b
        a, b = b, a
    if isinstance(b, int):
        if b == 0:
            return a
        return _sum(dict(a.terms), a.constant + b)
    return _add_forms(a, b)


@lru_cache(maxsize=1 << 14)
def _add_forms(a: Expr, b: Expr) -> Dim:
    terms = dict(a.terms)
    for monomial, count in b.terms:
        terms[monomial] = terms.get(monomial, 0) + count
    return _sum(terms, a.constant + b.constant)


def multiply(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int):
        if isinstance(b, int):
            return a * b
        a, b = b, a
    if isinstance(b, int):
        if b == 0:
            return 0
        return a if b == 1 else _scale(a, b)
    return _multiply_forms(a, b)


@lru_cache(maxsize=1 << 14)
def _scale(a: Expr, b: int) -> Dim:
    return _sum({monomial: count * b for monomial, count in a.terms}, a.constant * b)


@lru_cache(maxsize=1 << 14)
def _multiply_forms(a: Expr, b: Expr) -> Dim:
    terms: dict[Monomial, int] = {}
    for monomial_a, count_a in _all_terms(a):
        for monomial_b, count_b in _all_terms(b):
            if count_a and count_b:
                product = tuple(sorted(monomial_a + monomial_b, key=sort_key))
                terms[product] = terms.get(product, 0) + count_a * count_b
    constant = terms.pop((), 0)
    return _sum(terms, constant)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of `dims`."""
    result: Dim = 1
    for d in dims:
        result = multiply(result, d)
    return result


# --- division and modulo ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def floor_div(a: Dim, k: Dim) -> Dim:
    """a // k, rounded towards minus infinity. Raises ZeroDivisionError for a constant zero divisor."""
    if isinstance(k, int):
        if isinstance(a, int):
            return a // k
        return _floor_div_constant(a, k)
    if isinstance(a, int) and a == 0:
        return 0
    quotient, rest = _divide_symbolic(a, k)
    if rest == 0:
        return quotient
    if _within(rest, k):
        return quotient
    shared_a, shared_k, _ = _cancel(rest, k)
    if shared_k != k:
        return add(quotient, floor_div(shared_a, shared_k))
    for factor, multiple, _ in _blocks(rest, k):
        return add(quotient, floor_div(multiple, _quotient(k, factor)))
    block = _binary(FloorDiv, rest, k)
    low, high = interval(block)
    return add(quotient, int(low) if low == high else block)


def _floor_div_constant(a: Expr, k: int) -> Dim:
    if k == 0:
        raise ZeroDivisionError(f"{a} // 0")
    if k < 0:
        return floor_div(multiply(a, -1), -k)
    if k == 1:
        return a
    quotient, rest = _split_constant(a, k)
    if isinstance(rest, int):
        return quotient  # _split_constant leaves 0 <= rest < k
    low, high = interval(rest)
    if -INFINITY < low and high < INFINITY and low // k == high // k:
        return add(quotient, int(low // k))
    for divisor in _shared_divisors(rest, k):
        multiple, small = _split_constant(rest, divisor)
        if _fits(small, divisor):
            return add(quotient, floor_div(multiple, k // divisor))
    # (x // a + y) // k == (x + a*y) // (a*k): one floor instead of two.
    for monomial, count in rest.terms:
        if count == 1 and len(monomial) == 1 and type(monomial[0]) is FloorDiv and isinstance(monomial[0].right, int):
            inner = monomial[0]
            if inner.right > 0:  # type: ignore[operator]
                others = multiply(add(rest, multiply(inner, -1)), inner.right)
                return add(quotient, floor_div(add(inner.left, others), inner.right * k))
    if type(rest) is Mod and isinstance(rest.right, int) and rest.right > 0 and rest.right % k == 0:
        return add(quotient, modulo(floor_div(rest.left, k), rest.right // k))
    return add(quotient, _binary(FloorDiv, rest, k))


@lru_cache(maxsize=1 << 14)
def modulo(a: Dim, k: Dim) -> Dim:
    """a % k with Python's sign (that of k). Raises ZeroDivisionError for a constant zero divisor."""
    if isinstance(k, int):
        if isinstance(a, int):
            return a % k
        return _modulo_constant(a, k)
    if isinstance(a, int) and a == 0:
        return 0
    _, rest = _divide_symbolic(a, k)
    if rest == 0:
        return 0
    if _within(rest, k):
        return rest
    shared_a, shared_k, factor = _cancel(rest, k)
    if shared_k != k:
        return multiply(factor, modulo(shared_a, shared_k))
    for factor, multiple, small in _blocks(rest, k):
        return add(multiply(modulo(multiple, _quotient(k, factor)), factor), small)
    if floor_div(rest, k) == 0:
        return rest
    return _binary(Mod, rest, k)


def _modulo_constant(a: Expr, k: int) -> Dim:
    if k == 0:
        raise ZeroDivisionError(f"{a} % 0")
    if k < 0:
        return multiply(modulo(multiply(a, -1), -k), -1)
    if k == 1:
        return 0
    rest: Dim = a
    for reduce_ in (_drop_multiples, _unwrap_modulos, _reduce_coefficients):
        rest = reduce_(rest, k)
        if isinstance(rest, int):
            return rest % k
        low, high = interval(rest)
        if -INFINITY < low and high < INFINITY and low // k == high // k:
            return add(rest, -int(low // k) * k)
    for divisor in _shared_divisors(rest, k):  # type: ignore[arg-type]
        multiple, small = _split_constant(rest, divisor)
        if _fits(small, divisor):
            return add(multiply(modulo(multiple, k // divisor), divisor), small)
    return _binary(Mod, rest, k)


def _split_constant(a: Dim, k: int) -> tuple[Dim, Dim]:
    """(q, r) with a == q*k + r, where r keeps the terms whose coefficients k does not divide, and a constant in [0,
    k)."""
    if isinstance(a, int):
        return a // k, a % k
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, count in a.terms:
        if count % k == 0:
            quotient[monomial] = count // k
        else:
            rest[monomial] = count
    if not quotient and 0 <= a.constant < k:
        return 0, a
    return _sum(quotient, a.constant // k), _sum(rest, a.constant % k)


def _drop_multiples(a: Dim, k: int) -> Dim:
    if isinstance(a, int):
        return a
    kept = {monomial: count for monomial, count in a.terms if count % k}
    return a if len(kept) == len(a.terms) else _sum(kept, a.constant)


def _unwrap_modulos(a: Dim, k: int) -> Dim:
    """c*(x % m) is c*x modulo k when k divides c*m."""
    if isinstance(a, int):
        return a
    result: Dim = a
    for monomial, count in a.terms:
        atom = monomial[0]
        if len(monomial) == 1 and type(atom) is Mod and isinstance(atom.right, int) and (count * atom.right) % k == 0:
            result = add(result, multiply(add(atom.left, multiply(atom, -1)), count))
    return result


def _reduce_coefficients(a: Dim, k: int) -> Dim:
    if isinstance(a, int):
        return a
    return _sum({monomial: count % k for monomial, count in a.terms}, a.constant % k)


def _shared_divisors(a: Expr, k: int) -> list[int]:
    """Divisors above 1 that k shares with some coefficient of `a`, largest first."""
    return sorted({math.gcd(count, k) for _, count in a.terms} - {1}, reverse=True)


def _fits(d: Dim, k: int) -> bool:
    low, high = interval(d)
    return 0 <= low and high < k


def _within(d: Dim, k: Dim) -> bool:
    """0 <= d < k for certain."""
    return interval(d)[0] >= 0 and interval(add(add(k, -1), multiply(d, -1)))[0] >= 0


def _blocks(a: Dim, k: Expr) -> Iterator[tuple[Dim, Dim, Dim]]:
    """(f, q, r) with a == f*q + r and 0 <= r < f for a proper factor f of k, which is one product of sizes: a // k is
    then q // (k/f). An index into flattened dimensions is such a sum: (i*256 + j) // (n*256) is i // n for j < 256."""
    if isinstance(a, int) or len(k.terms) != 1 or k.constant or interval(k)[0] < 0:
        return
    ((monomial, count),) = k.terms
    factors: dict[Dim, None] = {}
    for other, other_count in a.terms:
        common = shared_atoms([(monomial, count), (other, other_count)])
        factors[multiply(product(common), math.gcd(count, other_count))] = None
    for factor in sorted(factors, key=sort_key, reverse=True):
        if factor == 1 or factor == k:
            continue
        multiple, small = _split_by(a, factor)
        if multiple != 0 and _within(small, factor):
            yield factor, multiple, small


def _split_by(a: Expr, factor: Dim) -> tuple[Dim, Dim]:
    """(q, r) with a == q*factor + r; the factor is one product, and r keeps the terms that it does not divide."""
    if isinstance(factor, int):
        return _split_constant(a, factor)
    ((monomial, count),) = factor.terms
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for other, other_count in a.terms:
        left_over = plain.monomial_quotient(other, monomial)
        if left_over is None or other_count % count:
            rest[other] = other_count
        else:
            quotient[left_over] = other_count // count
    return _sum(quotient, quotient.pop((), 0)), _sum(rest, a.constant)


def _quotient(k: Expr, factor: Dim) -> Dim:
    """k / factor, for a factor that `_blocks` gave."""
    return _split_by(k, factor)[0]


def _divide_symbolic(a: Dim, k: Expr) -> tuple[Dim, Dim]:
    """(q, r) with a == q*k + r, by long division on k's leading term; the division stops when no term is left to
    divide."""
    lead, lead_count = max(k.terms, key=lambda term: (len(term[0]), term_key(term)))
    quotient: Dim = 0
    rest: Dim = a
    for _ in range(16):  # long division over several variables may wander; what is left stays in r
        step = None if isinstance(rest, int) else _first_divisible(rest, lead, lead_count)
        if step is None:
            break
        quotient = add(quotient, step)
        rest = add(rest, multiply(multiply(step, k), -1))
    return quotient, rest


def _first_divisible(a: Expr, lead: Monomial, lead_count: int) -> Dim | None:
    for monomial, count in a.terms:
        left_over = plain.monomial_quotient(monomial, lead)
        if left_over is not None and count % lead_count == 0:
            return _sum({left_over: count // lead_count}, 0) if left_over else count // lead_count
    return None


def _cancel(a: Dim, k: Expr) -> tuple[Dim, Dim, Dim]:
    """(a/f, k/f, f) for the largest common factor f that every term of both shows; f is 1 when there is none."""
    terms = [term for term in (*_all_terms(a), *_all_terms(k)) if term[1]]
    number = math.gcd(*(count for _, count in terms))
    shared = shared_atoms(terms)
    if number == 1 and not shared:
        return a, k, 1
    factor = multiply(product(shared), number)

    def reduced(d: Dim) -> Dim:
        if isinstance(d, int):
            return d // number
        counts: dict[Monomial, int] = {}
        for monomial, count in _all_terms(d):
            if count:
                left_over = plain.monomial_quotient(monomial, shared)
                assert left_over is not None
                counts[left_over] = count // number
        return _sum(counts, counts.pop((), 0))

    return reduced(a), reduced(k), factor


# --- ranges ----------------------------------------------------------------------------------------------------------


def interval(d: Dim) -> Interval:
    if isinstance(d, int):
        return d, d
    try:
        return d._interval
    except AttributeError:
        d._interval = d._find_interval()
        return d._interval


def _is_relational(atom: Expr) -> bool:
    """Its range is known in terms of other symbols, so that an interval alone would lose what they have in common."""
    if isinstance(atom, Symbol):
        return isinstance(atom.upper, Expr)
    return not (isinstance(atom, Mod) and isinstance(atom.right, int))


def _replaceable(terms: Sequence[tuple[Monomial, int]]) -> list[Expr]:
    """The atoms that an expression which bounds them may replace, the first to be tried first."""
    seen = {atom for monomial, _ in terms for atom in monomial if _is_relational(atom)}
    kept = [atom for atom in seen if not isinstance(atom, FloorDiv) or plain.is_undone(atom, atom.right, terms)]
    if len(kept) < 2:
        return kept
    # Replace first what no other atom's range mentions: its own range mentions the others, and then cancels against
    # them.
    inner = {s for atom in seen for s in _range_symbols(atom)}
    return sorted(kept, key=lambda a: (a in inner, sort_key(a)))


def _tighten(e: Expr, atoms: Sequence[Expr], want_high: bool) -> Bound:
    """A bound of `e` found by replacing one of `atoms` by an expression that bounds it (and so on, recursively)."""
    for atom in atoms:
        scale, rest = split_atom(e, atom)
        if scale is None:
            continue
        low, high = interval(scale)
        if low < 0 < high:
            continue
        replacements, pick = _replacements(atom, scale, rising=low >= 0, want_high=want_high)
        if replacements:
            return pick(interval(add(rest, r))[1 if want_high else 0] for r in replacements)
    return INFINITY if want_high else -INFINITY


def _range_symbols(atom: Expr) -> frozenset[Symbol]:
    if isinstance(atom, Symbol):
        return free_symbols(atom.upper) if isinstance(atom.upper, Expr) else frozenset()
    return free_symbols(atom)


def split_atom(e: Expr, atom: Expr) -> tuple[Dim | None, Dim]:
    """(scale, rest) with e == scale*atom + rest; scale None when some monomial holds the atom twice."""
    scale: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, count in e.terms:
        occurrences = monomial.count(atom)
        if occurrences > 1:
            return None, 0
        if occurrences:
            left_over = plain.monomial_quotient(monomial, (atom,))
            assert left_over is not None
            scale[left_over] = count
        else:
            rest[monomial] = count
    constant = scale.pop((), 0)
    return _sum(scale, constant), _sum(rest, e.constant)


def _replacements(
    atom: Expr, scale: Dim, rising: bool, want_high: bool
) -> tuple[list[Dim], Callable[[Iterable[Bound]], Bound]]:
    """Expressions that bound scale*atom from above (want_high) or below, and how to combine the bounds that they
    give."""
    upward = rising == want_high  # the atom itself is wanted at its greatest
    first: Callable[[Iterable[Bound]], Bound] = min if want_high else max
    if isinstance(atom, Symbol):
        return ([multiply(scale, atom.upper)] if upward and isinstance(atom.upper, Expr) else []), first
    if isinstance(atom, FloorDiv):
        if not isinstance(atom.right, int) or not isinstance(scale, int) or scale % atom.right or atom.right < 0:
            return [], first
        times = scale // atom.right  # x - (k-1) <= k*(x//k) <= x
        return [multiply(atom.left if upward else add(atom.left, 1 - atom.right), times)], first
    if isinstance(atom, Mod):
        positive = interval(atom.right)[0] > 0
        return ([multiply(scale, add(atom.right, -1))] if upward and positive else []), first
    assert isinstance(atom, Choice)
    chosen = [multiply(scale, operand) for operand in atom.operands]
    return chosen, min if isinstance(atom, Min) == rising else max


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
