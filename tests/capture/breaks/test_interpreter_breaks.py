"""Capturing real frames: graph breaks, the restart, and the chain of resume functions, with the recorded graphs run eagerly."""

from __future__ import annotations

import contextlib
import io
import types
import warnings
import zlib

import pytest
import torch

import fusewright
from fusewright.base.signals import GraphBreak, SkipFrame
from fusewright.capture.attempt import capture_frame
from fusewright.capture.border.arguments import bind
from fusewright.capture.settings import CaptureOptions


class Compiled:
    """Captures a function and each of its resume functions at every call; `frames` are the captures in order, `skips` what ran eagerly."""

    def __init__(self, function, frames=None, skips=None):
        self.function = function
        self.frames = [] if frames is None else frames
        self.skips = [] if skips is None else skips

    def __call__(self, *args, **kwargs):
        values = tuple(bind(self.function, args, kwargs, default))
        options = CaptureOptions(wrap_resume=lambda function: Compiled(function, self.frames, self.skips))
        try:
            frame = capture_frame(self.function, values, options)
        except SkipFrame as skip:
            self.skips.append(skip)
            return self.function(*args, **kwargs)
        self.frames.append(frame)
        outputs = ()
        if frame.graph is not None:
            root = torch.nn.Module()
            for name, value in frame.constants.items():
                setattr(root, name, value)
            outputs = torch.fx.GraphModule(root, frame.graph)(*frame.example_inputs)
        return outputs[0] if frame.finish is None else frame.finish(outputs, self.function, *values)

    @property
    def codes(self):
        return [item.code for frame in self.frames for item in frame.breaks]


def default(function, key):
    return function.__defaults__[key] if isinstance(key, int) else function.__kwdefaults__[key]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(function, *args, breaks, skips=()):
    """Compiled equals eager, output to stdout included; gives the Compiled."""
    said, says = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said):
        expected = function(*args)
    compiled = Compiled(function)
    with contextlib.redirect_stdout(says):
        result = compiled(*args)
    assert same(expected, result), (expected, result)
    assert said.getvalue() == says.getvalue()
    assert compiled.codes == list(breaks)
    assert [skip.code for skip in compiled.skips] == list(skips)
    return compiled


SCALAR, BRANCH = "data-dependent-scalar", "data-dependent-branch"
x = torch.arange(6.0).reshape(2, 3) + 1


def test_no_break():
    def f(x):
        return (x + 1).relu() * 2

    compiled = check(f, x, breaks=())
    assert len(compiled.frames) == 1
    assert compiled.frames[0].op_count == 3


def test_a_break_between_two_graphs():
    def f(x):
        y = x * 2
        z = y + y.sum().item()
        return z.relu()

    compiled = check(f, x, breaks=[SCALAR])
    assert [frame.op_count for frame in compiled.frames] == [2, 2]
    (item,) = compiled.frames[0].breaks
    assert (item.stack[-1].file, item.stack[-1].line) == (__file__, f.__code__.co_firstlineno + 2)


def test_a_break_in_the_middle_of_an_expression_keeps_the_stack():
    def f(x):
        return torch.stack([x + 1, x * x.max().item(), x - 1]).sum(0) + len([x.sum().item(), 2])

    check(f, x, breaks=[SCALAR, SCALAR])


def test_a_data_dependent_branch_compiles_both_sides_as_they_come():
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    for argument in (x, -x):
        compiled = check(f, argument, breaks=[BRANCH])
        assert len(compiled.frames) == 2


def test_a_scalar_condition_needs_no_argument():
    def f(x):
        if x.mean().item() > 0:
            return x + 1
        return x - 1

    compiled = check(f, x, breaks=[SCALAR])
    assert "if type(" in compiled.frames[0].finish_text
    resumed = compiled.frames[1:]
    assert len(resumed) == 1
    assert not any(guard.kind == "EQUALS" for guard in resumed[0].guards)


def needs_no_value(compiled):
    """No resume function is guarded on the value of a number."""
    return not any(
        guard.kind == "EQUALS" and type(guard.value) in (float, int)
        for frame in compiled.frames[1:]
        for guard in frame.guards
    )


def test_a_scalar_that_is_only_printed_formatted_or_stored_is_no_argument():
    class Log:
        last = 0.0

    log = Log()
    history = []

    def f(x, log, history):
        y = x * 2
        value = y.sum().item()
        print(f"sum {value:.3f} and {value!r}", round(value, 2), "end")
        log.last = value
        history.append(value + 1)
        return y.relu()

    compiled = check(f, x, log, history, breaks=[SCALAR])
    assert needs_no_value(compiled)
    assert log.last == 42.0
    assert history == [43.0, 43.0]


def test_an_unused_scalar_is_no_argument():
    def f(x):
        y = x * 2
        y.sum().item()
        unused = y.max().item()  # noqa: F841
        return y.relu()

    assert needs_no_value(check(f, x, breaks=[SCALAR, SCALAR]))


def test_a_result_that_is_no_scalar_goes_on_by_the_other_path():
    class Answers:
        def __gt__(self, other):
            return True

    def opaque(x):
        return Answers()

    opaque._fusewright_disable = True

    def f(x):
        y = x * 2
        if opaque(y) > 0:
            return y + 1
        return y - 1

    compiled = check(f, x, breaks=["disabled-function"])
    assert "if type(" in compiled.frames[0].finish_text


def test_boolean_operators_as_values():
    def f(x):
        y = (x.sum() > 100) or x
        return y * 2

    check(f, x, breaks=[BRANCH])
    check(f, x * 100, breaks=[BRANCH])


def test_print_of_tensors_with_keywords():
    def f(x):
        y = x + 1
        print(y.sum().item(), "and", y.shape, sep="|", end="!\n")
        return y * 2

    check(f, x, breaks=[SCALAR])


def test_star_arguments():
    def f(x):
        args = (b"text",)
        kwargs = {"level": 1}
        y = x * 2
        return y + len(zlib.compress(*args, **kwargs))

    compiled = check(f, x, breaks=["untraceable-call"])
    assert len(compiled.frames) == 2


def codes_of(function):
    """The codes of the breaks of a call whose codes are not the point of the test."""
    compiled = Compiled(function)
    with contextlib.redirect_stdout(io.StringIO()):
        compiled(x)
    assert compiled.codes
    return compiled.codes


def test_many_breaks_are_a_chain():
    def f(x):
        a = x.sum().item()
        b = (x * 2).max().item()
        c = (x * 3).min().item()
        return x * a + b * c

    compiled = check(f, x, breaks=[SCALAR] * 3)
    assert len(compiled.frames) == 4


def test_a_break_inside_an_inlined_function_is_one_at_its_call():
    def inner(y):
        return y * y.sum().item()

    def f(x):
        return inner(x + 1) * 2

    compiled = check(f, x, breaks=[SCALAR])
    assert [level.function.rsplit(".", 1)[-1] for level in compiled.frames[0].breaks[0].stack] == ["f", "inner"]


def test_closures_and_cells():
    def f(x):
        count = 2

        def inner(a):
            nonlocal count
            count += 1
            return a * count

        y = inner(x)
        y.sum().item()
        z = inner(y)
        y.sum().item()
        return z, inner(z), count

    check(f, x, breaks=[SCALAR, SCALAR])


def test_free_variables():
    weight = torch.ones(3) * 3
    calls = 0

    def f(x):
        nonlocal calls
        y = x * weight
        y.sum().item()
        calls += 1
        return y + weight

    check(f, x, breaks=[SCALAR])
    assert calls == 2


def test_mutation_of_arguments_before_and_after():
    def f(values, x):
        values.append(x + 1)
        x.sum().item()
        values.append(values[0] * 2)
        return len(values)

    one, other = [], []
    expected = f(one, x)
    compiled = Compiled(f)
    assert compiled(other, x) == expected
    assert same(one, other)


def test_an_exception_at_the_break_goes_to_the_handler():
    def f(x):
        log = []
        y = x * 2
        try:
            value = int("not a number" + str(y.sum().item()))
        except ValueError:
            log.append("caught")
            value = 3
        finally:
            log.append("finally")
        return y * value, log

    compiled = check(f, x, breaks=codes_of(f))
    assert compiled.skips == []


def test_an_exception_at_a_break_that_nobody_handles_is_the_users():
    def f(x):
        y = x * 2
        int("no" + str(y.sum().item()))
        return y

    with pytest.raises(ValueError, match="invalid literal"):
        Compiled(f)(x)


def test_inside_no_grad():
    parameter = torch.ones(3)

    def f(x):
        with torch.no_grad():
            y = x * parameter
            y.sum().item()
            z = y * parameter
        return z, x * parameter, torch.is_grad_enabled()

    compiled = check(f, x, breaks=[SCALAR])
    assert compiled.skips == []
    assert torch.is_grad_enabled()


def test_an_exception_inside_no_grad_restores_the_mode():
    def f(x):
        try:
            with torch.no_grad():
                y = x * 2
                int("no" + str(y.sum().item()))
        except ValueError:
            pass
        return x + 1, torch.is_grad_enabled()

    check(f, x, breaks=codes_of(f))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        if y.sum() > 1e9:
            y = y * 2
        return y.relu()


class Derived(Layer):
    def forward(self, x):
        scale = x.abs().max().item()
        return super().forward(x) * scale


def test_modules_super_and_attributes():
    for module in (Layer(), Derived()):
        expected = module(x)
        assert module.calls == 1
        compiled = Compiled(type(module).forward)
        assert torch.equal(compiled(module, x), expected)
        assert module.calls == 2
        assert compiled.codes[0] in (SCALAR, BRANCH)


def test_breaks_in_a_loop_are_cut_at_each_iteration():
    def f(x):
        for _ in range(3):
            x = x * 2
            x.sum().item()
        return x

    check(f, x, breaks=[SCALAR, "loop-goes-on"] + [SCALAR, "loop-goes-on"] * 2)


def test_many_iterations_do_not_nest():
    def f(x, n):
        while n > 0:
            x = x + 1
            if x.sum() < 0:
                return x
            n -= 1
        return x

    compiled = fusewright.compile(f, backend="eager", recompile_limit=2000)
    assert torch.equal(compiled(x, 700), x + 700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a limit that is reached inside a loop is no news
        assert torch.equal(fusewright.compile(f, backend="eager")(x, 700), x + 700)


def test_a_loop_without_tensors_runs_eagerly():
    def opaque(i):
        return i + 1

    opaque._fusewright_disable = True

    def f(x):
        total = 0
        for i in range(3):
            total += opaque(i)
        return x + total

    check(f, x, breaks=(), skips=["disabled-function"])


def test_a_break_behind_a_loop_is_cut():
    def f(x):
        for step in range(3):
            x = x * step + 1
        x.sum().item()
        for step in range(2):
            x = x + step
        return x

    check(f, x, breaks=[SCALAR])


def test_a_break_in_a_handler():
    def f(x):
        try:
            raise ValueError
        except ValueError:
            return x * x.sum().item()

    check(f, x, breaks=[SCALAR])


def test_a_frame_with_nothing_to_capture_is_skipped():
    def f(x):
        return x.item()

    check(f, torch.tensor(2.0), breaks=(), skips=[SCALAR])


def test_fullgraph_raises_the_first_break():
    def f(x):
        return x * x.sum().item()

    with pytest.raises(GraphBreak) as caught:
        capture_frame(f, (x,), CaptureOptions(fullgraph=True))
    assert caught.value.code == SCALAR
    assert caught.value.stack[-1].line == f.__code__.co_firstlineno + 1


def test_an_escaping_exception_skips():
    def f(x):
        raise ValueError(f"shape {x.shape}")

    with pytest.raises(ValueError, match="shape"):
        Compiled(f)(x)


def test_generators_and_native_consumers_in_a_graph():
    def halves(x, count):
        for step in range(count):
            yield x / (step + 1)

    def f(x):
        total = sum(halves(x, 3))
        pairs = dict(zip("ab", halves(x, 2)))
        return total + pairs["b"], [v.shape for v in halves(x, 1)]

    compiled = check(f, x, breaks=())
    assert compiled.frames[0].op_count > 6


def test_the_same_break_reuses_the_resume_code():
    def f(x):
        y = x * 2
        y.sum().item()
        return y + 1

    def resumed(frame):
        return next(v.code for v in frame.finish.__globals__.values() if type(v).__name__ == "Resumption")

    one = capture_frame(f, (x,), CaptureOptions())
    other = capture_frame(f, (torch.ones(4, 4),), CaptureOptions())
    assert resumed(one) is resumed(other)


def test_class_creation_is_a_break_that_runs():
    class Meta(type):
        pass

    def f(x):
        y = x + 1

        class Local(metaclass=Meta):
            size = 3

        return y * Local.size

    check(f, x, breaks=["class-creation"])


def test_a_resumed_frame_shows_the_users_lines():
    def f(x):
        y = x * 2
        y.sum().item()
        raise ValueError("after the break")

    with pytest.raises(ValueError) as caught:
        Compiled(f)(x)
    traceback = caught.value.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code.co_name == "f"
    assert traceback.tb_lineno == f.__code__.co_firstlineno + 3
    assert isinstance(traceback, types.TracebackType)
