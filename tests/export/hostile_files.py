"""Loads seeded mutations of a program and of a package, and says what became of them: `python -m tests.export.hostile_files FOLDER 0 500`.

Takes a folder with program.fw and package.fwp, and a range of seeds; prints the counts. Always holds: an error of another type than
ProgramFileError, an import, a started program, a file opened for writing, or memory beyond a file's size ends it with an error.
"""

from __future__ import annotations

import io
import json
import random
import resource
import stat
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusewright

FORBIDDEN = ("exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "ctypes.dlopen", "socket.connect", "pickle.find_class")
FIXED = 4 << 20
"""Bytes that a load may take besides the file's: the parser, and a graph as objects (some 50 times its text)."""
WORDS = ["os.system.default", "aten.from_file.default", "operator.attrgetter", "%nothing", "inf", "-1", "1" * 30, "(" * 3000, "[[", "device(", '"\\ud800"', ""]
ODD: list[Any] = [None, -1, 0, 1 << 62, 1 << 70, 1e308, "", "x" * 1000, "../../evil", "os.system", [], {}, [[]] * 50, True, "aten.relu.default", "s0", ["*", "s0", -1]]


def truncated(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def flipped(draw: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(draw.randrange(1, 20)):
        made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def sized(draw: random.Random, data: bytes) -> bytes:
    """Numbers of the zip's own records are changed: sizes, offsets, counts, methods."""
    made = bytearray(data)
    starts = [place for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6") for place in range(len(data)) if data.startswith(mark, place)]
    for _ in range(draw.randrange(1, 4)):
        place = draw.choice(starts) + draw.randrange(4, 22)
        made[place : place + 4] = struct.pack("<I", draw.choice([0, 1, 8, 99, 0x7FFFFFFF, 0xFFFFFFFF, draw.randrange(1 << 32)]))
    return bytes(made[: len(data)])


def spliced(draw: random.Random, data: bytes) -> bytes:
    one, other = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:one] + draw.choice([b"", data[one:other] * 2, draw.randbytes(other - one), bytes(other - one)]) + data[other:]


def rewritten(draw: random.Random, data: bytes, change: Callable[[str, bytes], list[tuple[Any, bytes]]], compress: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compress) as new:
        warnings.simplefilter("ignore")
        for name in old.namelist():
            for entry, part in change(name, old.read(name)):
                new.writestr(entry, part)
    return file.getvalue()


def entries(draw: random.Random, data: bytes) -> bytes:
    """Paths that leave the folder, links, doubles, parts that are left out, parts that are compressed."""
    link = zipfile.ZipInfo(draw.choice(["graph.txt", "evil", "forward/graph.txt"]))
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    more = [("../../evil", b"x"), ("/etc/evil", b"x"), ("a\\..\\evil", b"x"), ("data.pkl", b"x"), ("CON", b""), (link, b"/etc/passwd"), ("signature.json", b"{}"), ("x/" * 500, b""), ("bomb.txt", bytes(1 << 24))]
    at, what = draw.randrange(3), draw.randrange(4)
    seen: list[str] = []

    def change(name: str, part: bytes) -> list[tuple[Any, bytes]]:
        seen.append(name)
        if len(seen) - 1 != at:
            return [(name, part)]
        return [[], [(name, part), (name, part)], [(name, part), draw.choice(more)], [(draw.choice(more)[0], part)]][what]

    return rewritten(draw, data, change, draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]))


def bomb(draw: random.Random, data: bytes) -> bytes:
    """A part of many times the file's size."""
    target = draw.choice(["graph.txt", "signature.json", "weights.safetensors", "package.json"])
    fill = draw.choice([b" ", b"[", b"0", b"\n"]) * (1 << 24)
    return rewritten(draw, data, lambda name, part: [(name, fill if name.endswith(target) else part)], zipfile.ZIP_DEFLATED)


def _changed(draw: random.Random, value: Any) -> Any:
    """JSON with one place changed."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {one: item for one, item in value.items() if one != key}
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.95:
        at = draw.randrange(len(value))
        return [*value[:at], *([] if draw.random() < 0.1 else [_changed(draw, value[at])]), *value[at + 1 :]]
    return draw.choice(ODD)


def lying(draw: random.Random, data: bytes) -> bytes:
    """Checksums hold; what the parts say does not."""

    def change(name: str, part: bytes) -> list[tuple[Any, bytes]]:
        if name.endswith(".json"):
            part = json.dumps(_changed(draw, json.loads(part))).encode()
        elif name.endswith("graph.txt") and draw.random() < 0.7:
            words = part.decode().split(" ")
            words[draw.randrange(len(words))] = draw.choice([*WORDS, draw.choice(words)])
            part = " ".join(words).encode(errors="replace")
        elif name.endswith(".safetensors") and draw.random() < 0.5:
            (size,) = struct.unpack_from("<Q", part)
            text = json.dumps(_changed(draw, json.loads(part[8 : 8 + size]))).encode()
            part = struct.pack("<Q", draw.choice([len(text), len(text), 1 << 40, (1 << 64) - 1])) + text + part[8 + size :]
        return [(name, part)]

    return rewritten(draw, data, change)


MUTATIONS = [truncated, flipped, sized, spliced, entries, bomb, lying, lying, lying, lying]


def main(folder: Path, first: int, last: int) -> None:
    kinds = [("program.fw", fusewright.load), ("package.fwp", fusewright.load_package)]
    for name, load in kinds:
        load((folder / name).read_bytes())  # what a load imports is there from now on
    heard: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and (event in FORBIDDEN or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))):
            heard.append(f"{event} {args!r:.200}")

    sys.addaudithook(hook)
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        draw = random.Random(seed)
        name, load = kinds[seed % 2]
        mutate = draw.choice(MUTATIONS)
        data = mutate(draw, (folder / name).read_bytes())
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        watching = True
        try:
            load(data)
            outcome = "loaded"
        except fusewright.ProgramFileError:
            outcome = "refused"
        finally:
            watching = False
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest) << 10
        if heard:
            raise AssertionError(f"seed {seed}, {mutate.__name__}: {heard}")
        if max(peak, grown - (64 << 20)) > FIXED + 4 * len(data):
            raise AssertionError(f"seed {seed}, {mutate.__name__}: {peak} and {grown} bytes for a file of {len(data)}")
        counts[f"{mutate.__name__} {outcome}"] += 1
    print(json.dumps(dict(sorted(counts.items()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
