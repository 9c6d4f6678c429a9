# ruff: noqa
"""With-blocks: user managers, contextlib, PyTorch's own, nested, left by break, return and exceptions."""

from __future__ import annotations

import contextlib
import io

import torch

from tests.capture.interpret.language.support import program, x


class Scope:
    """Notes what happens to it; suppresses the exceptions of class `catches`."""

    def __init__(self, log, name="scope", catches=()):
        self.log, self.name, self.catches = log, name, catches

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.append(f"exit {self.name} {None if kind is None else kind.__name__}")
        return bool(self.catches) and kind is not None and issubclass(kind, self.catches)


@program
def user_manager():
    def f(x, log):
        with Scope(log) as s:
            y = x + len(s.name)
        return y * 2

    return f, [(x(), []), (x(), [1])]


@program
def nested_managers():
    def f(x, log):
        with Scope(log, "a") as a, Scope(log, "b"):
            with Scope(log, "c"):
                y = x + 1
        return y, a

    return f, [(x(), []), (x(), [])]


@program
def exception_is_suppressed():
    def f(x, log):
        with Scope(log, catches=(ValueError,)):
            y = x + 1
            raise ValueError("gone")
        return y * 2

    return f, [(x(), []), (x(), [])]


@program
def exception_passes_through():
    def f(x, log):
        try:
            with Scope(log, "outer"), Scope(log, "inner", (KeyError,)):
                x = x + 1
                raise ValueError("seen")
        except ValueError as error:
            log.append(str(error))
        return x

    return f, [(x(), []), (x(), [])]


@program
def exception_escapes_through_with():
    def f(x, log):
        with Scope(log):
            log.append("body")
            raise ValueError("out")

    return f, [(x(), []), (x(), [])]


@program
def return_inside():
    def f(x, log, flag):
        with Scope(log, "a"):
            if flag:
                with Scope(log, "b"):
                    return x + 1
        return x - 1

    return f, [(x(), [], True), (x(), [], False)]


@program
def break_and_continue_inside():
    def f(x, log):
        for i in range(5):
            with Scope(log, str(i)):
                if i == 1:
                    continue
                if i == 3:
                    break
                x = x + i
        return x

    return f, [(x(), []), (x(), [])]


@program
def finally_order():
    def f(x, log):
        try:
            with Scope(log):
                try:
                    return x + 1
                finally:
                    log.append("inner finally")
        finally:
            log.append("outer finally")

    return f, [(x(), []), (x(), [])]


@program
def contextmanager_function():
    @contextlib.contextmanager
    def scale(log, k):
        log.append(k)
        try:
            yield k * 2
        except KeyError:
            log.append("caught")
        finally:
            log.append(-k)

    def f(x, log):
        with scale(log, 3) as k:
            y = x * k
        with scale(log, 4):
            raise KeyError
        return y

    return f, [(x(), []), (x(), [])]


@program
def exit_stack():
    def f(x, log):
        with contextlib.ExitStack() as stack:
            names = [stack.enter_context(Scope(log, str(i))).name for i in range(3)]
            stack.callback(log.append, "callback")
            y = x + len(names)
        return y, names

    return f, [(x(), []), (x(), [])]


@program
def contextlib_helpers():
    class Thing:
        def __init__(self, log):
            self.log = log

        def close(self):
            self.log.append("closed")

    def f(x, log):
        with contextlib.suppress(ZeroDivisionError):
            x = x + 1
            1 / 0
        with contextlib.nullcontext(5) as five:
            x = x * five
        with contextlib.closing(Thing(log)) as t:
            t.log.append("open")
        return x

    return f, [(x(), []), (x(), [])]


@program
def context_decorator():
    class Noted(contextlib.ContextDecorator):
        def __init__(self, log):
            self.log = log

        def __enter__(self):
            self.log.append("in")
            return self

        def __exit__(self, *exc):
            self.log.append("out")
            return False

    log = []

    @Noted(log)
    def g(x):
        log.append("body")
        return x + 1

    def f(x):
        return g(x) * 2

    return f, [(x(),), (x(),)], lambda: log


@program
def no_grad_block():
    def f(x, w):
        with torch.no_grad():
            y = x * w
            inside = torch.is_grad_enabled()
        z = x * w
        return y, z, inside, torch.is_grad_enabled(), y.requires_grad

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3))]


@program
def enable_grad_in_no_grad():
    def f(x, w):
        with torch.no_grad():
            with torch.enable_grad():
                y = x * w
            z = x * w
        return y, z

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def set_grad_enabled_as_a_block():
    def f(x, w, on):
        with torch.set_grad_enabled(on):
            y = x * w
        return y, torch.is_grad_enabled()

    w = torch.ones(3, requires_grad=True)
    return f, [(x(), w, True), (x(), w, False), (x(), w, True)]


@program
def set_grad_enabled_as_a_function():
    def f(x, w):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = x * w
        torch.set_grad_enabled(before)
        return y, x * w

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def no_grad_decorator():
    @torch.no_grad()
    def g(x, w):
        return x * w, torch.is_grad_enabled()

    def f(x, w):
        return g(x, w), x * w

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def compiled_under_no_grad():
    @torch.no_grad()
    def f(x, w):
        return x * w

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program("inference-mode", "opaque-object")
def inference_mode_block():
    def f(x, w):
        with torch.inference_mode():
            y = x * w
        return y + 0 if False else y, y.is_inference(), torch.is_inference_mode_enabled()

    return f, [(x(), torch.ones(3)), (x(), torch.ones(3))]


@program("inference-mode", "opaque-object")
def inference_mode_off():
    def f(x, w):
        with torch.inference_mode(False):
            y = x * w
        return y + 1

    return f, [(x(), torch.ones(3)), (x(), torch.ones(3, requires_grad=True))]


@program
def autocast_block():
    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            inside = torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", enabled=False):
                z = x @ w
        return y, z, y.dtype, z.dtype, inside, torch.is_autocast_enabled("cpu")

    return f, [(x(), torch.ones(3, 2)), (x(), torch.ones(3, 2))]


@program
def default_device_block():
    def f(x):
        with torch.device("cpu"):
            y = torch.ones(3)
        return x + y, y.device

    return f, [(x(),), (x(),)]


@program
def grad_mode_and_exception():
    def f(x, w):
        try:
            with torch.no_grad():
                raise ValueError("inside")
        except ValueError:
            return x * w, torch.is_grad_enabled()

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def exception_escapes_from_no_grad():
    def f(x, w, fail):
        with torch.no_grad():
            y = x * w
            if fail:
                raise ValueError("inside")
        return y

    w = torch.ones(3, requires_grad=True)
    return f, [(x(), w, False), (x(), w, True), (x(), w, False)]


@program
def return_from_no_grad():
    def f(x, w):
        with torch.no_grad():
            return x * w

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def manager_with_state():
    class Setting:
        value = 1

        @contextlib.contextmanager
        def at(self, value):
            old, self.value = self.value, value
            try:
                yield self
            finally:
                self.value = old

    def f(x, s):
        y = x * s.value
        with s.at(5):
            y = y + s.value
        return y, s.value

    return f, [(x(), Setting()), (x(), Setting())]


@program
def no_context_manager():
    def f(x):
        try:
            with 5:
                pass
        except TypeError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program("cannot-rebuild")
def error_in_enter_and_exit():
    class Bad:
        def __init__(self, where):
            self.where = where

        def __enter__(self):
            if self.where == "enter":
                raise ValueError("enter")

        def __exit__(self, *exc):
            if self.where == "exit":
                raise KeyError("exit")

    def f(x, where):
        try:
            with Bad(where):
                x = x + 1
                if where == "exit":
                    raise RuntimeError("body")
        except (ValueError, KeyError) as error:
            return x, error
        return x * 2

    return f, [(x(), "enter"), (x(), "exit"), (x(), "none")]


@program
def with_as_unpacks():
    @contextlib.contextmanager
    def pair():
        yield 1, [2, 3]

    def f(x):
        d = {}
        with pair() as (a, [b, d["c"]]):
            return x + a + b, d

    return f, [(x(),), (x(),)]


@program("untraceable-call", "opaque-object")
def redirected_output():
    def f(x):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            y = x + 1
            print("hidden", 3)
        print("shown")
        return y, text.getvalue()

    return f, [(x(),), (x(),)]


@program
def profiler_scope():
    def f(x):
        with torch.profiler.record_function("part"):
            y = x + 1
        return y * 2

    return f, [(x(),), (x(),)]


@program
def async_with_is_left_alone():
    class A:
        async def __aenter__(self):
            return 1

        async def __aexit__(self, *exc):
            return False

    def f(x):
        try:
            with A():
                pass
        except TypeError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program("untraceable-call", "opaque-object")
def lock_is_held():
    import threading

    lock = threading.Lock()

    def f(x):
        with lock:
            y = x + 1
        return y * 2, lock.locked()

    return f, [(x(),), (x(),)]
