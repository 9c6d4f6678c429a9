"""Guards on symbolic sizes: asked once, answered from what was learnt, never guessed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fusewright.base.signals import GraphBreak
from fusewright.sizes.expressions import Dim, Expr, Relation, evaluate, maximum, symbol
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.symint import dim_of, size_of


def test_guard_is_recorded_once_and_learnt_from() -> None:
    env = ShapeEnv()
    s = env.create("s0", 8, "source")
    assert env.guard(Relation("<", 5, s)) and env.guard(Relation("<", 4, s)) and env.guard(Relation("<=", 6, s))
    assert not env.guard(Relation("<", s, 3))
    assert [str(g) for g in env.guards] == ["5 < s0"]
    assert env.known(Relation("==", s, 2)) is False and env.known(Relation("==", s, 9)) is None


def test_equality_replaces_the_symbol() -> None:
    env = ShapeEnv()
    s, t = env.create("s0", 8, None), env.create("s1", 8, None)
    assert env.guard(Relation("==", s, t)) and env.known(Relation("==", s * 2, t * 2)) is True
    assert env.specialise(t) == 8 and env.simplify(s * 3 + t) == 32
    assert not env.guard(Relation("==", s, 9)) and len(env.guards) == 2


def test_what_divides_by_a_size_that_turns_out_0_says_nothing_more() -> None:
    env = ShapeEnv()
    s, t = env.create("s0", 0, None), env.create("s1", 7, None)
    env._different |= {t % s - 1, t // s, t - 3}
    assert env.specialise(s) == 0
    assert env.known(Relation("==", t, 3)) is False and env.known(Relation("==", t, 4)) is None


def test_inequality_is_learnt() -> None:
    env = ShapeEnv()
    s, t = env.create("s0", 8, None), env.create("s1", 7, None)
    assert not env.guard(Relation("==", s, t)) and env.known(Relation("==", t, s)) is False
    assert [str(g) for g in env.guards] == ["s0 != s1"]


def test_divisibility_is_learnt() -> None:
    env = ShapeEnv()
    s = env.create("s0", 24, None)
    assert env.guard(Relation("==", s % 8, 0)) and env.is_multiple(s, 4) and not env.is_multiple(s, 16)
    assert env.known(Relation("==", (s // 8) * 8, s)) is True
    assert env.known(Relation("==", s, 20)) is False
    assert len(env.guards) == 1
    t = env.create("s1", 3, None)
    assert env.guard(Relation("==", (s + t) % 9, 0))
    # One size has one form, by which loops of equal lengths know each other.
    assert env.simplify(t * (s // 8) * 8) == t * s and env.simplify(((s + t) // 9) * 9) == s + t


def test_divisibility_is_learnt_of_quotients_and_remainders() -> None:
    """What a model with windows asks of an image: whole patches, whole windows of 7, an even number of patches."""
    env = ShapeEnv()
    s = env.create("s0", 448, None)
    assert env.guard(Relation("==", s % 4, 0))
    assert env.guard(Relation("<=", (s // 4 * 6) % 7, 0))
    assert env.is_multiple(s, 28) and env.known(Relation("==", s // 28 * 28, s)) is True
    assert not env.guard(Relation("==", (s // 4) % 2, 1))
    assert env.is_multiple(s, 56) and env.known(Relation("==", (s + 4) // 8, s // 8)) is True and len(env.guards) == 3
    assert env.simplify((s // 4) * (s // 8)) == (s // 56) * (s // 56) * 98


def random_dim(rng: random.Random, atoms: list[Expr], depth: int = 2) -> Dim:
    made: Dim = rng.randint(-2, 4)
    for _ in range(rng.randint(1, 2)):
        atom: Dim = rng.choice(atoms) * rng.choice([1, 1, 2, 6])
        if depth and rng.random() < 0.6:
            inside, divisor = random_dim(rng, atoms, depth - 1), rng.choice([2, 3, 4, 7, 8, atoms[0] + 1])
            atom = rng.choice([inside // divisor, inside % divisor])
        made = made + atom * rng.choice([1, 1, 2, -1, 4])
    return made


@pytest.mark.parametrize("seed", range(8))
def test_nothing_false_is_known(seed: int) -> None:
    """Random guards and questions, against every assignment of small numbers that the guards admit."""
    rng, asked = random.Random(seed), 0
    for _ in range(12):
        env = ShapeEnv()
        atoms: list[Expr] = [env.create(f"s{k}", rng.choice([3, 8, 12, 14, 24, 28]), None) for k in range(2)]
        for _ in range(rng.randint(1, 5)):
            left, right = random_dim(rng, atoms), rng.choice([0, 0, 1, random_dim(rng, atoms)])
            if rng.random() < 0.4:
                left, right = rng.choice(atoms) * rng.choice([1, 6]) % rng.choice([2, 4, 7, 8]), 0
            env.settle(Relation(rng.choice(["==", "!=", "<", "<="]), left, right))
        dims = [random_dim(rng, atoms) for _ in range(6)]
        relations = [Relation(rng.choice(["==", "<="]), one, other) for one in dims for other in (0, dims[0], dims[1])]
        simple, answers = [env.simplify(d) for d in dims], [env.known(relation) for relation in relations]
        asked += sum(answer is not None for answer in answers)
        for numbers in itertools.product(range(57), range(30)):
            values: dict[Expr, int] = dict(zip(atoms, numbers))
            if not all(guard.holds(values) for guard in env.guards):
                continue
            assert [evaluate(d, values) for d in simple] == [evaluate(d, values) for d in dims], (env.guards, values)
            for relation, answer in zip(relations, answers):
                assert answer is None or relation.holds(values) is answer, (relation, env.guards, values)
    assert asked > 15


def test_an_equality_that_fixes_no_symbol_is_learnt_all_the_same() -> None:
    env = ShapeEnv()
    s, t = env.create("s0", 11, None), env.create("s1", 7, None)
    last = s - 2 * (s // 2)
    assert env.guard(Relation("==", last, 1)) and env.has_equalities
    assert (
        env.simplify(last) == 1
        and env.simplify(8 * t * last + 3) == 8 * t + 3
        and env.known(Relation("==", last * t, t)) is True
    )
    env = ShapeEnv()
    s = env.create("s0", 2, None)
    assert env.guard(Relation("==", s // 2, 1)) and env.simplify(s // 2) == 1 and env.simplify((s // 2 + 7) // 4) == 2
    assert env.simplify(s) is s and [str(g) for g in env.guards] == ["s0//2 == 1"]


def test_a_common_factor_of_an_equality_is_taken_out_where_it_is_not_0() -> None:
    """Strides that are the same are products of sizes; what fixes a size is said of shapes too."""
    env = ShapeEnv()
    s, t, u = env.create("s0", 3, None), env.create("s1", 3, None), env.create("s2", 4, None)
    assert env.guard(Relation("==", s * u, t * u)) and [str(g) for g in env.guards] == ["s0 == s1"]
    assert env.assumed == {u} and env.known(Relation("==", s, t)) is True
    env = ShapeEnv()
    s, t, n = env.create("s0", 3, None), env.create("s1", 5, None), env.create("n", 0, None)
    assert env.guard(Relation("==", s * n, t * n)) and env.known(Relation("==", s, t)) is None


def test_an_equality_of_strides_says_the_sizes() -> None:
    """The number that is in all of it is taken out: else types would have one size as the product and as a number."""
    env = ShapeEnv()
    s, t = env.create("s0", 7, None), env.create("s1", 7, None)
    assert env.guard(Relation("==", s * t * 256, 12544)) and env.simplify(s * t) == 49
    assert env.simplify(s * t * 16 + s) == 784 + s


def test_a_symbol_that_becomes_known_rewrites_what_others_follow_from() -> None:
    """With s0 known the first fact fixes s1, which the others are said of too."""
    env = ShapeEnv()
    s, t, u = env.create("s0", 2, None), env.create("s1", 3, None), env.create("s2", 4, None)
    assert env.guard(Relation("==", s * t + s, 8)) and env.guard(Relation("==", s * t * u, 24))
    assert env.guard(Relation("==", s * t * u * u, 96)) and env.guard(Relation("==", s, 2))
    assert (env.simplify(t), env.simplify(u), env.simplify(s * t + u)) == (3, 4, 10)


def test_ranges_are_learnt() -> None:
    env = ShapeEnv()
    s = env.create("s0", 64, None)
    assert (
        env.guard(Relation("<=", 16, s))
        and env.known(Relation("<", 0, s // 16)) is True
        and env.known(Relation("==", s // 16, 0)) is False
    )
    assert (
        env.guard(Relation("<", 1, s // 16))
        and env.range_of(s) == (32, None)
        and env.known(Relation("==", maximum(s // 16, 1), s // 16)) is True
    )
    assert env.guard(Relation("<", s // 4, 20)) and env.range_of(s) == (32, 79)
    assert len(env.guards) == 3


def test_sizes_that_depend_on_data_cannot_be_asked_but_stated() -> None:
    env = ShapeEnv()
    u = env.create_unbacked(0, None)
    with pytest.raises(GraphBreak):
        env.guard(Relation("<", u, 9))
    assert env.expect(Relation("<", u, 9)) and env.guard(Relation("<=", u, 10)) and not env.guards
    assert not env.guard(Relation("==", u, 1)) and [str(one) for one in env.assertions()] == ["u0 < 9", "2 <= u0"]


def test_hints_and_ranges() -> None:
    env = ShapeEnv()
    s = env.create("s0", 8, None)
    assert env.hint(s * 2 + 1) == 17 and env.known(Relation("!=", s, -1)) is True
    with pytest.raises(ValueError, match="outside"):
        env.create("s1", 1, None, lower=2)
    with pytest.raises(GraphBreak):
        env.hint(symbol("other"))


def test_small_sizes_are_an_assumption_and_no_guard() -> None:
    env = ShapeEnv()
    s, t = env.create("s0", 8, None), env.create("s1", 8, None)
    assert env.known(Relation("!=", s, 1)) is None
    assert env.guard(Relation("!=", s, 1)) and not env.guard(Relation("==", s * t, 0))
    assert not env.guards and env.assumed == {s, t}


def test_symint_arithmetic() -> None:
    env = ShapeEnv()
    s = env.create("s0", 8, None)
    n = size_of(s, env)
    assert (
        str(dim_of(n * 3 + 1)) == "s0*3 + 1" and str(dim_of((n * 6) // 3)) == "s0*2" and (n * 6) % 3 == 0 and n - n == 0
    )
    assert (
        dim_of(7 - n) == 7 - s and dim_of(torch.sym_max(n, 9)) == dim_of(torch.sym_max(9, n)) and dim_of(n**2) == s * s
    )
    assert not env.guards and (n > 1) and not (n < 2) and not env.guards
    assert n > 4 and [str(g) for g in env.guards] == ["4 < s0"]
    assert str(n * 3 + 1) == "25" and [str(g) for g in env.guards][1:] == ["s0*3 + 1 == 25"]
    assert n / 2 == 4.0 and range(n)[-1] == 7 and len(env.guards) == 2
    with pytest.raises(ZeroDivisionError):
        n // 0


def test_zero_divisor_is_guarded() -> None:
    env = ShapeEnv()
    n = size_of(env.create("s0", 8, None, lower=0), env)
    assert str(dim_of(16 // n)) == "16//s0" and not env.guards and len(env.assumed) == 1


def test_a_range_with_one_multiple_is_that() -> None:
    env = ShapeEnv()
    s = env.create("s0", 2, None)
    assert env.guard(Relation("==", s % 2, 0)) and env.guard(Relation("==", s // 2, 1))
    assert env.simplify(s) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_learnt_of_a_multiple_is_one_whatever_came_first(order: tuple[int, ...]) -> None:
    """Facts about an uneven half are of its half once the size is known to be even."""
    env = ShapeEnv()
    s, t, u = env.create("s0", 2, None), env.create("s1", 5, None), env.create("s2", 6, None)
    half = (s + 1) // 2
    facts = [Relation("==", s - half, 1), Relation("==", s % 2, 0), Relation("<", s - half, t - half)]
    assert all(env.guard(facts[place]) for place in order)
    assert env.simplify(s) == 2 and env.simplify(s - half) == 1 and env.known(facts[2]) is True
    assert env.guard(Relation("!=", u - (u + 1) // 2, t)) and env.guard(Relation("==", u % 2, 0))
    assert env.known(Relation("==", u // 2, t)) is False


def test_a_size_of_two_or_more_and_less_than_three_is_two() -> None:
    env = ShapeEnv()
    s = env.create("s0", 2, None)
    assert env.guard(Relation("!=", s, 1)) and env.guard(Relation("<", s - 1, 2)) and env.assumed == {s}
    assert (env.settled(s), env.settled(s - 1), env.simplify(s - 1)) == (2, 1, s - 1)
