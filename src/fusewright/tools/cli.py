"""The command `fusewright`: looks after the disk cache, and has the commands of tools/commands.py.

Takes command-line arguments; prints, and gives an exit status (0: well; 1: damaged entries were found; 2: wrong usage,
or a file or folder that cannot be used). Always holds: it never loads or runs what the cache holds; hashes are checked
on the bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import fusewright
from fusewright.base.errors import ExportError, OptionError
from fusewright.runtime.cache import (
    WARNED,
    DiskCache,
)
from fusewright.runtime.host import store
from fusewright.tools import bundle
from fusewright.tools.commands import COMMANDS


class _UsageError(Exception):
    """Something the user gave cannot be used; the message says what and why."""


def _size(cache: DiskCache, arguments: argparse.Namespace) -> int:
    kernels = cache.kernels()
    count = f"{len(cache.entries())} entries" + (f" and {kernels} GPU kernels" if kernels else "")
    print(f"{count}, {bundle.bytes_text(cache.size())} of at most {bundle.bytes_text(cache.limit)}, in {cache.folder}")
    return 0


def _list(cache: DiskCache, arguments: argparse.Namespace) -> int:
    for entry in cache.entries():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.key[:16]}  {bundle.bytes_text(entry.size):>10}  {used}  {entry.label}")
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
    file: Path = arguments.file
    if file.is_dir():
        raise _UsageError(f"{file} is a folder: give the name of a file")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")  # a bundle is whole or absent
    try:
        with open(temporary, "xb") as made:
            count, damaged = bundle.write(cache, made, sign_key=_key(arguments.sign_key))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    for name in damaged:
        print(f"{name}: damaged, left out", file=sys.stderr)
    print(f"wrote {count} entries to {file}")
    return 1 if damaged else 0


def _key(file: Path | None) -> bytes | None:
    """The 32 bytes of an Ed25519 key, which a file holds as they are or in hexadecimal."""
    if file is None:
        return None
    data = file.read_bytes()
    if len(data) == 32:
        return data
    try:
        return bytes.fromhex(data.decode())
    except ValueError:
        raise _UsageError(f"{file} is no Ed25519 key: it holds neither 32 bytes nor their 64 digits") from None


def _import(cache: DiskCache, arguments: argparse.Namespace) -> int:
    if not arguments.trust and arguments.verify_key is None:
        raise _UsageError(
            f"{arguments.file} holds machine code, which would run with your rights. Pass --trust if you would run any "
            "program of whoever made it, or --verify-key FILE to take it only if the owner of that key has signed it"
        )
    with open(arguments.file, "rb") as file:
        count, refused = bundle.read(cache, file, str(arguments.file), _key(arguments.verify_key))
    for complaint in refused:
        print(complaint, file=sys.stderr)
    print(f"took {count} entries into {cache.folder}" + (f", refused {len(refused)}" if refused else ""))
    return 1 if refused else 0


_ACTIONS: dict[str, tuple[Callable[[DiskCache, argparse.Namespace], int], str]] = {
    "size": (_size, "number of entries, bytes, and the folder"),
    "list": (_list, "every entry: key, bytes, last use, function; the last used first"),
    "clear": (_clear, "remove every entry"),
    "verify": (_verify, "check every entry's hash and remove damaged ones (exit status 1 if there were any)"),
    "export": (_export, "write all entries to a bundle, to warm another machine of the same kind"),
    "import": (_import, "take the entries of a bundle, which holds machine code: --trust it, or check who signed it"),
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
        if name == "export":
            action.add_argument("--sign-key", type=Path, metavar="FILE", help="an Ed25519 private key that signs it")
        elif name == "import":
            action.add_argument("--trust", action="store_true", help="run its machine code, whoever made it")
            action.add_argument(
                "--verify-key", type=Path, metavar="FILE", help="an Ed25519 public key, whose owner must have signed it"
            )
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
    except (OSError, OptionError, ExportError, bundle.BundleError, _UsageError) as error:
        print(f"fusewright: {error}", file=sys.stderr)
        return 2


def _run(parsed: argparse.Namespace) -> int:
    cache = store()
    problem = cache.problem()
    if problem:
        raise _UsageError(f"the folder {cache.folder} {problem}; nothing is cached there")
    return _ACTIONS[parsed.action][0](cache, parsed)
