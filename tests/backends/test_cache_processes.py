"""Compiling processes that share a disk cache, and are killed: nothing wrong, nothing hangs, nothing is left (see cache_processes.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusewright.runtime.cache import NOTE, SCANNED, STALE_SECONDS, SUFFIX, UNLOCKED_SECONDS, DiskCache

ROOT = Path(__file__).parents[2]


def run(folder: Path, kills: int, seed: int) -> None:
    command = [sys.executable, str(ROOT / "tests/backends/cache_processes.py"), str(folder), str(kills), str(seed)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cache = DiskCache(folder, 1 << 30)
    assert cache.entries() and cache.verify() == []
    left = [path for path in folder.rglob("*") if path.is_file() and path.suffix != SUFFIX and path.name not in (NOTE, SCANNED)]
    assert all(path.name.startswith("tmp-") for path in left) and len(left) <= kills + 8
    assert UNLOCKED_SECONDS < STALE_SECONDS
    past = time.time() - UNLOCKED_SECONDS - 1
    for path in left:
        os.utime(path, (past, past))
    cache.evict()
    assert not [path for path in left if path.exists()]  # the next writer removes them: the dead hold no lock


def test_a_few_kills(tmp_path: Path) -> None:
    run(tmp_path / "cache", 4, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 4))
def test_fifty_kills(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "cache", 50, seed)
