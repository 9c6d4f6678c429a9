"""The algebra beneath `sizes/expressions.py`: sums, products, quotients and remainders of symbolic integers in the one
form that each has, and the ranges of their values.

Takes and gives `Dim = int | Expr`. Import from `sizes/expressions.py`, which adds the questions.
Always holds: no simplification changes the value for any assignment that respects the symbols' ranges and makes every
divisor non-zero. Division and modulo are Python's (towards minus infinity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from fusewright.sizes import arithmetic as plain
from fusewright.sizes.arithmetic import INFINITY, Bound, Interval, interval_product, shared_atoms
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
    binary,
    free_symbols,
    intern,
    sort_key,
    symbol,
    term_key,
)

# --- construction ----------------------------------------------------------------------------------------------------


def loop_symbol(name: str, extent: Dim) -> Symbol:
    """A loop variable that runs over 0 .. extent - 1."""
    return symbol(name, 0, extent - 1)


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
    block = binary(FloorDiv, rest, k)
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
    return add(quotient, binary(FloorDiv, rest, k))


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
    return binary(Mod, rest, k)


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
    return binary(Mod, rest, k)


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
        d._interval = _INTERVALS[type(d)](d)
        return d._interval


def _interval_of_symbol(s: Symbol) -> Interval:
    low = -INFINITY if s.lower is None else s.lower
    high = INFINITY if s.upper is None else interval(s.upper)[1]
    return low, high


def least(d: Dim, enough: Bound = INFINITY) -> Bound:
    """The lower end of the interval, alone; or a number below it, where that is at least `enough`."""
    if type(d) is not Sum or hasattr(d, "_interval"):
        return interval(d)[0]
    try:
        return d._least
    except AttributeError:
        low = _terms_apart(d)[0]
        if low >= enough:
            return low
        d._least = max(low, _tighten(d, _replaceable(d._terms), want_high=False))
        return d._least


def is_at_least_zero(d: Dim) -> bool:
    return d >= 0 if isinstance(d, int) else least(d, 0) >= 0


def _interval_of_sum(d: Sum) -> Interval:
    return least(d), min(_terms_apart(d)[1], _tighten(d, _replaceable(d._terms), want_high=True))


def _terms_apart(d: Sum) -> Interval:
    """Between which bounds a sum lies by its terms' own, and by those of what they have in common."""
    try:
        return d._apart
    except AttributeError:
        pass
    low: Bound = plain.least(d._constant)
    high: Bound = plain.most(d._constant)
    for monomial, coefficient_ in d._terms:
        low_term, high_term = interval_product([(coefficient_, coefficient_), *(interval(atom) for atom in monomial)])
        low, high = plain.least(low + plain.least(low_term)), plain.most(high + plain.most(high_term))
    shared = shared_atoms(d._terms) if len(d._terms) > 1 else ()
    if shared:  # a*b - a is a*(b - 1): above 0 when b is above 1, which the terms apart do not show
        counts = {plain.monomial_quotient(monomial, shared) or (): count for monomial, count in d._terms}
        quotient = _sum(counts, counts.pop((), 0))
        low_product, high_product = interval_product([interval(quotient), *(interval(atom) for atom in shared)])
        low = max(low, plain.least(plain.least(low_product) + plain.least(d._constant)))
        high = min(high, plain.most(plain.most(high_product) + plain.most(d._constant)))
    d._apart = low, high
    return low, high


def _interval_of_quotient(d: FloorDiv) -> Interval:
    low, high = interval(d.left)
    divisor_low, divisor_high = interval(d.right)
    if divisor_low <= 0 <= divisor_high:
        if divisor_low < 0:
            return -INFINITY, INFINITY
        divisor_low = 1  # a divisor is never zero
        divisor_high = max(divisor_high, 1)
    corners = [plain.floor_corner(a, b) for a in (low, high) for b in (divisor_low, divisor_high)]
    return min(corners), max(corners)


def _interval_of_remainder(d: Mod) -> Interval:
    divisor_low, divisor_high = interval(d.right)
    low: Bound = 0 if divisor_low >= 0 else divisor_low + 1
    high: Bound = 0 if divisor_high <= 0 else divisor_high - 1
    left_low, left_high = interval(d.left)
    if left_low >= 0 and divisor_low >= 0:
        high = min(high, left_high)
    return low, high


def _interval_of_choice(d: Choice) -> Interval:
    lows, highs = zip(*(interval(operand) for operand in d.operands))
    best = min if isinstance(d, Min) else max
    return best(lows), best(highs)


_INTERVALS: dict[type[Expr], Callable[..., Interval]] = {
    Symbol: _interval_of_symbol,
    Sum: _interval_of_sum,
    FloorDiv: _interval_of_quotient,
    Mod: _interval_of_remainder,
    Min: _interval_of_choice,
    Max: _interval_of_choice,
}


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
            return pick(interval(add(rest, r))[1] if want_high else least(add(rest, r)) for r in replacements)
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
