"""The machine and the installation that compiled code is for, and the disk cache that the environment names."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from fusewright.base.options import cache_folder, environment
from fusewright.runtime.cache import DiskCache

_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")


@cache
def _sources() -> str:
    """A digest of this package's code, compiled and not: development changes it without changing the version."""
    root = str(Path(__file__).parents[1])
    digest = hashlib.sha256()
    for path in sorted(_code_below(root)):
        digest.update(path[len(root) :].encode() + b"\0")
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    return digest.hexdigest()


def _code_below(folder: str) -> Iterator[str]:
    """The files of a folder and those below it that Python loads from source or as an extension (pathlib takes thrice
    as long)."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py") or entry.name.startswith("_native"):
                yield entry.path
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _code_below(entry.path)


@cache
def _processor() -> str:
    """What tells this kind of processor from another: its model, and the instructions that it has."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    fields = (line.partition(":") for line in first.splitlines())
    return f"{platform.machine()} " + "; ".join(
        value.strip() for name, _, value in fields if name.strip() in _CPU_FIELDS
    )


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
