"""The disk cache: what is stored comes back, what is damaged never does, whoever writes and however writers die."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fusewright.errors import CacheWarning
from fusewright.runtime.cache import STALE_SECONDS, SUFFIX, DiskCache, pack


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 1 << 20)


def test_what_is_stored_comes_back(cache: DiskCache) -> None:
    assert cache.get(key_of("a")) is None
    assert cache.put(key_of("a"), "forward (model.py:3)", b"\0body")
    assert cache.get(key_of("a")) == b"\0body"
    assert DiskCache(cache.folder, 1 << 20).get(key_of("a")) == b"\0body"
    (entry,) = cache.entries()
    assert (entry.key, entry.label) == (key_of("a"), "forward (model.py:3)")
    assert cache.size() == entry.size
    assert cache.clear() == 1 and cache.get(key_of("a")) is None and not cache.entries()


def test_the_folder_and_its_files_are_private(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    (file,) = cache.folder.glob(f"*/*{SUFFIX}")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    cache = DiskCache(folder, 1 << 20)
    with pytest.warns(CacheWarning, match="open to other users"):
        assert not cache.put(key_of("a"), "f", b"x")
    assert cache.get(key_of("a")) is None and not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="cannot be made"):
        assert not DiskCache(tmp_path / "file" / "cache", 1 << 20).put(key_of("a"), "f", b"x")


def test_every_flipped_bit_is_found(cache: DiskCache) -> None:
    key = key_of("a")
    whole = pack(key, "f", b"some machine code")
    for bit in range(len(whole) * 8):
        cache.put(key, "f", b"some machine code")
        (file,) = cache.folder.glob(f"*/*{SUFFIX}")
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.warns(CacheWarning, match="damaged"):
            assert cache.get(key) is None
        assert not file.exists()


@pytest.mark.parametrize("length", [0, 1, 40, 45, 50])
def test_a_cut_entry_is_found(cache: DiskCache, length: int) -> None:
    cache.put(key_of("a"), "f", b"some machine code")
    (file,) = cache.folder.glob(f"*/*{SUFFIX}")
    file.write_bytes(file.read_bytes()[:length])
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(key_of("a")) is None


def test_an_entry_under_another_name_is_refused(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    (file,) = cache.folder.glob(f"*/*{SUFFIX}")
    other = cache.folder / key_of("b")[:2] / (key_of("b") + SUFFIX)
    other.parent.mkdir(exist_ok=True)
    file.rename(other)
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.get(key_of("b")) is None


def test_verify_removes_what_is_damaged(cache: DiskCache) -> None:
    for name in "abc":
        cache.put(key_of(name), name, b"body" * 10)
    (cache.folder / key_of("b")[:2] / (key_of("b") + SUFFIX)).write_bytes(b"nonsense")
    assert cache.verify() == [key_of("b")]
    assert {entry.label for entry in cache.entries()} == {"a", "c"}


def test_what_was_not_used_for_longest_goes_first(cache: DiskCache) -> None:
    body = bytes(100_000)
    for age, name in enumerate("abcdefgh"):
        cache.put(key_of(name), name, body)
        file = cache.folder / key_of(name)[:2] / (key_of(name) + SUFFIX)
        os.utime(file, (1e9 + age, 1e9 + age))
    cache.get(key_of("a"))  # used now
    cache.limit = 500_000
    cache.evict()
    assert {entry.label for entry in cache.entries()} == {"a", "g", "h"}
    assert cache.size() <= cache.limit


def test_what_dead_writers_left_is_removed(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    old, new = cache.folder / "tmp-1-old", cache.folder / "tmp-2-new"
    for file in (old, new):
        file.write_bytes(b"half")
    past = time.time() - STALE_SECONDS - 1
    os.utime(old, (past, past))
    cache.evict()
    assert not old.exists() and new.exists()


def test_only_keys_are_paths(cache: DiskCache) -> None:
    for bad in ("../../etc/passwd", "", "A" * 64, "a" * 63):
        with pytest.raises(ValueError, match="not a key"):
            cache.get(bad)


def _write_forever(folder: Path, seed: int) -> None:
    warnings.simplefilter("error")  # a damaged entry would be a warning, and end this process
    generator = random.Random(seed)
    cache = DiskCache(folder, 3_000_000)
    while True:
        name = str(generator.randrange(40))
        body = (name * 50_000).encode()
        found = cache.get(key_of(name))
        assert found is None or found == body, name
        if generator.random() < 0.7:
            cache.put(key_of(name), name, body)


def test_writers_killed_at_any_moment_damage_nothing(tmp_path: Path) -> None:
    """Eight processes on one empty cache, killed by SIGKILL one after the other, 50 times."""
    folder = tmp_path / "cache"
    generator = random.Random(0)
    fork = multiprocessing.get_context("fork")

    def start(seed: int) -> BaseProcess:
        process = fork.Process(target=_write_forever, args=(folder, seed))
        process.start()
        return process

    running = [start(seed) for seed in range(8)]
    for kill in range(50):
        time.sleep(generator.random() * 0.02)
        victim = running.pop(0)
        assert victim.is_alive()
        victim.kill()
        victim.join()
        running.append(start(100 + kill))
    for process in running:
        assert process.is_alive()
        process.kill()
        process.join()
    cache = DiskCache(folder, 3_000_000)
    assert cache.verify() == [] and cache.entries()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in map(str, range(40)):
            assert cache.get(key_of(name)) in (None, (name * 50_000).encode())
    left = [path for path in folder.rglob("*") if path.is_file() and path.suffix != SUFFIX]
    assert all(path.name.startswith("tmp-") for path in left)  # no lock; these go when they are old
