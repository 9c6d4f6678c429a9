"""Threads and processes: compiling and calling from several at once, in forked and spawned children; interrupted compiles and calls."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Captured, InternalError
from fusewright.capture.border.native import Interceptor
from fusewright.codegen.llvm import module as llvm_module


def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return torch.relu(x * by).sum(-1)


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    fusewright.graph_break()
    return helper(y) + 1


def helper(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    fusewright.graph_break()
    return y * 2


class Net(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(torch.relu(self.first(x)))


def together(count: int, work) -> list[object]:
    """Runs work(i) on `count` threads that start at the same moment."""
    ready = threading.Barrier(count)

    def one(index: int) -> object:
        ready.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=120) for future in [pool.submit(one, index) for index in range(count)]]


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_one_function_from_several_threads(backend: str) -> None:
    compiled = fusewright.compile(scale, backend=backend)
    captures: list[object] = []

    def work(index: int) -> None:
        for turn in range(8):
            x = torch.randn(3 + (index + turn) % 2, 5)
            torch.testing.assert_close(compiled(x), scale(x))

    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        together(4, work)
    assert len(captures) <= 3  # one for the first size, one for the second, one when the size becomes symbolic


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_different_functions_with_breaks_and_recompiles(backend: str) -> None:
    def work(index: int) -> None:
        compiled = fusewright.compile(breaks if index % 2 else scale, backend=backend)
        plain = breaks if index % 2 else scale
        for turn in range(4):
            x = torch.randn(2 + turn, 4)
            torch.testing.assert_close(compiled(x), plain(x))

    together(4, work)


def branching(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x.cos() * 2


def raising(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.shape[0] > 3:
            raise ValueError(x.shape[0])
        return x.exp()
    except ValueError as error:
        return x * error.args[0]


def generating(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Size]]:
    def times() -> Iterator[torch.Tensor]:
        for i in range(3):
            yield x * i

    return torch.stack(list(times())).sum(0), [part.shape for part in times()]


def nested(x: torch.Tensor) -> dict[str, object]:
    return {"rows": x.shape[0], "parts": [x.relu(), (x.cumsum(0), x.argmax(1))], "again": {"x": x * 2}}


@pytest.mark.usefixtures("restless_threads")
@pytest.mark.parametrize("seed", range(2))
def test_functions_of_all_kinds_over_sizes_while_all_is_forgotten(seed: int) -> None:
    """Values and gradients of what four threads call at once are eager's, whoever compiles, recompiles or forgets meanwhile."""
    chance = random.Random(seed)

    def observe(call, x: torch.Tensor) -> tuple[list[object], object]:
        x = x.clone().requires_grad_()
        leaves, structure = torch.utils._pytree.tree_flatten(call(x))
        summed = sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return [*leaves, *torch.autograd.grad(summed, x)], structure

    functions = (branching, breaks, raising, generating, nested, Net())
    calls = []
    for function in functions:
        compiled = fusewright.compile(function)
        for x in (torch.randn(chance.choice((0, 1, 1, 2, 3, 5, 8)), 8) for _ in range(12)):
            calls.append((compiled, x, observe(function, x)))

    def work(index: int) -> None:
        own = random.Random(seed * 4 + index)
        for _ in range(300):
            compiled, x, expected = own.choice(calls)
            found = observe(compiled, x)
            torch.testing.assert_close(found[0], expected[0])
            assert found[1] == expected[1]
            if index == 0 and own.random() < 0.03:
                fusewright.reset()

    with STREAM.listening(lambda event: pytest.fail(str(event)) if isinstance(event, InternalError) else None):
        together(4, work)


def test_eager_code_of_other_threads_is_left_alone() -> None:
    compiled = fusewright.compile(breaks, backend="eager")
    stop = threading.Event()
    seen: list[object] = []

    def other() -> None:
        while not stop.is_set():
            seen.append(torch.equal(helper(torch.zeros(2)), torch.zeros(2)))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with STREAM.listening(lambda event: seen.append(threading.current_thread() is not thread)):
            for size in range(2, 6):
                x = torch.randn(size)
                torch.testing.assert_close(compiled(x), breaks(x))
    finally:
        stop.set()
        thread.join()
    assert all(seen) and len(seen) > 4


def test_compile_inside_compiled_code() -> None:
    def outer(x):
        inner = fusewright.compile(lambda y: y * 2, backend="eager")
        return inner(x) + 1

    compiled = fusewright.compile(outer, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_a_compiled_function_calls_another() -> None:
    inner = fusewright.compile(scale)
    outer = fusewright.compile(lambda x: inner(x) + inner(x, by=3.0))
    x = torch.randn(3, 4)
    torch.testing.assert_close(outer(x), scale(x) + scale(x, by=3.0))


def _in_child(queue, compiled, x, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    queue.put(compiled(x).tolist())


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
child_starts_threads = pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""),
    reason="ThreadSanitizer ends a child that starts threads, if its parent had some when it forked",
)


@needs_fork
@child_starts_threads
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_forked_child_calls_and_recompiles(backend: str) -> None:
    compiled = fusewright.compile(scale, backend=backend)
    x = torch.randn(64, 4096)
    expected = compiled(x)  # the parent has used its pool of threads
    # Where the parent has used OpenMP, PyTorch itself hangs in a child that asks for several threads.
    for values, threads in ((x, 1), (torch.randn(7, 4096), 1), (torch.randn(2, 3), 0)):
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue, compiled, values, threads))
        child.start()
        result = queue.get(timeout=60)
        child.join(timeout=60)
        assert child.exitcode == 0
        torch.testing.assert_close(torch.tensor(result), scale(values), rtol=1e-4, atol=1e-4)
    assert torch.equal(compiled(x), expected)


def in_a_backend(begun: threading.Event, go_on: threading.Event) -> None:
    def slow(gm, inputs):
        begun.set()
        go_on.wait(60)
        return gm.forward

    fusewright.compile(lambda x: x + 1, backend=slow)(torch.ones(3))


def in_llvm(begun: threading.Event, go_on: threading.Event) -> None:
    with llvm_module._machine().lock:
        begun.set()
        go_on.wait(60)


@needs_fork
@pytest.mark.parametrize("work", [in_a_backend, in_llvm])
def test_a_fork_while_another_thread_compiles(work) -> None:
    compiled = fusewright.compile(scale)
    x = torch.randn(3, 5)
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(begun, go_on))
    thread.start()
    begun.wait(60)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, compiled, x, 1), daemon=True)
    child.start()
    try:
        torch.testing.assert_close(torch.tensor(queue.get(timeout=60)), scale(x))
    finally:
        go_on.set()
        thread.join(60)
        child.join(60)
    assert child.exitcode == 0


module_level = fusewright.compile(scale, backend="eager")


@fusewright.compile(backend="eager")
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return module_level(torch.full((2, 3), float(index)))


def collate(batch: list[torch.Tensor]) -> torch.Tensor:
    return module_level(torch.stack(batch), by=0.5)


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=child_starts_threads), pytest.param("spawn", marks=pytest.mark.sweep)]
)  # spawning imports torch: 8 s
def test_workers_of_a_data_loader(method: str) -> None:
    module_level(torch.ones(2, 3))
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=3, num_workers=2, collate_fn=collate, multiprocessing_context=method
    )
    got = list(loader)
    expected = [
        scale(torch.stack([scale(torch.full((2, 3), float(i))) for i in group]), by=0.5)
        for group in ((0, 1, 2), (3, 4, 5))
    ]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_pickle_and_copies_of_a_module() -> None:
    net = Net()
    compiled = fusewright.compile(net, backend="eager")
    x = torch.randn(3, 8)
    expected = compiled(x)
    for other in (pickle.loads(pickle.dumps(compiled)), copy.deepcopy(compiled)):
        assert isinstance(other, Net) and other is not net
        assert torch.equal(other(x), expected)
        other.first.weight.data.zero_()
        assert not torch.equal(other(x), expected) and torch.equal(compiled(x), expected)
    shallow = copy.copy(compiled)
    assert shallow.first is net.first and torch.equal(shallow(x), expected)


def test_pickle_and_copies_of_a_function() -> None:
    x = torch.randn(2, 3)
    assert copy.copy(module_level) is copy.deepcopy(module_level) is module_level  # as a plain function
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    for other in (pickle.loads(pickle.dumps(module_level)), copy.deepcopy(module_level), copy.copy(module_level)):
        assert torch.equal(other(x), scale(x))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with the interrupt ignored, and Python then installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _raise_unraisable() -> object:
    """What sys.unraisablehook gets of an exception in a finalizer."""

    class Finalized:
        def __del__(self):
            raise ValueError

    told = []
    before, sys.unraisablehook = sys.unraisablehook, told.append
    Finalized()
    sys.unraisablehook = before
    return told[0]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_python_calls_by_itself_during_capture_is_no_part_of_the_program() -> None:
    interpreted = []

    class Tracer:
        def called_natively(self, function, values):
            interpreted.append(function)

    class Handler:
        def handle(self, number, frame):
            pass

    def handler(number, frame):
        pass

    intercept = Interceptor(Tracer())
    frame, method = sys._getframe(), Handler().handle
    before = signal.getsignal(signal.SIGUSR1)
    try:
        signal.signal(signal.SIGUSR1, handler)
        assert intercept(handler, (signal.SIGUSR1, frame)) is False
        signal.signal(signal.SIGUSR1, method)
        assert intercept(Handler.handle, (method.__self__, signal.SIGUSR1, frame)) is False
        unraisable = _raise_unraisable()
        assert intercept(lambda told: None, (unraisable,)) is False  # sys.unraisablehook, pytest's for one
        for other, values in (
            (handler, (signal.SIGUSR1, frame)),
            (handler, (-5, frame)),
            (handler, (signal.SIGUSR1, None)),
            (handler, (frame,)),
        ):
            assert intercept(other, values) == (None,)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(interpreted) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_compile_and_call_leave_a_usable_state() -> None:
    def slow(gm, inputs):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    broken = fusewright.compile(scale, backend=slow)
    with pytest.raises(KeyboardInterrupt):
        broken(torch.ones(2, 2))
    interrupts = [True]

    def graph(x):
        if interrupts.pop():
            interrupts.append(False)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        interrupts.append(False)
        return (x + 1,)

    called = fusewright.compile(breaks, backend=lambda gm, inputs: gm.forward if interrupts[-1] is False else graph)
    with pytest.raises(KeyboardInterrupt):
        called(torch.ones(2))
    x = torch.randn(2, 3)
    for function in (scale, breaks):
        torch.testing.assert_close(fusewright.compile(function, backend="eager")(x), function(x))
    from fusewright import _native

    state = _native.hook_state()
    assert not state["installed"] and state["depth"] == 0 and state["regions"] == 0
