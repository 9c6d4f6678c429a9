"""Compiling on another thread: calls run eagerly until the compiled version is ready (option `background`).

Takes work that was captured on the caller's thread; runs it on one worker thread under the caller's PyTorch settings.
Always holds: one compile at a time (the driver's lock is held while the worker compiles); results of work submitted
before a reset are dropped; the process waits for work in progress before it ends, unless it ends by an interrupt
(Ctrl-C): then the work is given up, and the process ends as an interrupted one does without us.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Iterator

from fusewright.base.pytorch import torch
from fusewright.capture.guards.torch_state import capture_global_state
from fusewright.capture.guards.types import GlobalState


class Abandoned(BaseException):
    """Ends the work in progress, wherever it is. No Exception: nobody shall take it for a failed compile."""


def _died_of_interrupt() -> bool:
    """Whether an interrupt that the main program did not handle is what ends this process."""
    trace = getattr(sys, "last_traceback", None)  # of what the interpreter printed last
    # a prompt goes on after one
    uncaught = getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")
    # An extension may have printed one as well, from a callback; the main program's begins in a module, or in what runs
    # modules (-m).
    return uncaught and trace is not None and trace.tb_frame.f_code.co_name in ("<module>", "_run_module_as_main")


def _note_interrupt() -> None:
    """The process shall end by SIGINT. CPython remembers that it has to in a flag, which each `exec` of a string writes
    anew (imports of dataclasses do that on the worker thread): so it is written once more, by the same means."""
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


@contextlib.contextmanager
def _under(state: GlobalState) -> Iterator[None]:
    """The settings of another thread, as far as PyTorch keeps them for each thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(state.inference_mode))
        stack.enter_context(torch.set_grad_enabled(state.grad_enabled))
        for device, enabled, dtype in state.autocast:
            stack.enter_context(
                torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=state.autocast_cache)
            )
        if torch.get_num_threads() != state.num_threads:
            torch.set_num_threads(state.num_threads)
        yield


class Worker:
    """One thread, started when there is work and ended when there is none."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets all work. (In the child of a fork: the thread is not there, and the parent compiles what it was
        given.)"""
        self._work: queue.SimpleQueue[tuple[GlobalState, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work` later. It must not raise."""
        _watch_end(self)
        with self._lock:
            self._work.put((capture_global_state(), work))
            self._waiting += 1
            self._idle.clear()
            if self._waiting == 1:
                self._thread = threading.Thread(target=self._run, name="fusewright compiler")
                try:
                    self._thread.start()
                except BaseException:  # no thread could be had: nobody waits for this
                    self._work.get()
                    self._waiting = 0
                    self._idle.set()
                    raise

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all work is done, after at most `timeout` seconds."""
        return self._idle.wait(timeout)

    def finish(self) -> None:
        """Waits for the work, on the main thread, as the process ends. Gives it up instead after an interrupt, or when
        one comes now."""
        if self.wait(0):
            return
        interrupted = _died_of_interrupt()
        while not interrupted and not self.wait(0):
            try:
                self.wait()
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            while not self.wait(0):
                try:
                    self._abandon()
                    self.wait(1)  # until native code returns; something may have taken the exception for its own
                except KeyboardInterrupt:
                    continue  # it is on its way
            _note_interrupt()

    def _abandon(self) -> None:
        with self._lock:  # the thread cannot end its last work now, so the exception finds it in `_run`
            if self._waiting and self._thread is not None and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(Abandoned)
                )

    def _run(self) -> None:
        try:
            while self._run_one():
                pass
        except Abandoned:
            with self._lock:
                self._waiting = 0
            self._idle.set()

    def _run_one(self) -> bool:
        """Whether there is more."""
        state, work = self._work.get()
        try:
            with _under(state):
                work()
        finally:
            with self._lock:
                self._waiting -= 1
                last = self._waiting == 0
                if last:
                    self._idle.set()
        return not last


_watched: list[Worker] = []


def _watch_end(worker: Worker) -> None:
    """Has `worker.finish` called before the process waits for its threads."""
    if worker not in _watched:
        _watched.append(worker)
        # Python calls what `atexit` has only after its threads have ended. This is where concurrent.futures is called
        # as well.
        with contextlib.suppress(RuntimeError):  # the main thread has ended already: nobody interrupts it any more
            threading._register_atexit(worker.finish)  # type: ignore[attr-defined]


WORKER = Worker()
