# ruff: noqa  (odd code on purpose)
"""Graph breaks while an exception is in flight: in `except`, in `finally`, in the exit of `with`. The frame is cut there, and what follows
sees the exception, its context and its traceback as in eager.

Each program is a maker as in language/support.py; `graphs` is how many graphs its calls give at least. No frame may be left to run eagerly,
but for those that an exception leaves, and those of the codes `skips`. (Tracebacks are compared by language.support: these programs lie outside of its folder, so they note the
lines themselves.)
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any

import pytest
import torch

import fusewright

from tests.capture.breaks.breaking import adder, check_case
from tests.capture.interpret.language.support import Program, x

CASES: list[Any] = []
case = adder(CASES)


@fusewright.disable
def lines(error: BaseException | None) -> list[Any]:
    """The user's lines of a traceback, and those of its context."""
    found: list[Any] = []
    while error is not None:
        step = error.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            if code.co_filename == __file__:
                found.append((code.co_name, step.tb_lineno, *traceback._get_code_position(code, step.tb_lasti)))  # type: ignore[attr-defined]
            step = step.tb_next
        found.append((type(error).__name__, error.args, error.__suppress_context__, repr(error.__cause__)))
        error = error.__context__
    return found


def counter() -> tuple[list, Any]:
    """A log, and an opaque function that notes its calls, and what is being handled then."""
    log: list = []

    def note(name: Any, value: Any = None) -> Any:
        log.append((name, lines(sys.exception())))
        return value

    note._fusewright_disable = True  # type: ignore[attr-defined]
    return log, note


class Failure(Exception):
    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def fails(text: str = "in a callee") -> Any:
    raise Failure(text, 3)


@case(2)
def in_except_with_an_exception_of_a_callee():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails()
        except Failure as error:
            note(error.code)
            y = y * 2
        return y - 1

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def in_except_without_a_name():
    log, note = counter()

    def f(x, d):
        y = x + 1
        try:
            y = y * d["missing"]
        except KeyError:
            note("handler")
            y = y * 2
            note("again")
        note("behind")
        return y - 1

    return f, [(x(), {}), (x(), {"missing": 2}), (x(), {})], lambda: log


@case(2)
def raised_by_the_break_itself():
    log, note = counter()

    def opaque(value):
        log.append("opaque")
        raise ValueError(value)

    opaque._fusewright_disable = True  # type: ignore[attr-defined]

    def f(x):
        y = x * 3
        try:
            opaque("first")
        except ValueError as error:
            y = y + 1
            note(str(error))
            y = y + len(error.args[0])
            note("second")
        return y * 2

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def bare_raise_behind_a_break():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            try:
                fails("inner")
            except Failure:
                note("inner handler")
                y = y + 1
                raise
        except Failure as error:
            note(error)
            y = y * 2
        return y, sys.exc_info()

    return f, [(x(),), (x(),)], lambda: log


@case(1)
def bare_raise_that_leaves():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails("leaves")
        except Failure:
            note("handler")
            y = y * 2
            note(y.sum().item())
            raise

    return f, [(x(),), (x(),)], lambda: log


@case(1)
def another_error_behind_a_break():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails("cause")
        except Failure as error:
            note("handler")
            raise RuntimeError("wrapped") from error

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def context_and_cause():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            try:
                fails("one")
            except Failure as error:
                note("outer")
                y = y * 2
                try:
                    raise KeyError("two")
                except KeyError as key:
                    note("inner")
                    y = y - 1
                    raise IndexError("three") from key
        except IndexError as error:
            note("last")
            y = y * 5
        note("none")
        return y

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def finally_entered_by_an_exception():
    log, note = counter()

    def f(x, flag):
        y = x + 1
        try:
            try:
                y = y * 2
                if flag:
                    fails("on the way")
            finally:
                note("finally")
                y = y + 10
        except Failure as error:
            note("outer")
            return y, error.args
        return y

    return f, [(x(), True), (x(), False), (x(), True)], lambda: log


@case(2)
def return_in_finally_swallows():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails("swallowed")
        finally:
            note("finally")
            return y * 2

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def continue_in_a_handler_of_a_loop():
    log, note = counter()

    def f(x):
        for i in range(4):
            x = x + i
            try:
                if i % 2:
                    raise ValueError(i)
            except ValueError as error:
                note(i)
                x = x * 2
                if i == 3:
                    break
                continue
            x = x - 1
        return x

    return f, [(x(),), (x(),)], lambda: log


class Manager:
    def __init__(self, log: Any, note: Any, swallows: bool) -> None:
        self.log, self.note, self.swallows = log, note, swallows

    def __enter__(self) -> Manager:
        self.log.append("enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.note(("exit", kind, trace is not None))
        return self.swallows


@case(2)
def exit_of_a_manager_with_an_exception():
    log, note = counter()

    def f(x, swallows):
        y = x + 1
        try:
            with Manager(log, note, swallows):
                y = y * 2
                fails("in with")
                y = y * 100
            y = y + 1
        except Failure:
            note("passed on")
            y = y + 5
        return y * 2

    return f, [(x(), True), (x(), False), (x(), True)], lambda: log


@case(2)
def opaque_exit():
    log, note = counter()

    class Opaque:
        def __enter__(self):
            return self

        @fusewright.disable
        def __exit__(self, kind, error, trace):
            log.append((kind, lines(error), trace.tb_lineno))
            return kind is Failure

    def f(x, d):
        y = x + 1
        with Opaque():
            y = y * 2
            fails("in with")
        with Opaque():
            y = y * 3
        return y * 2

    return f, [(x(), {}), (x(), {})], lambda: log


@case(2)
def settings_in_handlers():
    log, note = counter()

    def f(x):
        try:
            with torch.no_grad():
                y = x * 2
                note(torch.is_grad_enabled())
                fails("under no_grad")
        except Failure:
            note(torch.is_grad_enabled())
            y = x * 3
        return y * 2

    return f, [(x().requires_grad_(),), (x().requires_grad_(),)], lambda: log


@case(2)
def the_text_of_a_traceback():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails("formatted")
        except Failure:
            text = traceback.format_exc()
            y = y * 2
        return y, text.replace(" " * 4 + "~" * 5, "")

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def lines_of_a_traceback():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            fails("looked at")
        except Failure as error:
            kind, value, trace = sys.exc_info()
            number = trace.tb_lineno - f.__code__.co_firstlineno
            y = y * number
            names = [entry.name for entry in traceback.extract_tb(trace)]
            y = y + 1
        return y, names, number

    return f, [(x(),), (x(),)], lambda: log


@case(1)
def exceptions_that_are_kept():
    log, note = counter()
    kept: list = []

    def f(x, table):
        y = x + 1
        try:
            fails("kept")
        except Failure as error:
            kept.append(error)
            first = error
        try:
            table.nothing
        except AttributeError as error:
            second = error
        try:
            next(iter(()))
        except StopIteration as error:
            third = error
        return y * 2, first, second, third, first.__traceback__

    return f, [(x(), {}), (x(), {})], lambda: [lines(error) for error in kept]


@case(2)
def a_handler_of_an_error_of_torch():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            y = y @ y
        except RuntimeError as error:
            note(type(error).__name__)
            y = y @ y.T
        return y * 2

    return f, [(x(),), (x(),)], lambda: log


@case(2, "disabled-function")  # behind the last operator of the frame
def handlers_in_handlers_in_inner_functions():
    log, note = counter()

    def inner(x, depth):
        try:
            fails(str(depth))
        except Failure as error:
            note((depth, str(error)))
            if depth:
                x = inner(x + 1, depth - 1)
            note((depth, "behind"))
            return x * 2

    def f(x):
        y = x + 1
        try:
            raise KeyError("root")
        except KeyError:
            y = inner(y, 2)
            note("root")
        return y

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def a_bare_raise_in_a_function_called_from_the_handler():
    log, note = counter()

    def again():
        raise

    def f(x):
        y = x + 1
        try:
            try:
                fails("handled")
            except Failure:
                note("first")
                y = y * 2
                again()
        except Failure as error:
            note("second")
            y = y + 3
        return y

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def a_generator_manager_around():
    log, note = counter()

    @contextlib.contextmanager
    def managed():
        log.append("in")
        try:
            yield 1
        except Failure as error:
            log.append(["seen", *error.args])
        finally:
            log.append("out")

    def f(x):
        y = x + 1
        try:
            with managed():
                y = y * 2
                fails("in a generator's manager")
            raise ValueError
        except ValueError:
            note("handler")
            y = y + 1
        return y

    return f, [(x(),), (x(),)], lambda: log


@case(1, "opaque-object")  # except* after a break
def except_star():
    log, note = counter()

    def f(x):
        y = x + 1
        try:
            raise ExceptionGroup("several", [ValueError(1), KeyError(2)])
        except* ValueError as group:
            note([type(one).__name__ for one in group.exceptions])
            y = y * 2
        except* KeyError:
            note("key")
            y = y * 3
        return y

    return f, [(x(),), (x(),)], lambda: log


@case(2)
def logging_an_exception():
    log, note = counter()
    logger = logging.getLogger("fusewright.tests.handlers")
    logger.propagate = False

    class Handler(logging.Handler):
        def emit(self, record):
            log.append((record.getMessage(), lines(record.exc_info[1]) if record.exc_info else None))

    logger.handlers[:] = [Handler()]

    def f(x):
        y = x + 1
        try:
            fails("logged")
        except Failure:
            logger.exception("it failed")
            y = y * 2
        return y + 1

    return f, [(x(),), (x(),)], lambda: log


@case(1, "frame-access", "opaque-object")
def called_while_an_exception_is_handled():
    log, note = counter()

    def inner(x):
        y = x + 1
        try:
            fails("inner")
        except Failure as error:
            kept = error
            y = y * 2
        return y, repr(kept.__context__), repr(sys.exception())

    def f(x, flag):
        if flag:
            try:
                raise KeyError("outer")
            except KeyError:
                note("outer")
                return inner(x)
        return inner(x)

    return f, [(x(), False), (x(), True), (x(), False), (x(), True)], lambda: log


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("one, graphs, skips", CASES)
def test_an_exception_in_flight_crosses_a_break(
    one: Program, graphs: int, skips: tuple[str, ...], backend: str
) -> None:
    check_case(one, graphs, skips, backend)


def test_the_callers_exception_is_not_taken_for_none() -> None:
    def inner(x):
        y = x + 1
        try:
            fails("inner")
        except Failure as error:
            kept = error
        return y * 2, kept, sys.exception()

    compiled = fusewright.compile(inner, backend="eager")
    for _ in range(2):
        try:
            raise KeyError("outer")
        except KeyError as outer:
            _, kept, handled = compiled(x())
            assert kept.__context__ is outer and handled is outer
        _, kept, handled = compiled(x())
        assert kept.__context__ is None and handled is None


def test_what_is_split_off_a_group_has_the_callers_exception_too() -> None:
    def inner(x):
        kept = []
        try:
            raise ExceptionGroup("g", [ValueError(3), KeyError("b")])
        except* ValueError as part:
            kept.append(part)
        except* KeyError as part:
            kept.append(part)
        group = ExceptionGroup("g", [ValueError(3), KeyError("b")])
        try:
            raise group
        except Exception:
            kept += [*group.split(KeyError), group.subgroup(KeyError)]
        return x + 1, [*kept, group.derive([KeyError("b")])]

    compiled = fusewright.compile(inner, backend="eager")
    for handled in (KeyError("outer"), None):
        for call in (inner, compiled, compiled):
            try:
                if handled is not None:
                    raise handled
            except KeyError:
                _, kept = call(x())
            else:
                _, kept = call(x())
            *parts, derived = kept
            assert [part.__context__ for part in parts] == [handled] * 5 and derived.__context__ is None
            assert all(part.__traceback__ is not None for part in parts) and derived.__traceback__ is None


def test_what_a_traceback_keeps_alive() -> None:
    """Frames of tracebacks that are made at run time hold no variables, and no frame of the compiler."""

    def f(x):
        y = x + 1
        try:
            fails("kept")
        except Failure as error:
            kept = error
        return y * 2, kept

    _, kept = fusewright.compile(f, backend="eager")(x())
    step = kept.__traceback__
    names = []
    while step is not None:
        names.append(step.tb_frame.f_code.co_name)
        assert step.tb_frame.f_back is None and not step.tb_frame.f_locals
        step = step.tb_next
    assert names == ["f", "fails"]
