"""`fusewright cache`: exit statuses, messages, and bundles that are damaged, hostile, or from another kind of machine."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusewright.runtime import host
from fusewright.runtime.cache import SUFFIX, DiskCache, pack
from fusewright.tools import bundle as bundles, cli

ROOT = Path(__file__).parents[2]


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskCache]:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    yield DiskCache(tmp_path / "cache", 1 << 20)


@pytest.fixture
def bundle(tmp_path: Path, cache: DiskCache) -> Path:
    """A bundle of two entries; the cache is empty again."""
    for name in "ab":
        cache.put(key_of(name), name, name.encode() * 3000)
    assert cli.main(["cache", "export", str(tmp_path / "bundle.zip")]) == 0
    assert cli.main(["cache", "clear"]) == 0
    return tmp_path / "bundle.zip"


def rewritten(bundle: Path, **members: bytes) -> Path:
    """The bundle with further members (names with `__` for `/`), or with another host.txt."""
    made = bundle.with_name("other.zip")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            if name not in members:
                new.writestr(name, old.read(name))
        for name, data in members.items():
            new.writestr(name, data)
    return made


def test_a_bundle_comes_back(bundle: Path, cache: DiskCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 0
    assert "took 2 entries" in capsys.readouterr().out
    assert cache.get(key_of("b")) == b"b" * 3000
    assert sorted(path.name for path in bundle.parent.iterdir()) == [
        "bundle.zip",
        "cache",
    ]  # no half-written file beside it


@pytest.mark.parametrize("part", range(len(bundles.HOST_PARTS)))
def test_a_bundle_of_another_kind_of_host_is_refused(
    bundle: Path, cache: DiskCache, part: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = host.host_text().split("|")
    parts[part] += "other"
    monkeypatch.setattr(bundles, "host_text", lambda: "|".join(parts))
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 2
    told = capsys.readouterr().err
    assert bundles.HOST_PARTS[part] in told and told.startswith("fusewright: ") and not cache.entries()


def test_hostile_members_are_refused(
    bundle: Path, cache: DiskCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = pack(key_of("c"), "c", b"body")
    hostile = rewritten(
        bundle,
        **{
            f"../../{key_of('c')}{SUFFIX}": good,
            f"/tmp/{key_of('c')}{SUFFIX}": good,
            f"{key_of('c')[:2]}/{key_of('c')}{SUFFIX}": good,
            f"{key_of('d')}{SUFFIX}": good,  # under another key
            f"{key_of('c').upper()}{SUFFIX}": good,
            f"cubin/../../{key_of('c')[:48]}.cubin": good,
            "\x1b[2J.fw": good,
            f"{key_of('e')}{SUFFIX}": b"",
        },
    )
    assert cli.main(["cache", "import", "--trust", str(hostile)]) == 1
    output = capsys.readouterr()
    assert "took 2 entries" in output.out and "refused 8" in output.out and "\x1b" not in output.err
    assert {entry.label for entry in cache.entries()} == {"a", "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.zip", "cache", "other.zip"]


def test_a_member_that_would_fill_the_disk_is_refused(
    bundle: Path, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_MIB", "1")
    with zipfile.ZipFile(bundle, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{key_of('z')}{SUFFIX}", bytes(8 << 20))
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 1 and len(cache.entries()) == 2
    lying = bytearray(bundle.read_bytes())  # the directory says that it is small
    at = lying.rindex(b"PK\x01\x02") + 24
    assert struct.unpack_from("<I", lying, at)[0] == 8 << 20
    struct.pack_into("<I", lying, at, 1000)
    bundle.write_bytes(lying)
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 1 and len(cache.entries()) == 2


def test_damaged_bundles(bundle: Path, cache: DiskCache) -> None:
    """Wherever a bundle is damaged: an exit status, and never an entry that was not in it."""
    whole = bundle.read_bytes()
    generator = random.Random(0)
    statuses = set()
    for turn in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        if turn % 5 == 0:
            damaged = damaged[: generator.randrange(len(damaged))]
        bundle.write_bytes(damaged)
        statuses.add(cli.main(["cache", "import", "--trust", str(bundle)]))
        assert all(cache.get(key_of(name)) in (None, name.encode() * 3000) for name in "ab") and cache.verify() == []
        assert {entry.key for entry in cache.entries()} <= {key_of("a"), key_of("b")}
        cache.clear()
    assert {1, 2} <= statuses <= {0, 1, 2}


def test_a_locked_or_strangely_packed_bundle(bundle: Path, cache: DiskCache) -> None:
    made = bundle.with_name("lzma.zip")
    with zipfile.ZipFile(made, "w", zipfile.ZIP_LZMA) as file:
        file.writestr(bundles.HOST_FILE, host.host_text())
    assert cli.main(["cache", "import", "--trust", str(made)]) == 2
    locked = bytearray(bundle.read_bytes())
    at = -1
    while (at := locked.find(b"PK\x01\x02", at + 1)) >= 0:
        locked[at + 8] |= 1  # the flag of encryption
    bundle.write_bytes(locked)
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 2 and not cache.entries()


def test_damaged_entries_are_not_exported(cache: DiskCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        cache.put(key_of(name), name, b"body")
    (cache.folder / key_of("a")[:2] / (key_of("a") + SUFFIX)).write_bytes(b"nonsense")
    assert cli.main(["cache", "export", str(tmp_path / "bundle.zip")]) == 1
    output = capsys.readouterr()
    assert "wrote 1 entries" in output.out and "left out" in output.err
    assert cli.main(["cache", "export", str(tmp_path)]) == 2
    assert cli.main(["cache", "export", str(tmp_path / "no" / "bundle.zip")]) == 2
    assert cli.main(["cache", "verify"]) == 1 and cli.main(["cache", "verify"]) == 0


def test_entries_that_are_no_files(cache: DiskCache) -> None:
    cache.put(key_of("a"), "a", b"body")
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        path = cache.folder / key_of(name)[:2] / (key_of(name) + SUFFIX)
        path.parent.mkdir(exist_ok=True)
        make(path)
    assert cli.main(["cache", "list"]) == 0
    assert cli.main(["cache", "verify"]) == 1
    assert cli.main(["cache", "clear"]) == 2  # the folder cannot be removed as a file


def test_a_folder_that_is_not_used(cache: DiskCache, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.folder.chmod(0o755)
    for action in (["size"], ["list"], ["clear"], ["verify"], ["export", "x.zip"], ["import", "--trust", str(bundle)]):
        assert cli.main(["cache", *action]) == 2
        assert "open to other users" in capsys.readouterr().err


def test_settings_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("many", "0", "-3", "1.5"):
        monkeypatch.setenv("FUSEWRIGHT_CACHE_MIB", wrong)
        assert cli.main(["cache", "size"]) == 2
        assert f"FUSEWRIGHT_CACHE_MIB is {wrong!r}" in capsys.readouterr().err


def test_labels_do_not_reach_the_terminal_raw(cache: DiskCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.put(key_of("a"), "f\x1b[2J\n\ud800.py", b"body")
    assert cli.main(["cache", "list"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and "\x1b" not in shown


def test_a_reader_that_stops_early(cache: DiskCache) -> None:
    for number in range(300):
        cache.put(key_of(str(number)), "f" * 1000, b"")
    command = f"{sys.executable} -c 'import sys; from fusewright.tools.cli import main; sys.exit(main())' cache list"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -1"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Broken" not in done.stderr, done.stderr
    assert done.stdout.count("\n") == 1


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["cache"], ["cache", "shrink"], ["cache", "export"]):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 2


def test_machine_code_is_taken_by_consent_alone(
    bundle: Path, cache: DiskCache, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", "import", str(bundle)]) == 2 and not cache.entries()
    assert "--trust" in capsys.readouterr().err


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder of an Ed25519 key's halves, and of another public key."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    for name in ("own", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        (tmp_path / f"{name}.private").write_text(key.private_bytes_raw().hex() + "\n")
        (tmp_path / f"{name}.public").write_bytes(key.public_key().public_bytes_raw())
    return tmp_path


def test_a_bundle_is_taken_from_the_owner_of_a_key(
    bundle: Path, keys: Path, cache: DiskCache, capsys: pytest.CaptureFixture[str]
) -> None:
    signed, damaged = keys / "signed.zip", keys / "damaged.zip"
    verified = ["cache", "import", "--verify-key", str(keys / "own.public")]
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 0
    assert cli.main(["cache", "export", "--sign-key", str(keys / "own.private"), str(signed)]) == 0
    assert cli.main(["cache", "clear"]) == 0
    assert cli.main(["cache", "import", "--verify-key", str(keys / "other.public"), str(signed)]) == 2
    assert cli.main([*verified, str(bundle)]) == 2
    assert "not signed (it has no bundle.ed25519)" in capsys.readouterr().err
    with zipfile.ZipFile(signed) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    (entry, *_) = (name for name in members if name.endswith(SUFFIX))
    another = pack(key_of("c"), "c", b"c" * 3000)
    changes: list[dict[str, bytes]] = [
        {**members, entry: another},  # its content
        {name: data for name, data in members.items() if name != entry},  # one less
        {**members, f"{key_of('c')}{SUFFIX}": another},  # one more
        {**members, "bundle.ed25519": bytes(64)},
    ]
    for change in changes:
        with zipfile.ZipFile(damaged, "w") as made:
            for name, data in change.items():
                made.writestr(name, data)
        assert cli.main([*verified, str(damaged)]) == 2 and not cache.entries()
        assert "was not signed by this key" in capsys.readouterr().err
    with zipfile.ZipFile(damaged, "w") as made, pytest.warns(UserWarning, match="Duplicate name"):
        for name, data in [*members.items(), (entry, members[entry])]:
            made.writestr(name, data)
    assert cli.main([*verified, str(damaged)]) == 2 and not cache.entries()
    assert cli.main([*verified, str(signed)]) == 0 and len(cache.entries()) == 2
    assert cli.main(["cache", "import", "--trust", str(signed)]) == 0
    (keys / "none").write_text("no key")
    for action in (["export", "--sign-key"], ["import", "--verify-key"]):
        assert cli.main(["cache", *action, str(keys / "none"), str(keys / "x.zip")]) == 2
