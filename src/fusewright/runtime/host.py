"""The machine and the installation that compiled code is for, which targets' code runs here, and the disk cache that
the environment names."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch

from fusewright.base.options import cache_folder, environment
from fusewright.runtime.cache import DiskCache

_V2 = ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm")
_V3 = (*_V2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "x86-64-v4": ("x86_64", _V4),
    "x86-64-v3": ("x86_64", _V3),
    "x86-64-v2": ("x86_64", _V2),
    "aarch64": ("aarch64", ()),
}
"""What a target's code needs: the machine, and flags of /proc/cpuinfo. The best stands first."""
_INSTRUCTIONS = (
    "3dnowprefetch", "abm", "adx", "aes", "amx", "apx", "avx", "bmi", "clflushopt", "clwb", "clzero", "cmpccxadd",
    "cx16", "f16c", "fma", "fsgsbase", "gfni", "invpcid", "lahf_lm", "lwp", "movbe", "movdir", "mwaitx", "pclmul",
    "pku", "pni", "popcnt", "prefetchi", "rdp", "rdrand", "rdseed", "rtm", "sse", "ssse", "serialize", "sha", "sm3",
    "sm4", "tbm", "vaes", "vpclmul", "waitpkg", "xop", "xsave",
)  # fmt: skip
"""Beginnings of the flags of x86-64 that code for one processor may rely on."""
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


@cache
def _sources() -> str:
    """A digest of this package's code, compiled and not: development changes it without changing the version. Reading
    all of it takes a tenth of a small function's first call, so the disk cache keeps the digest with the files' sizes
    and times, by which Python too knows that a file is what it was."""
    root = str(Path(__file__).parents[1])
    files = sorted(_code_below(root))
    if not environment("FUSEWRIGHT_CACHE"):
        return _digest_of(root, files)
    stamp = hashlib.sha256(repr(files).encode()).hexdigest()
    kept = store().noted(stamp)
    if kept is not None:
        return kept.decode()
    digest = _digest_of(root, files)
    store().note(stamp, digest.encode())
    return digest


def _digest_of(root: str, files: list[tuple[str, int, int]]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(path[len(root) :].encode() + b"\0")
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    return digest.hexdigest()


def _code_below(folder: str) -> Iterator[tuple[str, int, int]]:
    """The files of a folder and those below it that Python loads from source or as an extension, with size and time of
    change (pathlib takes thrice as long)."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py") or entry.name.startswith("_native"):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _code_below(entry.path)


@cache
def _cpu_info() -> dict[str, str]:
    """What the system says of the first processor; nothing where it does not."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def _processor() -> str:
    """What tells this kind of processor from another: its model, and the instructions that it has."""
    info = _cpu_info()
    if not info:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    return f"{platform.machine()} " + "; ".join(value for name, value in info.items() if name in _CPU_FIELDS)


def cpu_flags() -> frozenset[str]:
    """The flags of this processor."""
    info = _cpu_info()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def needs(target: str) -> tuple[str, tuple[str, ...]]:
    """What a target's code needs of the machine that runs it: the machine's name, and flags of its processor."""
    if target in _NEEDS:
        return _NEEDS[target]
    machine = platform.machine()
    return machine, tuple(sorted(flag for flag in cpu_flags() if machine != "x86_64" or flag.startswith(_INSTRUCTIONS)))


def runs_here(machine: str, flags: Iterable[str]) -> bool:
    """Whether code that needs these runs on this machine. Where the system does not tell flags, other code does not."""
    return machine == platform.machine() and cpu_flags().issuperset(flags)


@cache
def host_text() -> str:
    """What an entry depends on beside the graph: versions of fusewright, Python and PyTorch, and the processor."""
    return "|".join(
        (_sources(), sys.implementation.cache_tag, torch.__version__, str(torch.version.git_version), _processor())
    )


@cache
def _store(folder: Path, mib: int) -> DiskCache:
    return DiskCache(folder, mib << 20)


def store() -> DiskCache:
    """The disk cache that the environment names."""
    return _store(cache_folder(), environment("FUSEWRIGHT_CACHE_MIB"))
