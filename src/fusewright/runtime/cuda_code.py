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
import signal
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
from fusewright.base.signals import memory_was_short
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


class CompileError(LoadError):
    """Triton, the assembler or the driver refused kernels, or Triton cannot be run. `refused`: what was said, by the
    kernels' keys; `refusal` knows them from now on."""

    def __init__(self, refused: dict[str, str]) -> None:
        super().__init__("; ".join(dict.fromkeys(refused.values())))
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was said of a kernel. lasting: it says something of the kernel, not of the moment (memory, a full disk, a
    process that was killed). times: how often the kernel was tried."""

    text: str
    lasting: bool
    times: int = 1

    @property
    def is_final(self) -> bool:
        """Whether this process does not try again."""
        return self.lasting or self.times > 1


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
    errors: dict[str, Refusal] = field(default_factory=dict)
    unread: bytes = b""
    lost: int = 0  # processes, one after the other, that ended before they gave an answer
    lock: threading.RLock = field(default_factory=threading.RLock)

    def start(self) -> None:
        """Raises OSError where there is no process to be had."""
        with self.lock:
            if self.process is not None and self.owner == os.getpid():
                if self.process.poll() is None:
                    return
                self._lose("the compiler process ended")
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
        """Has the job done, unless it was refused for good; `wait` says what became of it."""
        path = job["path"]
        with self.lock:
            if path in self.errors and self.errors[path].is_final:
                return
            try:
                self.start()
                if path in self.asked:
                    return
                self.asked.add(path)
                assert self.process is not None and self.process.stdin is not None
                data = memoryview(json.dumps(job).encode() + b"\n")
                while data:
                    data = data[self.process.stdin.write(data) or 0 :]
            except OSError as error:
                self.asked.add(path)
                self._lose(f"the compiler process cannot be used: {error}")

    def wait(self, path: str) -> None:
        """Until the job of that path has been answered. Raises CompileError with Triton's message."""
        with self.lock:
            while path in self.asked and self.owner == os.getpid():
                line = self._line()
                if line is None:
                    continue
                answer = json.loads(line)
                self.lost = 0
                self.asked.discard(answer["path"])
                self.errors.pop(answer["path"], None) if not answer["error"] else self._refuse(**answer)
            if path in self.errors:
                raise CompileError({path: self.errors[path].text})

    def _refuse(self, path: str, error: str, lasting: bool) -> None:
        before = self.errors.get(path)
        self.errors[path] = Refusal(error, lasting, 1 if before is None else before.times + 1)

    def _line(self) -> bytes | None:
        """None where there is none to come: nothing is asked any more then."""
        assert self.process is not None and self.process.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], LONGEST_COMPILE)
            data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not data and ready:
                self._lose("the compiler process ended")
                return None
            if not data:  # it was waited for long enough
                for path in self.asked:
                    self.errors[path] = Refusal("the compiler process does not answer", lasting=False, times=2)
                self.stop()
                return None
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _lose(self, why: str) -> None:
        """The process is of no use any more, nor are its jobs."""
        self.lost += 1
        for path in self.asked:
            self._refuse(path, why, lasting=False)
        self.stop()

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            if self.process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # and what is being compiled, perhaps for ever
            self.process.wait()
        self.process = None
        self.asked.clear()


COMPILER = Compiler()


def warm_up() -> None:
    """Starts the compiler process before the first kernel is known."""
    if triton_version() is not None:
        with contextlib.suppress(OSError):  # the first kernel meets it again
            COMPILER.start()


def is_broken() -> bool:
    """Whether no kernel can be compiled: one compiler process after the other has ended without any answer."""
    return COMPILER.lost > 1


def request(kernels: Iterable[DeviceKernel], arch: int, ptx: bool = False) -> None:
    """Has machine code made for those that the store lacks. ptx: with its PTX."""
    for kernel in kernels:
        path = path_of(kernel.key, arch, ptx)
        if read(path) is not None:
            COMPILER.errors.pop(str(path), None)  # another process has made it
        else:
            with contextlib.suppress(OSError):  # who writes it says so
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
_refused: dict[tuple[str, int], Refusal] = {}
"""By the driver, of each GPU."""


def refusal(key: str, index: int) -> str:
    """What was said of a kernel that the GPU of that number cannot have, as far as this process knows; nothing of
    others."""
    found = _refusal(key, index)
    return found.text if found is not None and found.is_final else ""


def may_come(key: str, index: int) -> bool:
    """Whether a kernel was refused for a reason of the moment."""
    found = _refusal(key, index)
    return found is not None and not found.lasting


def _refusal(key: str, index: int) -> Refusal | None:
    found = _refused.get((key, index))
    if found is None and COMPILER.errors:
        found = COMPILER.errors.get(str(path_of(key, processor(index).arch)))
    return found


def short_of_kernels() -> bool:
    """Whether kernels were refused for reasons of the moment: what was generated without them is not kept on disk."""
    refused = (*COMPILER.errors.values(), *_refused.values())
    return COMPILER.lost > 0 or any(not found.lasting for found in refused)


def read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """(what a launch needs to know, machine code), or None where there is no such file or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"fusewright's disk cache: GPU kernel {path} cannot be read ({error}); it is compiled again", CacheWarning)
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
    store, CompileError with all that were refused."""
    functions: dict[str, DeviceFunction] = {}
    refused: dict[str, str] = {}
    for number, (key, index) in enumerate(wanted, 1):
        tell(number, len(wanted))
        try:
            found = _loaded.get((key, index))
            if found is None:
                found = _loaded[key, index] = _load(key, index)
        except CompileError as error:
            refused |= error.refused
        else:
            functions[device_key(key, index)] = found
    if refused:
        raise CompileError(refused)
    return functions


def made(key: str, arch: int, ptx: bool = False) -> tuple[dict[str, Any], bytes]:
    """(what a launch needs to know, machine code) of a kernel that was asked for: waits for it. Raises LoadError and
    CompileError as `load` does."""
    path = path_of(key, arch, ptx)
    try:
        COMPILER.wait(str(path))
    except CompileError as error:
        raise CompileError({key: str(error)}) from None
    found = read(path)
    if found is None:
        raise LoadError(f"the machine code of kernel {key} is not in {path}")
    return found


def _load(key: str, index: int) -> DeviceFunction:
    known = _refused.get((key, index))
    if known is not None:
        raise CompileError({key: known.text})
    launch, code = made(key, processor(index).arch)
    with torch.cuda.device(index):
        torch.cuda.current_stream()  # makes PyTorch create the device's context
        try:
            handle = _function(code, launch)
        except RuntimeError as error:  # its shared memory is more than there is, say
            if memory_was_short(error):
                raise
            lasting = not torch.cuda.is_current_stream_capturing()
            if lasting:
                torch.cuda.synchronize()  # raises where the error is an earlier kernel's
            _refused[key, index] = Refusal(str(error), lasting, times=2)
            raise CompileError({key: str(error)}) from error
    return DeviceFunction(handle, 32 * launch["warps"], launch["shared"])


def _function(code: bytes, launch: dict[str, Any]) -> int:
    try:
        handle, _, _ = _native.cuda_load(code, launch["name"], launch["shared"])
    except torch.OutOfMemoryError:  # PyTorch may keep what is free for itself
        torch.cuda.empty_cache()
        handle, _, _ = _native.cuda_load(code, launch["name"], launch["shared"])
    return int(handle)
