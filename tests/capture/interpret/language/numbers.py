# ruff: noqa
"""Numbers in Python: ints, floats, complex; symbolic sizes in arithmetic; math, itertools, random."""

from __future__ import annotations

import decimal
import fractions
import itertools
import math
import random
import statistics

import torch

from tests.capture.interpret.language.support import program, x


@program
def integer_arithmetic():
    def f(x, n):
        return (
            x + n,
            n // 3,
            n % 3,
            -n // 3,
            -n % 3,
            n << 2,
            n >> 1,
            n & 6,
            n | 1,
            n ^ 3,
            ~n,
            n**3,
            n.bit_length(),
            (-n).__abs__(),
            n / 2,
            divmod(n, 4),
            int(7.9),
            10**20 + n,
            n == 7.0,
            n.bit_count(),
        )

    return f, [(x(), 7), (x(), 12), (x(), 7)]


@program
def float_arithmetic():
    def f(x, v):
        return (
            x * v,
            v // 0.3,
            v % 0.3,
            round(v, 2),
            round(v),
            int(v),
            v.is_integer(),
            v.hex(),
            v.as_integer_ratio(),
            -v,
            v**0.5,
            v == v,
            math.isnan(v),
            math.floor(v),
            math.ceil(v),
            math.trunc(v),
            math.copysign(1, -v),
            repr(v),
            float("nan") != float("nan"),
            0.1 + 0.2,
            -0.0,
        )

    return f, [(x(), 2.5), (x(), 3.75), (x(), 2.5)]


@program
def complex_arithmetic():
    def f(x, c):
        return x + 1, c * c, c.conjugate(), abs(c), c.real, c.imag, c == complex(1, 2), c**2, -c, c + 1.5

    return f, [(x(), 1 + 2j), (x(), 3 - 1j)]


@program
def booleans():
    def f(x, a, b):
        return (
            x + (a and not b),
            a & b,
            a | b,
            a ^ b,
            a + b,
            a == 1,
            not a,
            a is True,
            bool(a) and 5,
            (a or b) and "yes",
            ~5,
        )

    return f, [(x(), True, False), (x(), False, False), (x(), True, True)]


@program
def chained_comparisons():
    def f(x, n):
        return x + 1, 0 < n < 10, 0 < n > 3 != 4, n == n == 5, not 0 < n, n in (1, 2, 3) in [True], 1 < 2 in (True, 2)

    return f, [(x(), 5), (x(), 2), (x(), -1)]


@program
def sizes_as_numbers():
    def f(x):
        b, n = x.shape
        return (
            x.view(b * n),
            x + b / n,
            x.reshape(n, -1) * (b // 2 + n % 2),
            b,
            n,
            [0] * b,
            b * n == x.numel(),
            range(n),
            max(b, n),
            f"{b}x{n}",
            b > 1 and n > 1,
            x.new_zeros(b + 1),
            math.prod(x.shape),
            float(b),
            -b,
        )

    return f, [(x(),), (torch.ones(4, 3),), (torch.ones(5, 3),), (torch.ones(6, 7),)]


@program
def loop_over_a_size():
    def f(x):
        total = 0
        out = []
        for i in range(x.shape[0]):
            total += i
            out.append(x[i] * total)
        return torch.stack(out), total

    return f, [(torch.ones(2, 3),), (torch.ones(4, 3),), (torch.ones(5, 3),), (torch.ones(2, 3),)]


@program
def branch_on_a_size():
    def f(x):
        if x.shape[0] > 3:
            return x + 1
        elif x.shape[0] == 3:
            return x * 2
        return x - 1

    return f, [(torch.ones(n, 2),) for n in (2, 3, 4, 5, 2, 9)]


@program
def size_is_stored_outside():
    def f(x, log, d):
        log.append(x.shape[0])
        d["shape"] = x.shape
        d[x.shape[0]] = "by size"
        return x + x.shape[0], x.size()

    log, d = [], {}
    return f, [(torch.ones(n, 2), log, d) for n in (2, 3, 4, 5)]


@program
def math_functions():
    def f(x, v):
        return (
            x * math.sqrt(v), math.exp(v), math.log(v, 2), math.sin(v), math.atan2(v, 2), math.hypot(3, v), math.gcd(12, 18), math.factorial(5), math.comb(5, 2),
            math.isclose(v, v + 1e-12), math.fsum([0.1] * 3), math.prod([1, 2, v]), math.degrees(v), math.pi, math.log2(8), math.isqrt(17), math.dist([0, 0], [3, 4]),
        )  # fmt: skip

    return f, [(x(), 2.0), (x(), 3.5)]


@program
def itertools_all():
    def f(x, l):
        return (
            list(itertools.chain(l, [9])), list(itertools.product(l, repeat=2)), list(itertools.permutations(l, 2)), list(itertools.combinations(l, 2)),
            list(itertools.accumulate(l)), list(itertools.accumulate(l, lambda a, b: a * b, initial=1)), list(itertools.islice(itertools.count(5, 2), 3)),
            list(itertools.takewhile(lambda v: v < 3, l)), list(itertools.dropwhile(lambda v: v < 2, l)), list(itertools.starmap(pow, [(2, 3)])),
            [(k, list(g)) for k, g in itertools.groupby(l, key=lambda v: v % 2)], list(itertools.compress(l, [1, 0, 1])), list(itertools.repeat(x, 2)),
            list(itertools.pairwise(l)), list(itertools.zip_longest(l, [1])), list(itertools.filterfalse(lambda v: v > 1, l)),
            list(itertools.islice(itertools.cycle(l), 5)), list(itertools.chain.from_iterable([l, l])), [list(t) for t in itertools.tee(l, 2)],
            list(itertools.combinations_with_replacement(l[:2], 2)),
        )  # fmt: skip

    return f, [(x(), [1, 2, 3]), (x(), [4, 1, 5])]


@program
def sums_of_tensors():
    def f(x, l):
        return sum(l), sum(l, x), sum([]), sum(v * 2 for v in l), math.prod(v.shape[0] for v in l)

    return f, [(x(), [x(), x() + 1]), (x(), [x()])]


@program
def fractions_and_decimals():
    def f(x):
        a = fractions.Fraction(1, 3) + fractions.Fraction(1, 6)
        b = decimal.Decimal("0.1") + decimal.Decimal("0.2")
        return x + float(a), a, str(b), a.denominator, statistics.mean([1, 2, 3, 4])

    return f, [(x(),), (x(),)]


@program("random-state", "host-random", "untraceable-call", "opaque-object")
def python_random():
    def f(x):
        random.seed(3)
        a = random.random()
        b = random.randint(1, 5)
        l = [1, 2, 3]
        random.shuffle(l)
        r = random.Random(1)
        return x + 1, a, b, l, r.choice([1, 2, 3]), random.uniform(0, 1)

    return f, [(x(),), (x(),)]


@program("host-random", "untraceable-call", "random-state", "opaque-object")
def python_random_advances():
    random.seed(7)

    def f(x):
        return x + 1, random.random(), random.random()

    return f, [(x(),), (x(),), (x(),)]


@program
def int_subclass_and_index():
    class N(int):
        def __add__(self, o):
            return N(int(self) + o + 100)

    def f(x):
        n = N(2)
        return x + int(n), n + 1, type(n + 1).__name__, [1, 2, 3][n], n == 2

    return f, [(x(),), (x(),)]


@program
def float_argument_changes_every_call():
    def f(x, lr):
        return x * lr + lr**2

    return f, [(x(), 0.5), (x(), 0.25), (x(), 0.125), (x(), 2.0), (x(), 0.5)]


@program
def int_argument_changes_every_call():
    def f(x, step):
        return x * step, step + 1, x[:, :1] + step // 2

    return f, [(x(), n) for n in range(1, 7)]


@program
def integers_beyond_64_bits_that_follow_from_an_argument():
    def f(x, n):
        big, cube, wide = 10**30 + n, n * n * n, n * 2**40
        many = x.shape[0] * 10**25
        parts = (big // 7, big % 7, -big, divmod(-big, 10**29), big > n, big - 10**30, many // 10**24, x.shape[0] < big)
        return x * 2, big, cube, wide, [float(one) for one in (big, cube, wide, many)], parts, cube / 3, n**5, many

    return f, [(x(), n) for n in (2, 3, 4, 5, 2**31 - 5, 7)] + [(torch.ones(n), 6) for n in (3, 4, 5)]


@program
def overflow_and_precision():
    def f(x, n):
        try:
            return x + 1, 2.0**n
        except OverflowError as error:
            return x - 1, str(error)

    return f, [(x(), 10), (x(), 5000)]


@program
def item_of_constant_tensor_and_numel():
    def f(x):
        n = x.numel()
        return (
            x.sum() / n,
            n,
            x.dim(),
            x.size(-1),
            len(x),
            x.nelement(),
            x.ndim,
            x.element_size(),
            x.is_floating_point(),
        )

    return f, [(x(),), (torch.ones(3, 2),), (torch.ones(4, 2),)]


@program
def range_semantics():
    def f(x, n):
        r = range(1, n, 2)
        return (
            x + len(r),
            r[1],
            r[-1],
            3 in r,
            r.index(3),
            list(r),
            r == range(1, n, 2),
            r.start,
            r.step,
            list(reversed(r)),
            r[:2],
            bool(range(0)),
            r,
        )

    return f, [(x(), 9), (x(), 8)]


@program
def ternary_and_short_circuit():
    def f(x, a, log):
        t = lambda v: log.append(v) or v
        b = t(1) if a else t(2)
        c = t(0) and t(3)
        d = t(0) or t(4)
        e = not t(5)
        return x + b, c, d, e, log

    return f, [(x(), 0, []), (x(), 1, [])]


@program
def while_loops():
    def f(x, n):
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
            if steps > 50:
                break
        else:
            x = x + 1
        return x * steps, n

    return f, [(x(), 6), (x(), 27), (x(), 1)]
