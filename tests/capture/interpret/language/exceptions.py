# ruff: noqa
"""Exceptions raised, caught, chained, grouped; finally; assert; what escapes."""

from __future__ import annotations

import traceback

import torch

from tests.capture.interpret.language.support import program, x


class Failure(Exception):
    def __init__(self, code, detail=""):
        super().__init__(code)
        self.code, self.detail = code, detail

    def __str__(self):
        return f"<{self.code}:{self.detail}>"


@program
def caught_by_class():
    def f(x, kind):
        try:
            raise kind("message")
        except (ValueError, KeyError) as error:
            return x + 1, type(error).__name__
        except Exception as error:
            return x + 2, error.args
        finally:
            x = x + 100

    return f, [(x(), ValueError), (x(), KeyError), (x(), RuntimeError), (x(), ValueError)]


@program
def else_and_finally():
    def f(x, n, log):
        try:
            y = x / n if n else 1 / 0
        except ZeroDivisionError:
            log.append("zero")
            y = x
        else:
            log.append("fine")
        finally:
            log.append("finally")
        return y

    return f, [(x(), 2, []), (x(), 0, []), (x(), 3, [])]


@program
def return_in_finally_wins():
    def f(x):
        try:
            raise ValueError
        finally:
            return x + 1

    return f, [(x(),), (x(),)]


@program
def nested_handlers():
    def f(x, log):
        try:
            try:
                raise KeyError("a")
            except KeyError:
                log.append("inner")
                raise ValueError("b")
            finally:
                log.append("cleanup")
        except ValueError as error:
            log.append(type(error.__context__).__name__)
            return x + 1

    return f, [(x(), []), (x(), [])]


def chain(error):
    """What an exception and its contexts are, as far as a ring of them is worth following."""
    found = []
    while error is not None and len(found) < 6:
        found.append((type(error).__name__, error.args))
        error = error.__context__
    return found


@program
def raised_on_a_ring_of_contexts():
    def closed():
        first, second = KeyError(1), OSError(2)
        first.__context__ = second
        second.__context__ = first
        return first, second

    def thrown_into():
        try:
            yield
        except OSError:
            raise ValueError

    def f(x):
        seen = []
        first, second = closed()
        try:
            raise first
        except KeyError:
            try:
                raise second
            except OSError as error:
                seen.append((chain(error), chain(first)))
        first, second = closed()
        try:
            try:
                raise second
            except OSError:
                [][3]
        except IndexError as error:
            seen.append(chain(error)[1:])
        first, second = closed()
        waiting = thrown_into()
        next(waiting)
        try:
            waiting.throw(second)
        except ValueError as error:
            seen.append(chain(error))
        return x + 1, seen

    return f, [(x(),), (x(),)]


@program
def a_ring_of_contexts_leaves():
    def f(x, log):
        error = KeyError(1)
        error.__context__ = error
        log.append(x + 1)
        try:
            raise error
        except KeyError:
            raise TypeError(2)

    def outer(x, log):
        try:
            f(x, log)
        except TypeError as error:
            log.append(chain(error))
        return x * 2

    return outer, [(x(), []), (x(), [])]


@program
def cause_and_context():
    def f(x):
        try:
            try:
                raise KeyError("a")
            except KeyError as error:
                raise ValueError("b") from error
        except ValueError as error:
            first = (repr(error.__cause__), error.__suppress_context__, error.__cause__ is error.__context__)
        try:
            try:
                raise KeyError("a")
            except KeyError:
                raise ValueError("b") from None
        except ValueError as error:
            return x + 1, first, error.__cause__, repr(error.__context__), error.__suppress_context__

    return f, [(x(),), (x(),)]


@program
def reraised():
    def f(x, log):
        try:
            try:
                raise Failure(3, "d")
            except Failure as error:
                log.append(error.code)
                raise
        except Failure as error:
            return x + error.code, str(error)

    return f, [(x(), []), (x(), [])]


@program
def name_is_unbound_after_handler():
    def f(x):
        error = "before"
        try:
            raise ValueError
        except ValueError as error:
            pass
        try:
            return error
        except NameError as missing:
            return x + 1, str(missing)

    return f, [(x(),), (x(),)]


@program
def raise_in_a_callee():
    def check(n):
        if n < 0:
            raise ValueError(f"negative: {n}")
        return n

    def f(x, n):
        try:
            return x + check(n)
        except ValueError as error:
            return x, str(error)

    return f, [(x(), 1), (x(), -1), (x(), 2), (x(), -2)]


@program("opaque-object")  # Failure.__init__, when the call is repeated eagerly
def escapes_with_message():
    def check(n):
        if n < 0:
            raise Failure(n, "too small")
        return n

    def f(x, n):
        y = x + check(n)
        return y

    return f, [(x(), 1), (x(), -1), (x(), 1), (x(), -5)]


@program("opaque-object")  # Failure.__init__, when the call is repeated eagerly
def escapes_after_side_effects():
    def f(x, log, d):
        log.append(x + 1)
        d["n"] = len(log)
        print("before")
        if len(log) > 1:
            raise Failure(len(log))
        return x * 2

    log, d = [], {}
    return f, [(x(), log, d), (x(), log, d), (x(), log, d)]


@program("operator-failed")
def tensor_error_escapes_after_side_effects():
    def f(x, y, log):
        log.append("start")
        x.add_(1)
        z = x + 1
        log.append(z)
        w = z @ y
        log.append("never")
        return w

    return f, [(x(), torch.ones(3, 2), []), (x(), torch.ones(2, 2), []), (x(), torch.ones(3, 2), [])]


@program("operator-failed", "opaque-object")  # the text of an exception that was raised outside of a graph
def tensor_error_is_caught():
    def f(x, y):
        try:
            return x @ y
        except RuntimeError as error:
            return x + 1, "shapes" in str(error)

    return f, [(x(), torch.ones(3, 2)), (x(), torch.ones(2, 2))]


@program
def index_error_at_run_time():
    def f(x, i, log):
        log.append(1)
        y = torch.index_select(x, 0, i)
        log.append(2)
        return y + 1

    return f, [(x(), torch.tensor([0, 1]), []), (x(), torch.tensor([0, 5]), []), (x(), torch.tensor([1, 1]), [])]


@program
def index_error_caught_at_run_time():
    def f(x, i):
        try:
            return torch.index_select(x, 0, i) + 1
        except IndexError:
            return x * 2

    return f, [(x(), torch.tensor([0, 1])), (x(), torch.tensor([0, 5])), (x(), torch.tensor([1, 1]))]


@program
def division_by_zero_and_type_errors():
    def f(x, a, b):
        try:
            return x * (a / b)
        except ZeroDivisionError as error:
            return x, str(error)
        except TypeError as error:
            return x + 1, str(error)

    return f, [(x(), 1, 2), (x(), 1, 0), (x(), "a", 2), (x(), [], {})]


@program
def key_and_index_errors():
    def f(x, d, k):
        try:
            return x + d[k]
        except (KeyError, IndexError) as error:
            return x, repr(error), isinstance(error, LookupError)

    return f, [(x(), {"a": 1}, "a"), (x(), {"a": 1}, "b"), (x(), [1], 3), (x(), [1], 0), (x(), (1, 2), -3)]


@program
def attribute_error_has_name_and_obj():
    def f(x, o):
        try:
            o.missing
        except AttributeError as error:
            return x + 1, str(error), error.name, error.obj is o

    return f, [(x(), [1]), (x(), 3), (x(), "s")]


@program
def assert_with_and_without_message():
    def f(x, n):
        assert n
        assert n > 1, ("n", n)
        return x * n

    return f, [(x(), 2), (x(), 1), (x(), 0), (x(), 3)]


@program
def stop_iteration_is_an_ordinary_exception():
    def f(x):
        it = iter([1])
        total = next(it)
        try:
            next(it)
        except StopIteration as stop:
            return x + total, stop.value

    return f, [(x(),), (x(),)]


@program
def exception_with_notes():
    def f(x):
        try:
            error = ValueError("a")
            error.add_note("first")
            error.add_note("second")
            raise error
        except ValueError as caught:
            return x + 1, caught.__notes__, caught is error

    return f, [(x(),), (x(),)]


@program
def exception_group_except_star():
    def f(x, which):
        log = []
        try:
            raise ExceptionGroup("many", [ValueError("v"), KeyError("k"), TypeError("t")][: which + 1])
        except* ValueError as group:
            log.append(("value", len(group.exceptions)))
        except* (KeyError, TypeError) as group:
            log.append(("other", [type(one).__name__ for one in group.exceptions]))
        return x + len(log), log

    return f, [(x(), 0), (x(), 1), (x(), 2)]


@program
def except_star_with_naked_exception():
    def f(x):
        try:
            raise ValueError("v")
        except* ValueError as group:
            kind = type(group).__name__, str(group), repr(group), group.args
            kind += group.__traceback__ is None, group.exceptions[0].__traceback__ is None
        return x + 1, kind

    return f, [(x(),), (x(),)]


@program
def except_star_remainder_escapes():
    def f(x):
        try:
            raise ExceptionGroup("many", [ValueError("v"), OSError("o")])
        except* ValueError:
            pass
        return x

    return f, [(x(),), (x(),)]


@program
def nothing_to_raise_again():
    def f(x):
        try:
            raise
        except RuntimeError as error:
            return x + 1, str(error), error.__traceback__ is not None

    return f, [(x(),), (x(),)]


@program
def group_methods():
    def f(x):
        group = ExceptionGroup("g", [ValueError(1), ExceptionGroup("n", [KeyError(2), ValueError(3)])])
        match, rest = group.split(ValueError)
        return x + len(match.exceptions), len(rest.exceptions), group.subgroup(KeyError) is not None, group.message

    return f, [(x(),), (x(),)]


@program
def exception_object_is_returned():
    def f(x):
        return x + 1, ValueError("made", x), Failure(1, "d")

    return f, [(x(),), (x(),)]


@program
def caught_exception_is_returned():
    def g():
        raise ValueError("deep")

    def f(x):
        try:
            g()
        except ValueError as error:
            return x + 1, error

    return f, [(x(),), (x(),)]


@program
def caught_exception_is_stored():
    def f(x, log):
        for i in range(2):
            try:
                raise Failure(i)
            except Failure as error:
                log.append(error)
        return x + 1

    return f, [(x(), []), (x(), [])]


@program("outside-exception")
def exception_from_outside_is_raised():
    def f(x, error):
        y = x + 1
        try:
            raise error
        except ValueError as caught:
            return y, caught is error

    return f, [(x(), ValueError("a")), (x(), ValueError("b"))]


@program("frame-access", "untraceable-call", "outside-iterator")
def traceback_is_read():
    def g():
        raise ValueError("deep")

    def f(x):
        y = x + 1
        try:
            g()
        except ValueError as error:
            return y, [
                (one.name, one.line) for one in traceback.extract_tb(error.__traceback__) if "language" in one.filename
            ]

    return f, [(x(),), (x(),)]


@program("frame-access", "untraceable-call")
def traceback_is_formatted():
    def f(x):
        try:
            raise ValueError("deep")
        except ValueError:
            text = traceback.format_exc()
        return x + 1, text.count("ValueError"), "in f" in text

    return f, [(x(),), (x(),)]


@program
def exc_info_is_asked():
    import sys

    def f(x):
        try:
            raise ValueError("deep")
        except ValueError as error:
            kind, value, tb = sys.exc_info()
            same = value is error and kind is ValueError and tb is not None
        return x + 1, same, sys.exc_info()

    return f, [(x(),), (x(),)]


@program("opaque-object")  # Failure.__init__, when the call is repeated eagerly
def loop_with_retries():
    def f(x, fail_until):
        attempts = 0
        while True:
            attempts += 1
            try:
                if attempts < fail_until:
                    raise Failure(attempts)
                return x * attempts, attempts
            except Failure as error:
                if error.code > 3:
                    raise RuntimeError("gave up") from error
            finally:
                x = x + 1

    return f, [(x(), 2), (x(), 3), (x(), 9), (x(), 2)]


@program
def continue_and_break_in_finally():
    def f(x):
        log = []
        for i in range(4):
            try:
                if i == 1:
                    continue
                if i == 2:
                    break
                x = x + i
            finally:
                log.append(i)
        else:
            log.append("else")
        return x, log

    return f, [(x(),), (x(),)]


@program
def exception_in_comprehension():
    def f(x, values):
        try:
            return [x / v if v else 1 // v for v in values]
        except ZeroDivisionError:
            return x

    return f, [(x(), [1, 2]), (x(), [1, 0]), (x(), [4, 2])]


@program
def exception_in_generator():
    def f(x):
        def gen():
            yield x
            raise Failure(7)

        out = []
        try:
            for v in gen():
                out.append(v)
        except Failure as error:
            return out, error.code

    return f, [(x(),), (x(),)]


@program
def exception_in_sort_key():
    def f(x, values):
        try:
            return x, sorted(values, key=lambda v: 10 // v)
        except ZeroDivisionError as error:
            return x + 1, str(error)

    return f, [(x(), [3, 1, 2]), (x(), [3, 0, 2])]


@program
def invalid_raise():
    def f(x, value):
        try:
            raise value
        except TypeError as error:
            return x + 1, str(error)

    return f, [(x(), 3), (x(), "s"), (x(), int)]


@program
def bare_raise_without_exception():
    def f(x):
        try:
            raise
        except RuntimeError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program
def exception_hierarchy_and_abc():
    def f(x):
        out = []
        for kind in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
            try:
                raise kind()
            except Exception:
                out.append("exception")
            except BaseException as error:
                out.append(type(error).__name__)
        return x + len(out), out

    return f, [(x(),), (x(),)]


@program
def custom_exception_with_fields():
    def f(x, n):
        try:
            if n:
                raise Failure(n, detail=x)
        except Failure as error:
            error.extra = error.code + 1
            return error.detail * error.extra
        return x

    return f, [(x(), 0), (x(), 2), (x(), 0)]


@program
def exception_in_init_and_property():
    class A:
        def __init__(self, n):
            if n < 0:
                raise ValueError("init")
            self.n = n

        @property
        def half(self):
            if self.n % 2:
                raise ArithmeticError("odd")
            return self.n // 2

    def f(x, n):
        try:
            return x + A(n).half
        except (ValueError, ArithmeticError) as error:
            return x, str(error)

    return f, [(x(), 4), (x(), 3), (x(), -1)]


@program("inline-depth", "recursion")
def recursion_error():
    def f(x):
        def deep(n):
            return deep(n + 1)

        try:
            deep(0)
        except RecursionError:
            return x + 1

    import sys

    return f, [(x(),)]


@program
def context_of_error_while_handling():
    def f(x, d):
        try:
            return d["a"]
        except KeyError:
            return x + d["b"]

    return f, [(x(), {"a": x()}), (x(), {"b": 2}), (x(), {})]


@program
def system_exit_and_keyboard_interrupt_escape():
    def f(x, kind):
        y = x + 1
        raise kind("bye")

    return f, [(x(), SystemExit), (x(), KeyboardInterrupt)]


@program("data-dependent-scalar")
def errors_right_behind_a_value_show_the_users_line():
    """A call, a store and a format that take the value of a tensor, and raise."""

    class Narrow:
        __slots__ = ()

    def f(x, held, spec):
        if spec == "remove":
            return held.remove(int(x.sum()))
        if spec == "attribute":
            held.one = int(x.sum())
        if spec == "item":
            held[int(x.sum())] = 1
        if spec == "pop":
            return held.pop(int(x.sum()))
        return x + 1, f"{x.sum().item():{spec}}"

    return f, [
        (x(), [1], "remove"),
        (x(), Narrow(), "attribute"),
        (x(), (), "item"),
        (x(), [1, 2], "pop"),
        (x(), 1, "zz"),
        (x(), [3], "remove"),
    ]


@program("exception-escapes")
def notes_and_groups():
    def f(x, n):
        seen = []
        try:
            try:
                if n == 1:
                    raise ExceptionGroup("g", [ValueError("a"), TypeError("b"), ExceptionGroup("h", [KeyError("k")])])
                if n == 2:
                    raise ValueError("plain")
                if n == 3:
                    raise ExceptionGroup("g", [OSError(1)])
                x = x + 1
            except* ValueError as e:
                e.add_note("one")
                seen.append((str(e), [str(i) for i in e.exceptions], e.__notes__))
                x = x * 2
            except* (TypeError, KeyError) as e:
                e.add_note("two")
                seen.append((str(e), len(e.exceptions)))
                x = x * 3
        except OSError as e:
            return "os"
        except BaseExceptionGroup as e:
            e.add_note("left")
            return x, seen, e, e.__notes__
        return x, seen

    return f, [(x(), 0), (x(), 1), (x(), 2), (x(), 3), (x(), 1)]


@program("unsupported-instruction")
def group_reraised():
    def f(x, n):
        try:
            try:
                raise ExceptionGroup("g", [ValueError("a"), TypeError("b")])
            except* ValueError as e:
                if n:
                    raise
            except* TypeError as e:
                if n > 1:
                    raise KeyError("new") from e
        except BaseExceptionGroup as e:
            return x + 1, repr(e), e.split(ValueError), e.subgroup(TypeError), e.derive([ValueError(1)])
        return x

    return f, [(x(), 0), (x(), 1), (x(), 2)]
