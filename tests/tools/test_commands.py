"""The commands `env`, `doctor`, `check`, `--version`, and FUSEWRIGHT_LOGS=help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusewright
from fusewright.runtime import host
from fusewright.runtime.cache import DiskCache
from fusewright.tools import cli, doctor, logs


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    return host.store()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"fusewright {fusewright.__version__}\n"


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    told = capsys.readouterr().out
    for fact in (fusewright.__version__, torch.__version__, "llvmlite", "FUSEWRIGHT_CACHE_DIR", "processor"):
        assert fact in told


def statuses() -> dict[str, str]:
    return {finding.name: finding.status for finding in doctor.examine().findings}


def test_doctor_on_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    assert "failure" not in statuses().values()
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["findings"]} == set(statuses())


@pytest.mark.parametrize(
    ("name", "text", "row", "status"),
    [
        ("FUSEWRIGHT_LOG", "recompiles", "variables", "warning"),
        ("FUSEWRIGHT_DISABLE", "1", "variables", "warning"),
        ("FUSEWRIGHT_CACHE_MIB", "many", "variables", "failure"),
        ("FUSEWRIGHT_CACHE", "0", "cache", "warning"),
        ("FUSEWRIGHT_CACHE_DIR", "/proc/nowhere", "cache", "failure"),
    ],
)
def test_doctor_finds_what_is_wrong(
    name: str, text: str, row: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [doctor._variables] if row == "variables" else [doctor._cache])
    assert statuses() == {row: "ok"}
    monkeypatch.setenv(name, text)
    assert statuses() == {row: status}


def test_doctor_removes_damaged_entries(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("ab" * 32, "f", b"x" * 100)
    path = next(path for path in cache.folder.rglob("*") if path.is_file() and path.stem.startswith("ab"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(doctor, "CHECKS", [doctor._cache])
    assert statuses() == {"cache": "warning"} and statuses() == {"cache": "ok"}


def test_doctor_tells_of_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.api, "compile", lambda f, **_: lambda x, w: f(x, w) * 1.01)
    found = doctor._on_cpu()
    assert found.status == "failure" and "AssertionError" in found.text


MODEL = """
import torch
model = torch.nn.Linear(4, 2).eval()
inputs = (torch.randn(3, 4),)
args = torch.randn(5, 4)

class Net(torch.nn.Module):
    def forward(self, x):
        print("called", x.sum().item())
        return x
"""


def test_check_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "a_model_of_mine.py"
    file.write_text(MODEL)
    quick = ["--seconds", "0.01"]
    assert cli.main(["check", f"{file}:model", "--args", "inputs", "--shape", "2,4", "--shape", "1,4", *quick]) == 0
    assert "2 further sizes" in capsys.readouterr().out
    assert cli.main(["check", "a_model_of_mine:model", "--json", *quick]) == 0
    assert json.loads(capsys.readouterr().out)["status"] in ("ok", "warning")
    assert cli.main(["check", f"{file}:Net", "--input", "2,4", "--json", *quick]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["status"] == "warning" and "called" in printed.err
    assert cli.main(["check", f"{file}:Net", "--input", "2,4", *quick]) == 0
    assert "could be better" in capsys.readouterr().out
    assert cli.main(["check", f"{file}:Net", "--input", "2,4", "--strict", *quick]) == 1
    assert cli.main(["check", f"{file}:Net", "--input", "2,4", "--fullgraph", *quick]) == 1
    for wrong in (f"{file}:nothing", f"{file}", f"{file}:model --args none"):
        assert cli.main(["check", *wrong.split(), *quick]) == 2
        assert "fusewright: " in capsys.readouterr().err


def test_logs_help_ends_the_program_at_import() -> None:
    environment = {**os.environ, "FUSEWRIGHT_LOGS": "recompiles, help"}
    program = "import fusewright; print('imported')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert all(name in done.stderr and meaning in done.stderr for name, meaning in logs.ARTIFACTS.items())
    assert "Traceback" not in done.stderr
