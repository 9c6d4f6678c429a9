# ruff: noqa  (odd code on purpose)
"""Small functions without arguments that between them use every kind of instruction. Each returns a plain value; none has a lasting effect.

PROGRAMS is the list; tests compare interpretation, and cutting at every instruction, with CPython.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

PROGRAMS: list = []


def program(function):
    PROGRAMS.append(function)
    return function


GLOBAL = 5


@program
def arithmetic():
    a, b = 7, 3
    c = a + b * 2 - a // b % 2
    c += a
    c <<= 1
    c |= 5
    c ^= a & b
    c **= 2
    return -c, ~c, +c, not c, a / b, a >> 1, c - 1, a @ Matrix(3)


class Matrix:
    def __init__(self, value):
        self.value = value

    def __rmatmul__(self, other):
        return other * self.value

    def __enter__(self):
        return self.value

    def __exit__(self, kind, error, traceback):
        return kind is KeyError


@program
def comparisons():
    a, b = 1, 2
    return (
        a < b,
        a <= b,
        a == b,
        a != b,
        a > b,
        a >= b,
        a is b,
        a is not b,
        a in (1, 3),
        a not in (1, 3),
        1 < a < 3,
        0 < a < b,
    )


@program
def boolean_jumps():
    result = []
    for value in (0, 1, None, "", "x"):
        result.append(value or "empty")
        result.append(value and "full")
        if value is None:
            result.append("none")
        elif not value:
            result.append("false")
        if value is not None and value:
            result.append("true")
    return result


@program
def loops():
    total = 0
    for i in range(10):
        if i == 3:
            continue
        if i == 8:
            break
        total += i
    else:
        total = -1
    while total > 5:
        total -= 4
    else:
        total += 100
    return total


@program
def containers():
    base = [1, 2]
    pairs = {"a": 1, **{"b": 2}, "c": 3}
    return (
        [*base, 3, *(4, 5)],
        (*base, 0),
        {*base, 9},
        pairs,
        {"x": 1, "y": 2},
        [],
        (),
        {},
        base[0:1],
        base[::-1],
        {(1, 2): 3},
    )


@program
def slices():
    values = list(range(10))
    values[2:4] = [20, 30, 40]
    del values[0]
    values[-1] = 7
    a, b = 1, 5
    return values[a:b], values[a:], values[:b:2]


@program
def unpacking():
    a, (b, c), *d, e = 1, (2, 3), 4, 5, 6
    f, g = "xy"
    *h, i = range(3)
    j, k = {1: 2, 3: 4}.items()
    return a, b, c, d, e, f, g, h, i, j, k


@program
def comprehensions():
    n = 3
    outer = [[i * j + n for j in range(i)] for i in range(4) if i != 1]
    return (
        outer,
        {i % 2 for i in range(5)},
        {i: i * n for i in range(3)},
        sum(i * n for i in range(4)),
        [x for x in "ab" for _ in (1, 2)],
    )


@program
def comprehension_restores():
    x = 10
    values = [x for x in range(3)]
    functions = [lambda: y for y in range(3)]
    return x, values, [f() for f in functions]


@program
def strings():
    x, w = 3.14159, 8
    return f"{x}", f"{x:.2f}", f"{x!r:>{w}}", f"{'a'!s}{'b'!a}", f"a{x:{w}.1f}b", "{} {}".format(1, 2), "%d" % 3


@program
def closures():
    counter = 0

    def increase(by=1, *, twice=False):
        nonlocal counter
        counter += 2 * by if twice else by
        return counter

    increase()
    increase(3)
    increase(by=4, twice=True)
    return counter, increase.__name__, increase.__defaults__


@program
def deleted_cells():
    x = 1

    def read():
        return x

    first = read()
    del x
    try:
        read()
    except NameError as error:
        return first, str(error)


@program
def unbound():
    if GLOBAL == 0:
        missing = 1
    try:
        return missing
    except UnboundLocalError as error:
        return str(error)


@program
def unbound_global():
    try:
        return no_such_name
    except NameError as error:
        return str(error), error.name


@program
def global_store():
    global GLOBAL
    saved = GLOBAL
    GLOBAL = 77
    seen = GLOBAL
    GLOBAL = saved
    return seen


def signature(a, /, b, c=3, *args, d, e=5, **kwargs):
    return a, b, c, args, d, e, kwargs


@program
def calls():
    args, kwargs = [4, 5], {"z": 1}
    return (
        signature(1, 2, d=4),
        signature(1, b=2, d=4, e=6),
        signature(1, 2, 3, *args, d=0, **kwargs),
        signature(*args, d=1),
        signature(1, 2, d=1, a=9),
        max(3, 1, key=lambda v: -v),
        sorted([3, 1, 2], key=lambda v: -v, reverse=False),
        functools.partial(signature, 1, d=2)(3),
        "a-b".split("-"),
        dict(x=1, **kwargs),
        list(map(lambda v: v + 1, args)),
    )


@program
def bad_calls():
    messages = []
    attempts = (
        lambda: signature(),
        lambda: signature(1),
        lambda: signature(1, 2),
        lambda: signature(1, 2, 3, d=1, c=4),
        lambda: closures(1),
        lambda: closures(x=1),
        lambda: signature(*3),
        lambda: signature(**3),
        lambda: signature(1, **{"b": 1}, **{"b": 2}),
        lambda: signature(**{1: 2}),
        lambda: (lambda a: a)(1, 2),
        lambda: None(),
        lambda: [*3],
        lambda: {**3},
    )
    for attempt in attempts:
        try:
            attempt()
        except TypeError as error:
            messages.append(str(error))
    return messages


@program
def bad_unpacking():
    messages = []
    for value in ((1,), (1, 2, 3), 5, iter([1]), iter([1, 2, 3])):
        try:
            a, b = value
        except (TypeError, ValueError) as error:
            messages.append(str(error))
        try:
            a, b, *c = value
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


@program
def complaints_about_objects():
    """CPython names some types with their module, and quotes what it did not find in some containers."""
    messages, thing = [], types.SimpleNamespace
    attempts = (
        lambda: 2 in thing(),
        lambda: [*thing()],
        lambda: {**thing()},
        lambda: max(*thing()),
        lambda: dict(**thing()),
        lambda: len(thing()),
        lambda: [(1,)].index(2),
        lambda: [(1,)].remove(2),
        lambda: ((1,),).index("b"),
        lambda: collections.deque([(1,)]).index((2, 3)),
        lambda: collections.deque([(1,)]).remove(2),
    )
    for attempt in attempts:
        try:
            messages.append(attempt())
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


@program
def exceptions():
    log = []
    try:
        try:
            [][1]
        except KeyError:
            log.append("wrong")
        finally:
            log.append("finally")
    except (ValueError, IndexError) as error:
        log.append(str(error))
    else:
        log.append("else")
    try:
        pass
    except ValueError:
        log.append("no")
    else:
        log.append("else")
    return log


@program
def raising():
    log = []
    for kind in (ValueError, ValueError("b"), 3, None):
        try:
            raise kind
        except ValueError as error:
            log.append(str(error))
        except TypeError as error:
            log.append(str(error))
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        log.append((repr(error.__cause__), repr(error.__context__), error.__suppress_context__))
    try:
        raise KeyError from None
    except KeyError as error:
        log.append((error.__cause__, error.__suppress_context__))
    try:
        raise
    except RuntimeError as error:
        log.append(str(error))
    return log


@program
def contexts():
    try:
        try:
            1 / 0
        except ZeroDivisionError:
            try:
                {}["x"]
            except KeyError as key:
                inner = repr(key.__context__)
                raise
    except KeyError as error:
        return inner, repr(error.__context__), repr(sys.exc_info()[1]), sys.exception() is error


@program
def handled_state():
    before = sys.exc_info()
    try:
        raise ValueError(1)
    except ValueError:
        inside = sys.exc_info()[0]
    return before, inside, sys.exc_info()


def fails_in_finally():
    try:
        return "try"
    finally:
        sys.intern("x")


@program
def finally_return():
    def overriding():
        try:
            raise ValueError
        finally:
            return "finally"

    def looping():
        for i in range(5):
            try:
                if i == 3:
                    break
                continue
            finally:
                last = i
        return last

    return overriding(), looping(), fails_in_finally()


@program
def reraised():
    log = []

    def inner():
        try:
            raise ValueError("v")
        except ValueError:
            log.append("seen")
            raise

    try:
        inner()
    except ValueError as error:
        log.append(str(error))
    return log


@program
def with_blocks():
    log = []
    with Matrix(4) as value:
        log.append(value)
    with Matrix(1) as a, Matrix(2) as b:
        log.append((a, b))
        raise KeyError("swallowed")
    try:
        with Matrix(3):
            raise ValueError("kept")
    except ValueError as error:
        log.append(str(error))
    try:
        with 3:
            pass
    except TypeError as error:
        log.append(str(error))
    return log


@program
def early_exit_of_with():
    for i in range(3):
        with Matrix(i) as value:
            if value == 1:
                return "left", i
    return "not reached"


@contextlib.contextmanager
def managed(log):
    log.append("enter")
    try:
        yield "value"
    except KeyError as error:
        log.append(repr(error))
    finally:
        log.append("exit")


@program
def generator_context_manager():
    log = []
    with managed(log) as value:
        log.append(value)
    with managed(log):
        raise KeyError("k")
    try:
        with managed(log):
            raise ValueError("v")
    except ValueError as error:
        log.append(repr(error))
    return log


def countdown(n):
    while n:
        received = yield n
        if received:
            n = received
        n -= 1
    return "done"


@program
def generators():
    generator = countdown(5)
    seen = [next(generator), generator.send(10), next(generator)]
    rest = list(generator)
    try:
        next(generator)
    except StopIteration as stop:
        ended = stop.value
    return (
        seen,
        rest,
        ended,
        sum(countdown(4)),
        dict(zip("ab", countdown(3))),
        any(v == 2 for v in countdown(3)),
        ",".join(str(v) for v in countdown(2)),
    )


def delegating():
    result = yield from countdown(2)
    yield result
    inner = yield from [7, 8]
    yield inner
    return "end"


@program
def yield_from():
    return list(delegating())


def catching(log):
    while True:
        try:
            yield len(log)
        except ValueError as error:
            log.append(str(error))
        finally:
            log.append("f")


@program
def generator_throw():
    log = []
    generator = catching(log)
    next(generator)
    log.append(generator.throw(ValueError("one")))
    log.append(generator.throw(ValueError, "two"))
    generator.close()
    generator.close()
    log.append(list(generator))

    def outer():
        try:
            yield from catching(log)
        except KeyError:
            yield "outer"

    generator = outer()
    next(generator)
    log.append(generator.throw(ValueError("three")))
    log.append(generator.throw(KeyError("four")))
    try:
        generator.throw(OSError("five"))
    except OSError as error:
        log.append(str(error))
    return log


def returning_on_throw():
    try:
        yield 1
    except ValueError:
        return "returned"


@program
def delegated_return_on_throw():
    def outer():
        value = yield from returning_on_throw()
        yield value

    generator = outer()
    next(generator)
    return generator.throw(ValueError), list(generator)


@program
def generator_errors():
    log = []

    def stops():
        yield 1
        raise StopIteration("early")

    def raises():
        yield 1
        raise ValueError("in generator")

    try:
        list(stops())
    except RuntimeError as error:
        log.append((str(error), repr(error.__cause__)))
    try:
        list(raises())
    except ValueError as error:
        log.append(str(error))
    try:
        countdown(2).send(5)
    except TypeError as error:
        log.append(str(error))
    return log


@program
def generator_handling():
    def generate():
        try:
            raise ValueError("g")
        except ValueError:
            yield sys.exc_info()[1].args
            yield sys.exc_info()[1].args

    generator = generate()
    first = next(generator)
    outside = sys.exc_info()[0]
    try:
        raise KeyError
    except KeyError:
        second = next(generator)
        now = sys.exc_info()[0]
    list(generator)
    return first, outside, second, now


class Base:
    tag = "base"

    def __init__(self, x=1):
        self.x = x

    def describe(self):
        return f"{self.tag}:{self.x}"

    @property
    def double(self):
        return self.x * 2

    @classmethod
    def make(cls, x):
        return cls(x)

    @staticmethod
    def plain(x):
        return x


class Derived(Base):
    tag = "derived"

    def __init__(self, x):
        super().__init__(x + 1)
        self.extra = [x]

    def describe(self):
        return "<" + super().describe() + ">" + super(Derived, self).tag

    def captured(self):
        return (lambda: self.x)() + super().double

    def comprehended(self):
        return [super(Derived, self).describe() for _ in range(2)]


@program
def classes():
    d = Derived(3)
    d.extra.append(1)
    d.x += 5
    before = d.double
    del d.extra
    return (
        d.describe(),
        before,
        hasattr(d, "extra"),
        Derived.make(2).x,
        d.plain(4),
        d.captured(),
        d.comprehended(),
        isinstance(d, Base),
    )


@program
def class_statement():
    n = 2

    class Local(Base):
        size = n * 2
        names: int = 4

        def describe(self):
            return __class__.__name__, super().describe(), n

        squares = [i * i for i in range(3)]
        if size > 3:
            big = True

    return Local(1).describe(), Local.size, Local.squares, Local.big, Local.__annotations__, Local.__qualname__


@dataclass
class Point:
    x: int
    y: int


Pair = namedtuple("Pair", "left right")


@program
def matching():
    def kind(value):
        match value:
            case 0 | 1:
                return "small"
            case [a, b]:
                return "pair", a, b
            case [first, *rest]:
                return "list", first, rest
            case {"key": inner, **others}:
                return "mapping", inner, others
            case Point(x=0, y=y):
                return "axis", y
            case Point(x, y) if x == y:
                return "diagonal", x
            case Point():
                return "point"
            case str(text):
                return "text", text
            case int() | float() as number:
                return "number", number
            case None:
                return "none"
            case _:
                return "other"

    values = (
        0,
        (1, 2),
        [1, 2, 3],
        {"key": 1, "b": 2},
        Point(0, 5),
        Point(2, 2),
        Point(1, 2),
        "s",
        5,
        2.5,
        None,
        object,
        {"no": 1},
        [],
    )
    return [kind(value) for value in values]


@program
def imports():
    import os.path
    from collections import OrderedDict as Ordered
    from collections import deque

    import xml.dom as dom

    return os.path.join("a", "b"), Ordered is OrderedDict, deque([1], 1), dom.__name__


@program
def assertions():
    try:
        assert GLOBAL == 0, "message"
    except AssertionError as error:
        return str(error)


@program
def walrus_and_lambda():
    if (n := len([1, 2, 3])) > 2:
        return n, (lambda a, b=n: a + b)(1), [last := i for i in range(3)], last


@program
def decorators():
    def twice(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) * 2

        return wrapper

    @twice
    def add(a, b: int = 4) -> int:
        "Adds."
        return a + b

    return add(1), add(1, b=2), add.__doc__, add.__annotations__


@program
def frame_variables():
    a, b = 1, 2

    def inner():
        return b

    return sorted(locals()) == ["a", "b", "inner"], vars()["a"], dir(), inner()


@program
def annotations_and_deletes():
    a: int = 3
    values = {"x": 1, "y": 2}
    del values["x"]
    b = a
    del a
    try:
        del a
    except UnboundLocalError as error:
        return values, b, str(error)


@program
def nested_functions():
    def outer(x):
        def middle(y):
            def inner(z):
                nonlocal y
                y += 1
                return x, y, z

            return inner(1), inner(2), y

        return middle

    return outer("x")(5)


@program
def recursion():
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    return fibonacci(10)


@program
def mutual_state():
    values = [3, 1, 2]
    values.sort()
    a, b, c = values
    a, b = b, a
    values[0], values[1] = values[1], values[0]
    x = y = []
    x.append(1)
    return a, b, c, values, x is y


@program
def big_unpack():
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r = range(18)
    q, r = r, q
    return (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r)
