"""Whether a size expression is at least 0 where others are: the questions of bounds checks.

Takes an expression and facts, which are size expressions that are at least 0; answers True only where that is proved.
The ranges of the algebra decide most; where these do not do, multiples of facts are taken away: d is at least 0 if f
and d - q * f are, for a q that is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from fusewright.sizes.algebra import interval, is_at_least_zero, split_atom
from fusewright.sizes.arithmetic import INFINITY, Bound, interval_product, monomial_quotient
from fusewright.sizes.expressions import (
    Dim,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Symbol,
    Term,
    bounds,
    coefficient,
    evaluate,
    free_symbols,
    product,
    split_factor,
    substitute,
    symbol as new_symbol,
    total,
)

Facts = tuple[Dim, ...]
"""Size expressions that are at least 0."""

_FAR = 1000  # from 0, where a symbol has no end on that side
MOST_STEPS = 40
MOST_TRIED = 600
MOST_SPLITS = 4
"""Of one proof: sums that facts are taken from, what is tried in all of them (proofs that were found took at most 251,
where a hundred facts would make it thousands), and choices that are tried one operand after the other."""


class Given(NamedTuple):
    """What is known of the sizes of a graph. multiples: sizes that are a number times another size, as that."""

    facts: Facts = ()
    multiples: tuple[tuple[Expr, Dim], ...] = ()

    def in_parts(self, sizes: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The sizes, written in those that others are multiples of."""
        parts = dict(self.multiples)
        return tuple(substitute(size, parts) for size in sizes) if parts else sizes


class View:
    """Facts about sizes alone, or about one loop variable between numbers, written into these: of what is known to be
    at least 1, say, such a symbol. `facts`: the others. multiples: sizes that are a number times another size."""

    def __init__(self, facts: Facts, sizes: Collection[Expr], multiples: Mapping[Expr, Dim] | None = None) -> None:
        multiples = multiples or {}
        self.sizes = {*sizes, *(symbol for whole in multiples.values() for symbol in free_symbols(whole))}
        self.mapping: dict[Expr, Dim] = dict(multiples)
        kept: list[Dim] = []
        for fact in facts:
            symbols = free_symbols(fact)
            numbered = len(symbols) == 1 and not any(isinstance(symbol.upper, Expr) for symbol in symbols)
            if symbols and (numbered or all(symbol in sizes for symbol in symbols)):
                kept += self.learn(self.of(fact))
            else:
                kept.append(fact)
        self.facts = tuple(dict.fromkeys(map(self.of, kept)))

    def of(self, d: Dim) -> Dim:
        """`d` in the symbols of this view; loop variables have ranges in them too."""
        if isinstance(d, int):
            return d
        mapping = dict(self.mapping)
        for symbol in free_symbols(d):
            if symbol not in mapping and isinstance(symbol.upper, Expr):
                upper = substitute(symbol.upper, self.mapping)
                if upper is not symbol.upper:
                    mapping[symbol] = new_symbol(symbol.name, symbol.lower, upper)
        try:
            return substitute(d, mapping)
        except ZeroDivisionError:  # by a size that is 0 where the facts hold: as it is, it is as true
            return d

    def learn(self, fact: Dim) -> list[Dim]:
        """Writes the fact into a symbol; gives what is left to be said."""
        if is_at_least_zero(fact):
            return []
        if isinstance(fact, int):
            return [fact]
        alone = [
            (monomial[0], times)
            for monomial, times in fact.terms
            if len(monomial) == 1 and isinstance(monomial[0], Symbol) and coefficient(fact, monomial[0]) == times
        ]
        for symbol, times in alone:
            if (
                len(fact.terms) == 1 and times > 0
            ):  # symbol >= -constant / times; what is above is 0 or more, so that products are too
                least = -(fact.constant // times)
                upper = None if symbol.upper is None else symbol.upper - least
                self.replace(symbol, new_symbol(f"{symbol.name}_{least}", 0, upper) + least)
                return []
            if len(fact.terms) == 1 and (symbol.upper is None or isinstance(symbol.upper, int)):
                most = fact.constant // -times
                self.replace(
                    symbol,
                    new_symbol(symbol.name, symbol.lower, most if symbol.upper is None else min(symbol.upper, most)),
                )
                return []
        alone.sort(key=lambda item: item[0].lower is not None)
        for symbol, times in alone:
            if abs(times) == 1 and symbol.upper is None:
                rest = fact - symbol * times
                self.replace(symbol, (new_symbol(f"t{len(self.mapping)}", 0) - rest) * times)
                return [] if symbol.lower is None else [symbol - symbol.lower]
        return [fact]

    def replace(self, symbol: Expr, by: Dim) -> None:
        self.mapping = {one: substitute(value, {symbol: by}) for one, value in self.mapping.items()}
        self.mapping.setdefault(symbol, by)


def not_empty(extent: Dim) -> list[Dim]:
    """What a loop of this extent, inside of which one is, says: it is at least 1, and so is each factor of it."""
    if isinstance(extent, int):
        return []
    number = math.gcd(extent.constant, *(times for _, times in extent.terms))
    common, rest = split_factor(extent, number, is_at_least_zero)
    return [d for d in (*(atom - 1 for atom in dict.fromkeys(common)), rest - 1) if isinstance(d, Expr)]


def certain(when: Dim) -> tuple[Dim, ...]:
    """What it says that a size, which is 1 or 0, is 1: a product of such sizes, each the greater of 0 and another
    one."""
    if isinstance(when, int) or len(when.terms) != 1 or when.constant:
        return () if isinstance(when, int) else (when - 1,)
    found = [more for atom in when.terms[0][0] for more in loosened(_without_zero(atom) - 1)]
    return tuple(dict.fromkeys(d for d in found if not isinstance(d, int)))


def _without_zero(atom: Expr) -> Dim:
    """max(0, x) is 1 where x is."""
    operands = atom._children()
    return operands[0] if isinstance(atom, Max) and len(operands) == 2 and operands[1] == 0 else atom


def loosened(d: Dim) -> list[Dim]:
    """What is at least as large as `d`: each operand in place of a minimum that is added, or of a maximum that is taken
    away."""
    if isinstance(d, int):
        return [d]
    for monomial, times in d.terms:
        if len(monomial) == 1 and isinstance(monomial[0], Min if times > 0 else Max):
            rest = d - monomial[0] * times
            return [more for operand in monomial[0]._children() for more in loosened(rest + operand * times)]
    return [d]


def prove(d: Dim, facts: Facts, splits: int = MOST_SPLITS, search: bool = True) -> bool:
    """Whether `d` is at least 0 where the facts are. search: not at a glance only."""
    if is_at_least_zero(d) or any(isinstance(fact, int) and fact < 0 for fact in facts):  # or nothing gets here
        return True
    given = tuple(fact for fact in facts if isinstance(fact, Expr))
    d = _without_factor(_at_ends(d, given))
    if isinstance(d, int) or _is_plainly(d):
        return _is_plainly(d)
    if any(is_at_least_zero(_at_ends(_with_least(d, given, linear), given)) for linear in (False, True)):
        return True
    if not search or _is_refuted(d, given):
        return False
    d, *more = _with_quotients(d, given)
    if isinstance(d, int):
        return d >= 0
    given = tuple(fact for fact in more if isinstance(fact, Expr))
    if combine(d, (*given, *_ends(d, given), *_meanings(d, given))):
        return True
    choice = next((atom for monomial, _ in d.terms for atom in monomial if isinstance(atom, (Min, Max))), None)
    if choice is None or not splits:
        return False
    if len(d.terms) > 1 and d.constant >= 0 and all(_is_choice(term) for term in d.terms):
        return all(prove(product(monomial) * times, given, splits - 1) for monomial, times in d.terms)
    sign = 1 if isinstance(choice, Max) else -1
    for operand in choice.operands:
        taken = tuple((operand - other) * sign for other in choice.operands if other is not operand)
        if not prove(_with(d, choice, operand), (*given, *taken), splits - 1):
            return False
    return True


def _is_refuted(d: Expr, facts: tuple[Expr, ...]) -> bool:
    """Whether an example shows that `d` may be below 0 where the facts are not: each symbol at the end of its range
    where `d` is less, moved from there as far as facts want."""
    symbols: list[Symbol] = []
    values: dict[Expr, int] = {}

    def ends(one: Symbol) -> tuple[Bound, Bound]:
        return -INFINITY if one.lower is None else one.lower, INFINITY if one.upper is None else at(one.upper)

    def at(size: Dim) -> int:
        for one in free_symbols(size) - values.keys():
            low, high = ends(one)
            scale = coefficient(d, one)
            least = max(low, min(high, 0))
            symbols.append(one)
            values[one] = int(least if scale is None or interval(scale)[1] > 0 else min(high, least + _FAR))
        return evaluate(size, values)

    try:
        for fact in (d, *facts, *facts):  # what one fact moves, another may not want
            lacks = -at(fact)
            if fact is d or lacks <= 0:
                continue
            for (first, *more), times in fact.terms:
                if isinstance(first, Symbol) and not more:
                    moved = values[first] + -(-lacks // abs(times)) * (1 if times > 0 else -1)
                    low, high = ends(first)
                    if low <= moved <= high:
                        values[first] = moved
                        break
        inside = all(low <= values[one] <= high for one in symbols for low, high in [ends(one)])
        return inside and at(d) < 0 and all(at(fact) >= 0 for fact in facts)
    except ZeroDivisionError:
        return False


def _is_choice(term: Term) -> bool:
    return len(term[0]) == 1 and isinstance(term[0][0], (Min, Max))


def _is_plainly(d: Dim) -> bool:
    """The same at a glance: by the ranges of terms apart."""
    return d >= 0 if isinstance(d, int) else d.constant + sum(map(_least, d.terms)) >= 0


@lru_cache(4096)  # a search asks it of the same few terms again and again
def _least(term: Term) -> Bound:
    monomial, times = term
    return interval_product([(times, times), *map(interval, monomial)])[0]


def combine(d: Expr, facts: tuple[Expr, ...]) -> bool:
    """Whether multiples of facts, taken from `d`, leave what is at least 0: what seems to lack least is tried first."""
    order = count()
    waiting: list[tuple[tuple[Bound, ...], int, Expr]] = [((), next(order), d)]
    seen: set[Dim] = {d}
    facts = _strongest(facts)
    least = {fact - fact.constant: fact.constant for fact in facts}
    left = MOST_TRIED
    for _ in range(MOST_STEPS):
        if not waiting or left <= 0:
            return False
        now = heappop(waiting)[2]
        tried = dict.fromkeys(islice(_without_multiples(now, facts), left))
        left -= len(tried)
        for less in tried:
            less = _without_factor(less)
            if less in seen or (isinstance(less, Expr) and len(less.terms) > len(d.terms) + 2) or _is_huge(less):
                continue
            seen.add(less)
            if _is_plainly(less):
                return True
            if isinstance(less, Expr):
                if least.get(less - less.constant, INFINITY) <= less.constant:
                    return True
                heappush(waiting, (_lack(less), next(order), less))
    return False


def _is_huge(d: Dim) -> bool:
    """Whether a factor has grown beyond what any size has: no proof comes of it."""
    factors = (d,) if isinstance(d, int) else (d.constant, *(times for _, times in d.terms))
    return any(abs(factor) >> 96 for factor in factors)


def _strongest(facts: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Of facts that differ by a number, the one that says most."""
    found: dict[Dim, Expr] = {}
    for fact in facts:
        like = fact - fact.constant
        if like not in found or fact.constant < found[like].constant:
            found[like] = fact
    return tuple(found.values())


def _lack(d: Expr) -> tuple[Bound, ...]:
    """How far it is from being at least 0: terms without a bound from below, what the others lack, and terms."""
    least = [_least(term) for term in d.terms]
    return least.count(-INFINITY), -d.constant - sum(one for one in least if one > -INFINITY), len(least)


def _without_factor(d: Dim) -> Dim:
    """`d` without a factor that is at least 0. A number is taken out of the terms beside a constant too, which is
    rounded down: sums of terms are whole."""
    if isinstance(d, int):
        return d
    return split_factor(d, math.gcd(*(times for _, times in d.terms)), is_at_least_zero)[1]


def _without_multiples(d: Expr, facts: tuple[Expr, ...]) -> Iterator[Dim]:
    """d (or some times d), less multiples of a fact that are at least 0: those that remove a term, where the fact has
    one against a term of `d` that may be below 0."""
    mine = _terms(d)
    against = [one for one in mine if _least(one) < 0]
    for fact in facts:
        its = _terms(fact)
        if any(_quotient(one, other) is not None for one in against for other in its):
            for one in mine:
                yield from _without_term(d, fact, its, one, facts if one in against else ())


def _without_term(d: Expr, fact: Expr, its: tuple[Term, ...], one: Term, facts: tuple[Expr, ...]) -> Iterator[Dim]:
    """The same for one of its terms. facts: given where it may be below 0."""
    for other in its:
        left_over = _quotient(one, other)
        if left_over is None:
            continue
        factor = product(left_over) * abs(one[1])
        if is_at_least_zero(factor):
            yield _less(d, abs(other[1]), factor, fact)
        if left_over and len(other[0]) == 1 and facts:
            scale, _ = split_atom(d, other[0][0])
            whole = 0 if scale is None else scale if other[1] > 0 else -scale
            if whole is not factor and any(is_at_least_zero(whole - more) for more in facts):
                yield _less(d, abs(other[1]), whole, fact)


def _quotient(one: Term, other: Term) -> tuple[Expr, ...] | None:
    """What the other term's atoms must be multiplied by to be this one's, if both have one sign."""
    return monomial_quotient(one[0], other[0]) if (one[1] > 0) is (other[1] > 0) else None


def _terms(d: Expr) -> tuple[Term, ...]:
    """The constant among them."""
    return (*d.terms, ((), d.constant)) if d.constant else d.terms


def _less(d: Expr, times: int, factor: Dim, fact: Expr) -> Dim:
    """times * d - factor * fact, and what may be missing for times * d to be more than -times: d is a whole number."""
    shared = math.gcd(
        times, factor if isinstance(factor, int) else math.gcd(factor.constant, *(n for _, n in factor.terms))
    )
    times //= shared
    return d * times + (times - 1) - (factor // shared) * fact


def _meanings(d: Expr, facts: tuple[Expr, ...]) -> Iterator[Expr]:
    """What quotients and remainders in `d` and in the facts are: q = x // k has 0 <= x - k * q < k, and is at most what
    the greatest x gives; x % k has 0 <= x % k < k."""
    for atom in dict.fromkeys(inside for whole in (d, *facts) for inside in _divisions(whole)):
        if not _divides(atom, facts):
            continue
        rest = atom.left - atom.right * atom if isinstance(atom, FloorDiv) else atom
        for meaning in (rest, atom.right - 1 - rest, _highest(atom, facts) - atom):
            if isinstance(meaning, Expr):
                yield meaning


def _with_quotients(d: Expr, facts: tuple[Expr, ...]) -> tuple[Dim, ...]:
    """The same with x - k * (x // k) in place of x % k, where one of them speaks of that quotient too."""
    found: tuple[Dim, ...] = (d, *facts)
    atoms = dict.fromkeys(atom for whole in found for atom in _divisions(whole))
    quotients = {(atom.left, atom.right): atom for atom in atoms if isinstance(atom, FloorDiv)}
    for atom in atoms:
        quotient = quotients.get((atom.left, atom.right)) if isinstance(atom, Mod) else None
        if quotient is not None and _divides(atom, facts):
            found = tuple(_with(size, atom, atom.left - quotient * atom.right) for size in found)
    return found


def _divides(atom: FloorDiv | Mod, facts: tuple[Expr, ...]) -> bool:
    """Whether the divisor is at least 1: one that may be 0 gives anything."""
    return is_at_least_zero(atom.right - 1) or any(is_at_least_zero(atom.right - 1 - fact) for fact in facts)


def _highest(d: Dim, facts: tuple[Expr, ...]) -> Dim:
    """A bound of `d` from above: its divisions and symbols at the ends of their ranges, where these are known."""
    for _ in range(8):
        if isinstance(d, int):
            break
        inside = ((atom, times) for (atom, *more), times in d.terms if times > 0 and not more)
        found = (one for one in inside if isinstance(one[0], (FloorDiv, Mod)) and _divides(one[0], facts))
        top, times = next(found, (None, 0))
        if isinstance(top, (FloorDiv, Mod)):
            above = top.right - 1 if isinstance(top, Mod) else _highest(top.left, facts) // top.right
            if above is top:
                break
            d = d + (above - top) * times  # of this term alone: in another one it may be taken away
        else:
            ends = (_end(-d, symbol) for symbol in sorted(free_symbols(d), key=str))
            end = next((one for one in ends if one is not None), None)
            if end is None:
                break
            d = substitute(d, end)
    return d


def _with_least(d: Expr, facts: tuple[Expr, ...], linear: bool) -> Dim:
    """A bound of `d` from below: its divisions at the ends of their ranges, as if they had nothing to do with each
    other. linear: of k * (x // k) that is taken away, x is."""
    found: list[Dim] = [d.constant]
    for monomial, times in d.terms:
        factors: list[Dim] = list(monomial)
        at = next((k for k, atom in enumerate(monomial) if isinstance(atom, (FloorDiv, Mod))), None)
        if at is not None and is_at_least_zero(product(factors[:at] + factors[at + 1 :])):
            atom = monomial[at]
            if times < 0 and linear and isinstance(atom, FloorDiv) and isinstance(atom.right, int) and atom.right > 0:
                if times % atom.right == 0:
                    factors[at], times = atom.left, times // atom.right
            elif times < 0:
                factors[at] = _highest(atom, facts)
            elif is_at_least_zero(atom):
                factors[at] = 0
        found.append(product(factors) * times)
    return total(found)


def _divisions(d: Dim) -> Iterator[FloorDiv | Mod]:
    if isinstance(d, int):
        return
    for monomial, _ in d.terms:
        for atom in monomial:
            if isinstance(atom, (FloorDiv, Mod)):
                yield atom
            if not isinstance(atom, Symbol):
                for child in atom._children():
                    yield from _divisions(child)


def _with(d: Dim, old: Expr, new: Dim) -> Dim:
    """`d` with another expression in place of an atom of its terms."""
    if isinstance(d, int):
        return d
    return total(
        product(new if atom is old else atom for atom in monomial) * n
        for monomial, n in (*d.terms, ((), d.constant))
    )


def lowest(d: Dim, known: Collection[Expr]) -> Dim:
    """A bound from below over the symbols in `known` alone, others at the end of their range; `d` where there is none
    to be had."""
    for _ in range(16):
        others = [symbol for symbol in free_symbols(d) if symbol not in known]
        ends = (_end(d, symbol) for symbol in sorted(others, key=lambda symbol: isinstance(symbol.upper, int)))
        moved = next((end for end in ends if end is not None), None)
        if moved is None:
            break
        d = substitute(d, moved)
    return d


def _ends(d: Expr, facts: tuple[Expr, ...]) -> list[Expr]:
    """The upper ends of symbols that are sizes too."""
    symbols = free_symbols(d).union(*map(free_symbols, facts))
    return [
        end
        for symbol in sorted(symbols, key=str)
        if symbol.upper is not None and isinstance(end := symbol.upper - symbol, Expr)
    ]


def _at_ends(d: Dim, facts: tuple[Expr, ...]) -> Dim:
    """The least that `d` is over symbols of which nothing but their range is known."""
    bound = frozenset[Expr]().union(*map(free_symbols, facts))
    while True:
        symbols = free_symbols(d)
        tied = bound.union(*(free_symbols(symbol.upper) for symbol in symbols if isinstance(symbol.upper, Expr)))
        end = next(
            (end for end in (_end(d, symbol) for symbol in sorted(symbols - tied, key=str)) if end is not None), None
        )
        if end is None:
            return d
        d = substitute(d, end)


def _end(d: Dim, symbol: Symbol) -> dict[Expr, Dim] | None:
    """Where in the symbol's range `d` is least."""
    scale = coefficient(d, symbol)
    low, high = (None, None) if scale is None else bounds(scale)
    if low is not None and low >= 0 and symbol.lower is not None:
        return {symbol: symbol.lower}
    if high is not None and high <= 0 and symbol.upper is not None:
        return {symbol: symbol.upper}
    return None
