"""Packages of programs on a GPU: the same results from the file, by the file's own code, in Python and without it.
Skipped where there is none. tests/export/test_gpu_runtime.py has a driver of its own instead, and runs anywhere."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.exporting import device_code, packaged
from fusewright.runtime import cuda_code
from tests.export import c_library

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)
        self.register_buffer("gain", torch.rand(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.gelu(x) * self.gain, torch.softmax(x, -1).sum(1)


class Counting(nn.Module):
    """Writes to a buffer and to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x.mul_(2) + self.count


def exported(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    return fusewright.export(model, (x,), dynamic_shapes=({0: fusewright.Dim("batch", 1, 64)},))


def written(program, **options) -> bytes:
    file = io.BytesIO()
    fusewright.package(program, file, **options)
    return file.getvalue()


@pytest.fixture
def by_its_code(monkeypatch):
    """No call runs operator by operator, and nothing is compiled when a package is loaded."""

    def fails(*args, **kwargs):
        raise AssertionError("the package's code was not used")

    monkeypatch.setattr(packaged.EntryPoint, "by_operators", fails)
    monkeypatch.setattr(packaged, "_compiled", fails)


def own() -> str:
    return f"sm_{cuda_code.processor(torch.cuda.current_device()).arch}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("targets", [("native",), ("sm_80", "own"), ("sm_80",)])
def test_a_package_gives_what_eager_gives(dtype, targets, by_its_code):
    """With the last targets, a later GPU's driver compiles the PTX of an older architecture."""
    torch.manual_seed(0)
    model = Block().to("cuda", dtype).eval()
    with torch.no_grad():
        wanted = tuple(dict.fromkeys(own() if target == "own" else target for target in targets))
        run = fusewright.load_package(written(exported(model, 2, 16, 64, dtype=dtype), targets=wanted))
        assert run.target == "cuda"
        limits = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for size in (1, 2, 7, 64):
            x = torch.randn(size, 16, 64, device="cuda", dtype=dtype)
            torch.testing.assert_close(run(x), model(x), **limits)
        with pytest.raises(fusewright.ProgramInputError, match="batch"):
            run(torch.randn(65, 16, 64, device="cuda", dtype=dtype))


def test_weights_are_replaced(by_its_code):
    model, other = Block().cuda().eval(), Block().cuda().eval()
    with torch.no_grad():
        run = fusewright.load_package(written(exported(model, 2, 16, 64)))
        run.load_state_dict(other.state_dict())
        x = torch.randn(3, 16, 64, device="cuda")
        torch.testing.assert_close(run(x), other(x), rtol=1e-4, atol=1e-4)


def test_what_is_written_to_is(by_its_code):
    model = Counting().cuda().eval()
    with torch.no_grad():
        run = fusewright.load_package(written(exported(model, 2, 8)))
        counting = Counting().cuda().eval()
        for size in (2, 5):
            x = torch.randn(size, 8, device="cuda")
            mine, eagers = x.clone(), x.clone()
            torch.testing.assert_close(run(mine), counting(eagers))
            torch.testing.assert_close(mine, eagers)
        torch.testing.assert_close(run.state_dict()["count"], counting.count)


FRESH = """
import sys, torch, fusewright
run = fusewright.load_package(sys.argv[1])
made = run(torch.ones(3, 16, 64, device="cuda"))
assert "llvmlite" not in sys.modules
assert not [name for name in sys.modules if name.startswith(("fusewright.codegen.triton", "fusewright.schedule"))]
torch.save([one.cpu() for one in made], sys.argv[2])
"""


def test_a_fresh_process_needs_no_compiler(tmp_path):
    model = Block().cuda().eval()
    with torch.no_grad():
        (tmp_path / "model.fwp").write_bytes(written(exported(model, 2, 16, 64)))
        command = [sys.executable, "-c", FRESH, str(tmp_path / "model.fwp"), str(tmp_path / "out")]
        subprocess.run(command, check=True)
        found = torch.load(tmp_path / "out", weights_only=True)
        expected = [one.cpu() for one in model(torch.ones(3, 16, 64, device="cuda"))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Looked(nn.Module):
    """A check in a kernel; an operator that is called by name; a result that lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 32), nn.Linear(32, 32)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.last(self.words(words))
        order = torch.searchsorted(torch.linspace(-1, 1, 5, device=x.device), x.detach().contiguous(), right=True)
        return x.transpose(1, 2), torch.sort(x, -1).values, order


WITHOUT_PYTHON = {
    "block": (Block, lambda size: torch.randn(size, 16, 64, device="cuda")),
    "looked": (Looked, lambda size: torch.randint(0, 50, (size, 16), device="cuda")),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> c_library.CLibrary:
    return c_library.CLibrary(c_library.build(tmp_path_factory.mktemp("runtime")))


@pytest.mark.parametrize("targets", [("native",), ("sm_80",)])
@pytest.mark.parametrize("name", WITHOUT_PYTHON)
def test_without_python_it_gives_what_eager_gives(name, targets, library, tmp_path):
    """Arguments on the CPU and on the GPU, aligned and not; a stream of the caller's."""
    kind, arguments = WITHOUT_PYTHON[name]
    model, stream = kind().cuda().eval(), torch.cuda.Stream()
    with torch.no_grad():
        program = fusewright.export(model, (arguments(2),), dynamic_shapes=({0: fusewright.Dim("batch", 1, 64)},))
        (tmp_path / "model.fwp").write_bytes(written(program, targets=targets))
        loaded = library.load(tmp_path / "model.fwp")
        for size in (1, 2, 7, 64):
            x = arguments(size)
            odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
            expected = [one.cpu() for one in model(x)]
            torch.cuda.synchronize()
            for given, on in ((x.cpu(), None), (x, None), (odd, None), (x, stream.cuda_stream), (x.cpu(), stream.cuda_stream)):
                found = library.run(loaded, [c_library.described(given)], on)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    library.close(loaded)


def test_without_python_a_call_is_recorded_into_a_graph(library, tmp_path):
    model, x, stream = Block().cuda().eval(), torch.randn(3, 16, 64, device="cuda"), torch.cuda.Stream()
    with torch.no_grad():
        (tmp_path / "model.fwp").write_bytes(written(exported(model, 2, 16, 64)))
        loaded = library.load(tmp_path / "model.fwp")
        library.run(loaded, [c_library.described(x)], stream.cuda_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = library.run_kept(loaded, [c_library.described(x)], stream.cuda_stream)
        x.copy_(torch.randn(3, 16, 64))
        graph.replay()
        torch.cuda.synchronize()
        expected = [one.cpu() for one in model(x)]
    torch.testing.assert_close([library.taken(one) for one in kept], expected, rtol=1e-4, atol=1e-4)
    library.close(loaded)


def test_a_process_without_python_runs_it(library, tmp_path):
    """The C example, which opens libtorch and the driver by itself."""
    model, x = Block().cuda().eval(), torch.randn(3, 16, 64)
    with torch.no_grad():
        (tmp_path / "model.fwp").write_bytes(written(exported(model, 2, 16, 64)))
        expected = model(x.cuda())
    (tmp_path / "given").write_bytes(x.numpy().tobytes())
    folder, program = Path(library.path).parent, Path(__file__).parents[2] / "examples" / "c" / "run.c"
    words = ["cc", program, "-I", c_library.RUNTIME, "-L", folder, "-lfusewright_runtime", "-o", tmp_path / "run"]
    subprocess.run(list(map(str, words)), check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{Path(torch.__file__).parent / 'lib'}"}
    words = [tmp_path / "run", tmp_path / "model.fwp", 3, tmp_path / "given"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    for number, one in enumerate(expected):
        found = torch.frombuffer(bytearray((tmp_path / f"given.out.{number}").read_bytes()), dtype=one.dtype)
        torch.testing.assert_close(found.view(one.shape), one.cpu(), rtol=1e-4, atol=1e-4)


OUT_OF_RANGE = """
import pathlib, sys, torch
from tests.export.c_library import *
c = CLibrary(pathlib.Path(sys.argv[1]))
loaded = c.load(sys.argv[2])
try:
    c.run(loaded, [described(torch.full((2, 16), 50))])
except Failed as error:
    print(error.status, error)
"""


def test_without_python_an_index_out_of_range_is_an_error(library, tmp_path):
    """In a process of its own: the GPU is of no use to it afterwards."""
    with torch.no_grad():
        x = torch.ones(2, 16, dtype=torch.int64, device="cuda")
        program = fusewright.export(Looked().cuda().eval(), (x,))
        (tmp_path / "model.fwp").write_bytes(written(program))
    words = [sys.executable, "-c", OUT_OF_RANGE, library.path, str(tmp_path / "model.fwp")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    # Where a library operator meets it, a PyTorch before 2.13 says what it was on standard error alone.
    assert done.stdout.startswith("5 ") and "assert" in (done.stdout + done.stderr).lower(), (done.stdout, done.stderr)


def test_where_no_code_fits_it_is_compiled_again(monkeypatch):
    model = Block().cuda().eval()
    with torch.no_grad():
        data = written(exported(model, 2, 16, 64))
        monkeypatch.setattr(device_code, "fits", lambda archs: False)
        run = fusewright.load_package(data)
        assert run.target == "native"
        x = torch.randn(3, 16, 64, device="cuda")
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def test_damaged_code_is_an_error(tmp_path):
    model = Block().cuda().eval()
    with torch.no_grad():
        data = written(exported(model, 2, 16, 64))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".cuda"))
        part = archive.read(name)
        plan = packaged._graph(archive.read(name.replace(".cuda", ".code")), name).plan
    head, _, code = part.partition(b"\n")
    records = json.loads(head)
    for damaged in (b"", b"{}\n", b"[1]\n", head[:-5] + b"\n" + code, head + b"\n" + code[: len(code) // 2]):
        with pytest.raises(fusewright.ProgramFileError):
            device_code.functions(damaged, plan)
    for change in ({"start": -1}, {"size": 1 << 50}, {"warps": 99}, {"name": 3}, {"ptx": 1}, {"arch": "90"}, {"more": 1}):
        other = {key: [{**one, **change} for one in codes] for key, codes in records.items()}
        with pytest.raises(fusewright.ProgramFileError):
            device_code.functions(json.dumps(other).encode() + b"\n" + code, plan)


def test_a_package_is_for_processors_or_for_gpus():
    model = Block().cuda().eval()
    with torch.no_grad():
        program = exported(model, 2, 16, 64)
        for options in ({"targets": ("native", "sm_80")}, {"targets": ("x86-64-v3",)}, {"targets": ("sm_80",), "standalone": True}):
            with pytest.raises(fusewright.ExportError):
                written(program, **options)
