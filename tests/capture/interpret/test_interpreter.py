"""The interpreter against CPython, over a World that does everything natively."""

from __future__ import annotations

import types

import pytest

from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.border.native import Trampoline
from fusewright.capture.interpret.generators import InterpretedGenerator
from fusewright.capture.settings import CaptureOptions
from tests.capture.border.fake_world import FakeWorld, interpret, no_cut, tracer_for
from tests.capture.interpret.programs import PROGRAMS


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_programs_give_what_cpython_gives(function):
    assert repr(interpret(function)) == repr(function())


def run(function, *arguments, options=None):
    tracer = tracer_for(function, arguments, options=options)
    return tracer.run(lambda real, slot, name: real, no_cut).values[0]


def test_an_exception_that_escapes_skips_the_frame():
    def f():
        raise ValueError("for the user")

    with pytest.raises(SkipFrame) as caught:
        run(f)
    assert caught.value.code == "exception-escapes"
    assert "for the user" in caught.value.detail
    assert caught.value.stack[-1].line == f.__code__.co_firstlineno + 1


def breaking(value=None):
    raise GraphBreak("test-break", "on purpose")


@pytest.mark.parametrize(
    "consume",
    [
        lambda generator: list(generator()),
        lambda generator: sum(generator()),
        lambda generator: dict(zip("ab", generator())),
        lambda generator: any(generator()),
        lambda generator: sorted(generator(), key=lambda v: v),
        lambda generator: ",".join(generator()),
        lambda generator: [*generator()],
        lambda generator: dict.fromkeys(generator()),
        lambda generator: next(generator(), None),
        lambda generator: max(map(str, generator())),
    ],
)
def test_signals_pass_through_native_consumers_and_user_handlers(consume):
    def generate():
        try:
            yield breaking()
        except BaseException:
            yield "caught"
        finally:
            pass

    def f():
        try:
            return consume(generate)
        except:  # noqa: E722
            return "caught"

    tracer = tracer_for(f, ())
    tracer._call = lambda tracer, function, args, kwargs: (
        breaking() if function is breaking else call_of(tracer, function, args, kwargs)
    )
    with pytest.raises(GraphBreak) as caught:
        tracer.run(lambda real, slot, name: real, no_cut)
    assert caught.value.code == "test-break"
    assert [level.function.rsplit(".", 1)[-1] for level in caught.value.stack][-1] == "generate"


def call_of(tracer, function, args, kwargs):
    from tests.capture.border.fake_world import call

    return call(tracer, function, args, kwargs)


def test_the_stack_names_every_level_outermost_first():
    seen = []

    def inner(tracer):
        return look(tracer)

    def look(tracer):
        raise AssertionError("replaced")

    def f(tracer):
        return inner(tracer)

    tracer = tracer_for(f, ())
    tracer.locals = (tracer,)
    original = tracer._call
    tracer._call = lambda t, function, args, kwargs: (
        seen.append(t.stack()) if function is look else original(t, function, args, kwargs)
    )
    tracer.run(lambda real, slot, name: real, no_cut)
    assert [(level.function.rsplit(".", 1)[-1], level.line) for level in seen[0]] == [
        ("f", f.__code__.co_firstlineno + 1),
        ("inner", inner.__code__.co_firstlineno + 1),
    ]


def test_the_instruction_budget_ends_in_a_skip():
    def f():
        total = 0
        while True:
            total += 1

    with pytest.raises(SkipFrame) as caught:
        run(f, options=CaptureOptions(instruction_budget=10_000))
    assert caught.value.code == "instruction-budget"


def test_too_deep_recursion_is_a_break():
    def f(n):
        return f(n + 1)

    with pytest.raises(GraphBreak) as caught:
        run(f, 0, options=CaptureOptions(inline_depth=30))
    assert caught.value.code == "inline-depth"


def test_a_recursion_error_of_the_users_skips_the_frame():
    def f():
        try:
            raise RecursionError
        except RecursionError:
            return "caught"

    with pytest.raises(SkipFrame) as caught:
        run(f)
    assert caught.value.code == "recursion"


def test_a_defect_is_never_shown_to_the_user():
    def f(value):
        try:
            return value.attribute
        except Exception:
            return "caught"

    class Broken(FakeWorld):
        def getattr(self, obj, name):
            raise KeyError("a defect of World")

    tracer = tracer_for(f, (3,))
    tracer.world = Broken(tracer)
    with pytest.raises(KeyError, match="a defect"):
        tracer.run(lambda real, slot, name: real, no_cut)


def test_frames_that_are_not_functions_are_skipped():
    def generator():
        yield 1

    async def coroutine():
        return 1

    for function in (generator, coroutine):
        with pytest.raises(SkipFrame) as caught:
            run(function)
        assert caught.value.code == "frame-kind"


def test_a_generator_left_inside_a_try_skips_the_frame():
    log = []

    def generate():
        try:
            yield 1
        finally:
            log.append("closed")

    def f():
        return next(generate())

    with pytest.raises(SkipFrame) as caught:
        run(f)
    assert caught.value.code == "generator-abandoned"
    assert log == []


def test_a_generator_that_would_be_closed_by_another_skips_the_frame():
    log = []

    def generate():
        try:
            yield 1
        finally:
            log.append("closed")

    def delegate(inner):
        yield from inner

    def f():
        inner = generate()
        found = [next(delegate(inner))]
        inner = None
        return found

    for _ in range(8):  # in which order they are closed depends on where they lie
        with pytest.raises(SkipFrame) as caught:
            run(f)
        assert caught.value.code == "generator-abandoned"
        assert log == []


@pytest.mark.parametrize(
    "use",
    [list, next, lambda inner: inner.send(None), lambda inner: inner.throw(ValueError), lambda inner: [*zip(inner)]],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_closed_by_another_is_used_and_dropped(use, depth):
    """The other generator died when `next` had returned, and closed it: CPython's `use` finds it so."""

    def generate(step):
        yield step
        yield step + 1

    def delegate(inner, depth):
        yield from delegate(inner, depth - 1) if depth > 1 else inner

    def f():
        inner = generate(1)
        found = [next(delegate(inner, depth))]
        try:
            found.append(use(inner))
        except (StopIteration, ValueError):
            found.append("ended")
        inner = None
        return found

    with pytest.raises(SkipFrame) as caught:
        run(f)
    assert caught.value.code == "generator-abandoned"


def test_a_generator_that_lives_may_go_on_where_others_used_what_it_delegates_to():
    def generate(step):
        while step < 9:
            try:
                yield step
            except ValueError:
                yield -step
            step += 1

    def delegate(inner):
        yield from inner

    def f():
        inner = generate(1)
        outer = delegate(inner)
        return [next(outer), next(inner), outer.throw(ValueError), *outer]

    assert run(f) == f()


def test_a_generator_left_inside_a_try_whose_handler_does_nothing_is_closed():
    def generate(values):
        while True:
            try:
                yield next(values)
            except StopIteration:
                return

    def f():
        return next(generate(iter([1, 2])))

    assert run(f) == 1


def test_a_generator_whose_handler_only_stores_skips_the_frame():
    def f():
        closed = False

        def generate():
            nonlocal closed
            try:
                yield 1
            finally:
                closed = True

        next(generate())
        return closed

    assert f() is True
    with pytest.raises(SkipFrame):
        run(f)


def test_a_generator_left_elsewhere_is_harmless():
    def generate():
        yield 1
        yield 2

    def f():
        return next(generate())

    assert run(f) == 1


def test_a_stubborn_generator():
    def stubborn():
        while True:
            try:
                yield 1
            except GeneratorExit:
                pass

    tracer = tracer_for(lambda: None, ())
    generator = tracer.inline(stubborn)
    next(generator)
    with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
        generator.close()


def test_an_interpreted_generator_looks_like_one():
    def generate():
        yield 1

    tracer = tracer_for(lambda: None, ())
    generator = tracer.inline(generate)
    assert type(generator) is InterpretedGenerator
    assert isinstance(generator, types.GeneratorType)
    assert iter(generator) is generator


def test_reentering_a_running_generator_is_an_error():
    def generate(box):
        yield next(box[0])

    tracer = tracer_for(lambda: None, ())
    box = []
    box.append(tracer.inline(generate, (box,)))
    with pytest.raises(ValueError, match="already executing"):
        next(box[0])


def test_arguments_that_are_never_read_are_not_loaded():
    loaded = []

    def f(a, unused, b, *args, **kwargs):
        unused = a
        return unused, b

    def load(real, slot, name):
        loaded.append((slot, name))
        return real

    tracer = tracer_for(f, (1, 2, 3, (), {}))
    assert tracer.run(load, no_cut).values[0] == (1, 3)
    assert loaded == [(0, "a"), (2, "b")]


def test_locals_loads_every_argument():
    def f(a, b):
        return locals()

    assert run(f, 1, 2) == {"a": 1, "b": 2}


@pytest.mark.parametrize("source", ["eval('a')", "exec('b = 1')"])
def test_calls_that_read_the_frame_are_skipped_in_the_root_and_break_below(source):
    scope: dict = {}
    exec(f"def f(a):\n    return {source}\ndef g(a):\n    return f(a)\n", scope)
    with pytest.raises(SkipFrame):
        run(scope["f"], 1)
    with pytest.raises(GraphBreak):
        run(scope["g"], 1)


def test_classes_whose_creation_runs_python_code_break():
    class Registry(type):
        pass

    class Hooked:
        def __init_subclass__(cls):
            super().__init_subclass__()

    class Named:
        def __set_name__(self, owner, name):
            self.name = name

    def with_metaclass():
        class A(metaclass=Registry):
            pass

    def with_base():
        class A(Hooked):
            pass

    def with_descriptor():
        class A:
            field = Named()

    for function in (with_metaclass, with_base, with_descriptor):
        with pytest.raises(GraphBreak) as caught:
            run(function)
        assert caught.value.code == "class-creation"


def test_exceptions_raised_in_except_star_clauses_are_skipped():
    def f():
        try:
            raise ExceptionGroup("g", [ValueError()])
        except* ValueError:
            raise KeyError from None

    with pytest.raises(SkipFrame) as caught:
        run(f)
    assert caught.value.code == "unsupported-instruction"


def test_user_exceptions_keep_their_cause_through_native_consumers():
    def generate():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error
        yield 1

    def f():
        try:
            list(generate())
        except ValueError as error:
            return repr(error.__cause__), error.__suppress_context__

    assert run(f) == ("KeyError('inner')", True)


def test_a_raising_operation_is_the_users():
    world = tracer_for(lambda: None, ()).world
    with pytest.raises(UserException) as caught:
        world.getitem([], 0)
    assert isinstance(caught.value.exception, IndexError)


def test_a_trampoline_keeps_the_cause_of_an_exception():
    def key(value):
        raise ValueError("outer") from KeyError("inner")

    trampoline = Trampoline(tracer_for(lambda: None, ()), key)
    with pytest.raises(ValueError) as caught:
        trampoline(1)
    assert isinstance(caught.value.__cause__, KeyError)
