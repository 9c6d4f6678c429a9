"""Resume functions: cut everywhere, the rest of a frame run by CPython gives what the uncut frame gives."""

from __future__ import annotations

import builtins
import gc
import inspect
import sys
import traceback
import types
import weakref

import pytest

from fusewright.base.signals import SkipFrame
from fusewright.capture.breaks.cutting import cut
from fusewright.capture.bytecode.instructions import decoded
from fusewright.capture.bytecode.liveness import live_slots
from fusewright.capture.bytecode.resume import PASSED, CannotCut, Layout, Resumption, origin_of, resume_code
from tests.capture.border.fake_world import tracer_for
from tests.capture.breaks.cut_everywhere import chained, results, resume_here, run, steps
from tests.capture.interpret.programs import PROGRAMS

ids = pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
# Programs that inspect their frame, and share variables with inner functions, cannot be cut.
UNCUTTABLE = {"frame_variables"}


@ids
def test_the_rest_of_the_frame_from_every_instruction(function):
    expected = repr(function())
    cuts = 0
    for step, result in results(function, resume_here):
        assert repr(result) == expected, f"cut at step {step}"
        cuts += 1
    assert cuts > 5 or function.__name__ in UNCUTTABLE


@ids
def test_a_break_at_every_instruction_that_can_break(function):
    expected = repr(function())
    cuts = 0
    for step, result in results(function, cut):
        assert repr(result) == expected, f"break at step {step}"
        cuts += 1
    assert cuts > 0 or function.__name__ in UNCUTTABLE


@ids
@pytest.mark.parametrize("distance", [1, 4])
def test_breaks_in_resume_functions_are_cut_from_the_original(function, distance):
    result, _ = chained(function, distance)
    assert repr(result) == repr(function())


def negative(value):
    return -value


def test_chains_are_long():
    def f():
        b = negative(-1) + 1
        c = negative(b) + 1
        d = negative(c) + 1
        e = negative(d) + 1
        return negative(e) + 1

    result, cuts = chained(f, 1)
    assert result == f()
    assert cuts >= 5


def layout_of(function, step, index):
    return Layout(index, tuple(range(function.__code__.co_nlocals)), ())


def nth(function, name, count=0):
    """The index of an instruction of this name."""
    found = [
        index for index, instruction in enumerate(decoded(function.__code__).instructions) if instruction.name == name
    ]
    return found[count]


def example(a, b=2, *args, c=3, **kwargs):
    x = a + b
    y = x * 2
    return x, y, args, c, kwargs


def test_a_resume_function_keeps_names_lines_and_file():
    info = decoded(example.__code__)
    index = nth(example, "STORE_FAST", 1)
    made = resume_code(info, Layout(index, (0, 1, 2, 3, 4, 5), (PASSED,)))
    code = made.code
    assert (code.co_name, code.co_qualname, code.co_filename) == ("example", "example", __file__)
    assert code.co_varnames[:7] == ("a", "b", "c", "args", "kwargs", "x", "__held0")
    assert not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    last = {line for _, _, line in code.co_lines() if line}
    assert max(last) == example.__code__.co_firstlineno + 3


def test_one_layout_gives_one_code_object():
    info = decoded(example.__code__)
    index = nth(example, "STORE_FAST", 1)
    layout = Layout(index, (0, 5), (PASSED,))
    assert resume_code(info, layout) is resume_code(info, Layout(index, (0, 5), (PASSED,)))
    assert resume_code(info, Layout(index, (0, 1, 5), (PASSED,))) is not resume_code(info, layout)


def test_the_origin_of_a_resume_function_is_the_original():
    info = decoded(example.__code__)
    index = nth(example, "STORE_FAST", 1)
    made = resume_code(info, Layout(index, (0, 5), (PASSED,)))
    origin = origin_of(made.code)
    assert origin.info is info
    assert index in origin.indices
    assert origin.slots[:3] == (0, 5, -1)


def test_resume_code_dies_with_the_original():
    scope: dict = {}
    exec("def f(a):\n    b = a + 1\n    return b\n", scope)
    code = scope["f"].__code__
    made = resume_code(decoded(code), Layout(nth(scope["f"], "STORE_FAST"), (0,), (PASSED,)))
    watcher = weakref.ref(made.code)
    del code, made
    scope.clear()
    gc.collect()
    assert watcher() is None


def test_arguments_on_the_stack_are_not_kept_alive():
    class Thing:
        pass

    def f(watcher, thing):
        thing.touch()
        return watcher() is None

    # The value is on the stack in front of POP_TOP, and must be gone afterwards.
    made = resume_code(decoded(f.__code__), Layout(nth(f, "POP_TOP"), (0,), (PASSED,)))
    resumed = types.FunctionType(made.code, globals())
    things = [Thing()]
    gone = resumed(weakref.ref(things[0]), things.pop())
    assert gone


def test_a_resumption_is_bound_once_for_the_same_globals_and_cells():
    wrapped = []

    def wrap(function):
        wrapped.append(function)
        return function

    info = decoded(example.__code__)
    made = resume_code(info, Layout(nth(example, "STORE_FAST", 0) + 1, (0, 1, 2, 3, 4, 5), ()))
    resumption = Resumption(made.code, wrap)
    for _ in range(3):
        assert resumption(example, (), 1, 2, 3, (), {}, 5) == (5, 10, (), 3, {})
    assert len(wrapped) == 1


def raising_inside_try(log):
    try:
        log.append("before")
        value = int("x" + str(len(log)))
        log.append(value)
    except ValueError as error:
        log.append(type(error).__name__)
    finally:
        log.append("finally")
    return log


def test_an_exception_of_the_eager_step_reaches_the_handler():
    expected = raising_inside_try([])
    seen = 0
    for step in range(steps(raising_inside_try, ([],))):
        tracer = tracer_for(raising_inside_try, ([],), step)
        try:
            continuation = tracer.run(lambda real, slot, name: real, cut)
        except CannotCut:
            continue
        text = "\n".join(continuation.lines)
        seen += "except BaseException" in text
        assert run(continuation, raising_inside_try) == expected
    assert seen >= 4


def test_the_users_traceback_shows_the_line():
    def f(a):
        b = abs(a)
        c = b / 0
        return c

    tracer = tracer_for(f, (1,), nth(f, "CALL"))
    continuation = tracer.run(lambda real, slot, name: real, cut)
    with pytest.raises(ZeroDivisionError) as caught:
        run(continuation, f)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert (frames[-1].name, frames[-1].lineno) == ("f", f.__code__.co_firstlineno + 2)


def test_a_branch_right_behind_the_break_needs_no_guard_on_the_scalar():
    def f(a):
        if abs(a) > 3:
            return "big", len([a])
        return "small", len([a, a])

    tracer = tracer_for(f, (5,), nth(f, "CALL"))
    continuation = tracer.run(lambda real, slot, name: real, cut)
    text = "\n".join(continuation.lines)
    # One exit per branch, and one for a result that is no scalar.
    assert sum(isinstance(value, Resumption) for value in continuation.constants.values()) == 3, text
    assert run(continuation, f) == ("big", 1)


def test_a_return_right_behind_the_break_needs_no_resume_function():
    def f(a):
        return abs(a)

    tracer = tracer_for(f, (-5,), nth(f, "CALL"))
    continuation = tracer.run(lambda real, slot, name: real, cut)
    assert not any(isinstance(value, Resumption) for value in continuation.constants.values())
    assert run(continuation, f) == 5


def test_a_handler_goes_on_with_the_exception_that_it_handles():
    def in_handlers(value):
        try:
            raise ValueError("outer")
        except ValueError:
            try:
                raise KeyError("inner")
            except KeyError:
                seen = repr(sys.exception())
                text = str(abs(value))
            return seen, text, repr(sys.exception())

    for step in range(steps(in_handlers, (-3,))):
        try:
            continuation = tracer_for(in_handlers, (-3,), step).run(lambda real, slot, name: real, cut)
        except (CannotCut, SkipFrame):
            continue
        assert run(continuation, in_handlers) == ("KeyError('inner')", "3", "ValueError('outer')")
        assert sys.exception() is None


def test_super_without_arguments_in_a_resume_function():
    class Base:
        def f(self, a):
            return "base", a

    class Derived(Base):
        def f(self, a):
            b = abs(a)
            return super().f(b)

    function = Derived.f
    arguments = (Derived(), -3)
    for step in range(steps(function, arguments)):
        tracer = tracer_for(function, arguments, step)
        try:
            continuation = tracer.run(lambda real, slot, name: real, cut)
        except CannotCut:
            continue
        assert run(continuation, function) == ("base", 3)


def test_dead_variables_are_not_live():
    def f(a, b):
        c = a + b
        d = c * 2
        return d

    live = live_slots(decoded(f.__code__))
    assert live[nth(f, "STORE_FAST", 1)] == 0
    assert live[nth(f, "STORE_FAST", 0)] == 0
    assert live[0] == 0b11


def test_what_reads_a_frame_keeps_its_variables():
    def plain(model, torch, x):
        model.eval()
        return torch.stack([x, x]).exec()

    def asks(x):
        return locals()

    def asks_inspect(x):
        return inspect.stack()

    def asks_builtins(x):
        return builtins.vars()

    def asks_frame(x):
        return x.f_back.f_locals

    assert live_slots(decoded(plain.__code__))[nth(plain, "RETURN_VALUE")] == 0
    for function in (asks, asks_inspect, asks_builtins, asks_frame):
        assert live_slots(decoded(function.__code__))[nth(function, "RETURN_VALUE")] == 1


def test_a_variable_that_a_handler_reads_is_live_in_the_block():
    def f(a):
        b = 1
        try:
            b = abs(a)
        except TypeError:
            return b
        return 0

    info = decoded(f.__code__)
    slot = info.slots.index("b")
    assert live_slots(info)[nth(f, "CALL")] >> slot & 1
