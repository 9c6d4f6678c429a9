"""Packages by the library without Python: eager's results, no Python in the process, errors for damage. Standalone ones
need nothing else; others call PyTorch's operators through its C functions."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("cmake", "cc", "c++", "ldd")
pytestmark = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs a C++ compiler and CMake")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 10)

    def forward(self, x):
        return torch.softmax(self.last(F.gelu(self.norm(self.first(x)))), -1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2, groups=2)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(F.relu(self.second(x)).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Parameter(torch.randn(16, 32))
        self.queries, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
        self.up, self.down, self.last = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, words):
        x = self.words(words) + self.places
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.queries(x).chunk(3, -1))
        x = self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        x = self.last(x + self.down(F.gelu(self.up(x))))
        return x, x.mean(1).argmax(-1)


class Functions(nn.Module):
    """Each elementary function, in both precisions: none may be a library's."""

    def forward(self, x):
        results = []
        for y in (x, x.double()):
            inside, positive = y.clamp(-0.99, 0.99), y.abs() + 1.01
            results += [
                y.sin() + y.cos() + y.tan() + y.sinh() + y.cosh() + y.tanh(),
                inside.asin() + inside.acos() + inside.atanh() + y.atan() + y.asinh() + positive.acosh(),
                y.exp() + y.exp2() + y.expm1() + y.sigmoid() + y.erf() + y.erfc(),
                positive.log() + positive.log2() + positive.log10() + positive.log1p() + positive.lgamma(),
                torch.atan2(y, positive) + positive.pow(y) + torch.hypot(y, positive) + torch.fmod(y, positive),
            ]
        return tuple(results)


class Blocks(nn.Module):
    """Products of rows, of an inner length that is no multiple of a vector, and of halves; attention of few queries and of
    many, with a mask, and causal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(38, 96), nn.Linear(96, 24).half()

    def forward(self, x):
        q, k, v = self.first(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(1, 21).masked_fill(torch.arange(21) % 5 == 3, -1e4)
        few = F.scaled_dot_product_attention(q[:, :, :3], k, v, attn_mask=mask)
        many = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return few, many, self.last(F.relu(self.first(x)).half())


MODELS = {
    "blocks": (Blocks, lambda size: torch.randn(size, 21, 38)),
    "functions": (Functions, lambda size: torch.randn(size, 37)),
    "layers": (Layers, lambda size: torch.randn(size, 64)),
    "images": (Images, lambda size: torch.randn(size, 3, 16, 16)),
    "encoder": (Encoder, lambda size: torch.randint(0, 50, (size, 16))),
}


class Operators(nn.Module):
    """Operators that PyTorch's dispatcher is asked for by name: with lists, texts, optional arguments, several results,
    one that returns its argument, and a result that nobody reads."""

    def forward(self, x):
        square = x.unflatten(1, (4, 4)) + torch.eye(4) * 4
        sign, size = torch.linalg.slogdet(square)
        q, _ = torch.linalg.qr(square, mode="reduced")
        norm = torch.linalg.matrix_exp(square * 0.1).flatten(1)
        order = torch.searchsorted(torch.linspace(-1, 1, 5), x.contiguous(), right=True)
        return torch.linalg.solve(square, q) + sign[:, None, None] * size[:, None, None], norm, order


class Lists(nn.Module):
    """Tensor lists, sorting, and a result that lies otherwise than row by row in memory."""

    def forward(self, x):
        values, places = torch.sort(torch.cat([x, x * 2, -x], 1), dim=1, stable=True)
        return values, places, (values @ values.t()).t(), torch.cumsum(values, 1)


LIBRARY_MODELS = {
    "operators": (Operators, lambda size: torch.randn(size, 16)),
    "lists": (Lists, lambda size: torch.randn(size, 16)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the library, installed, and the examples, built against it by find_package."""
    return build_all(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> list[object]:
    """A command that runs the example on AArch64, emulated."""
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if not shutil.which(compiler) or not shutil.which(emulator):
        pytest.skip(f"needs {compiler} and {emulator}")
    folder = tmp_path_factory.mktemp("aarch64")
    (folder / "toolchain.cmake").write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR aarch64)\n"
        "set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)\nset(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)\n"
    )
    build_all(folder, f"-DCMAKE_TOOLCHAIN_FILE={folder / 'toolchain.cmake'}")
    libraries = f"LD_LIBRARY_PATH={folder / 'installed/lib'}"
    return [emulator, "-L", "/usr/aarch64-linux-gnu", "-E", libraries, folder / "examples/run"]


def build_all(folder: Path, *options: str) -> Path:
    for source, more in (("csrc/runtime", ()), ("examples", (f"-DCMAKE_PREFIX_PATH={folder / 'installed'}",))):
        build, more = folder / Path(source).name, (*options, *more)
        configure = ["cmake", "-S", ROOT / source, "-B", build, f"-DCMAKE_INSTALL_PREFIX={folder / 'installed'}", *more]
        subprocess.run(configure, check=True, capture_output=True)
        subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
        if source == "csrc/runtime":
            subprocess.run(["cmake", "--install", build], check=True, capture_output=True)
    return folder / "examples"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, tuple[nn.Module, Path]]:
    torch.manual_seed(0)
    made = {}
    for name, (kind, arguments) in MODELS.items():
        model = kind().eval()
        batch = fusewright.Dim("batch", min=1, max=256)
        program = fusewright.export(model, (arguments(2),), dynamic_shapes=({0: batch},))
        path = tmp_path_factory.mktemp("packages") / f"{name}.fwp"
        fusewright.package(program, path, standalone=True)
        made[name] = (model, path)
    return made


@pytest.fixture(scope="module")
def library_packages(tmp_path_factory) -> dict[str, tuple[nn.Module, Path]]:
    """Packages that call PyTorch's operators; each with a version for any batch."""
    torch.manual_seed(0)
    made = {}
    for name, (kind, arguments) in {**MODELS, **LIBRARY_MODELS}.items():
        model = kind().eval()
        program = fusewright.export(model, (arguments(2),), dynamic_shapes=({0: fusewright.Dim("batch", 1, 256)},))
        path = tmp_path_factory.mktemp("packages") / f"{name}.fwp"
        fusewright.package(program, path)
        made[name] = (model, path)
    return made


TORCH = str(Path(torch.__file__).parent / "lib")


def run(built: Path, *words, libraries: str = "") -> subprocess.CompletedProcess[str]:
    command, env = [str(built / "run"), *map(str, words)], {**os.environ, "LD_LIBRARY_PATH": libraries}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, env=env)


def compared(built, model, path, arguments, given, libraries="") -> None:
    """Eager's results, from Python and from the library, at several sizes."""
    loaded = fusewright.load_package(path)
    torch.manual_seed(1)
    for size in (1, 2, 7, 64):
        x = arguments(size)
        given.write_bytes(x.numpy().tobytes())
        done = run(built, path, size, given, libraries=libraries)
        assert done.returncode == 0, done.stderr
        expected, again = model(copy.deepcopy(x)), loaded(x)
        for number, (one, other) in enumerate(zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, again)))):
            found = torch.frombuffer(bytearray(Path(f"{given}.out.{number}").read_bytes()), dtype=one.dtype)
            # 96 products of halves, each rounded by 2**-11 of about 0.05: an element near zero is their sum
            least = {"rtol": 1e-3, "atol": 2.5e-4} if one.dtype is torch.float16 else {}
            torch.testing.assert_close(found.view(one.shape), one.detach(), **least)
            torch.testing.assert_close(other, one.detach(), **least)


@pytest.mark.parametrize("name", MODELS)
def test_the_library_gives_what_eager_gives(name, built, packages, tmp_path):
    (model, path), given = packages[name], tmp_path / "given"
    arguments = MODELS[name][1]
    compared(built, model, path, arguments, given)
    given.write_bytes(bytes(8 * arguments(1).numel() * 300))
    done = run(built, path, 300, given)
    assert done.returncode == 1 and "batch" in done.stderr and "256" in done.stderr


def test_an_index_out_of_range_is_an_error(built, packages, tmp_path):
    given = tmp_path / "given"
    given.write_bytes(torch.full((2, 16), 50).numpy().tobytes())
    done = run(built, packages["encoder"][1], 2, given)
    assert done.returncode == 1 and "index out of range" in done.stderr


def test_the_library_needs_neither_python_nor_pytorch(built):
    needs = subprocess.run(["ldd", built / "run"], capture_output=True, text=True, check=True).stdout
    assert "libfusewright_runtime" in needs and "libc.so" in needs
    assert not [line for line in needs.splitlines() if "python" in line or "torch" in line or "stdc++" in line]


def test_the_cpp_example(built, packages):
    model, path = packages["layers"]
    done = subprocess.run([built / "run_cpp", path, "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.tensor([float(word) for word in done.stdout.split()]).view(3, 10)
    torch.testing.assert_close(found, model(torch.ones(3, 64)).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["standalone", "calls operators"])
def test_damaged_files_are_errors(kind, built, packages, library_packages, tmp_path):
    """Truncated at any place, or with a bit of a part turned over: an error that says where. Elsewhere in the file (the
    zip's dates) a bit may mean nothing."""
    path = packages["layers"][1] if kind == "standalone" else library_packages["images"][1]
    whole = path.read_bytes()
    draw, bad = random.Random(0), tmp_path / "bad.fwp"
    with zipfile.ZipFile(path) as archive:
        parts = [(one.header_offset + 30 + len(one.filename), one.file_size) for one in archive.infolist()]

    def damaged(data: bytes, must_fail: bool) -> None:
        bad.write_bytes(data)
        done = run(built, bad, libraries=TORCH)
        assert done.returncode == 1 or (done.returncode == 0 and not must_fail), (done.returncode, done.stderr)
        assert done.returncode == 0 or done.stderr.startswith("load: ")

    for size in (0, 1, 21, 22, 100, *(draw.randrange(len(whole)) for _ in range(20)), len(whole) - 1):
        damaged(whole[:size], True)
    for start, size in parts * 4:
        data = bytearray(whole)
        data[start + size // 2 + draw.randrange(size // 2)] ^= 1 << draw.randrange(8)
        damaged(bytes(data), True)
    for _ in range(40):
        data = bytearray(whole)
        data[-1 - draw.randrange(600)] ^= 1 << draw.randrange(8)
        damaged(bytes(data), False)


def test_signatures(built, tmp_path):
    """With a key, what another key signed, what nobody signed, and what was changed behind the signature is refused."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    program = fusewright.export(Layers().eval(), (torch.randn(3, 64),))
    own, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    for name, key in (("own", own), ("other", other)):
        (tmp_path / name).write_bytes(key.public_key().public_bytes_raw())
    good, unsigned, changed = (tmp_path / name for name in ("good.fwp", "unsigned.fwp", "changed.fwp"))
    fusewright.package(program, good, standalone=True, sign_key=own)
    fusewright.package(program, unsigned, standalone=True)
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(changed, "w") as made:
        for name in archive.namelist():
            data = bytearray(archive.read(name))
            if name == "weights.safetensors":
                data[-5] ^= 1
            made.writestr(zipfile.ZipInfo(name), bytes(data))

    def load(path, key=None):
        words = [str(path), *(() if key is None else ("--key", str(tmp_path / key)))]
        done = subprocess.run([built / "serve", *words], input="", capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    for path in (good, unsigned, changed):
        assert load(path)[0] == 0
    assert load(good, "own") == (0, "")
    for path, key, message in (
        (good, "other", "was not signed by this key"),
        (unsigned, "own", "package.ed25519: is missing"),
        (changed, "own", "weights.safetensors: its hash differs"),
    ):
        code, said = load(path, key)
        assert code == 1 and message in said


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("machine", ["Haswell", "aarch64"])
@pytest.mark.parametrize("name", MODELS)
def test_one_file_runs_on_other_processors(name, machine, built, foreign, packages, tmp_path):
    """A processor without AVX-512, and one of another kind, emulated: the same file, eager's results."""
    model, given, path = packages[name][0], tmp_path / "given", tmp_path / "model.fwp"
    example, batch = MODELS[name][1](2), fusewright.Dim("batch", 1, 256)
    program = fusewright.export(model, (example,), dynamic_shapes=({0: batch},))
    fusewright.package(program, path, targets=("x86-64-v4", "x86-64-v3", "aarch64"), standalone=True)
    command = ["qemu-x86_64", "-cpu", "Haswell", built / "run"] if machine == "Haswell" else foreign
    for size in (1, 7):
        x = MODELS[name][1](size)
        given.write_bytes(x.numpy().tobytes())
        done = subprocess.run([*map(str, command), path, str(size), given], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        expected = model(x)
        for number, one in enumerate(expected if isinstance(expected, tuple) else (expected,)):
            found = torch.frombuffer(bytearray(Path(f"{given}.out.{number}").read_bytes()), dtype=one.dtype)
            limits = {} if one.dtype is torch.float16 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(found.view(one.shape), one.detach(), **limits)


@pytest.mark.parametrize("change", [b"", b"{}", b"[" * 5000, b'{"format": 2}', b'{"format": 1, "hashes": 3}'])
def test_a_manifest_that_is_none_is_an_error(change, built, packages, tmp_path):
    bad = tmp_path / "bad.fwp"
    with zipfile.ZipFile(packages["layers"][1]) as archive, zipfile.ZipFile(bad, "w") as other:
        for name in archive.namelist():
            other.writestr(name, change if name == "package.json" else archive.read(name))
    done = run(built, bad)
    assert done.returncode == 1 and "package.json" in done.stderr


@pytest.mark.parametrize("name", [*MODELS, *LIBRARY_MODELS])
def test_a_package_that_calls_operators_gives_what_eager_gives(name, built, library_packages, tmp_path):
    model, path = library_packages[name]
    arguments = {**MODELS, **LIBRARY_MODELS}[name][1]
    compared(built, model, path, arguments, tmp_path / "given", TORCH)


def test_threads_share_a_package_that_calls_operators(built, library_packages, tmp_path):
    """The first calls come at once: weights are prepared once."""
    model, path = library_packages["encoder"]
    (tmp_path / "threads.cpp").write_text(THREADS)
    command = ["c++", "-std=c++17", "-pthread", "-I", ROOT / "csrc/runtime", tmp_path / "threads.cpp", "-o", tmp_path / "threads"]
    libraries = built.parent / "installed/lib"
    subprocess.run([*command, "-L", libraries, "-lfusewright_runtime"], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run([tmp_path / "threads", path, TORCH], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    (found,) = set(done.stdout.splitlines())
    expected = model(torch.ones(2, 16, dtype=torch.int64))[0][0, 0, 0].item()
    torch.testing.assert_close(float(found), expected, rtol=1e-4, atol=1e-5)


THREADS = """
#include <fusewright.hpp>
#include <iostream>
#include <thread>

int main(int, char **arguments) {
    fusewright::use_torch(arguments[2]);
    fusewright::Package package(arguments[1]);
    std::vector<int64_t> words(2 * 16, 1);
    std::vector<float> found(8);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++)
        threads.emplace_back([&, i] {
            for (int again = 0; again < 20; again++)
                found[i] = package({fusewright::tensor(words.data(), FW_INT64, {2, 16})})[0].data<float>()[0];
        });
    for (auto &one : threads) one.join();
    for (float one : found) std::cout << one << "\\n";
}
"""


def test_without_libtorch_a_package_that_calls_operators_is_an_error(built, library_packages, tmp_path):
    path = library_packages["layers"][1]
    done = run(built, path, libraries="")
    assert done.returncode == 1 and "libtorch is not found" in done.stderr and "standalone" in done.stderr
    (tmp_path / "libtorch_cpu.so").write_bytes(b"no library")
    done = run(built, path, libraries=str(tmp_path))
    assert done.returncode == 1 and "libtorch is not found" in done.stderr


def test_what_the_library_cannot_call_is_an_error(built, tmp_path):
    class Renormed(nn.Module):
        def forward(self, x):
            return torch.renorm(x, 2, 0, 1.0)

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count += 1
            return x + self.count

    for kind, message in ((Renormed, "cannot pass .* to aten::renorm"), (Written, "writes to an argument or a buffer")):
        path = tmp_path / "model.fwp"
        fusewright.package(fusewright.export(kind(), (torch.randn(3, 3),)), path)
        done = run(built, path, libraries=TORCH)
        assert done.returncode == 1 and re.search(message, done.stderr), done.stderr


def changed_manifest(path: Path, made: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w") as other:
        for name in archive.namelist():
            data = archive.read(name)
            if name == "package.json":
                manifest = json.loads(data)
                change(manifest)
                data = json.dumps(manifest).encode()
            other.writestr(name, data)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another release": (lambda m: m["made_with"].update(torch="1.2.3"), "made with PyTorch 1.2.3"),
    "no operators": (lambda m: m.pop("operators"), "not describe|not described"),
    "no preparation": (lambda m: m["programs"]["forward"]["versions"][0].pop("prepare"), "prepares weights"),
    "other values": (lambda m: m["programs"]["forward"]["versions"][0]["prepare"].update(values=9), "no such output"),
    "a value outside": (
        lambda m: m["programs"]["forward"]["versions"][0]["prepare"].update(results=[["value", 99]]),
        "package.json",
    ),
    "no part": (lambda m: m["programs"]["forward"]["versions"][0]["prepare"].update(part="none"), "none: is missing"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_does_not_fit_its_plans_is_an_error(name, built, library_packages, tmp_path):
    change, message = MANIFESTS[name]
    changed_manifest(library_packages["images"][1], tmp_path / "bad.fwp", change)
    done = run(built, tmp_path / "bad.fwp", libraries=TORCH)
    assert done.returncode == 1 and re.search(message, done.stderr), (done.returncode, done.stderr)


class Determinant(nn.Module):
    def forward(self, x):
        return torch.linalg.det(x * 2) + 1


def test_what_has_no_kernel_is_an_error_with_the_line(tmp_path):
    program = fusewright.export(Determinant(), (torch.randn(3, 4, 4),))
    with pytest.raises(fusewright.ExportError, match=r"(?s)no generated kernel for .*det.*test_c_runtime\.py:\d+"):
        fusewright.package(program, tmp_path / "model.fwp", standalone=True)


def test_find_package_works_where_the_wheel_is_installed(tmp_path):
    """The wheel's files, laid out as an installation does: a project finds them, and builds the library with itself."""
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    for folder, patterns in files.items():
        (prefix / folder).mkdir(parents=True, exist_ok=True)
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            shutil.copy(path, prefix / folder)
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Debug")  # it is built sooner
    subprocess.run(["cmake", "-S", ROOT / "examples", "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "run"], check=True, capture_output=True)
    assert subprocess.run([build / "run", tmp_path / "none"], capture_output=True).returncode == 1


def test_the_program_on_the_page_compiles(tmp_path):
    (text,) = re.findall(r"^```cpp\n(.*?)^```", (ROOT / "docs/export.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "page.cpp").write_text(text)
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-I", ROOT / "csrc/runtime", tmp_path / "page.cpp"]
    subprocess.run(command, check=True)
