# ruff: noqa
"""Strings: every way of formatting, methods, regular expressions, json, dates."""

from __future__ import annotations

import datetime
import json
import re
import string
import textwrap

import torch

from tests.capture.interpret.language.support import program, x


@program
def f_strings():
    def f(x, n, s):
        w = 8
        return (
            x + n,
            f"{n} {n!r} {s!s:>{w}} {n:05d} {n / 3:.3f} {n:,} {n:x} {n:#b} {s!a} {'nested ' + f'{n}'} {{}} {n=} {s=!r:^9}",
        )

    return f, [(x(), 3, "a"), (x(), 1234567, "é"), (x(), 3, "b")]


@program
def percent_and_format():
    def f(x, n, s):
        a = "%d %5.2f %s %r %x %% %-5s|" % (n, n / 7, s, s, n, s)
        b = "%(k)s-%(n)03d" % {"k": s, "n": n}
        c = "{} {1} {0}".format(s, n) if False else "{0} {1} {0!r:>6}".format(s, n)
        d = "{a.real} {b[0]} {b[1]:>3}".format(a=n, b=[s, n])
        return (
            x + len(a),
            a,
            b,
            c,
            d,
            "{:{}}".format(s, 5),
            format(n, "08.3f"),
            "{k}".format_map({"k": n}),
            string.Template("$a b").substitute(a=s),
        )

    return f, [(x(), 3, "s"), (x(), 42, "tt")]


@program
def shapes_in_strings():
    def f(x):
        return (
            x + 1,
            f"{x.shape} {tuple(x.shape)} {x.dtype} {x.device} {x.dim()} {x.size(0)}",
            str(x.shape),
            repr(x.dtype),
            "%s" % (x.shape,),
        )

    return f, [(x(),), (x(),), (x()[:1],)]


@program
def string_methods():
    def f(x, s):
        return (
            x + len(s), s.upper(), s.title(), s.split(), s.partition(" "), s.replace("a", "b"), s.strip(), s.find("b"), s.startswith(("a", "b")),
            s.center(9, "*"), s.encode(), s.join(["1", "2"]), s.splitlines(), s.zfill(7), s.isalpha(), s.swapcase(), s[::-1], s * 2, s + "x",
            "a" in s, s.count("a"), s.translate(str.maketrans("a", "z")), s.rsplit(" ", 1), s.casefold(), s.removeprefix("a"), ord(s[0]), chr(66),
            s < "b", max(s), sorted(s), list(s), s.expandtabs(), s.format(1), hash(s) == hash(s + ""), [c for c in s],
        )  # fmt: skip

    return f, [(x(), "a bc"), (x(), "abba x")]


@program
def regular_expressions():
    pattern = re.compile(r"(?P<k>\w+)=(?P<v>\d+)")

    def f(x, s):
        m = pattern.match(s)
        total = sum(int(v) for _, v in pattern.findall(s))
        y = x + total
        if m:
            y = y * int(m.group("v"))
        return (
            y,
            re.sub(r"\d", "#", s),
            re.split(r"[,;]", s),
            bool(re.search("zz", s)),
            m and m.groupdict(),
            [m.span() for m in pattern.finditer(s)],
        )

    return f, [(x(), "a=1,b=22"), (x(), "none"), (x(), "c=3;d=4")]


@program
def regex_substitution_by_function():
    def f(x, s):
        return x + 1, re.sub(r"\d+", lambda m: str(int(m.group()) * 2), s)

    return f, [(x(), "a1b22"), (x(), "")]


@program
def json_round_trip():
    def f(x, d):
        s = json.dumps(d, sort_keys=True)
        e = json.loads(s)
        return x + e["n"], s, e

    return f, [(x(), {"n": 1, "l": [1, None, True]}), (x(), {"n": 2.5, "s": "é"})]


@program
def dates():
    def f(x, d):
        e = d + datetime.timedelta(days=1, hours=2)
        return (
            x + e.day,
            e.isoformat(),
            (e - d).total_seconds(),
            e > d,
            f"{d:%Y-%m-%d}",
            d.strftime("%H"),
            datetime.date(2020, 2, 29).weekday(),
            e,
        )

    return f, [(x(), datetime.datetime(2024, 1, 31, 5)), (x(), datetime.datetime(2023, 12, 31))]


@program
def text_of_containers():
    def f(x):
        return (
            x + 1,
            str([1, "a", None, (2,), {"k": 1.5}]),
            repr(
                {
                    "s",
                }
            ),
            str({1: [2]}),
            f"{(1,)}",
            str(True),
            repr("q'"),
            str(1e20),
            repr(0.1),
            str(1j),
            repr(b"a"),
            str(range(3)),
            str(slice(1, 2)),
            repr(...),
        )

    return f, [(x(),), (x(),)]


@program
def text_of_tensors_breaks(*_):
    def f(x):
        return x + 1, x.shape.numel(), len(str(tuple(x.shape)))

    return f, [(x(),), (x(),)]


@program("print-tensor")
def tensor_is_printed():
    def f(x):
        y = x + 1
        print("value:", y)
        print(f"{y.sum():.2f}", end="!\n")
        return y * 2

    return f, [(x(),), (x() + 1,), (x(),)]


@program("print-tensor")
def text_of_a_tensor_is_returned():
    def f(x):
        y = x * 2
        return y, str(y), f"{y}", repr([y])

    return f, [(x(),), (x() + 1,)]


@program
def prints_of_constants():
    def f(x, n):
        print("start", n, sep="-")
        y = x + n
        print(x.shape, y.dtype, end=";\n")
        print()
        print([1, n], {"a": n}, None)
        return y

    return f, [(x(), 1), (x(), 2), (x(), 1)]


@program
def prints_inside_inlined_calls_and_loops():
    def g(x, i):
        print("g", i)
        return x + i

    def f(x):
        for i in range(3):
            x = g(x, i)
            if i % 2:
                print("odd")
        return x

    return f, [(x(),), (x(),)]


@program
def print_of_an_object():
    class A:
        def __init__(self, n):
            self.n = n

        def __str__(self):
            return f"A{self.n}"

    def f(x, a):
        print(a)
        a.n += 1
        print(a, A(9))
        return x + a.n

    return f, [(x(), A(1)), (x(), A(5))]


@program
def print_of_a_list_that_changes_later():
    def f(x, l):
        print(l)
        l.append(1)
        print(l)
        return x + len(l)

    return f, [(x(), []), (x(), [3])]


@program
def printed_before_an_exception():
    def f(x, n):
        print("one")
        y = x + 1
        print("two")
        if n:
            raise ValueError("three")
        return y

    return f, [(x(), 0), (x(), 1), (x(), 0)]


@program("untraceable-call", "opaque-object")
def print_to_a_file():
    import io

    def f(x, out):
        y = x + 1
        print("hello", file=out)
        print("to stderr", file=__import__("sys").stderr)
        return y, out.getvalue()

    return f, [(x(), io.StringIO()), (x(), io.StringIO())]


@program
def logging_records():
    import logging

    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append((record.levelname, record.getMessage(), record.funcName))

    logger = logging.getLogger("fusewright-test-programs")
    logger.handlers[:] = [Keep()]
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def f(x, n):
        logger.info("start %d %s", n, x.shape)
        y = x + n
        logger.debug("hidden")
        logger.warning(f"end {n}")
        return y

    return f, [(x(), 1), (x(), 2), (x(), 1)], lambda: [r[:2] for r in records]


@program
def warnings_are_issued():
    import warnings

    def f(x, n):
        warnings.warn("careful")
        y = x + n
        warnings.warn(f"deprecated {n}", DeprecationWarning)
        return y

    return f, [(x(), 1), (x(), 2)]


@program("untraceable-call")
def warnings_that_are_errors_are_raised_where_they_are_given():
    import warnings

    log = []

    def f(x, inside):
        for category in (UserWarning, DeprecationWarning):
            try:
                warnings.warn("outside", category)
            except category as error:
                log.append(str(error))
        if inside:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="in")
                try:
                    warnings.warn("inside")
                except UserWarning as error:
                    log.append(str(error))
                warnings.warn("other")
            with warnings.catch_warnings(action="error"):
                try:
                    warnings.warn("action")
                except UserWarning as error:
                    log.append(str(error))
            warnings.warn("behind")
        return x + len(log)

    def calls():
        yield x(), False
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            yield x(), False
        yield x(), True

    return f, calls(), lambda: log


@program("untraceable-call", "opaque-object")
def filters_of_warnings_are_looked_at_and_changed_by_hand():
    import warnings

    log, known = [], warnings.filters

    def f(x, n):
        first = warnings.filters[0] if n == 1 else None
        with warnings.catch_warnings(record=n > 1) as seen:
            warnings.simplefilter("ignore" if n == 3 else "always")
            log.append((len(warnings.filters), warnings.filters[0][0], warnings.filters is known, len(known)))
            warnings.warn("one")
            warnings.filters.insert(0, ("always", None, UserWarning, None, 0))
            warnings.filters[:] = warnings.filters[:3]
            warnings.warn("two")
            if n == 4:
                warnings.showwarning = lambda message, *rest: log.append(str(message))
                warnings.warn("three")
        log.append((len(warnings.filters), warnings.filters is known, first and first[0], seen and len(seen)))
        return x + n

    return f, [(x(), 1), (x(), 2), (x(), 3), (x(), 4), (x(), 1)], lambda: (log, warnings.showwarning.__name__)


@program("untraceable-call")
def filters_of_warnings_that_stay_are_looked_at():
    import warnings

    def f(x, n):
        warnings.warn("before")
        warnings.filters.append(("ignore", None, UserWarning, None, n))
        if n == 2:
            return x
        if n == 1:
            warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "ab")
        text = warnings.filters[0][1].pattern
        warnings.resetwarnings()
        return x + n, text, len(warnings.filters)

    return f, [(x(), 1), (x(), 2), (x(), 1)]


@program
def text_wrap_and_helpers():
    def f(x, s):
        return x + 1, textwrap.dedent(s), textwrap.fill(s, 5), string.ascii_lowercase[:3], s.splitlines(True)

    return f, [(x(), "  ab cd\n  ef"), (x(), "x")]


@program
def string_building_in_loops():
    def f(x, n):
        parts = []
        s = ""
        for i in range(n):
            s += str(i)
            parts.append(f"{i:02}")
        return x + len(s), s, "|".join(parts), "".join(reversed(parts))

    return f, [(x(), 3), (x(), 5), (x(), 0)]
