"""Packages of programs on a GPU: the same results from the file, by the file's own code. Skipped where there is none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.exporting import device_code, packaged
from fusewright.runtime import cuda_code

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
@pytest.mark.parametrize("targets", [("native",), ("sm_80", "own")])
def test_a_package_gives_what_eager_gives(dtype, targets, by_its_code):
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


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 8, reason="has sm_80's code")
def test_the_driver_compiles_the_ptx_of_an_older_architecture(by_its_code):
    """On a GPU that none of the cubins is for."""
    model = Block().cuda().eval()
    with torch.no_grad():
        run = fusewright.load_package(written(exported(model, 2, 16, 64), targets=("sm_80",)))
        x = torch.randn(3, 16, 64, device="cuda")
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


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
