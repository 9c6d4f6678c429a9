"""What goes wrong inside of the compiler never reaches the program: each stage is made to fail, with every kind of failure."""

from __future__ import annotations

import ctypes
import dis
import errno
import importlib
import inspect
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import graph_cache
from fusewright.background import WORKER
from fusewright.base import signals
from fusewright.base.errors import (
    CacheWarning,
    CannotFunctionalise,
    FusewrightError,
    InternalErrorWarning,
    RuntimeFallback,
)
from fusewright.base.events import STREAM, Captured, Compiled, Event, InternalError, Skipped
from fusewright.codegen.device_kernel import Processor
from fusewright.codegen.llvm import module as llvm_module
from fusewright.runtime import cuda_code
from fusewright.tools import debug_folder

FAILURES: tuple[Callable[[], BaseException], ...] = (
    lambda: signals.GraphBreak("operator-failed", "injected"),
    lambda: signals.SkipFrame("recursion", "injected"),
    lambda: signals.UserException(ValueError("injected")),
    signals.Retry,
    lambda: AttributeError("injected"),
    lambda: StopIteration("injected"),
    lambda: RuntimeError("injected"),
    lambda: RuntimeFallback("injected"),
    lambda: CannotFunctionalise("injected"),
    lambda: RecursionError("injected"),
    lambda: MemoryError("injected"),
)

# Where one stage calls the next.
STAGES = (
    "compiler:capture_frame", "compiler:build_program", "compiler:plain_sources", "generalise.serve:is_general",
    "generalise.serve:serves",
    "generalise.serve:widened", "compiler:_parameters", "compiler:Compiler._entry",
    "generalise.serve:_taken_larger", "compiler:serve", "compiler:Compiler._compile", "compiler:Compiler._finish",
    "frame_policy:_is_collector_callback",
    "capture.attempt:check_history", "capture.attempt:_Attempt.run", "capture.attempt:_Attempt._captured",
    "capture.attempt:_Attempt._cut", "capture.attempt:check_marks", "capture.call.dispatch:call", "capture.breaks.finish:build",
    "capture.breaks.cutting:cut", "capture.border.world:World.load", "capture.border.world:World.load_global", "capture.border.world:World.guards",
    "capture.border.world:World.close", "capture.border.world:World.forget", "capture.border.world:World.binary", "capture.border.world:World.torch_call",
    "capture.interpret.interpreter:Tracer.run", "record.recorder:Recorder.call", "record.recorder:Recorder.dispatch", "record.recorder:Recorder.finish",
    "graph.passes:run", "compiler:record_backward", "backends.native:_mark_parameters",
    "backends.native:_stages", "backends.native:_generate", "backends.native:_compile_half", "backends.graph_cache:find",
    "backends.graph_cache:load_plan", "backends.graph_cache:save", "backends.joint:compile_joint", "schedule.driver:build_kernel",
)  # fmt: skip


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def program(x: torch.Tensor, log: list[int]) -> torch.Tensor:
    y = (x * 2).relu()
    log.append(len(log))
    fusewright.graph_break()
    for _ in range(2):
        y = scale(y) + x.sum()
    return y


CALLS = [
    lambda: torch.arange(6.0).reshape(2, 3) - 2,
    lambda: torch.arange(9.0).reshape(3, 3) - 2,
    lambda: torch.ones(1, 3, requires_grad=True),
]


def observe(function: Any) -> list[Any]:
    found: list[Any] = []
    for make in CALLS * 2:
        x, log = make(), [7]
        y = function(x, log)
        if y.requires_grad:
            y.sum().backward()
        found.append((y.detach(), log, x.grad))
    return found


def place(path: str) -> tuple[Any, str]:
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(f"fusewright.{module}")
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, path: str, failure: Callable[[], BaseException], always: bool = True
) -> Iterator[None]:
    owner, name = place(path)
    raised = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        raised.append(failure())
        raise raised[-1]

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield
    assert raised or not always, f"{path} is not part of the way"


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return observe(program)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure()).__name__)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("path", STAGES)
def test_a_stage_that_fails_leaves_eager_results(
    path: str,
    background: bool,
    failure: Callable[[], BaseException],
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings(), failing(monkeypatch, path, failure, not background):
        warnings.simplefilter("ignore", InternalErrorWarning)
        compiled = fusewright.compile(program, options={"background": background})
        found = observe(compiled)
        assert WORKER.wait(60)
        found_after = observe(compiled)
    with warnings.catch_warnings():
        if background:  # a call that met a busy worker compiles now, by what the compiler took along when it was made
            warnings.simplefilter("ignore", InternalErrorWarning)
        again = observe(compiled)
    for results in (found, found_after, again):
        torch.testing.assert_close(results, expected)


@contextmanager
def heard() -> Iterator[list[Event]]:
    found: list[Event] = []
    with STREAM.listening(found.append):
        yield found


@pytest.mark.parametrize("path", STAGES)
def test_an_interrupt_is_the_users(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt, SystemExit):
        fusewright.reset()
        with failing(monkeypatch, path, error), pytest.raises(error):
            observe(fusewright.compile(program))
    torch.testing.assert_close(observe(fusewright.compile(program)), observe(program))


def test_a_defect_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    debug_folder.of_process.cache_clear()
    compiled = fusewright.compile(lambda x: x + 1, options={"trace.enabled": True})
    with failing(monkeypatch, "capture.border.world:World.binary", lambda: KeyError("injected")), heard() as events:
        with pytest.warns(InternalErrorWarning, match="internal error in its capture: KeyError: 'injected'") as told:
            compiled(torch.ones(3))
        assert told[0].filename == __file__
    assert [event.stage for event in events if isinstance(event, InternalError)] == ["capture"]
    (file,) = tmp_path.rglob("*_internal_error.txt")
    assert "KeyError" in file.read_text()
    debug_folder.of_process.cache_clear()
    with (
        failing(monkeypatch, "capture.border.world:World.binary", lambda: KeyError("injected")),
        pytest.raises(FusewrightError, match="injected"),
    ):
        fusewright.compile(lambda x: x + 1, fullgraph=True)(torch.ones(3))


def twice(one: int) -> int:
    return one * 2


class One:
    def __getitem__(self, index: int) -> int:
        return (2, 4)[index]


@pytest.mark.parametrize("iterator", [lambda: map(twice, [1, 2]), lambda: filter(twice, [2, 4]), lambda: iter(One())])
def test_a_defect_in_what_native_code_calls_is_no_exception_of_the_programs(iterator: Callable[[], Any]) -> None:
    def program(x: torch.Tensor) -> Any:
        try:
            return x + sum(iterator())
        except TypeError:
            return None

    expected = program(torch.ones(2))
    with pytest.MonkeyPatch.context() as patch, failing(patch, "capture.interpret.interpreter:Tracer.inline", lambda: TypeError("in")):
        with pytest.warns(InternalErrorWarning, match="TypeError: in"):
            assert torch.equal(fusewright.compile(program, backend="eager")(torch.ones(2)), expected)


def test_a_subscriber_that_fails_stops_nobody() -> None:
    def full(event: Event) -> None:
        raise OSError("no space left")

    compiled = fusewright.compile(lambda x: x + 1)
    with STREAM.listening(full), pytest.warns(InternalErrorWarning, match="no space left"):
        torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_memory_that_is_short_once_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = fusewright.compile(lambda x: x + 1)
    for path in ("capture.border.world:World.binary", "compiler:Compiler._entry"):
        with failing(monkeypatch, path, MemoryError):
            with heard() as events:
                torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
            assert not any(isinstance(event, InternalError) for event in events)
    with heard() as events:
        compiled(torch.ones(3))
    assert any(isinstance(event, Captured) for event in events)


def test_a_gpu_without_room_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver finds no memory for one of two kernels, also without what PyTorch keeps for later: the call runs eagerly. Where that is
    enough, it is compiled."""
    room, loaded = ["none"], []

    def cuda_load(code: bytes, name: str, shared: int) -> tuple[int, int, int]:
        if room[0] != "free" and name == "second":
            raise torch.OutOfMemoryError("finding a kernel in its module: out of memory")
        loaded.append(name)
        return 1, 0, 0

    def empty_cache() -> None:
        room[0] = {"kept": "free"}.get(room[0], room[0])

    def with_kernels(*args: Any) -> Any:
        cuda_code.load([("first", 0), ("second", 0)])
        return load_plan(*args)

    load_plan = graph_cache.load_plan
    monkeypatch.setattr(graph_cache, "load_plan", with_kernels)
    monkeypatch.setattr(cuda_code, "_native", types.SimpleNamespace(cuda_load=cuda_load))
    monkeypatch.setattr(cuda_code, "_loaded", {})
    monkeypatch.setattr(cuda_code, "processor", lambda index: Processor())
    monkeypatch.setattr(cuda_code, "made", lambda key, arch: ({"name": key, "shared": 0, "warps": 4}, b""))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    compiled = fusewright.compile(lambda x: x + 1)
    with heard() as events:
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
        assert loaded == ["first"]
        skipped = [event.report.code for event in events if isinstance(event, Skipped)]
        assert skipped == ["memory-short"] * 3
        assert not any(isinstance(event, (Compiled, InternalError)) for event in events)
        room[0] = "kept"
        compiled(torch.ones(3))
    assert loaded == ["first", "second"]
    assert any(isinstance(event, Compiled) for event in events)


def test_little_room_on_the_stack() -> None:
    """Where the program itself has room enough, it gives its result at every depth."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def callee(x: torch.Tensor) -> torch.Tensor:
        fusewright.graph_break()
        return x * 2

    def g(x: torch.Tensor) -> torch.Tensor:
        return callee(x) + 1

    def at(depth: int, function: Any, x: torch.Tensor) -> Any:
        return function(x) if depth == 0 else at(depth - 1, function, x)

    def deepest(function: Any, x: torch.Tensor) -> int:
        depth = 0
        while True:
            try:
                at(depth, function, x)
            except RecursionError:
                return depth - 1
            depth += 1

    limit = sys.getrecursionlimit()
    x = torch.ones(3)
    sys.setrecursionlimit(len(inspect.stack(0)) + 120)
    try:
        for function, callees in ((f, 0), (g, 0)):
            most = deepest(function, x)
            for depth in range(most - 90, most + 1):
                fusewright.reset()
                torch.testing.assert_close(
                    at(depth, fusewright.compile(function), x), function(x), msg=f"{most - depth} frames left"
                )
    finally:
        sys.setrecursionlimit(limit)


LOSES_CODE = """
import sys, _testcapi
maker = lambda given: lambda: given
code = next(one for one in maker.__code__.co_consts if hasattr(one, "co_code"))
kept = [maker(None) for _ in range(1000)]
others = sys.getrefcount(code) - len(kept)
for number in range(4):
    _testcapi.set_nomemory(number, number + 1)
    try:
        kept.append(maker(None))
    except MemoryError:
        pass
    _testcapi.remove_mem_hooks()
sys.exit(sys.getrefcount(code) - len(kept) < others)
"""
MEMORY_OF_PYTHONS_OWN = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", LOSES_CODE], capture_output=True).returncode != 0,
    reason="CPython itself, where a function finds no memory, lets go of its code once too often (3.12.1, 3.13.0)",
)


@MEMORY_OF_PYTHONS_OWN
@pytest.mark.parametrize("calls", [0, 2])
def test_memory_of_pythons_own_that_is_short(calls: int) -> None:
    """Each of many requests fails once, in a compile and in later calls: the user's MemoryError, or the right result."""
    testcapi = pytest.importorskip("_testcapi")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = (x * 2).relu()
        return y.sum(1), {"y": y}

    x = torch.ones(4, 3)
    for number in range(20) if calls else (*range(40), *range(40, 40_000, 997)):
        fusewright.reset()
        compiled = fusewright.compile(function)
        for _ in range(calls):
            compiled(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            testcapi.set_nomemory(number, number + 1)
            try:
                found = compiled(x)
            except MemoryError:
                found = function(x)
            finally:
                testcapi.remove_mem_hooks()
        torch.testing.assert_close((found, compiled(x)), (function(x), function(x)), msg=f"request {number}")


@contextmanager
def short_of_memory(number: int) -> Iterator[None]:
    """The request for memory of that number fails."""
    testcapi = pytest.importorskip("_testcapi")
    testcapi.set_nomemory(number, number + 1)
    try:
        yield
    finally:
        testcapi.remove_mem_hooks()


LOOKS_FOR_SIGNALS = {dis.opmap.get(name) for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")}


@contextmanager
def interrupted(number: int) -> Iterator[None]:
    """A handler of a signal raises in what compiles by LLVM, at the moment of that number at which CPython looks for signals."""
    left, before = [number], sys.gettrace()
    last: dict[Any, int] = {}

    def trace(frame: Any, event: str, argument: object) -> Any:
        if "llvm" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= last.get(frame) in LOOKS_FOR_SIGNALS
            if left[0] == -1:
                left[0] = -2
                raise KeyboardInterrupt
            last[frame] = frame.f_code.co_code[frame.f_lasti]
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("trouble", "least"),
    [
        pytest.param(
            short_of_memory,
            20,  # of CPython 3.14, which keeps most of what it has had for the next one
            marks=MEMORY_OF_PYTHONS_OWN,
        ),
        (interrupted, 10),
    ],
)
def test_llvm_that_is_stopped_at_any_moment(trouble: Any, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a module that was not finished is freed without a crash, and no other thread waits for it."""
    texts, compile_text = [], llvm_module._compile
    monkeypatch.setattr(llvm_module, "_compile", lambda *text: texts.append(text) or compile_text(*text))
    fusewright.compile(lambda x: (x * 2).relu().sum(1))(torch.ones(4, 3))
    ((machine, ir),) = texts
    expected, failed = compile_text(machine, ir), 0
    for number in range(100):
        try:
            with trouble(number):
                found = compile_text(machine, ir)
        except (MemoryError, ctypes.ArgumentError, KeyboardInterrupt):
            failed += 1
        else:
            assert found == expected
        assert not machine.lock._is_owned(), number
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(compile_text, machine, ir).result(60) == expected
    assert failed > least


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no children here")
def test_signals_that_only_arrive() -> None:
    """Children that end, and a descriptor that is woken, in the middle of a compile: no part of the program."""
    ended: list[int] = []
    reader, writer = os.pipe2(os.O_NONBLOCK)
    before = signal.signal(signal.SIGCHLD, lambda number, frame: ended.append(number))
    waking = signal.set_wakeup_fd(writer)
    try:
        for _ in range(5):
            fusewright.reset()
            child = subprocess.Popen(["sleep", "0.02"])
            with STREAM.listening(lambda event: pytest.fail(str(event)) if isinstance(event, InternalError) else None):
                torch.testing.assert_close(observe(fusewright.compile(program)), observe(program))
            child.wait()
        assert ended and os.read(reader, 100)
    finally:
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, before)
        os.close(reader)
        os.close(writer)


def vanish(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def read_only(folder: Path) -> None:
    raise PermissionError(errno.EROFS, "Read-only file system")


def full(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fault", [vanish, read_only, full])
@pytest.mark.parametrize("first", range(6))
def test_a_cache_folder_that_fails_midway(
    first: int, fault: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the `first` file on that a compile touches or writes in it: the right result, and at most one warning."""
    folder, asked, opening = tmp_path / "cache", [0], os.open
    active: list[int] = []  # what the fault itself opens does not count

    def failing(function: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            reads = function is opening and not args[0] & (os.O_WRONLY | os.O_RDWR)
            if str(path).startswith(str(folder)) and not active and (fault is vanish or not reads):
                asked[0] += 1
                if asked[0] > first:
                    active.append(1)
                    try:
                        fault(folder)
                    finally:
                        active.clear()
            return function(path, *args, **kwargs)

        return call

    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder))
    expected = observe(program)
    with warnings.catch_warnings(record=True) as told, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        for name in ("open", "replace", "utime", "mkdir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        for _ in range(2):
            fusewright.reset()
            torch.testing.assert_close(observe(fusewright.compile(program)), expected)
    assert asked[0] > first and {one.category for one in told} <= {CacheWarning} and len(told) <= 1, [
        str(one.message) for one in told
    ]
    fusewright.reset()
    torch.testing.assert_close(observe(fusewright.compile(program)), expected)


def test_clocks_that_jump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time of day back and forth by years, and a time limit that a suspended machine runs over."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    expected, real = observe(program), time.time
    jumps = itertools.cycle((0.0, -3e8, 3e8, -1.0, 1e9))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    for _ in range(3):
        fusewright.reset()
        torch.testing.assert_close(observe(fusewright.compile(program)), expected)
    steady, ahead = time.perf_counter, itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: steady() + 3600 * next(ahead))
    with heard() as events:
        compiled = fusewright.compile(program, options={"compile_seconds": 60})
        torch.testing.assert_close(observe(compiled), expected)
    assert any(isinstance(event, Skipped) and event.report.code == "compile-time" for event in events)
    monkeypatch.undo()
    torch.testing.assert_close(observe(compiled), expected)


class Alarm(Exception):
    """What a program's own handler of a signal raises."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_what_a_handler_raises_leaves_nothing_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """At many moments of a compile and of the calls after it: PyTorch's modes and settings are as they were, and the next call is right."""

    def handler(number: int, frame: object) -> None:
        raise Alarm

    def modes() -> tuple[int, int, bool, bool]:
        depth = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        return *depth, torch.is_grad_enabled(), torch.utils._python_dispatch.is_in_torch_dispatch_mode()

    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: None)  # in a finalizer Python itself drops it
    expected, usual = observe(program), modes()
    before = signal.signal(signal.SIGALRM, handler)
    heard = 0
    try:
        for moment in range(60):
            fusewright.reset()
            compiled = fusewright.compile(program)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * 1.1**moment)
                observe(compiled)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                heard += 1
            assert modes() == usual, f"moment {moment}"
            torch.testing.assert_close(observe(compiled), expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard > 10


HANDLERS = (Alarm, TimeoutError, AttributeError, RuntimeError, KeyboardInterrupt)


@contextmanager
def handling(error: type[BaseException]) -> Iterator[None]:
    """SIGALRM's handler puts CPython's own in its place, as many do, and raises `error`."""

    def handler(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise error("from the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def ring() -> BaseException:
    signal.raise_signal(signal.SIGALRM)
    return AssertionError("the handler has raised")


@pytest.mark.parametrize("path", [path for path in STAGES if path != "compiler:record_backward"])  # is taken along
def test_what_a_handler_raises_in_a_stage_is_the_users(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = HANDLERS[STAGES.index(path) % len(HANDLERS)]
    compiled = fusewright.compile(program)
    with handling(error), failing(monkeypatch, path, ring, False), pytest.raises(error, match="from the handler"):
        observe(compiled)
    with STREAM.listening(
        lambda event: pytest.fail(str(event)) if isinstance(event, (InternalError, Skipped)) else None
    ):
        torch.testing.assert_close(observe(compiled), observe(program))


def test_what_a_handler_raises_is_the_users_whoever_catches_it_in_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the compiler, or a library that it calls, takes for an answer."""
    for error in HANDLERS:
        fusewright.reset()
        compiled = fusewright.compile(program)
        owner, name = place("backends.graph_cache:find")
        find = getattr(owner, name)

        def catching(*args: Any, find: Any = find) -> Any:
            with suppress(BaseException):
                ring()
            return find(*args)

        with handling(error), monkeypatch.context() as patch, pytest.raises(error, match="from the handler"):
            patch.setattr(owner, name, catching)
            observe(compiled)
        assert all(
            not callable(signal.getsignal(number)) or number == signal.SIGINT for number in signal.valid_signals()
        )
        torch.testing.assert_close(observe(compiled), observe(program))


ringing: list[str] = []
"""Where the signal comes, once."""


def comes(where: str) -> None:
    if where in ringing:
        ringing.clear()
        ring()


@torch.library.custom_op("fusewright_faults::doubled", mutates_args=())
def doubled(x: torch.Tensor, where: str) -> torch.Tensor:
    comes(where)
    return x * 2


doubled.register_fake(lambda x, where: torch.empty_like(x))
doubled.register_autograd(
    lambda ctx, gradient: (doubled(gradient, "backward"), None), setup_context=lambda ctx, inputs, output: None
)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        comes("guard")
        return isinstance(other, Named) and other.name == self.name


FACTORS = {Named("a"): 3.0}


def stepping(x: torch.Tensor) -> torch.Tensor:
    y = doubled(x, "plan") * FACTORS[Named("a")]
    fusewright.graph_break()
    return doubled(y.sin(), "resume function")


@pytest.mark.parametrize("where", ["plan", "resume function", "backward", "guard"])
def test_what_a_handler_raises_in_a_call_is_the_users(where: str) -> None:
    def observed(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(3, requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    compiled, expected = fusewright.compile(stepping), observed(stepping)
    for error in HANDLERS:
        torch.testing.assert_close(observed(compiled), expected)
        with handling(error), pytest.raises(error, match="from the handler"):
            ringing.append(where)
            observed(compiled)
        assert not ringing
        torch.testing.assert_close(observed(compiled), expected)
