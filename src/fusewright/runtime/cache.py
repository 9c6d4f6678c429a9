"""The disk cache: content-addressed entries in a private folder, shared by every process of the user.

Takes a key (hexadecimal digest) and bytes; gives the bytes back, in this process or a later one.
Always holds: nobody waits for a lock to read or to write; who would compile what another process is compiling waits for
that entry, for PATIENCE at most and no longer than the other one lives (`claim`). A writer makes a temporary file and
renames it, so an entry is whole or absent however a writer dies (it holds a lock on that file, which the system lets go
when it dies: so its file can be told from a living one's, and goes). A reader checks the entry's hash, which covers the
key, before it uses a byte of it; a damaged entry is removed with a warning and made again. The folder belongs to this
user alone (0700), or the cache is not used. Its size is bounded: what was not read for longest goes. Machine code of
GPU kernels lies in a folder inside, written by the compiler process (codegen/triton/compiler.py); it counts, is
checked, and goes, as entries do.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fusewright.base.errors import CacheWarning, warn
from fusewright.base.records import dataclass

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

MAGIC = b"FWCE\x02"
SUFFIX = ".fw"
TEMPORARY = "tmp-"
KEY_LENGTH = 64
KERNEL_NAME_LENGTH = 48
KERNEL_MAGIC = b"fusewright-cubin-2\n"
KERNEL_FOLDER = "cubin"
KERNEL_SUFFIX = ".cubin"
NOTE = "note"
"""The file that holds one thing that is quick to make again."""
STALE_SECONDS = 600.0
"""A temporary file this old was left by a writer that died."""
UNLOCKED_SECONDS = 5.0
"""And one this old that nobody holds a lock on (between making it and locking it a writer takes less)."""
PATIENCE = 30.0
"""Seconds to wait for an entry that another process is making."""
TOUCH_SECONDS = 3600.0
SCANNED = "scanned"
"""The file whose time says when a process looked at the folder's size last."""
SCAN_SECONDS = 3600.0
"""A look is due behind so long,"""
SCAN_SHARE = 16
"""or when this process has written this part of the limit since its last one: a look asks for every file's size."""
WARNED = "fusewright's disk cache: "
"""How its warnings begin."""
_HEADER = struct.Struct("<5s32sI")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: its key, what it was made from (a function's name), bytes on disk, and when it was last used (seconds
    since the epoch)."""

    key: str
    label: str
    size: int
    used: float


class DamagedEntry(ValueError):
    """An entry whose content is not what was written."""


def pack(key: str, label: str, body: bytes) -> bytes:
    """The content of an entry's file."""
    name = label.encode(errors="replace")
    return _HEADER.pack(MAGIC, _digest(key, name, body), len(name)) + name + body


def _digest(key: str, name: bytes, body: bytes) -> bytes:
    """Covers everything that a reader is told, also where the name ends."""
    return hashlib.sha256(MAGIC + key.encode() + struct.pack("<I", len(name)) + name + body).digest()


def unpack(key: str, data: bytes) -> tuple[str, bytes]:
    """(label, body) of an entry's file. Raises DamagedEntry unless it is exactly what was written under this key."""
    if len(data) < _HEADER.size:
        raise DamagedEntry("too short")
    magic, digest, length = _HEADER.unpack_from(data)
    name, body = data[_HEADER.size : _HEADER.size + length], data[_HEADER.size + length :]
    if magic != MAGIC:
        raise DamagedEntry("not an entry of this version")
    if _digest(key, name, body) != digest:
        raise DamagedEntry("its hash does not fit its content")
    return name.decode(), body


def unpack_kernel(name: str, data: bytes) -> bytes:
    """What follows the hash in the file of a GPU kernel. Raises DamagedEntry unless it is exactly what was written
    under this name."""
    if not data.startswith(KERNEL_MAGIC):
        raise DamagedEntry("not a kernel of this version")
    digest, newline, body = data[len(KERNEL_MAGIC) :].partition(b"\n")
    if not newline or hashlib.sha256(name.encode() + b"\0" + body).hexdigest().encode() != digest:
        raise DamagedEntry("its hash does not fit its content")
    return body


def touch(path: Path) -> None:
    """Notes that the file was used."""
    with contextlib.suppress(OSError):  # only the order of eviction depends on it
        if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
            os.utime(path)


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for what is no plain file: a pipe would never end."""
    with _opened(path) as file:
        return file.read()


def _opened(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return open(descriptor, "rb")


def is_key(name: str) -> bool:
    return len(name) == KEY_LENGTH and _is_hexadecimal(name)


def is_kernel_name(name: str) -> bool:
    return len(name) == KERNEL_NAME_LENGTH and _is_hexadecimal(name)


def _is_hexadecimal(name: str) -> bool:
    return all(c in "0123456789abcdef" for c in name)


class Claim:
    """Says to other processes that this one is making an entry, until `release` or the end of the process."""

    __slots__ = ("_descriptor", "_path")

    mine: set[Path] = set()
    """Of this process: another thread of it waits for none of them."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        Claim.mine.add(path)

    def release(self) -> None:
        if self._descriptor < 0:
            return
        Claim.mine.discard(self._path)
        with contextlib.suppress(OSError):  # the lock goes with the descriptor
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    __del__ = release


class DiskCache:
    """The entries under `folder`, at most `limit` bytes of them (checked now and then, so a burst may pass it for a
    while)."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._written = 0  # bytes since the last look at the folder's size
        self._looked: float | None = None  # when that was; None before the first write
        self._warned: set[str] = set()
        self.used: set[str] = set()
        """Keys that this process has read or written."""

    # --- entries -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The body stored under `key`, or None. A damaged entry is removed, with a CacheWarning."""
        path = self._path(key)
        if not self._is_usable():
            return None
        try:
            data = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"entry {path} cannot be read ({error}); it is compiled again")
            return None
        try:
            _, body = unpack(key, data)
        except (DamagedEntry, UnicodeDecodeError) as error:
            self._warn(f"entry {path} is damaged ({error}); it was removed and is compiled again")
            self._remove(path)
            return None
        touch(path)
        self.used.add(key)
        return body

    def claim(self, key: str) -> Claim | None:
        """To be asked for by who has found no entry and would make it: waits as long as another process is making it.
        None where there is nothing to wait for or to claim (the entry may be there now; look again)."""
        path = self.folder / f"{TEMPORARY}{key}"
        if fcntl is None or path in Claim.mine or not self._is_usable(create=True):
            return None
        until = time.monotonic() + PATIENCE
        pause = 0.002
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            except OSError:
                return None  # `put` will say what is wrong with the folder
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                held = isinstance(error, BlockingIOError)  # else this file system has no locks
                if not held or self._path(key).exists() or time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                continue
            if _is_at(path, descriptor):
                return Claim(path, descriptor)
            os.close(descriptor)  # who held it has removed it since

    def put(self, key: str, label: str, body: bytes) -> bool:
        """Stores `body` under `key`; False, with a CacheWarning, when the folder cannot be written."""
        written = self._write(self._path(key), pack(key, label, body))
        if written:
            self.used.add(key)
        return written

    def put_kernel(self, name: str, data: bytes) -> bool:
        """Stores the file of a GPU kernel, which `unpack_kernel` accepts under this name; False, with a CacheWarning,
        when it cannot."""
        if not is_kernel_name(name):
            raise ValueError(f"not a kernel's name: {name!r}")
        return self._write(self.folder / KERNEL_FOLDER / (name + KERNEL_SUFFIX), data)

    def _write(self, path: Path, data: bytes) -> bool:
        if not self._is_usable(create=True):
            return False
        temporary = self.folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    _try_lock(descriptor)
                    file.write(data)
                    file.flush()
                    os.replace(temporary, path)
            except BaseException:
                self._remove(temporary)
                raise
        except OSError as error:
            self._warn_once(f"an entry could not be written to {self.folder} ({error.strerror or error})")
            return False
        self._written += len(data)
        if self._is_look_due():
            self.evict()
        return True

    def _is_look_due(self) -> bool:
        if self._looked is None:
            try:
                self._looked = os.stat(self.folder / SCANNED).st_mtime
            except OSError:
                self._looked = -math.inf
        return self._written * SCAN_SHARE > self.limit or abs(time.time() - self._looked) > SCAN_SECONDS

    def noted(self, key: str) -> bytes | None:
        """What `note` kept last, if it was under this key."""
        if not self._is_usable():
            return None
        try:
            return unpack(key, read_file(self.folder / NOTE))[1]
        except (OSError, DamagedEntry, UnicodeDecodeError):
            return None  # none is there, or another one

    def note(self, key: str, body: bytes) -> None:
        """Keeps a few bytes in place of what was noted before."""
        self._write(self.folder / NOTE, pack(key, "", body))

    def discard(self, key: str) -> None:
        """Removes an entry, if it is there."""
        self._remove(self._path(key))

    # --- the whole folder --------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first. Their content is not checked."""
        found = [Entry(path.stem, _label(path), status.st_size, status.st_mtime) for path, status in self._files()]
        return sorted(found, key=lambda entry: -entry.used)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """(key, file's content) of every entry, unchecked."""
        yield from self._contents(self._files())

    def kernels(self) -> int:
        """How many GPU kernels there are."""
        return sum(1 for _ in self._kernels())

    def kernel_files(self) -> Iterator[tuple[str, bytes]]:
        """(name, file's content) of every GPU kernel, unchecked."""
        yield from self._contents(self._kernels())

    def _contents(self, files: Iterator[tuple[Path, os.stat_result]]) -> Iterator[tuple[str, bytes]]:
        for path, _ in files:
            try:
                yield path.stem, read_file(path)
            except FileNotFoundError:
                pass  # another process removed it
            except OSError as error:
                self._warn(f"{path} cannot be read ({error})")

    def size(self) -> int:
        """Bytes of all entries and GPU kernels."""
        return sum(status.st_size for _, status in (*self._files(), *self._kernels()))

    def clear(self) -> int:
        """Removes every entry, GPU kernel and temporary file; gives the number of entries and kernels removed."""
        count = sum(self._remove(path) for path, _ in (*self._files(), *self._kernels()))
        for path in self._temporaries():
            self._remove(path)
        if self._is_usable():
            for name in (NOTE, SCANNED):
                self._remove(self.folder / name)
        return count

    def verify(self) -> list[str]:
        """Checks every entry and GPU kernel and removes the damaged ones; gives their names."""
        damaged = []
        for path, _ in (*self._files(), *self._kernels()):
            try:
                (unpack_kernel if path.suffix == KERNEL_SUFFIX else unpack)(path.stem, read_file(path))
            except FileNotFoundError:
                continue  # another process removed it
            except (DamagedEntry, UnicodeDecodeError, OSError):
                damaged.append(path.stem)
                self._remove(path)
        return damaged

    def evict(self) -> None:
        """Brings the folder back under its limit, and removes what dead writers left."""
        now = time.time()
        self._written, self._looked = 0, now
        if self._is_usable():
            with contextlib.suppress(OSError):  # the next process looks again
                (self.folder / SCANNED).touch(mode=0o600)
        for path in self._temporaries():
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > (UNLOCKED_SECONDS if _is_abandoned(path) else STALE_SECONDS):
                    self._remove(path)
        files = sorted((*self._files(), *self._kernels()), key=lambda item: item[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        if total <= self.limit:
            return
        for path, status in files:
            self._remove(path)
            total -= status.st_size
            if total <= self.limit * 4 // 5:
                return

    # --- files -------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        if not is_key(key):
            raise ValueError(f"not a key: {key!r}")
        return self.folder / key[:2] / (key + SUFFIX)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        if not self._is_usable():
            return
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            if not is_key(path.stem):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                yield path, path.stat()

    def _kernels(self) -> Iterator[tuple[Path, os.stat_result]]:
        if not self._is_usable():
            return
        for path in self.folder.glob(f"{KERNEL_FOLDER}/*{KERNEL_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                yield path, path.stat()

    def _temporaries(self) -> list[Path]:
        if not self._is_usable():
            return []
        return [*self.folder.glob(f"{TEMPORARY}*"), *self.folder.glob(f"{KERNEL_FOLDER}/*{KERNEL_SUFFIX}.*")]

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"{path} could not be removed ({error})")
            return False
        return True

    def problem(self) -> str:
        """Why the folder is not used; "" when it is, or is not there yet."""
        try:
            status = os.stat(self.folder)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"cannot be looked at ({error})"
        if not stat.S_ISDIR(status.st_mode):
            return "is not a folder"
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            return "belongs to another user"
        if os.name == "posix" and status.st_mode & 0o077:
            return "is open to other users (mode should be 0700)"
        return ""

    def _is_usable(self, create: bool = False) -> bool:
        """Whether the folder is there (made if asked) and belongs to this user alone. Looked at each time: it may be
        removed or changed."""
        if create:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                self._warn_once(f"the folder {self.folder} cannot be made ({error}); nothing is cached")
                return False
        problem = self.problem()
        if problem:
            self._warn_once(f"the folder {self.folder} {problem}; nothing is cached")
        return not problem and self.folder.is_dir()

    def _warn_once(self, text: str) -> None:
        """A CacheWarning about the folder, which is the same for every entry."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)

    def _warn(self, text: str) -> None:
        warn(WARNED + text, CacheWarning)


def _try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file, if it is free (and this file system has locks). It goes with the descriptor, or
    the process."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _is_abandoned(path: Path) -> bool:
    """Whether nobody holds the lock of a temporary file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _label(path: Path) -> str:
    """The label in an entry's header, unchecked; "" when it cannot be read."""
    try:
        with _opened(path) as file:
            head = file.read(_HEADER.size)
            length = _HEADER.unpack(head)[2] if len(head) == _HEADER.size else 0
            text = file.read(min(length, 4096)).decode(errors="replace")
    except OSError:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
