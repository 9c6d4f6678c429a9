"""The size algebra against plain evaluation on random values, and against sympy."""

from __future__ import annotations

import random

import pytest

from fusewright.sizes.algebra import is_at_least_zero
from fusewright.sizes.expressions import (
    Dim,
    Expr,
    Relation,
    bounds,
    ceil_div,
    coefficient,
    evaluate,
    free_symbols,
    from_tuples,
    is_multiple,
    known,
    known_eq,
    known_le,
    known_lt,
    loop_symbol,
    maximum,
    minimum,
    sort_key,
    substitute,
    symbol,
    to_tuples,
)

N = symbol("s0", 1)
IV = loop_symbol("i0", 12)
J = loop_symbol("i1", 768)
K = loop_symbol("k", N)
L = loop_symbol("l", 96)
M = loop_symbol("m", 8)
X = symbol("x", None)
W = symbol("w", 0)


@pytest.mark.parametrize(
    ("built", "text"),
    [
        ((IV * 768 + J) // 768, "i0"),
        ((IV * 768 + J) % 768, "i1"),
        ((12 * IV + J) // 4, "i0*3 + i1//4"),
        (X // 4 // 3, "x//12"),
        (X // 1, "x"),
        ((X * 6) % 3, "0"),
        (J % 800, "i1"),
        (IV * 768 + J, "i0*768 + i1"),
        (((IV * 768 + M * 96 + L) % 768) // 96, "m"),
        (((IV * 768 + M * 96 + L) % 768) % 96, "l"),
        ((X // 4) * 4 + X % 4, "x"),
        ((K * N + K) // N, "k"),
        ((J * N + K) % N, "k"),
        ((X % 12) // 4, "(x//4)%3"),
        ((X % 12) % 4, "x%4"),
        (minimum(IV, 20), "i0"),
        (maximum(IV * 768, X), "max(x, i0*768)"),
        (ceil_div(16 * N, 16), "s0"),
        (ceil_div(N, 16), "(s0 + 15)//16"),
        (X % -4, "-((x*3)%4)"),
        ((2 * N * X) // (4 * N), "x//2"),
        ((N + 1) * (N - 1) // (N + 1), "s0 - 1"),
        ((4 * IV + M % 4) // 32, "i0//8"),
        (3 - X, "-x + 3"),
        ((K * 256 + L) // (N * 256), "0"),
        ((X * 128 + L) // (N * 128), "x//s0"),
        ((X * 128 + L) % (N * 128), "l + (x%s0)*128"),
        ((X * N + K) // (N * W), "x//w"),
        ((X * N * 8 + K * 8 + M) // (W * N * 8), "x//w"),
        (W * ((X * 128 + L) // (W * 128)) * 128 + (X % W) * 128 + L, "l + x*128"),
        ((X * 128 + L) // (X * 128), "l//(x*128) + 1"),  # x may be negative
    ],
)
def test_canonical_form(built: Dim, text: str) -> None:
    assert str(built) == text


def test_constants_are_ints_and_equal_forms_are_one_object() -> None:
    assert type(X - X) is int and type(X * 0) is int and type((X + 3) - X) is int
    assert (IV + J) * 2 is 2 * J + IV * 2
    assert symbol("x", None) is X and symbol("x") is not X


def test_zero_divisor() -> None:
    with pytest.raises(ZeroDivisionError):
        X // 0
    with pytest.raises(ZeroDivisionError):
        X % 0


def test_truth_and_pickle_are_refused() -> None:
    with pytest.raises(TypeError, match="truth"):
        bool(X)
    with pytest.raises(TypeError, match="pickled"):
        X.__reduce__()


def test_tiles_are_in_range() -> None:
    tile = loop_symbol("t", ceil_div(N, 16))
    lane = loop_symbol("u", minimum(16, N - 16 * tile))
    assert known_lt(tile * 16 + lane, N) is True
    full = loop_symbol("q", N // 16)
    assert known_lt(full * 16 + loop_symbol("r", 16), N) is True
    assert known_lt(full * 16 + loop_symbol("r", 17), N) is None
    assert bounds(N - 16 * (N // 16)) == (0, 15)


def test_questions() -> None:
    assert known_eq(IV, 12) is False and known_eq(2 * X, 2 * X + 1) is False and known_eq(2 * X, 3) is False
    assert known_eq(X, 3) is None and known_le(0, N) is True and known_lt(0, N) is True and known_lt(1, N) is None
    assert known(Relation("!=", IV, 12)) is True and known(Relation("<", IV, 12).negated()) is False
    assert is_multiple(12 * X + 8, 4) and not is_multiple(12 * X + 8, 8) and is_multiple((8 * X) % 32 * 3, 24)
    assert coefficient(IV * N + J, IV) is N and coefficient(IV * IV, IV) is None and coefficient(IV % 5, IV) is None
    assert coefficient(IV * 3 + IV * N + 1, IV) is N + 3 and coefficient(J, IV) == 0
    assert str(Relation("<", IV, N)) == "i0 < s0"


SYMBOLS: list[Expr] = [IV, M, L, X, N, K, W]


def random_values(rng: random.Random) -> dict[Expr, int]:
    n = rng.choice([1, 2, 3, 7, 16, 96, 1000])
    return {
        IV: rng.randrange(12),
        M: rng.randrange(8),
        L: rng.randrange(96),
        X: rng.randrange(-200, 200),
        N: n,
        K: rng.randrange(n),
        W: rng.choice([1, 2, 5, 64]),
    }


def random_tree(rng: random.Random, depth: int) -> object:
    """A tree as `to_tuples` would give it, but unsimplified."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([("sym", s.name) for s in SYMBOLS] + [rng.randrange(-9, 20)])
    operator = rng.choice(["+", "+", "+", "*", "//", "%", "min", "max"])
    left = random_tree(rng, depth - 1)
    if operator in ("//", "%"):
        divisors = [
            2,
            3,
            4,
            6,
            8,
            12,
            96,
            768,
            -3,
            -8,
            ("sym", "s0"),
            ("*", ("sym", "s0"), 4),
            ("+", ("sym", "s0"), 1),
            ("*", ("*", ("sym", "s0"), ("sym", "w")), 8),
            ("*", ("sym", "w"), 96),
        ]
        return operator, left, rng.choice(divisors)
    if operator == "*" and rng.random() < 0.8:
        return operator, left, rng.choice([2, 3, 4, 8, 12, 96, -1, ("sym", "s0")])
    return operator, left, random_tree(rng, depth - 1)


NAMES = {s.name: s for s in SYMBOLS}
PLAIN = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}


def plain(tree: object, values: dict[Expr, int]) -> int:
    if isinstance(tree, int):
        return tree
    if tree[0] == "sym":
        return values[NAMES[tree[1]]]
    return PLAIN[tree[0]](plain(tree[1], values), plain(tree[2], values))


@pytest.mark.parametrize("seed", range(20))
def test_simplification_keeps_the_value(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        tree = random_tree(rng, rng.randrange(1, 6))
        built = from_tuples(tree, NAMES)
        again = from_tuples(to_tuples(built), NAMES)
        positive = is_at_least_zero(built)
        low, high = bounds(built)
        assert positive == (low is not None and low >= 0)
        other = from_tuples(random_tree(rng, 2), NAMES)
        less = known_lt(built, other)
        equal = known_eq(built, other)
        multiple = is_multiple(built, 4)
        for _ in range(12):
            values = random_values(rng)
            value = plain(tree, values)
            assert evaluate(built, values) == value == evaluate(again, values), (tree, built, values)
            assert (low is None or low <= value) and (high is None or value <= high), (tree, built, values, low, high)
            assert less is None or less == (value < evaluate(other, values)), (built, other, values)
            assert equal is None or equal == (value == evaluate(other, values)), (built, other, values)
            assert not multiple or value % 4 == 0
            assert evaluate(substitute(built, values), {}) == value
        for s in free_symbols(built):
            stride = coefficient(built, s)
            if stride is not None:
                values = random_values(rng)
                moved = {**values, s: values[s] + 1}
                rest = substitute(built, {s: 0})
                assert evaluate(rest, moved) + evaluate(stride, moved) * moved[s] == evaluate(built, moved)


def test_against_sympy() -> None:
    sympy = pytest.importorskip("sympy")
    names = {
        "x": sympy.Symbol("x", integer=True),
        "y": sympy.Symbol("y", integer=True),
        "z": sympy.Symbol("z", integer=True),
    }
    ours = {name: symbol(name, None) for name in names}
    rng = random.Random(7)

    def polynomial(depth: int) -> object:
        if depth == 0:
            return rng.choice([("sym", "x"), ("sym", "y"), ("sym", "z"), rng.randrange(-5, 6)])
        return rng.choice("+*"), polynomial(depth - 1), polynomial(depth - 1)

    def oracle(tree: object) -> object:
        if isinstance(tree, int):
            return sympy.Integer(tree)
        if tree[0] == "sym":
            return names[tree[1]]
        left, right = oracle(tree[1]), oracle(tree[2])
        return left + right if tree[0] == "+" else left * right

    for _ in range(60):
        tree = polynomial(3)
        built = from_tuples(tree, ours)
        assert sympy.expand(oracle(tree)) - sympy.expand(oracle(to_tuples(built))) == 0
        # Canonical: another writing of the same polynomial is the same object.
        assert from_tuples(_tuples_of(sympy.expand(oracle(tree))), ours) == built


def _tuples_of(expression: object) -> object:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return "sym", expression.name
    if expression.is_Pow:
        base, power = expression.args
        result = _tuples_of(base)
        for _ in range(int(power) - 1):
            result = ("*", result, _tuples_of(base))
        return result
    operator = "+" if expression.is_Add else "*"
    parts = [_tuples_of(argument) for argument in expression.args]
    result = parts[0]
    for part in parts[1:]:
        result = (operator, result, part)
    return result


def test_order_is_total_and_natural() -> None:
    names = [symbol(f"i{n}") for n in (10, 2, 1)] + [3, symbol("i2", 1), symbol("i1") * 2]
    ordered = sorted(names, key=sort_key)
    assert [str(d) for d in ordered[:2]] == ["3", "i1"]
    assert len({sort_key(d) for d in names}) == len(names)


def test_products_of_many_sizes_have_bounds() -> None:
    """Bounds beyond what a float holds are none."""
    huge = 1
    for index in range(40):
        huge = huge * symbol(f"n{index}", 2, 2**31 - 1)
    assert bounds(huge + 1)[1] is None and bounds(huge * (2**2000) - 5)[0] > 0
