"""Option `background`: eager until the compiled version is ready, and the same results, exceptions and side effects all along."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import _native
from fusewright.background import WORKER, Worker
from fusewright.base.errors import BackendError, InternalErrorWarning
from fusewright.process import PROCESS

ROOT = Path(__file__).parents[1]


def background(function: Callable[..., Any], **options: Any) -> Any:
    return fusewright.compile(function, options={"background": True}, **options)


def test_the_compiled_version_takes_over() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    x = torch.randn(20, 30)
    expected = f(x)
    torch.testing.assert_close(compiled(x), expected)
    assert WORKER.wait(60)
    assert len(compiled.entries) == 1 and compiled.entries[0].calls == 0
    torch.testing.assert_close(compiled(x), expected)
    assert compiled.entries[0].calls == 1


def test_calls_meanwhile_do_not_compile_again() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    x = torch.randn(20, 30)
    for _ in range(50):
        torch.testing.assert_close(compiled(x), f(x))
    assert WORKER.wait(60)
    assert len(compiled.entries) == 1


class Contended:
    """A lock that another thread takes as soon as it is free, until it is asked to end. A `with` statement, which must
    not come where calls do not wait, would wait for that thread."""

    def __init__(self) -> None:
        self.lock, self.ended, self.holders = threading.RLock(), threading.Event(), list[threading.Thread]()
        self.acquire = self.lock.acquire

    def hold(self, taken: threading.Event) -> None:
        with self.lock:
            taken.set()
            self.ended.wait(60)

    def release(self) -> None:
        self.lock.release()
        if not self.holders:
            taken = threading.Event()
            self.holders.append(threading.Thread(target=self.hold, args=(taken,)))
            self.holders[0].start()
            taken.wait(60)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_call_waits_for_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled, x, lock = background(f), torch.randn(20, 30), Contended()
    monkeypatch.setattr(PROCESS, "lock", lock)
    try:
        for _ in range(3):  # the second finds the lock taken
            started = time.monotonic()
            torch.testing.assert_close(compiled(x), f(x))
            assert time.monotonic() - started < 50 and lock.holders and not lock.ended.is_set()
        torch.testing.assert_close(background(f)(x), f(x))
    finally:
        lock.ended.set()
        assert WORKER.wait(60)
    lock.holders[0].join(60)
    torch.testing.assert_close(compiled(x), f(x))
    assert len(compiled.entries) == 1


def test_what_is_called_while_a_lock_is_held() -> None:
    lock = threading.Lock()
    with lock:
        assert _native.call_if_free(lock, pytest.fail, "called") is None
    assert _native.call_if_free(lock, lambda *given: (given, lock.locked()), 1, 2) == ((1, 2), True)
    with pytest.raises(ZeroDivisionError):
        _native.call_if_free(lock, lambda: 1 // 0)
    assert not lock.locked()


def test_other_sizes_become_dynamic_as_ever() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    compiled = background(f)
    for n in (5, 6, 7, 8, 9, 10):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), f(x))
        assert WORKER.wait(60)
    assert len(compiled.entries) == 2


@pytest.mark.parametrize("grad", [False, True])
def test_gradients(grad: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    compiled = background(net)
    x = torch.randn(5, 8)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            result = compiled(x)
            torch.testing.assert_close(result, net(x))
            assert result.requires_grad == grad
            assert WORKER.wait(60)


def test_autocast_of_the_caller() -> None:
    net = nn.Linear(8, 16)
    compiled = background(net)
    x = torch.randn(5, 8)
    for _ in range(2):
        for enabled in (True, False):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                got = compiled(x)
                assert got.dtype == (torch.bfloat16 if enabled else torch.float32)
                torch.testing.assert_close(got, net(x))
            assert WORKER.wait(60)


def test_exceptions_and_side_effects() -> None:
    log: list[int] = []

    def f(x: torch.Tensor, fail: bool) -> torch.Tensor:
        log.append(len(log))
        if fail:
            raise ValueError("asked for")
        return x + len(log)

    compiled = background(f)
    for turn in range(4):
        torch.testing.assert_close(compiled(torch.ones(3), False), torch.ones(3) + len(log))
        with pytest.raises(ValueError, match="asked for"):
            compiled(torch.ones(3), True)
        assert WORKER.wait(60)
        assert log == list(range(2 * turn + 2))


def test_a_backend_that_fails_is_told_at_the_next_call() -> None:
    def broken(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    compiled = fusewright.compile(lambda x: x.sin(), backend=broken)
    with pytest.raises(BackendError, match="no such kernel"):
        compiled(torch.ones(3))


def test_a_defect_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.backends import native

    def fail(to_compile: Any) -> Any:
        raise AssertionError("a defect")

    compiled = background(lambda x: x.sin())
    monkeypatch.setattr(type(native.BACKEND), "compile", property(lambda self: fail), raising=False)
    with pytest.warns(InternalErrorWarning, match="a defect"):
        compiled(torch.ones(3))
        assert WORKER.wait(60)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())


def test_a_reset_drops_what_is_under_way() -> None:
    compiled = background(lambda x: x.sin() * 3)
    compiled(torch.ones(3))
    fusewright.reset()
    assert WORKER.wait(60)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() * 3)
    assert WORKER.wait(60)


def test_from_several_threads() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1)

    compiled = background(f)
    wrong: list[Exception] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                x = torch.randn(n, 7)
                torch.testing.assert_close(compiled(x), f(x))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (4, 5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert WORKER.wait(60) and not wrong


def test_random_numbers_are_the_callers() -> None:
    """The compiler, on its thread, draws none of them."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + torch.randn(4)

    compiled = fusewright.compile(f, options={"background": True, "fallback_random": True})
    torch.manual_seed(5)
    got = []
    for turn in range(5):
        got += [compiled(torch.ones(4)), torch.rand(2)]
        assert turn == 0 or WORKER.wait(60)
    torch.manual_seed(5)
    expected = [part for _ in range(5) for part in (f(torch.ones(4)), torch.rand(2))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@torch.no_grad()
def test_weights_that_change_while_they_are_prepared() -> None:
    for width in range(64, 68):
        net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8)).eval()
        compiled = background(net)
        x = torch.randn(5, 64)
        compiled(x)
        while not WORKER.wait(0):
            net[0].weight.neg_()
            net[2].bias.neg_()
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x))
            net[0].weight.mul_(1.5)


def test_a_module_that_is_deleted_while_it_is_compiled() -> None:
    deleted = []
    for _ in range(5):
        net = nn.Linear(3, 3)
        x = torch.ones(2, 3)
        background(net)(x)
        deleted += [weakref.ref(net), weakref.ref(x)]
        del net, x
    assert WORKER.wait(60)
    for _ in range(50):  # what is done is noted before the thread's own frames let go of it
        gc.collect()
        if not any(found() is not None for found in deleted):
            break
        time.sleep(0.1)
    assert [found() for found in deleted] == [None] * 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_while_something_is_compiled() -> None:
    """The child has no compiling thread: it starts its own, and does not wait for what the parent's thread holds."""

    def check(function: Callable[..., Any], compiled: Any) -> None:
        torch.testing.assert_close(compiled(torch.ones(3)), function(torch.ones(3)))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 7

    def g(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 7

    compiled = background(f)
    compiled(torch.ones(3))
    child = os.fork()
    if not child:
        status = 1
        try:
            other = background(g)
            for function, made in ((f, compiled), (g, other)):
                check(function, made)
                assert WORKER.wait(300) and len(made.entries) == 1
                check(function, made)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 600
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0
    assert WORKER.wait(60) and len(compiled.entries) == 1
    check(f, compiled)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("os._exit(4)", 4)])
def test_a_process_that_ends_while_something_is_compiled(end: str, status: int) -> None:
    program = """
        import os, sys, torch, fusewright
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 32 + i), torch.nn.GELU(), torch.nn.Linear(32 + i, 32)) for i in range(6)]
        fusewright.compile(torch.nn.Sequential(*layers), options={"background": True})(torch.randn(2, 32))
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", textwrap.dedent(program) + end]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status and "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr


INTERRUPTED = """
    import os, signal, sys, threading, time
    import torch, fusewright
    from fusewright.backends import native

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background with it ignored
    begun = threading.Event()

    def slow(to_compile):
        begun.set()
        for _ in range(6000):  # a minute: nobody waits for it
            exec("time.sleep(0.01)")  # importing a dataclass does that: CPython then forgets that an interrupt ends the process

    def f(x):
        return x.sin() * 2

    type(native.BACKEND).compile = property(lambda self: slow)
    compiled = fusewright.compile(f, options={"background": True})
    compiled(torch.ones(3))
    assert begun.wait(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("end", ["uncaught", "caught", "at the end"])
@pytest.mark.parametrize("as_module", [False, True])
def test_an_interrupt_while_something_is_compiled(end: str, as_module: bool, tmp_path: Path) -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"
    if end == "caught":  # the program goes on, and so does the compile, until another one
        interrupt = f"try: {interrupt}\nexcept KeyboardInterrupt: print('caught', flush=True)\nos.kill(os.getpid(), signal.SIGINT); compiled(torch.ones(3))"
    elif end == "at the end":
        interrupt = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start(); print('ends', flush=True)"
    (tmp_path / "interrupted_program.py").write_text(textwrap.dedent(INTERRUPTED) + interrupt)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    where = ["-m", "interrupted_program"] if as_module else [str(tmp_path / "interrupted_program.py")]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, *where], env=environment, capture_output=True, text=True, timeout=600)
    assert time.monotonic() - begun < 50
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stdout.split() == {"uncaught": [], "caught": ["caught"], "at the end": ["ends"]}[end]
    expected = 0 if end == "at the end" else 1
    assert done.stderr.count("Traceback") == done.stderr.count("KeyboardInterrupt") == expected, done.stderr
    assert "Exception ignored" not in done.stderr and "Abandoned" not in done.stderr, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_that_is_handled_leaves_the_compile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.backends import native

    begun, go_on = threading.Event(), threading.Event()
    compile_graph = native.BACKEND.compile

    def slow(to_compile: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return compile_graph(to_compile)

    monkeypatch.setattr(type(native.BACKEND), "compile", property(lambda self: slow), raising=False)
    compiled = background(lambda x: x.sin() * 2)
    x = torch.ones(3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        compiled(x)
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)
        go_on.set()
    assert WORKER.wait(60) and len(compiled.entries) == 1
    torch.testing.assert_close(compiled(x), x.sin() * 2)


def test_a_thread_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = Worker(), []
    with monkeypatch.context() as patched:
        patched.setattr(
            threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="new thread"):
            worker.submit(lambda: done.append(1))
    assert worker.wait(0)
    worker.submit(lambda: done.append(2))
    assert worker.wait(60) and done == [2]
