"""Compiling on another thread: calls run eagerly until the compiled version is ready (option `background`).

Takes work that was captured on the caller's thread; runs it on one worker thread under the caller's PyTorch settings.
Always holds: one compile at a time (the driver's lock is held while the worker compiles); results of work submitted before a reset are
dropped; the process waits for work in progress before it ends.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch

from fusewright.capture.guard_types import GlobalState
from fusewright.capture.torch_state import capture_global_state


@contextlib.contextmanager
def _under(state: GlobalState) -> Iterator[None]:
    """The settings of another thread, as far as PyTorch keeps them for each thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(state.inference_mode))
        stack.enter_context(torch.set_grad_enabled(state.grad_enabled))
        for device, enabled, dtype in state.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=state.autocast_cache))
        if torch.get_num_threads() != state.num_threads:
            torch.set_num_threads(state.num_threads)
        yield


class Worker:
    """One thread, started when there is work and ended when there is none."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets all work. (In the child of a fork: the thread is not there, and the parent compiles what it was given.)"""
        self._work: queue.SimpleQueue[tuple[GlobalState, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work` later. It must not raise."""
        with self._lock:
            self._work.put((capture_global_state(), work))
            self._waiting += 1
            self._idle.clear()
            if self._waiting == 1:
                threading.Thread(target=self._run, name="fusewright compiler").start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all work is done, after at most `timeout` seconds."""
        return self._idle.wait(timeout)

    def _run(self) -> None:
        while True:
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
            if last:
                return


WORKER = Worker()
