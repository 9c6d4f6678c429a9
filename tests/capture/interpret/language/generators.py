# ruff: noqa
"""Generators: consumed inside, sent to, thrown into, closed, delegated to, left unfinished."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys

import torch

from tests.capture.interpret.language.support import program, x


LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


@program
def consumed_by_builtins():
    def f(x):
        gen = lambda: (x * i for i in range(3))
        return (
            sum(gen()),
            list(gen()),
            tuple(gen()),
            [*gen()],
            dict(enumerate(gen())),
            max(i for i in range(5)),
            any(i > 3 for i in range(5)),
        )

    return f, [(x(),), (x(),)]


@program
def sends():
    def f(x):
        def acc():
            total = x * 0
            while True:
                got = yield total
                if got is None:
                    return
                total = total + got

        g = acc()
        next(g)
        a = g.send(x)
        b = g.send(x * 2)
        try:
            g.send(None)
        except StopIteration as stop:
            return a, b, stop.value

    return f, [(x(),), (x(),)]


@program
def throws():
    def f(x):
        def gen():
            try:
                yield x
            except ValueError as error:
                yield x * 2, str(error)
            yield x * 3

        g = gen()
        first = next(g)
        second = g.throw(ValueError("in"))
        third = next(g)
        return first, second, third, list(g)

    return f, [(x(),), (x(),)]


@program
def throw_that_is_not_caught():
    def f(x):
        def gen():
            yield x

        g = gen()
        next(g)
        try:
            g.throw(KeyError("k"))
        except KeyError as error:
            return x + 1, error.args, next(g, "ended")

    return f, [(x(),), (x(),)]


@program
def close_runs_finally():
    def f(x):
        log = []

        def gen():
            try:
                log.append("start")
                yield x
                yield x + 1
            finally:
                log.append("closed")

        g = gen()
        y = next(g)
        g.close()
        g.close()
        return y, log, next(g, None)

    return f, [(x(),), (x(),)]


@program
def what_close_gives():  # from Python 3.13 on, what the body returns
    def f(x):
        def returns(inner=()):
            try:
                yield x
                yield from inner
            except GeneratorExit:
                return x + 3

        def says_nothing():
            yield x

        def gives(generator, steps):
            for _ in range(steps):
                next(generator)
            return generator.close(), generator.close()

        begun = gives(returns(), 1), gives(says_nothing(), 1), gives(returns(returns()), 2), gives(returns([x]), 2)
        return begun, gives(returns(), 0), [*gives(iter_of(x), 1)]

    def iter_of(x):
        try:
            yield x
        except GeneratorExit as left:
            return str(left), x.shape

    return f, [(x(),), (x(),)]


@program
def generator_that_ignores_exit():
    def f(x):
        def gen():
            while True:
                try:
                    yield x
                except GeneratorExit:
                    yield x + 1

        g = gen()
        next(g)
        try:
            g.close()
        except RuntimeError as error:
            return x * 2, str(error)

    return f, [(x(),), (x(),)]


@program
def yield_from_returns():
    def f(x):
        def inner():
            got = yield x
            return got * 2

        def outer():
            result = yield from inner()
            yield result + 1

        g = outer()
        next(g)
        return g.send(x + 1)

    return f, [(x(),), (x(),)]


@program
def yield_from_containers():
    def f(x):
        def walk(tree):
            if isinstance(tree, list):
                for part in tree:
                    yield from walk(part)
            else:
                yield tree

        return list(walk([x, [x + 1, [x + 2]], []])), sum(walk([1, [2, 3]]))

    return f, [(x(),), (x(),)]


@program
def throw_through_yield_from():
    def f(x):
        def inner():
            try:
                yield 1
            except ValueError:
                yield x
            return "done"

        def outer():
            result = yield from inner()
            yield result

        g = outer()
        return next(g), g.throw(ValueError), next(g)

    return f, [(x(),), (x(),)]


@program
def throw_of_a_kind_and_a_value():  # from Python 3.12 on with a warning
    def f(x):
        def gen():
            caught = None
            while True:
                try:
                    yield caught, x
                except ValueError as error:
                    caught = error.args

        g = gen()
        next(g)
        return g.throw(ValueError), g.throw(ValueError(1)), g.throw(ValueError, 2), g.throw(ValueError, ValueError(3), None)

    return f, [(x(),), (x(),)]


@program
def stop_iteration_inside():
    def f(x):
        def gen():
            yield x
            raise StopIteration("leak")

        g = gen()
        next(g)
        try:
            next(g)
        except RuntimeError as error:
            return x + 1, str(error), type(error.__cause__).__name__

    return f, [(x(),), (x(),)]


@program
def infinite_generator_is_sliced():
    def f(x):
        def powers():
            y = x
            while True:
                yield y
                y = y * 2

        return list(itertools.islice(powers(), 4)), [a for a, _ in zip(powers(), range(2))]

    return f, [(x(),), (x(),)]


@program
def interleaved_generators():
    def f(x):
        def gen(k):
            for i in range(3):
                yield x + k * i

        a, b = gen(1), gen(10)
        return [next(a), next(b), next(a), next(b)], list(a), list(b)

    return f, [(x(),), (x(),)]


@program
def lazy_evaluation_order():
    def f(x):
        log = []

        def gen():
            for i in range(3):
                log.append(("make", i))
                yield i

        for i in gen():
            log.append(("use", i))
            x = x + i
        return x, log

    return f, [(x(),), (x(),)]


@program
def generator_expression_binds_first_iterable_early():
    def f(x):
        values = [1, 2, 3]
        g = (v * x for v in values)
        values = [10]
        return list(g)

    return f, [(x(),), (x(),)]


@program
def generator_over_mutated_list():
    def f(x):
        values = [1, 2]
        out = []
        for v in values:
            out.append(x * v)
            if len(values) < 5:
                values.append(v + 10)
        return out, values

    return f, [(x(),), (x(),)]


@program
def consume_partly_then_rest():
    def f(x):
        g = (x + i for i in range(5))
        first, second, *rest = g
        return first, second, rest, list(g)

    return f, [(x(),), (x(),)]


@program
def unpack_generator_errors():
    def f(x):
        try:
            a, b = (i for i in range(3))
        except ValueError as error:
            first = str(error)
        try:
            a, b = (i for i in range(1))
        except ValueError as error:
            return x + 1, first, str(error)

    return f, [(x(),), (x(),)]


@program
def already_executing():
    def f(x):
        def gen():
            yield next(g)

        g = gen()
        try:
            next(g)
        except ValueError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program
def send_before_start():
    def f(x):
        def gen():
            yield x

        g = gen()
        try:
            g.send(1)
        except TypeError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program
def generator_as_context_of_with():
    def f(x):
        import contextlib

        log = []

        @contextlib.contextmanager
        def scope(name):
            log.append("enter " + name)
            try:
                yield name.upper()
            finally:
                log.append("exit " + name)

        with scope("a") as a, scope("b") as b:
            y = x + len(a + b)
        return y, log

    return f, [(x(),), (x(),)]


@program("cannot-rebuild")
def unfinished_generator_is_returned():
    def f(x):
        def gen():
            yield x + 1
            yield x + 2

        g = gen()
        return next(g), g

    return f, [(x(),), (x(),)]


@program("cannot-rebuild")
def generator_expression_is_returned():
    def f(x):
        y = x + 1
        return (y * i for i in range(3))

    return f, [(x(),), (x(),)]


@program
def the_function_is_a_generator():
    def f(x):
        y = x + 1
        yield y
        yield y * 2

    return lambda x: list(f(x)), [(x(),), (x(),)]


@program("frame-kind")
def compiled_generator_function():
    def f(x):
        yield x + 1
        yield x * 2

    return f, [(x(),), (x(),)]


@program("outside-iterator", "loop-goes-on", "opaque-object")
def generator_from_outside():
    def f(x, g):
        y = x + 1
        for v in g:
            y = y * v
        return y

    return f, [(x(), (i for i in range(1, 4))), (x(), (i for i in range(2, 4)))]


@program("outside-iterator")
def iterator_from_outside_is_advanced():
    def f(x, it):
        return x + next(it), next(it, None)

    return f, [(x(), iter([1, 2, 3])), (x(), iter([5])), (x(), iter([]))]


@program
def iterator_protocol_by_hand():
    class Countdown:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            return self

        def __next__(self):
            if self.n == 0:
                raise StopIteration
            self.n -= 1
            return self.n

    def f(x, c):
        return [x + i for i in Countdown(3)], [x * i for i in c], c.n, list(c)

    return f, [(x(), Countdown(2)), (x(), Countdown(4))]


@program
def sequence_protocol_iteration():
    class Seq:
        def __getitem__(self, i):
            if i >= 3:
                raise IndexError
            return i * 2

    def f(x):
        return [x + v for v in Seq()], 4 in Seq(), 5 in Seq(), list(Seq())

    return f, [(x(),), (x(),)]


@program
def iter_with_sentinel():
    def f(x):
        state = [0]

        def step():
            state[0] += 1
            return state[0]

        return [x * v for v in iter(step, 4)], state

    return f, [(x(),), (x(),)]


@program
def generator_with_return_value():
    def f(x):
        def gen():
            yield 1
            return x

        g = gen()
        next(g)
        try:
            next(g)
        except StopIteration as stop:
            return stop.value + 1, stop.args

    return f, [(x(),), (x(),)]


@program
def pipeline():
    def f(x):
        def numbers():
            for i in range(10):
                yield i

        def even(source):
            for i in source:
                if i % 2 == 0:
                    yield i

        def scaled(source):
            for i in source:
                yield x * i

        return sum(scaled(even(numbers())))

    return f, [(x(),), (x(),)]


@program
def generator_methods_and_attributes():
    def f(x):
        def gen():
            "doc"
            yield x

        g = gen()
        return g.__name__, g.__qualname__.endswith("gen"), iter(g) is g, type(g).__name__, next(g) + 1

    return f, [(x(),), (x(),)]


@program("frame-kind")
def coroutine_run_by_hand():
    def f(x):
        async def work(v):
            return v + 1

        c = work(x)
        try:
            c.send(None)
        except StopIteration as stop:
            return stop.value

    return f, [(x(),), (x(),)]


@program("frame-kind", "untraceable-call", "opaque-object")
def asyncio_inside():

    def f(x):
        loop = LOOP

        async def work(v):
            await asyncio.sleep(0)
            return v + 1

        async def main():
            return await asyncio.gather(work(x), work(x * 2))

        return loop.run_until_complete(main())

    return f, [(x(),), (x(),)]


@program
def zip_strict_and_longest():
    def f(x):
        a = [y for y, _ in itertools.zip_longest((x + i for i in range(2)), range(3), fillvalue=x)]
        try:
            list(zip((i for i in range(2)), range(3), strict=True))
        except ValueError as error:
            return a, str(error)

    return f, [(x(),), (x(),)]


# CPython 3.14 goes through what `any` is given in the frame itself
@program("data-dependent-branch", "outside-iterator", "explicit-graph-break", *(["loop-goes-on"] if sys.version_info >= (3, 14) else []))
def generator_expressions_whose_consumer_breaks():
    def f(x, n):
        y = x * 2
        found = any(bool((t > 3).any()) for t in (x, y, y + n))
        rest = (y * i for i in range(n))
        fusewright.graph_break()
        return y + 1 if found else y - 1, [t + 1 for t in rest]

    return f, [(x(), 2), (x() * 5, 3), (x(), 2)]


@program("explicit-graph-break", "outside-iterator", "opaque-object")
def a_waiting_generator_crosses_a_break():
    def f(x):
        scale, log = 3, []

        def gen(a, b=2, *rest, c, **named):
            log.append("begun")
            try:
                for i in range(b):
                    yield a * i * scale + c + len(rest) + len(named)
            finally:
                log.append("ended")

        one, other, none = gen(x, 3, 4, 5, c=1, z=2), gen(x, c=0), gen(x, c=0)
        scale = 4
        fusewright.graph_break()
        first = next(other)
        other.close()
        none.close()
        return list(one), first, log, one.__name__

    return f, [(x(),), (x(),)]


@program
def a_generator_is_returned():
    def f(x, items):
        y = x + 1
        items.append(1)
        return (y * i for i in items)

    return lambda x, items: f(x, items), [(x(), [1, 2]), (x(), [3])]


@program
def the_type_of_a_generator():
    def made():
        yield 1

    def f(x):
        inner = (v for v in [1])
        return x + 1, type(inner).__name__, str(type(made())), type(inner) is type(made()), isinstance(inner, type(made()))

    return f, [(x(),), (x(),)]


class Stop(BaseException):
    """An exception that `except Exception` does not catch, as libraries of tail calls and tasks have them."""

    def __init__(self, value):
        super().__init__()
        self.value = value


@program
def exceptions_that_are_no_exceptions():
    """Raised by a generator, through native code: for, next, throw, close, a key function, sys.exit."""

    def ending(x):
        yield x
        raise Stop(x * 2)

    def delegating(x):
        try:
            yield x + 1
        except Stop as stop:
            yield stop.value

    def outer(x):
        yield from delegating(x)

    def refusing_to_close(x):
        try:
            yield x
        finally:
            raise Stop(x * 5)

    def key(value):
        raise Stop(value)

    def f(x):
        found = []
        try:
            for value in ending(x):
                found.append(value)
        except Stop as stop:
            found.append(stop.value)
        generator = outer(x)
        found += [next(generator), generator.throw(Stop(x * 3))]
        generator = refusing_to_close(x)
        next(generator)
        try:
            generator.close()
        except Stop as stop:
            found.append(stop.value)
        try:
            sorted([1, 2], key=key)
        except BaseException as stop:
            found.append(x + stop.value)
        return found

    return f, [(x(),), (x(),)]


@program("untraceable-call")
def an_exit_through_native_code():
    def leaving(value):
        sys.exit(3)

    def f(x):
        try:
            next(map(leaving, [x]))
        except SystemExit as end:
            return x * end.code

    return f, [(x(),), (x(),)]


@program
def what_is_thrown_has_no_context_of_the_callers():
    """Into generators that have not begun, are suspended, handle something themselves, delegate, or have ended."""

    def plain(x):
        try:
            yield x
            try:
                raise KeyError("in")
            except KeyError:
                yield x
        finally:
            x = None

    def delegating(x):
        yield from plain(x)

    def closed(x, seen):
        try:
            yield x
        except GeneratorExit as error:
            seen.append(error.__context__)
            raise

    def thrown(generator, begun, error, handling, seen):
        for _ in range(begun):
            next(generator, None)
        try:
            if handling:
                try:
                    raise IndexError("handled")
                finally:
                    generator.throw(error)
            generator.throw(error)
        except BaseException as caught:
            seen.append(caught)

    def f(x):
        seen = []
        for make in (plain, delegating):
            for begun in range(4):
                for error in (ValueError, StopIteration, GeneratorExit, KeyError("again")):
                    thrown(make(x), begun, error, False, seen)
                    thrown(make(x), begun, error, True, seen)
        generator = closed(x, seen)
        next(generator)
        try:
            raise IndexError("handled")
        except IndexError:
            generator.close()
        return x + 1, seen

    return f, [(x(),), (x(),)]


@program("generator-abandoned")
def what_was_closed_by_another_is_asked_where_it_stands():
    def plain(x):
        yield x
        yield x + 1

    def delegating(inner):
        yield from inner

    def f(x):
        inner = plain(x)
        found = [next(delegating(inner)), inner.gi_frame is None]
        inner = None
        return found

    return f, [(x(),), (x(),)]


@program("generator-abandoned")
def what_another_delegates_to_is_taken_from_it():
    def plain(x):
        yield x
        yield x + 1

    def delegating(x):
        yield from plain(x)

    def f(x):
        outer = delegating(x)
        found = [next(outer)]
        inner = outer.gi_yieldfrom
        outer = None
        return found + list(inner)

    return f, [(x(),), (x(),)]
