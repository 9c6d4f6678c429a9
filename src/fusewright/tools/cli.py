"""The command `fusewright`: looks after the disk cache, and has the commands of tools/commands.py.

Takes command-line arguments; prints, and gives an exit status (0: well; 1: damaged entries were found; 2: wrong usage,
or a file or folder that cannot be used). Always holds: it never loads or runs what the cache holds; hashes are checked
on the bytes. A bundle's entries are taken by name (a key), never by path, and only if it comes from a host of this
kind.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import fusewright
from fusewright.backends.graph_cache import host_text, store
from fusewright.base.errors import OptionError
from fusewright.runtime.cache import (
    KERNEL_FOLDER,
    KERNEL_SUFFIX,
    SUFFIX,
    WARNED,
    DamagedEntry,
    DiskCache,
    is_kernel_name,
    is_key,
    unpack,
    unpack_kernel,
)
from fusewright.tools.commands import COMMANDS

HOST_FILE = "host.txt"
HOST_LIMIT = 1 << 20
HOST_PARTS = (
    "another version of fusewright",
    "another Python",
    "another PyTorch",
    "another build of PyTorch",
    "another kind of processor",
)
"""What differs where a part of `host_text` does."""


class _UsageError(Exception):
    """Something the user gave cannot be used; the message says what and why."""


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _size(cache: DiskCache, arguments: argparse.Namespace) -> int:
    kernels = cache.kernels()
    count = f"{len(cache.entries())} entries" + (f" and {kernels} GPU kernels" if kernels else "")
    print(f"{count}, {_bytes(cache.size())} of at most {_bytes(cache.limit)}, in {cache.folder}")
    return 0


def _list(cache: DiskCache, arguments: argparse.Namespace) -> int:
    for entry in cache.entries():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.key[:16]}  {_bytes(entry.size):>10}  {used}  {entry.label}")
    return 0


def _clear(cache: DiskCache, arguments: argparse.Namespace) -> int:
    print(f"removed {cache.clear()} entries from {cache.folder}")
    left = len(cache.entries()) + cache.kernels()
    if left:
        raise _UsageError(
            f"{left} entries are still in {cache.folder}: they cannot be removed, or another process has written them "
            "since"
        )
    return 0


def _verify(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = len(cache.entries()) + cache.kernels()
    damaged = cache.verify()
    for key in damaged:
        print(f"{key}: damaged, removed")
    print(f"{count - len(damaged)} of {count} entries are whole")
    return 1 if damaged else 0


def _export(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = damaged = 0
    file: Path = arguments.file
    if file.is_dir():
        raise _UsageError(f"{file} is a folder: give the name of a file")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")  # a bundle is whole or absent
    sources = [
        ("", SUFFIX, unpack, cache.files()),
        (f"{KERNEL_FOLDER}/", KERNEL_SUFFIX, unpack_kernel, cache.kernel_files()),
    ]
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr(HOST_FILE, host_text())
            for folder, suffix, check, files in sources:
                for name, data in files:
                    try:
                        check(name, data)
                    except (DamagedEntry, UnicodeDecodeError):
                        print(f"{name}: damaged, left out", file=sys.stderr)
                        damaged += 1
                        continue
                    bundle.writestr(f"{folder}{name}{suffix}", data)
                    count += 1
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"wrote {count} entries to {file}")
    return 1 if damaged else 0


def _import(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = refused = 0
    try:
        bundle = zipfile.ZipFile(arguments.file)
    except _UNREADABLE as error:
        raise _UsageError(f"{arguments.file} is no bundle: {error}") from None
    with bundle:
        members = bundle.infolist()
        try:
            host = _content(bundle, bundle.getinfo(HOST_FILE), HOST_LIMIT).decode(errors="replace")
        except KeyError:
            raise _UsageError(f"{arguments.file} is no bundle: it has no {HOST_FILE}") from None
        except (DamagedEntry, *_UNREADABLE) as error:
            raise _UsageError(f"{arguments.file} is no bundle: its {HOST_FILE} cannot be read ({error})") from None
        if host != host_text():
            raise _UsageError(
                f"{arguments.file} was made with {_difference(host)}: its entries would never be used here. "
                "Export a bundle where the same program runs with the same versions, on the same kind of processor."
            )
        for member in members:
            if member.filename == HOST_FILE:
                continue
            try:
                stored = _take(cache, member.filename, _content(bundle, member, cache.limit))
            except (DamagedEntry, *_UNREADABLE) as error:
                print(f"{member.filename!r}: refused ({error})", file=sys.stderr)
                refused += 1
                continue
            if not stored:
                raise _UsageError(
                    f"took {count} of {len(members) - 1} entries: the next one could not be written to {cache.folder}"
                )
            count += 1
    print(f"took {count} entries into {cache.folder}" + (f", refused {refused}" if refused else ""))
    return 1 if refused else 0


_UNREADABLE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""What reading a damaged or hostile zip file raises (an encrypted or unknown kind of file is a RuntimeError)."""


def _content(bundle: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> bytes:
    """A file of a bundle. Raises DamagedEntry for one that would be larger than `limit` bytes, before it is
    unpacked."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedEntry("packed in another way than bundles are")
    if member.file_size > limit:
        raise DamagedEntry(f"it would take {_bytes(member.file_size)}, and {_bytes(limit)} is the most")
    return bundle.read(member)


def _difference(host: str) -> str:
    """What of another host's description is not as here."""
    theirs, ours = host.split("|"), host_text().split("|")
    if len(theirs) != len(ours):
        return "another version of fusewright"
    return " and ".join(name for name, a, b in zip(HOST_PARTS, theirs, ours, strict=True) if a != b)


def _take(cache: DiskCache, name: str, data: bytes) -> bool:
    """Stores a bundle's file, an entry or a GPU kernel. Raises DamagedEntry for anything else."""
    kernel = name.removeprefix(f"{KERNEL_FOLDER}/").removesuffix(KERNEL_SUFFIX)
    if name == f"{KERNEL_FOLDER}/{kernel}{KERNEL_SUFFIX}" and is_kernel_name(kernel):
        unpack_kernel(kernel, data)
        return cache.put_kernel(kernel, data)
    key = name.removesuffix(SUFFIX)
    if not is_key(key) or not name.endswith(SUFFIX):
        raise DamagedEntry("not the name of an entry")
    label, body = unpack(key, data)
    return cache.put(key, label, body)


_ACTIONS: dict[str, tuple[Callable[[DiskCache, argparse.Namespace], int], str]] = {
    "size": (_size, "number of entries, bytes, and the folder"),
    "list": (_list, "every entry: key, bytes, last use, function; the last used first"),
    "clear": (_clear, "remove every entry"),
    "verify": (_verify, "check every entry's hash and remove damaged ones (exit status 1 if there were any)"),
    "export": (_export, "write all entries to a bundle, to warm another machine of the same kind"),
    "import": (_import, "take the entries of a bundle; only from a source that you trust: it holds machine code"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusewright", description="fusewright, a just-in-time compiler for PyTorch programs"
    )
    parser.add_argument("--version", action="version", version=f"fusewright {fusewright.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.meaning, description=command.meaning))
    cache = commands.add_parser(
        "cache", help="the disk cache of compiled graphs (FUSEWRIGHT_CACHE_DIR, FUSEWRIGHT_CACHE_MIB)"
    )
    actions = cache.add_subparsers(dest="action", required=True)
    for name, (_, meaning) in _ACTIONS.items():
        action = actions.add_parser(name, help=meaning, description=meaning)
        if name in ("export", "import"):
            action.add_argument("file", type=Path, help="the bundle (a zip file)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (default: the process's own); gives its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command != "cache":
            return COMMANDS[parsed.command].run(parsed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                status = _run(parsed)
            finally:
                for warning in told:
                    print(f"fusewright: {str(warning.message).removeprefix(WARNED)}", file=sys.stderr)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, OptionError, _UsageError) as error:
        print(f"fusewright: {error}", file=sys.stderr)
        return 2


def _run(parsed: argparse.Namespace) -> int:
    cache = store()
    problem = cache.problem()
    if problem:
        raise _UsageError(f"the folder {cache.folder} {problem}; nothing is cached there")
    return _ACTIONS[parsed.action][0](cache, parsed)
