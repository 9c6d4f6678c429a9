"""The disk cache: what is stored comes back, what is damaged never does, whoever writes and however writers die."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

import fusewright
from fusewright.base.errors import CacheWarning
from fusewright.base.events import STREAM, CacheUse
from fusewright.runtime import host
from fusewright.runtime.cache import (
    KERNEL_MAGIC,
    SCANNED,
    STALE_SECONDS,
    SUFFIX,
    UNLOCKED_SECONDS,
    DamagedEntry,
    DiskCache,
    pack,
    unpack,
    unpack_kernel,
)
from fusewright.tools import cli

ROOT = Path(__file__).parents[2]


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


def test_a_name_that_ends_elsewhere_is_found(cache: DiskCache) -> None:
    """The label's length decides which bytes are the body; where that begins with a zero byte, a longer label must not fit the same hash."""
    key = key_of("a")
    whole = bytearray(pack(key, "ab", b"\0body"))
    for length in (0, 1, 3, 4, 7, 8):
        struct.pack_into("<I", whole, 37, length)
        with pytest.raises((DamagedEntry, UnicodeDecodeError)):
            unpack(key, bytes(whole))


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


def test_a_look_at_every_file_is_rare(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as there are files: one for many writes, and none in a process behind another's."""
    looks: list[DiskCache] = []
    look = DiskCache.evict
    monkeypatch.setattr(DiskCache, "evict", lambda self: (looks.append(self), look(self)))
    for number in range(100):
        cache.put(key_of(str(number)), "f", bytes(400))
    assert looks == [cache]
    again = DiskCache(cache.folder, cache.limit)
    again.put(key_of("again"), "f", bytes(400))
    assert looks == [cache]
    again.put(key_of("much"), "f", bytes(cache.limit // 16))
    assert looks == [cache, again]
    os.utime(cache.folder / SCANNED, (1e9, 1e9))
    DiskCache(cache.folder, cache.limit).put(key_of("later"), "f", b"x")
    assert len(looks) == 3


def test_what_dead_writers_left_is_removed(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    old, new = cache.folder / "tmp-1-old", cache.folder / "tmp-2-new"
    for file in (old, new):
        file.write_bytes(b"half")
    past = time.time() - STALE_SECONDS - 1
    os.utime(old, (past, past))
    cache.evict()
    assert not old.exists() and new.exists()


def test_what_living_writers_write_stays(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    dead, living = cache.folder / "tmp-1-dead", cache.folder / "tmp-2-living"
    past = time.time() - UNLOCKED_SECONDS - 1
    with open(living, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        dead.write_bytes(b"half")
        for path in (dead, living):
            os.utime(path, (past, past))
        cache.evict()
        assert not dead.exists() and living.exists()
    cache.evict()
    assert not living.exists()


def test_a_symbolic_link_to_the_folder(cache: DiskCache, tmp_path: Path) -> None:
    cache.put(key_of("a"), "f", b"x")
    (tmp_path / "link").symlink_to(cache.folder)
    linked = DiskCache(tmp_path / "link", 1 << 20)
    assert linked.get(key_of("a")) == b"x" and linked.put(key_of("b"), "f", b"y") and cache.get(key_of("b")) == b"y"
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.warns(CacheWarning, match="cannot be made"):
        assert not DiskCache(tmp_path / "nowhere", 1 << 20).put(key_of("a"), "f", b"x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_used(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    os.chown(cache.folder, 12345, -1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert cache.get(key_of("a")) is None and not cache.put(key_of("b"), "f", b"y")


def test_a_folder_that_changes_meanwhile(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    shutil.rmtree(cache.folder)
    assert cache.get(key_of("a")) is None and cache.put(key_of("a"), "f", b"x") and cache.get(key_of("a")) == b"x"
    cache.folder.chmod(0o750)
    with pytest.warns(CacheWarning, match="open to other users"):
        assert cache.get(key_of("a")) is None


def test_a_full_disk_is_one_warning(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, unlimited[1])
    )  # as ENOSPC does, writing fails after the first bytes
    try:
        with pytest.warns(CacheWarning, match="could not be written") as told:
            for name in "bcd":
                assert not cache.put(key_of(name), name, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert len(told) == 1 and not list(cache.folder.glob("tmp-*"))
    assert [entry.label for entry in cache.entries()] == ["f"] and cache.put(key_of("b"), "b", bytes(5000))


def test_a_folder_that_cannot_be_written(cache: DiskCache) -> None:
    cache.put(key_of("a"), "f", b"x")
    (cache.folder / key_of("b")[:2]).write_text("in the way of a folder")
    with pytest.warns(CacheWarning, match="could not be written"):
        assert not cache.put(key_of("b"), "f", b"y")
    assert cache.get(key_of("a")) == b"x" and not list(cache.folder.glob("tmp-*"))


def test_an_entry_that_is_no_file_does_not_hang(cache: DiskCache) -> None:
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        cache.put(key_of(name), name, b"x")
        path = cache.folder / key_of(name)[:2] / (key_of(name) + SUFFIX)
        path.unlink()
        make(path)
        with pytest.warns(CacheWarning, match="cannot be read"):
            assert cache.get(key_of(name)) is None
    assert cache.put(key_of("pipe"), "pipe", b"y") and cache.get(key_of("pipe")) == b"y"


def test_eviction_under_concurrent_readers(tmp_path: Path) -> None:
    """Readers see an entry whole or not at all while a writer keeps a small folder under its bound."""
    folder = tmp_path / "cache"
    bodies = {str(number): str(number).encode() * 30_000 for number in range(12)}
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        cache = DiskCache(folder, 300_000)
        while not stop.is_set():
            for name, body in bodies.items():
                found = cache.get(key_of(name))
                if found not in (None, body):
                    wrong.append(name)

    cache = DiskCache(folder, 300_000)
    cache.put(key_of("first"), "first", b"x")
    readers = [threading.Thread(target=read) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reader in readers:
            reader.start()
        for turn in range(120):
            name = str(turn % 12)
            assert cache.put(key_of(name), name, bodies[name])
            cache.evict()
            assert cache.size() <= 300_000
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong and cache.verify() == []


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
    left = [path for path in folder.rglob("*") if path.is_file() and path.suffix != SUFFIX and path.name != SCANNED]
    assert all(path.name.startswith("tmp-") for path in left)  # no lock; these go when they are old


def crowd(folder: str, number: int) -> None:
    """Forks processes that compile the same training step at once; prints how many did each thing with the cache."""
    torch.set_num_threads(1)
    fusewright.compile(lambda x: x.exp().sum())(torch.ones(3).requires_grad_()).backward()  # imports the compiler
    fork = multiprocessing.get_context("fork")
    begin, told = fork.Barrier(number), fork.SimpleQueue()

    def compiles() -> None:
        uses: list[bool] = []
        hear = lambda event: uses.append(event.hit) if isinstance(event, CacheUse) else None
        begin.wait()
        with STREAM.listening(hear):
            x = torch.arange(12.0).view(3, 4).requires_grad_()
            fusewright.compile(lambda x: torch.softmax(x.sin(), 1).square().sum())(x).backward()
        expected = torch.arange(12.0).view(3, 4).requires_grad_()
        torch.softmax(expected.sin(), 1).square().sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)
        told.put(tuple(uses))

    processes = [fork.Process(target=compiles) for _ in range(number)]
    for process in processes:
        process.start()
    found = Counter(told.get() for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    print(json.dumps([[list(uses), count] for uses, count in found.items()]))


def in_a_crowd(folder: Path, number: int) -> dict[tuple[bool, ...], int]:
    text = f"from tests.runtime.test_cache import crowd; crowd({str(folder)!r}, {number})"
    environment = os.environ | {"FUSEWRIGHT_CACHE_DIR": str(folder), "FUSEWRIGHT_CACHE": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, no backward runs in a fork of who has run one
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {tuple(uses): count for uses, count in json.loads(done.stdout.splitlines()[-1])}


def test_one_of_many_processes_compiles_and_the_others_load(tmp_path: Path) -> None:
    """The forward and the backward may be compiled by two of them."""
    found = in_a_crowd(tmp_path / "cache", 8)
    misses = [sum(not uses[place] for uses in found for _ in range(found[uses])) for place in range(2)]
    assert sum(found.values()) == 8 and misses == [1, 1], found
    cache = DiskCache(tmp_path / "cache", 1 << 30)
    assert len(cache.entries()) == 4 and cache.verify() == []
    assert not [path for path in cache.folder.iterdir() if path.name.startswith("tmp-")]


def _claims_and_dies(folder: Path) -> None:
    claim = DiskCache(folder, 1 << 20).claim(key_of("a"))  # kept: a claim that nobody holds has ended
    time.sleep(60)
    assert claim is not None


def test_a_claim_ends_with_its_process(cache: DiskCache) -> None:
    process = multiprocessing.get_context("fork").Process(target=_claims_and_dies, args=(cache.folder,))
    process.start()
    until = time.monotonic() + 30
    while not list(cache.folder.glob("tmp-*")):
        assert time.monotonic() < until, "no claim"
        time.sleep(0.01)
    threading.Timer(0.3, process.kill).start()
    begun = time.monotonic()
    claim = cache.claim(key_of("a"))
    assert claim is not None and 0.2 < time.monotonic() - begun < 10
    assert cache.claim(key_of("a")) is None, "it is this process's own"
    claim.release()
    assert not list(cache.folder.glob("tmp-*"))
    process.join()


def test_nobody_waits_for_a_claim_forever(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.runtime.cache.PATIENCE", 0.3)
    process = multiprocessing.get_context("fork").Process(target=_claims_and_dies, args=(cache.folder,))
    process.start()
    until = time.monotonic() + 30
    while not list(cache.folder.glob("tmp-*")):
        assert time.monotonic() < until, "no claim"
        time.sleep(0.01)
    time.sleep(0.1)
    begun = time.monotonic()
    assert cache.claim(key_of("a")) is None and 0.2 < time.monotonic() - begun < 10
    process.kill()
    process.join()


def kernel_file(name: str, body: bytes) -> bytes:
    """The file that the compiler process would write for a GPU kernel."""
    return KERNEL_MAGIC + hashlib.sha256(name.encode() + b"\0" + body).hexdigest().encode() + b"\n" + body


def test_gpu_kernels_count_are_checked_and_go(cache: DiskCache) -> None:
    names = [key_of(str(i))[:48] for i in range(3)]
    limit, cache.limit = cache.limit, 1 << 30  # a look does not come by itself
    for i, name in enumerate(names):
        assert cache.put_kernel(name, kernel_file(name, b"{}\n" + bytes(400_000)))
        os.utime(cache.folder / "cubin" / f"{name}.cubin", (i, i))
    assert cache.kernels() == 3 and cache.size() > 1_200_000 and not cache.entries()
    cache.put(key_of("a"), "f", b"x")
    cache.limit = limit
    cache.evict()  # the limit is a mebibyte; what is left is at most four fifths of it
    assert {name for name, _ in cache.kernel_files()} == set(names[1:]) and cache.get(key_of("a")) == b"x"
    file = cache.folder / "cubin" / f"{names[2]}.cubin"
    whole = file.read_bytes()
    for damage in (whole[:-1], whole[:50] + b"\xff" + whole[51:], kernel_file(names[0], b"{}\n"), b""):
        with pytest.raises(DamagedEntry):
            unpack_kernel(names[2], damage)
    assert cache.verify() == []
    file.write_bytes(whole[:-1] + b"\1")
    assert cache.verify() == [names[2]] and cache.kernels() == 1
    assert cache.clear() == 2 and cache.kernels() == 0


def test_a_bundle_takes_gpu_kernels_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "one"))
    one, name = DiskCache(tmp_path / "one", 1 << 20), key_of("k")[:48]
    one.put(key_of("a"), "f", b"x")
    one.put_kernel(name, kernel_file(name, b"{}\ncode"))
    bundle = str(tmp_path / "bundle.zip")
    assert cli.main(["cache", "export", bundle]) == 0 and cli.main(["cache", "size"]) == 0
    assert "1 entries and 1 GPU kernels" in capsys.readouterr().out
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "two"))
    assert cli.main(["cache", "import", "--trust", bundle]) == 0 and cli.main(["cache", "verify"]) == 0
    assert "2 of 2 entries are whole" in capsys.readouterr().out
    two = DiskCache(tmp_path / "two", 1 << 20)
    assert two.get(key_of("a")) == b"x" and [found for found, _ in two.kernel_files()] == [name]
    with zipfile.ZipFile(bundle, "a") as file:
        file.writestr("cubin/../../outside.cubin", kernel_file("../../outside", b"{}\n"))
        file.writestr(f"cubin/{key_of('b')[:48]}.cubin", b"damaged")
    assert cli.main(["cache", "import", "--trust", bundle]) == 1 and "refused 2" in capsys.readouterr().out
    assert not (tmp_path / "outside.cubin").exists()


def test_a_note_is_read_under_its_own_key_only(tmp_path: Path) -> None:
    store = DiskCache(tmp_path / "cache", 1 << 20)
    keys = [hashlib.sha256(bytes([place])).hexdigest() for place in range(2)]
    assert store.noted(keys[0]) is None
    store.note(keys[0], b"first")
    assert store.noted(keys[0]) == b"first" and store.noted(keys[1]) is None
    store.note(keys[1], b"second")  # in place of the first
    assert store.noted(keys[0]) is None and store.noted(keys[1]) == b"second"
    (tmp_path / "cache" / "note").write_bytes(b"damaged")
    assert store.noted(keys[1]) is None and not store.entries()
    store.note(keys[1], b"second")
    store.clear()
    assert store.noted(keys[1]) is None


def test_the_digest_of_the_code_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changed gives another digest, also where an earlier process noted one; it is that of the content."""
    package = tmp_path / "fusewright" / "runtime"
    package.mkdir(parents=True)
    monkeypatch.setattr(host, "__file__", str(package / "host.py"))
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    (package / "host.py").write_text("a = 1\n")
    digest = host._sources.__wrapped__
    first = digest()
    assert digest() == first
    (package / "host.py").write_text("a = 22\n")
    second = digest()
    assert second != first and digest() == second
    (package / "host.py").write_text("a = 1\n")
    assert digest() == first
