"""Machine code of GPU kernels: compiled by a compiler process, kept on disk, loaded into the driver.

Takes `DeviceKernel`s; gives `DeviceFunction`s. Compiling is asked for as early as possible (`request`) and waited for
as late as possible (`load`): the compiler process (codegen/triton/compiler.py) works on all processors meanwhile.
Always holds: a file in the store is complete, and its name holds all that decides its content (the kernel's key,
Triton's version, the library that kernels call); machine code is loaded once for each GPU of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fusewright import _native
from fusewright.base.errors import CacheWarning, warn
from fusewright.base.options import cache_folder, environment
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field, replace
from fusewright.codegen.device_kernel import DeviceKernel, Processor
from fusewright.runtime.cache import (
    KERNEL_FOLDER,
    KERNEL_MAGIC,
    KERNEL_NAME_LENGTH,
    KERNEL_SUFFIX,
    DamagedEntry,
    touch,
    unpack_kernel,
)
from fusewright.runtime.launch import DeviceFunction, LoadError, device_key

LONGEST_COMPILE = 300.0
"""Seconds without any answer after which the compiler process counts as lost."""
_PROGRAM = Path(__file__).parents[1] / "codegen" / "triton" / "compiler.py"


class CompileError(RuntimeError):
    """Triton refused a kernel, or cannot be run."""


@functools.cache
def triton_version() -> str | None:
    """Of the installed Triton, or None."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def processor(index: int) -> Processor:
    """The GPU of that number."""
    properties = torch.cuda.get_device_properties(index)
    return Processor(properties.major * 10 + properties.minor, properties.multi_processor_count)


_oldest: ContextVar[int | None] = ContextVar("oldest", default=None)


@contextlib.contextmanager
def generating_for(archs: Iterable[int]) -> Iterator[None]:
    """Within, kernels are generated such that GPUs of all these architectures run them; none: this machine's do."""
    token = _oldest.set(min(archs, default=None))
    try:
        yield
    finally:
        _oldest.reset(token)


def target(index: int) -> Processor:
    """What kernels for the GPU of that number are generated for: that GPU, without what an older one that they are for
    as well (`generating_for`) lacks."""
    own, oldest = processor(index), _oldest.get()
    return own if oldest is None or oldest >= own.arch else replace(own, arch=oldest)


@functools.cache
def _temporary_store() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="fusewright-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _store() -> Path:
    """Where machine code is kept: in the disk cache, if it is on and its folder belongs to this user alone, else for
    this process only."""
    if not environment("FUSEWRIGHT_CACHE"):
        return _temporary_store()
    folder = cache_folder() / KERNEL_FOLDER
    try:
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = made.stat()
            if status.st_mode & 0o077 or status.st_uid != os.getuid():
                return _temporary_store()
    except OSError:
        return _temporary_store()
    return folder


@functools.cache
def _surroundings() -> str:
    """What machine code depends on beside the kernel."""
    library = _PROGRAM.with_name("library.py").read_bytes()
    return hashlib.sha256(KERNEL_MAGIC + library + f"triton {triton_version()}".encode()).hexdigest()


def path_of(key: str, arch: int, ptx: bool = False) -> Path:
    """Of the machine code of the kernel with that key. ptx: of the file that has its PTX too."""
    name = hashlib.sha256(f"{key} {_surroundings()} sm_{arch}{' ptx' if ptx else ''}".encode()).hexdigest()
    return _store() / f"{name[:KERNEL_NAME_LENGTH]}{KERNEL_SUFFIX}"


def machine_text(*gpus: int) -> str:
    """What a plan for the GPUs of these numbers depends on."""
    return f"{_surroundings()} {[target(index) for index in gpus]}"


# --- the compiler process ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Compiler:
    """A compiler process and what it was asked for. Safe to use from several threads."""

    process: subprocess.Popen[bytes] | None = None
    owner: int = 0  # the process that started it: a fork of that one has a compiler of its own
    asked: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    unread: bytes = b""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def start(self) -> None:
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self.owner = os.getpid()
                self.asked.clear()
                self.unread = b""
                count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                command = [sys.executable, str(_PROGRAM), str(count)]
                # In a process group of its own: Ctrl-C at a terminal is for the program. It ends when its input does.
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
                )
                atexit.register(self.stop)

    def ask(self, job: dict[str, Any]) -> None:
        with self.lock:
            self.start()
            if job["path"] in self.asked:
                return
            assert self.process is not None and self.process.stdin is not None
            data = memoryview(json.dumps(job).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) or 0 :]
            self.asked.add(job["path"])
            self.errors.pop(job["path"], None)

    def wait(self, path: str) -> None:
        """Until the job of that path has been answered. Raises CompileError with Triton's message."""
        with self.lock:
            while path in self.asked and self.owner == os.getpid():
                answer = json.loads(self._line())
                self.asked.discard(answer["path"])
                if answer["error"]:
                    self.errors[answer["path"]] = answer["error"]
        if path in self.errors:
            raise CompileError(self.errors[path])

    def _line(self) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], LONGEST_COMPILE)
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                self.stop()
                raise CompileError("the compiler process ended or does not answer")
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            with contextlib.suppress(OSError):
                self.process.kill()
                self.process.wait()
            self.process = None
            self.asked.clear()


COMPILER = Compiler()


def warm_up() -> None:
    """Starts the compiler process before the first kernel is known."""
    if triton_version() is not None:
        COMPILER.start()


def request(kernels: Iterable[DeviceKernel], arch: int, ptx: bool = False) -> None:
    """Has machine code made for those that the store lacks. ptx: with its PTX."""
    for kernel in kernels:
        path = path_of(kernel.key, arch, ptx)
        if read(path) is None:
            path.unlink(missing_ok=True)
            COMPILER.ask(
                {
                    "text": kernel.text, "symbol": kernel.symbol, "signature": kernel.signature,
                    "aligned": kernel.aligned,
                    "warps": kernel.warps, "stages": kernel.stages, "checks": kernel.checks, "scratch": kernel.scratch,
                    "arch": arch, "ptx": ptx,
                    "path": str(path),
                }
            )  # fmt: skip


# --- loading ----------------------------------------------------------------------------------------------------------

_loaded: dict[tuple[str, int], DeviceFunction] = {}


def read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """(what a launch needs to know, machine code), or None where there is no such file or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        head, _, code = unpack_kernel(path.stem, data).partition(b"\n")
    except DamagedEntry as error:
        warn(f"fusewright's disk cache: GPU kernel {path} is damaged ({error}); it is compiled again", CacheWarning)
        return None
    touch(path)
    return json.loads(head), code


def load(
    wanted: Collection[tuple[str, int]], tell: Callable[[int, int], None] = lambda number, total: None
) -> dict[str, DeviceFunction]:
    """The functions of kernels, given as (key, number of the GPU), by `device_key`; waits for what is being compiled,
    and tells the number of each kernel before that, and how many there are. Raises LoadError for one that is not in the
    store, CompileError for one that Triton refused."""
    functions: dict[str, DeviceFunction] = {}
    for number, (key, index) in enumerate(wanted, 1):
        tell(number, len(wanted))
        found = _loaded.get((key, index))
        if found is None:
            found = _loaded[key, index] = _load(key, index)
        functions[device_key(key, index)] = found
    return functions


def made(key: str, arch: int, ptx: bool = False) -> tuple[dict[str, Any], bytes]:
    """(what a launch needs to know, machine code) of a kernel that was asked for: waits for it. Raises LoadError and
    CompileError as `load` does."""
    path = path_of(key, arch, ptx)
    COMPILER.wait(str(path))
    found = read(path)
    if found is None:
        raise LoadError(f"the machine code of kernel {key} is not in {path}")
    return found


def _load(key: str, index: int) -> DeviceFunction:
    launch, code = made(key, processor(index).arch)
    with torch.cuda.device(index):
        torch.cuda.current_stream()  # makes PyTorch create the device's context
        try:
            handle, _, _ = _native.cuda_load(code, launch["name"], launch["shared"])
        except torch.OutOfMemoryError:  # PyTorch may keep what is free for itself
            torch.cuda.empty_cache()
            handle, _, _ = _native.cuda_load(code, launch["name"], launch["shared"])
    return DeviceFunction(handle, 32 * launch["warps"], launch["shared"])
