"""What a capture knows about its symbolic sizes: where each comes from, an example value, and the relations learnt on
the way.

Takes symbols with sources and hints, and relations that tracing asks about; gives answers, and `guards`: the relations
that must hold for the capture to be valid.
Always holds: an answer is either provable from the symbols' ranges and `guards`, or its relation has just been added to
`guards`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping

from fusewright.base.location import Location
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak
from fusewright.sizes.estimate import NO_EXAMPLES
from fusewright.sizes.expressions import (
    Dim,
    Expr,
    FloorDiv,
    Mod,
    Relation,
    Symbol,
    Term,
    bounds,
    eliminate,
    evaluate,
    free_symbols,
    greatest_term,
    is_multiple,
    known,
    known_le,
    product,
    sort_key,
    split_factor,
    substitute,
    symbol,
    tightened,
    total,
)


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """One symbol of a capture: its source (opaque here) and the example's value."""

    symbol: Symbol
    source: object
    hint: int


class ShapeEnv:
    """The symbols and the learnt facts of one capture."""

    def __init__(self, location: Callable[[], tuple[Location, ...]] | None = None) -> None:
        self.location = location or (lambda: ())
        self.promised: set[Symbol] = set()  # sizes that the user has marked as dynamic
        self.declared: dict[
            Symbol, tuple[int | None, int | None]
        ] = {}  # the ranges that the user has given with such a mark
        self.narrowed_at: dict[Symbol, tuple[Location, ...]] = {}  # the user's stack where a size was last bounded
        self.fixed_at: dict[Symbol, tuple[Location, ...]] = {}  # the user's stack where an equality was learnt
        self.symbols: dict[Symbol, SizeSymbol] = {}
        self.guards: list[Relation] = []
        self.asked_at: list[tuple[Location, ...]] = []  # for each guard, the user's stack where it was asked
        self.assumed: set[Expr] = set()  # symbols that are taken to be 2 or more
        self._larger: dict[Expr, Symbol] = {}  # symbol -> the same, 2 or more
        self.ones: set[object] = set()  # where sizes of 1 were met that would be symbols were they larger
        self.taken: set[Symbol] = set()  # symbols that are 1 at the call at hand, with another example
        # of these, the ones for which 1 was shown to do as larger sizes do: see `show`
        self.shown: frozenset[Expr] = frozenset()
        self.one: ShapeEnv | None = None  # what is known when these are 1
        self.asked: list[tuple[Relation | None, bool | frozenset[Expr]]] | None = None  # see `take`
        self.first_met: list[object] = []  # arguments that only this capture has met, with their sizes as they are
        self.buckets: dict[Symbol, tuple[int, ...]] = {}  # what the sizes of marked dimensions may be padded to
        self.unbacked: list[Symbol] = []  # sizes that depend on data: no source, no example value
        self.may_give = False  # a library's shape function may make one
        self.asserted: list[Relation] = []  # what is taken for granted of those, checked at run time
        self.numbers: set[Symbol] = set()  # symbols that are Python ints of the program, not sizes of tensors
        self.float_of: Callable[[Expr], object] | None = None  # makes a run-time float (its node) from such numbers
        self._hints: dict[Expr, int] = {}
        self._equal: dict[Expr, Dim] = {}  # learnt: symbol == value
        self._divisors: dict[Symbol, int] = {}  # learnt: symbol is a multiple of this
        self._not_negative: list[Dim] = []  # learnt, and only grows: these are >= 0
        self._in_factors: list[Dim] = []  # the same over the factors of symbols that are multiples of a number
        self._tried: dict[Dim, int] = {}  # how many of them say nothing of this one
        self._different: set[Dim] = set()  # learnt: these are != 0
        self._zero: dict[
            Dim, Term
        ] = {}  # learnt: these are 0, and no symbol could be solved for; the term that the others replace
        self._simplified: dict[Dim, Dim] = {}  # what `simplify` has answered since the last fact was learnt
        self._answers: dict[Relation, bool | None] = {}  # what `known` has answered since then
        self._general: dict[
            Relation, tuple[bool | None, frozenset[Expr]]
        ] = {}  # what `generally` has, with the symbols concerned
        self._narrow: dict[Expr, Symbol] = {}  # symbol -> the same, with the range that learnt facts leave it

    def copy(self) -> ShapeEnv:
        """Another one that knows as much: what it learns stays with it."""
        made = ShapeEnv(self.location)
        for name, value in vars(self).items():
            setattr(made, name, value.copy() if isinstance(value, (dict, list, set)) else value)
        made.asked = made.one = None
        made.shown = frozenset()
        return made

    def supposing(self, values: Mapping[Expr, int], examples: Mapping[Expr, int]) -> ShapeEnv:
        """Another one, in which these symbols have these values; `examples`: other values for its example."""
        made = self.copy()
        made._hints.update(examples)
        for unknown, value in values.items():
            made.suppose(Relation("==", unknown, value))
        return made

    def take(self, one: Symbol) -> None:
        """Notes that a size is 1 at the call at hand. From now on `asked` holds what is answered by taking sizes to be
        2 or more: (relation, answer), or (None, symbols) for something else that depends on these."""
        self.taken.add(one)
        if self.asked is None:
            self.asked = []

    def show(self, symbols: frozenset[Symbol], one: ShapeEnv) -> None:
        """From now on these symbols are 1 or more: so far 1 does as larger sizes do, and what depends on their being
        larger is `assumed` from here on. `one`: these sizes when they are 1."""
        self.shown, self.one, self.asked = symbols, one, None
        self.assumed -= symbols
        for size in symbols:
            self.suppose(Relation("<=", 1, size))

    def assume(self, symbols: frozenset[Expr]) -> None:
        """Takes these symbols to be 2 or more."""
        self.assumed |= symbols
        if self.asked is not None:
            self.asked.append((None, symbols))

    def create(self, name: str, hint: int, source: object, lower: int = 0, upper: int | None = None) -> Symbol:
        """A new symbol of at least `lower`. Raises ValueError when the hint is out of range."""
        if hint < lower or (upper is not None and hint > upper):
            raise ValueError(f"{name}: the example's value {hint} is outside {lower}..{'' if upper is None else upper}")
        made = symbol(name, lower, upper)
        self.symbols[made] = SizeSymbol(made, source, hint)
        self._hints[made] = hint
        if hint >= 2 and lower < 2:
            self._larger[made] = symbol(f"{name}_2", 2, upper)
        return made

    def copy_of(self, original: Symbol, name: str) -> Symbol:
        """A symbol of the same range and example that no guard speaks of: the size at another call."""
        made = symbol(name, *bounds(original))
        self._hints[made] = self._hints[original]
        return made

    def create_unbacked(self, lower: int | None, upper: int | None) -> Symbol:
        """A new symbol for a size that depends on data."""
        name = f"u{len(self.unbacked)}"
        made = symbol(name, lower, upper)
        self.unbacked.append(made)
        if upper is None or upper >= 2:
            self._larger[made] = symbol(f"{name}_2", 2, upper)
        return made

    def expect(self, relation: Relation) -> bool:
        """As `guard`, for what the program states (torch._check): of sizes that depend on data it is checked at run
        time."""
        if self.known(relation) is not None or not self.is_unbacked(relation):
            return self.guard(relation)
        self.asserted.append(relation)
        self._learn(Relation(relation.op, self.simplify(relation.left), self.simplify(relation.right)))
        return True

    def is_unbacked(self, value: object) -> bool:
        """Whether a size or a relation depends on data."""
        if isinstance(value, Relation):
            return self.is_unbacked(value.left) or self.is_unbacked(value.right)
        return isinstance(value, Expr) and not free_symbols(value).isdisjoint(self.unbacked)

    def assertions(self) -> tuple[Relation, ...]:
        """All that is taken for granted of sizes that depend on data."""
        return (*self.asserted, *(Relation("<=", 2, made) for made in self.unbacked if made in self.assumed))

    def hint(self, d: Dim) -> int:
        """The value of `d` in the example. Raises GraphBreak for a symbol that is not of this capture."""
        try:
            return evaluate(d, self._hints)
        except KeyError as error:
            raise GraphBreak(
                "data-dependent-shape", f"the size {d} depends on {error.args[0]}, which has no example value"
            ) from error

    def real(self, d: Dim) -> int:
        """The value of `d` at the call at hand."""
        return evaluate(d, {**self._hints, **dict.fromkeys(self.taken, 1)})

    @property
    def examples(self) -> Mapping[Expr, int]:
        """The example's value of each symbol that has one."""
        return self._hints

    @property
    def may_settle(self) -> bool:
        """Whether `settled` may say more than what it is given."""
        return self.has_equalities or bool(self.assumed or self._narrow)

    @property
    def has_equalities(self) -> bool:
        """Whether a guard has fixed a size or tied it to another."""
        return bool(self._equal or self._zero or self._divisors)

    def simplify(self, d: Dim) -> Dim:
        """`d` with the learnt equalities applied."""
        if isinstance(d, int) or not (self._equal or self._zero or self._divisors):
            return d
        found = self._simplified.get(d)
        if found is None:
            found = self._simplified[d] = self._apply(d)
        return found

    def _apply(self, d: Dim) -> Dim:
        while True:
            simpler = self._in_parts(substitute(d, self._equal))
            for zero, term in self._zero.items():
                simpler = eliminate(simpler, zero, term)  # type: ignore[arg-type]
            if simpler == d:
                break
            d = simpler
        low, high = bounds(substitute(d, self._narrow))
        return d if low is None or low != high else low

    def known(self, relation: Relation) -> bool | None:
        """Whether ranges and learnt facts decide the relation; adds no guard."""
        try:
            return self._answers[relation]
        except KeyError:
            answer = self._answers[relation] = self._decide(relation)
            return answer

    def _decide(self, relation: Relation) -> bool | None:
        relation = Relation(relation.op, self.simplify(relation.left), self.simplify(relation.right))
        answer = known(relation)
        if answer is not None:
            return answer
        if self._narrow:
            answer = known(
                Relation(relation.op, substitute(relation.left, self._narrow), substitute(relation.right, self._narrow))
            )
            if answer is not None:
                return answer
        difference = relation.right - relation.left
        if relation.op in ("==", "!="):
            if difference in self._zero or -difference in self._zero:
                return relation.op == "=="
            unequal = difference in self._different or -difference in self._different
            if unequal or self._never_zero(difference):
                return relation.op == "!="
            if self._divisible(difference):
                return relation.op == "=="
            return None
        slack = 0 if relation.op == "<=" else 1
        if self._certainly_not_negative(difference - slack):
            return True
        return False if self._certainly_not_negative(slack - 1 - difference) else None

    def not_negative(self) -> tuple[Dim, ...]:
        """What the guards, and what is checked of sizes that depend on data, say to be at least 0."""
        found: list[Dim] = []
        for fact in (*self.guards, *self.asserted):
            difference = self.simplify(fact.right - fact.left)
            signs = {"<=": (difference,), "<": (difference - 1,), "==": (difference, -difference), "!=": ()}[fact.op]
            found += [tightened(d) for d in signs if not isinstance(d, int)]
        found += [d for zero in self._zero for d in (zero, -zero)]  # which `simplify` has made nothing of
        return tuple(dict.fromkeys(found))

    def guard(self, relation: Relation) -> bool:
        """Whether the relation holds: from what is known, else in the example, and then the answer becomes a guard."""
        answer = self.generally(relation)
        return self.settle(relation) if answer is None else answer

    def settle(self, relation: Relation) -> bool:
        """The same, for sizes of 0 and 1 as for others: what it answers is known from then on."""
        answer = self.known(relation)
        if answer is not None:
            return answer
        left, right = self.hint(relation.left), self.hint(relation.right)
        answer = Relation(relation.op, left, right).holds({})
        if max(abs(left), abs(right)) > sys.maxsize:  # guards compute in 64 bits
            for one in sorted(free_symbols(relation.left) | free_symbols(relation.right), key=sort_key):
                self.settle(Relation("==", one, self.hint(one)))
            return answer
        fact = self._reduced(relation if answer else relation.negated())
        self.guards.append(fact)
        self.asked_at.append(self.location())
        self._learn(Relation(fact.op, self.simplify(fact.left), self.simplify(fact.right)))
        return answer

    def _reduced(self, fact: Relation) -> Relation:
        """An equality without factors of all its terms that are not 0: what is left may fix a size, in all that is said
        of it, where the products would say only that two strides are the same."""
        difference = self.simplify(fact.left - fact.right)
        if fact.op != "==" or isinstance(difference, int):
            return fact
        common, rest = split_factor(difference, 1, lambda factor: self.generally(Relation("<=", 1, factor)) is True)
        if not common or isinstance(rest, int):
            return fact
        left = total(product(monomial) * count for monomial, count in rest.terms if count > 0)
        return Relation("==", left, left - rest)

    def generally(self, relation: Relation) -> bool | None:
        """Whether the relation holds for sizes of 2 and more, which neither broadcast nor vanish; None when that does
        not decide it. The symbols that the answer depends on are `assumed` to be that large: a guard, unless it is
        shown that the graph does the same without (graph/translation_validation.py)."""
        answer = self.known(relation)
        if answer is not None:
            return answer
        found = self._general.get(relation)
        if found is None:
            simple = Relation(relation.op, self.simplify(relation.left), self.simplify(relation.right))
            larger, symbols = self.larger(free_symbols(simple.left) | free_symbols(simple.right))
            answer = known(Relation(relation.op, substitute(simple.left, larger), substitute(simple.right, larger)))
            found = self._general[relation] = answer, frozenset(symbols)
        answer, symbols = found
        if answer is not None:
            if not symbols.isdisjoint(self.shown) and self._so_for_one(relation, answer):
                symbols -= self.shown
            self.assumed |= symbols
            if self.asked is not None:
                self.asked.append((relation, answer))
        return answer

    def _so_for_one(self, relation: Relation, answer: bool) -> bool:
        one = self.one
        assert one is not None
        assumed = set(one.assumed)
        return one.generally(relation) is answer and one.assumed == assumed

    def larger(self, symbols: Iterable[Expr]) -> tuple[dict[Expr, Dim], frozenset[Expr]]:
        """What these symbols become when they are taken to be 2 or more where they may be, and which those are."""
        found: dict[Expr, Dim] = {s: self._narrow[s] for s in symbols if s in self._narrow}
        taken = frozenset(s for s in symbols if s in self._larger)
        found.update((s, self._at_least_two(s)) for s in taken)
        return found, taken

    def _at_least_two(self, s: Expr) -> Symbol:
        narrow = self._narrow.get(s)
        if narrow is None:
            return self._larger[s]
        low, high = bounds(narrow)
        return symbol(f"{s}_2", max(2, low or 0), high)

    def settled(self, d: Dim) -> Dim:
        """`d` as it is for all sizes that the guards admit: with the learnt equalities and bounds, and the assumed
        symbols 2 or more (the smaller of such a size and 1 is 1, which broadcasts)."""
        simple = self.simplify(d)
        free = frozenset() if isinstance(simple, int) else free_symbols(simple)
        bounded, _ = self.larger(free & self.assumed)
        bounded |= {s: self._narrow[s] for s in free - bounded.keys() if s in self._narrow}
        if not bounded:
            return simple
        back: dict[Expr, Dim] = {new: old for old, new in bounded.items() if isinstance(new, Expr)}
        found = substitute(simple, bounded)
        low, high = bounds(found)
        return substitute(found, back) if low is None or low != high else low

    def range_of(self, s: Symbol) -> tuple[int | None, int | None]:
        """(least, most) that the symbol's own range and the learnt facts leave it."""
        return bounds(self._narrow.get(s, s))

    def specialise(self, d: Dim) -> int:
        """The value of `d` in the example, guarded."""
        d = self.simplify(d)
        if isinstance(d, int):
            return d
        value = self.hint(d)
        self.guard(Relation("==", d, value))
        return value

    def is_multiple(self, d: Dim, k: int) -> bool:
        """Whether `d` is certainly a multiple of `k`, with learnt divisibility."""
        return is_multiple(self._with_divisors(self.simplify(d)), k)

    def as_multiples(self) -> dict[Expr, Dim]:
        """Each symbol that is a multiple of a number, as the product of that number and another symbol."""
        parts: dict[Expr, Dim] = {}
        for s, divisor in self._divisors.items():
            low, high = self.range_of(s)
            part = symbol(
                f"{s.name}_{divisor}",
                None if low is None else -(-low // divisor),
                None if high is None else high // divisor,
            )
            parts[s] = part * divisor
        return parts

    def _with_divisors(self, d: Dim) -> Dim:
        return d if free_symbols(d).isdisjoint(self._divisors) else substitute(d, self.as_multiples())

    def _in_parts(self, d: Dim) -> Dim:
        """The one form of `d` over symbols that are multiples of a number: the symbol where its factor has the number,
        else the quotient."""
        if isinstance(d, int) or free_symbols(d).isdisjoint(self._divisors):
            return d
        if all(isinstance(atom, Symbol) for monomial, _ in d.terms for atom in monomial):
            return d
        parts = self.as_multiples()
        origin: dict[Expr, Symbol] = {part: s for s in self._divisors for part in free_symbols(parts[s])}
        back: dict[Expr, Dim] = {part: s // self._divisors[s] for part, s in origin.items()}
        d = substitute(d, parts)
        found: list[Dim] = [d] if isinstance(d, int) else [d.constant]
        for monomial, times in () if isinstance(d, int) else d.terms:
            factors: list[Dim] = []
            for atom in monomial:
                whole = origin.get(atom)
                if whole is not None and times % self._divisors[whole] == 0:
                    times //= self._divisors[whole]
                    factors.append(whole)
                else:
                    factors.append(substitute(atom, back))
            found.append(product(factors) * times)
        return total(found)

    def _divisible(self, difference: Dim) -> bool:
        """A difference that is zero only because of learnt divisibility."""
        return self._with_divisors(difference) == 0

    def _never_zero(self, difference: Dim) -> bool:
        if self._certainly_not_negative(difference - 1) or self._certainly_not_negative(-1 - difference):
            return True
        simpler = self._with_divisors(difference)
        return known(Relation("==", simpler, 0)) is False

    def _certainly_not_negative(self, d: Dim) -> bool:
        d = self._with_divisors(d)
        if known_le(0, d):
            return True
        facts, first = self._in_factors, self._tried.get(d, 0)
        facts.extend(map(self._with_divisors, self._not_negative[len(facts) :]))
        self._tried[d] = next((at for at in range(first, len(facts)) if known_le(facts[at], d)), len(facts))
        return self._tried[d] < len(facts)

    def suppose(self, fact: Relation) -> None:
        """Takes a relation for granted without a guard: for copies that follow what would be."""
        self._learn(Relation(fact.op, self.simplify(fact.left), self.simplify(fact.right)))

    def _learn(self, fact: Relation) -> None:
        if self.one is not None:
            self.one.suppose(fact)
        self._forget_answers()
        self._note(fact)
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._simplified.clear()
        self._answers.clear()
        self._general.clear()

    def _note(self, fact: Relation) -> None:
        difference = fact.right - fact.left
        if isinstance(difference, int):
            return
        if fact.op == "<=" or fact.op == "<":
            positive = tightened(difference if fact.op == "<=" else difference - 1)
            self._not_negative.append(positive)
            self._learn_bound(positive)
        elif fact.op == "!=":
            self._different.add(difference)
            for sign in (difference, -difference):  # not 0, and not below it
                if self._certainly_not_negative(sign):
                    self._learn_bound(sign - 1)
        else:
            self._learn_equality(difference)

    def _learn_bound(self, positive: Dim) -> None:
        """positive >= 0: a bound of a symbol, when it says no more than that."""
        if isinstance(positive, int) or len(positive.terms) != 1 or len(positive.terms[0][0]) != 1:
            return
        ((atom,), count), constant = positive.terms[0], positive.constant
        least = -(constant // count) if count > 0 else None  # count * atom >= -constant
        most = constant // -count if count < 0 else None
        if isinstance(atom, FloorDiv) and isinstance(atom.right, int) and atom.right > 0:
            if least is not None:
                self._learn_bound(atom.left - least * atom.right)
            if most is not None:
                self._learn_bound((most + 1) * atom.right - 1 - atom.left)
        if isinstance(atom, Mod) and most == 0 and atom not in self._zero:
            self._learn_equality(atom)
        if not isinstance(atom, Symbol):
            return
        low, high = bounds(self._narrow.get(atom, atom))
        if least is not None and (low is None or low < least):
            low = least
        if most is not None and (high is None or high > most):
            high = most
        if low is None or high is None or low <= high:
            if (low, high) != bounds(self._narrow.get(atom, atom)):
                self.narrowed_at[atom] = self.location()
            self._narrow[atom] = symbol(f"{atom}_n", low, high)
            self._pin(atom)

    def _pin(self, unknown: Symbol) -> None:
        """A symbol whose range holds a single multiple of its divisor is that."""
        divisor = self._divisors.get(unknown, 1)
        low, high = self.range_of(unknown)
        if divisor > 1 and low is not None and high is not None and unknown not in self._equal:
            least = -(-low // divisor) * divisor
            if least <= high < least + divisor:
                self._fix(unknown, least)

    def _learn_equality(self, difference: Expr) -> None:
        """difference == 0: solved for a symbol when one stands alone in it, or read as divisibility."""
        number = math.gcd(difference.constant, *(count for _, count in difference.terms))
        difference = split_factor(difference, number, lambda factor: False)[1]  # type: ignore[assignment]
        if len(difference.terms) == 1 and difference.constant == 0:
            (atom, *others), _ = difference.terms[0]
            if not others and isinstance(atom, Mod) and isinstance(atom.right, int):
                left: Expr = atom.left  # type: ignore[assignment]
                divisor = atom.right
                if len(left.terms) == 1 and not left.constant:  # 6 * n is a multiple of 7 where n is
                    monomial, times = left.terms[0]
                    left, divisor = product(monomial), divisor // math.gcd(divisor, times)  # type: ignore[assignment]
                if self._learn_divisor(left, divisor):
                    return
                whole = left // divisor * divisor - left  # so that sizes have one form
                if isinstance(whole, Expr):
                    self._zero[whole] = greatest_term(whole)
        alone = [
            (monomial[0], count)
            for monomial, count in difference.terms
            if len(monomial) == 1 and isinstance(monomial[0], Symbol) and abs(count) == 1
        ]
        if self.unbacked:  # what is known last is said in terms of what is known before
            alone.sort(key=lambda one: self.unbacked.index(one[0]) if one[0] in self.unbacked else -1, reverse=True)
        for unknown, count in alone:
            rest = (difference - unknown * count) * -count
            if unknown not in free_symbols(rest):
                self._fix(unknown, rest)
                return
        # Not solvable for one symbol alone: c*x == constant still fixes x.
        if len(difference.terms) == 1:
            (monomial, count), constant = difference.terms[0], difference.constant
            if len(monomial) == 1 and isinstance(monomial[0], Symbol):
                self._fix(monomial[0], -constant // count)
                return
        self._zero[difference] = greatest_term(difference)
        self._not_negative.extend((difference, -difference))
        self._learn_bound(difference)
        self._learn_bound(-difference)

    def _learn_divisor(self, multiple: Expr, divisor: int) -> bool:
        """`multiple` is one of `divisor`: whether that says of one symbol that it is a multiple of a number."""
        part = self._with_divisors(multiple)
        if isinstance(part, int) or len(part.terms) != 1 or part.constant or len(part.terms[0][0]) != 1:
            return False
        ((inner,), times) = part.terms[0]
        found: dict[frozenset[Expr], Expr] = {frozenset([s]): s for s in free_symbols(multiple)}
        found |= {frozenset(free_symbols(whole)): s for s, whole in self.as_multiples().items()}
        unknown = found.get(frozenset([inner]))
        if not isinstance(unknown, Symbol):
            return False
        self._divisors[unknown] = self._divisors.get(unknown, 1) * (divisor // math.gcd(divisor, times))
        self._in_factors.clear()
        self._tried.clear()
        self._pin(unknown)
        self._say_again(unknown, self._in_parts)
        return True

    def _fix(self, unknown: Symbol, value: Dim) -> None:
        self._equal[unknown] = value
        for known_symbol in {unknown} | {s for s in self.promised if isinstance(self.simplify(s), int)}:
            self.fixed_at.setdefault(known_symbol, self.location())
        self._say_again(unknown, lambda fact: _with(fact, unknown, value))

    def _say_again(self, unknown: Symbol, form: Callable[[Dim], Dim | None]) -> None:
        """What was learnt before in terms of this symbol is said in this form from now on, as questions will be. One
        such fact may fix another symbol, and so rewrite the others."""
        while True:
            again = ((zero, form(zero)) for zero in self._zero if unknown in free_symbols(zero))
            zero, now = next((pair for pair in again if pair[0] != pair[1]), (None, None))
            if zero is None:
                break
            del self._zero[zero]
            if isinstance(now, Expr):
                self._learn_equality(now)
        for facts, add in ((self._different, self._different.update), (self._not_negative, self._not_negative.extend)):
            said = [(other, form(other)) for other in facts if unknown in free_symbols(other)]
            add(now for other, now in said if isinstance(now, Expr) and now != other)


def _with(fact: Dim, unknown: Symbol, value: Dim) -> Dim | None:
    """What was learnt, said of the value; None where it divides by a size that is 0, and so says nothing."""
    try:
        return substitute(fact, {unknown: value})
    except ZeroDivisionError:
        return None


def examples_of(env: ShapeEnv | None) -> Mapping[Expr, int]:
    """What `sizes.estimate` takes: the values of symbols in the example, where there is one."""
    return NO_EXAMPLES if env is None else env.examples
