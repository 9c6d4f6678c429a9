"""Bundles: entries of the disk cache in one zip file, to warm another process or machine of the same kind.

Takes a cache, and a file or bytes; gives what was written, taken or refused. Always holds: nothing of a bundle is
loaded or run; its entries are taken by name (a key), never by path, by their hash, and only if it comes from a host of
this kind. Where a key is given, nothing is taken of a bundle that the owner of the key did not sign as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import struct
import zipfile
import zlib
from collections.abc import Collection
from typing import IO, Any

from fusewright.base.errors import FusewrightError
from fusewright.base.records import dataclass
from fusewright.exporting.packaged import ed25519_key
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
from fusewright.runtime.host import host_text, store

HOST_FILE, SEAL = "host.txt", "bundle.ed25519"
HOST_LIMIT = 1 << 20
HOST_PARTS = (
    "another version of fusewright",
    "another Python",
    "another PyTorch",
    "another build of PyTorch",
    "another kind of processor",
)
"""What differs where a part of `host_text` does."""


class BundleError(FusewrightError, ValueError):
    """A file is no bundle, or none for this host; the message says why."""


def bytes_text(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def write(
    cache: DiskCache, file: IO[bytes], only: Collection[str] | None = None, sign_key: Any = None
) -> tuple[int, list[str]]:
    """Writes the entries (those of the keys `only`) and the GPU kernels; gives their number, and the names of damaged
    ones, which are left out. `sign_key` (an Ed25519 private key, or its 32 bytes) signs all of it."""
    key = None if sign_key is None else ed25519_key(sign_key, "sign_key", "Private")
    count, damaged = 0, []
    contents = [(HOST_FILE, hashlib.sha256(host_text().encode()).digest())]
    sources = [
        ("", SUFFIX, unpack, cache.files()),
        (f"{KERNEL_FOLDER}/", KERNEL_SUFFIX, unpack_kernel, cache.kernel_files()),
    ]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(HOST_FILE, host_text())
        for folder, suffix, check, files in sources:
            for name, data in files:
                if only is not None and not folder and name not in only:
                    continue
                try:
                    check(name, data)
                except (DamagedEntry, UnicodeDecodeError):
                    damaged.append(name)
                    continue
                contents.append((f"{folder}{name}{suffix}", hashlib.sha256(data).digest()))
                bundle.writestr(f"{folder}{name}{suffix}", data)
                count += 1
        if key is not None:
            bundle.writestr(SEAL, key.sign(_signed(contents)))
    return count, damaged


def _signed(contents: list[tuple[str, bytes]]) -> bytes:
    """What a signature covers: the names and hashes of all files but its own."""
    lines = (f"{name}\0{digest.hex()}\n" for name, digest in sorted(contents))
    return b"fusewright bundle\n" + "".join(lines).encode(errors="surrogatepass")


def _verify(bundle: zipfile.ZipFile, key: Any, called: str, limit: int) -> list[bytes]:
    """The hashes of a bundle's files, in their order. Raises BundleError unless the owner of the key has signed
    them."""
    key = ed25519_key(key, "verify_key", "Public")
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    contents, seals = [], []
    try:
        for member in bundle.infolist():
            data = _content(bundle, member, limit)
            contents.append((member.filename, hashlib.sha256(data).digest()))
            if member.filename == SEAL:
                seals.append(data)
    except (DamagedEntry, *_UNREADABLE) as error:
        raise BundleError(f"{called} was not signed by this key, or was changed: it cannot be read ({error})") from None
    if len(seals) != 1:
        raise BundleError(f"{called} is not signed (it has no {SEAL})")
    try:
        key.verify(seals[0], _signed([one for one in contents if one[0] != SEAL]))
    except invalid:
        raise BundleError(f"{called} was not signed by this key, or was changed since") from None
    return [digest for _, digest in contents]


def read(cache: DiskCache, file: IO[bytes], called: str, verify_key: Any = None) -> tuple[int, list[str]]:
    """Takes the entries of a bundle; gives their number, and a complaint about each that was refused. `called` stands
    for the file in messages; `verify_key`: an Ed25519 public key (or its 32 bytes) whose owner must have signed it.
    Raises BundleError for what is no bundle of this host, or not signed so."""
    count, refused = 0, []
    try:
        bundle = zipfile.ZipFile(file)
    except _UNREADABLE as error:
        raise BundleError(f"{called} is no bundle: {error}") from None
    with bundle:
        members = bundle.infolist()
        try:
            host = _content(bundle, bundle.getinfo(HOST_FILE), HOST_LIMIT).decode(errors="replace")
        except KeyError:
            raise BundleError(f"{called} is no bundle: it has no {HOST_FILE}") from None
        except (DamagedEntry, *_UNREADABLE) as error:
            raise BundleError(f"{called} is no bundle: its {HOST_FILE} cannot be read ({error})") from None
        if host != host_text():
            raise BundleError(
                f"{called} was made with {_difference(host)}: its entries would never be used here. "
                "Export a bundle where the same program runs with the same versions, on the same kind of processor."
            )
        hashes = None if verify_key is None else _verify(bundle, verify_key, called, max(cache.limit, HOST_LIMIT))
        entries = [one for one in enumerate(members) if one[1].filename not in (HOST_FILE, SEAL)]
        for place, member in entries:
            try:
                data = _content(bundle, member, cache.limit)
                if hashes is not None and hashlib.sha256(data).digest() != hashes[place]:
                    raise DamagedEntry("it changed while it was read")
                stored = _take(cache, member.filename, data)
            except (DamagedEntry, *_UNREADABLE) as error:
                refused.append(f"{member.filename!r}: refused ({error})")
                continue
            if not stored:
                raise BundleError(
                    f"took {count} of {len(entries)} entries: the next one could not be written to {cache.folder}"
                )
            count += 1
    return count, refused


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
        raise DamagedEntry(f"it would take {bytes_text(member.file_size)}, and {bytes_text(limit)} is the most")
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


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What bytes of artifacts hold: the number of entries, and why each other one was refused."""

    entries: int
    refused: tuple[str, ...] = ()


def save_cache_artifacts(*, sign_key: Any = None) -> tuple[bytes, CacheInfo] | None:
    """The entries of the disk cache that this process has compiled or used, as bytes, with what they hold; None if
    there are none. `sign_key`: an Ed25519 private key, or its 32 bytes, that signs them."""
    file = io.BytesIO()
    count, damaged = write(store(), file, store().used, sign_key)
    return (file.getvalue(), CacheInfo(count, tuple(damaged))) if count else None


def load_cache_artifacts(serialized_artifacts: bytes, *, verify_key: Any = None) -> CacheInfo:
    """Takes what save_cache_artifacts gave into the disk cache, where later compiles find it. Only from a source that
    you trust: it holds machine code, which runs with the rights of your process.

    verify_key  an Ed25519 public key, or its 32 bytes: nothing is taken that its owner did not sign

    Raises BundleError for bytes that are no artifacts, from a host of another kind, or not signed by the key;
    ExportError where `cryptography`, which checks signatures, is not installed.
    """
    given = io.BytesIO(serialized_artifacts)
    count, refused = read(store(), given, "what load_cache_artifacts got", verify_key)
    return CacheInfo(count, tuple(refused))
