"""The command `fusewright`: looks after the disk cache.

Takes command-line arguments; prints, and gives an exit status (0: well; 1: damaged entries were found; 2: wrong usage or a file that
cannot be used). Always holds: it never loads or runs what the cache holds; hashes are checked on the bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fusewright.backends.graph_cache import host_text, store
from fusewright.runtime.cache import (
    KERNEL_FOLDER,
    KERNEL_SUFFIX,
    SUFFIX,
    DamagedEntry,
    DiskCache,
    is_kernel_name,
    is_key,
    unpack,
    unpack_kernel,
)

HOST_FILE = "host.txt"


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
    return 0


def _verify(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = len(cache.entries()) + cache.kernels()
    damaged = cache.verify()
    for key in damaged:
        print(f"{key}: damaged, removed")
    print(f"{count - len(damaged)} of {count} entries are whole")
    return 1 if damaged else 0


def _export(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = 0
    with zipfile.ZipFile(arguments.file, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(HOST_FILE, host_text())
        for key, data in cache.files():
            try:
                unpack(key, data)
            except (DamagedEntry, UnicodeDecodeError):
                print(f"{key}: damaged, left out", file=sys.stderr)
                continue
            bundle.writestr(key + SUFFIX, data)
            count += 1
        for name, data in cache.kernel_files():
            try:
                unpack_kernel(name, data)
            except DamagedEntry:
                print(f"{name}: damaged, left out", file=sys.stderr)
                continue
            bundle.writestr(f"{KERNEL_FOLDER}/{name}{KERNEL_SUFFIX}", data)
            count += 1
    print(f"wrote {count} entries to {arguments.file}")
    return 0


def _import(cache: DiskCache, arguments: argparse.Namespace) -> int:
    count = refused = 0
    try:
        bundle = zipfile.ZipFile(arguments.file)
    except zipfile.BadZipFile as error:
        raise _UsageError(f"{arguments.file} is no bundle: {error}") from None
    with bundle:
        names = bundle.namelist()
        if HOST_FILE not in names:
            raise _UsageError(f"{arguments.file} is no bundle: it has no {HOST_FILE}")
        if bundle.read(HOST_FILE).decode(errors="replace") != host_text():
            print("the bundle comes from another version or kind of processor: its entries will not be used here", file=sys.stderr)
        for name in names:
            if name == HOST_FILE:
                continue
            try:
                count += _take(cache, name, bundle.read(name))
            except (DamagedEntry, UnicodeDecodeError, zipfile.BadZipFile) as error:
                print(f"{name}: refused ({error})", file=sys.stderr)
                refused += 1
    print(f"took {count} entries into {cache.folder}" + (f", refused {refused}" if refused else ""))
    return 1 if refused else 0


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
    parser = argparse.ArgumentParser(prog="fusewright", description="fusewright, a just-in-time compiler for PyTorch programs")
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="the disk cache of compiled graphs (FUSEWRIGHT_CACHE_DIR, FUSEWRIGHT_CACHE_MIB)")
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
        return _ACTIONS[parsed.action][0](store(), parsed)
    except (OSError, _UsageError) as error:
        print(f"fusewright: {error}", file=sys.stderr)
        return 2
