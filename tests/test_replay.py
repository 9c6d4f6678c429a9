"""The replay script: a tree's records are equal to the byte whatever the hash seed, and a difference is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import replay

NAMES = "breaks_and_effects,control_flow,skinny_products,residual_block,sgd"


def record(folder: Path, seed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.replay", "record", str(folder), "--only", NAMES]
    return subprocess.Popen(
        command, cwd=replay.ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
    )


def test_two_records_are_equal_and_a_change_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / seed for seed in ("1", "2")]
    for process in [record(folder, folder.name) for folder in folders]:
        assert f"{NAMES.count(',') + 1} programs" in process.communicate()[0] and process.returncode == 0
    assert replay.compare(*folders, stages=[], patterns=[], show=9)
    assert capsys.readouterr().out.count(" 0 different") == len({path.name for path in folders[0].glob("*/*.txt")})
    changed = folders[1] / "sgd" / "kernels.txt"
    changed.write_text(changed.read_text().replace("fadd", "fsub", 1))
    assert not replay.compare(*folders, stages=["kernels"], patterns=[], show=9)
    assert "+++ after: sgd kernels" in capsys.readouterr().out
    assert replay.compare(*folders, stages=["output_code", "guards"], patterns=[], show=9)
    changed.unlink()
    assert not replay.compare(*folders, stages=[], patterns=["sgd"], show=9)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<function f at 0x7fb02234e200>", "<function f at 0x>"),
        ("default is <_MISSING_TYPE object at 0x7fd3...", "default is <_MISSING_TYPE object at 0x..."),
        ("fdiv float %v1, 0x4020000000000000", "fdiv float %v1, 0x4020000000000000"),
        ('f is <code object f at 0x7fb022453420, file "/a/b.py", line 3>', "f is <code object f at 0x>"),
        ("f is <code object f at 0x7fb022453420, file \"/home/somebody/lib...'", "f is <code object f at 0x>'"),
        ("F is <module 'torch.nn.functional' from '/a/functional.py'>", "F is <module 'torch.nn.functional'>"),
        ("[__P_7fb02234e200] [__P_7fb02234e210] [__P_7fb02234e200]", "[__P_object0] [__P_object1] [__P_object0]"),
        ("define void @fw_1546420280e3da54(ptr %x)", "define void @fw_1546420280e3da54(ptr %x)"),
        ("fusewright.api.compile _globals_of_fusewright_api['F']", "fusewright.compile _globals_of_fusewright['F']"),
        ("fusewright.choose(1) torch.ops.fusewright.skinny_gemm", "fusewright.choose(1) torch.ops.fusewright.skinny_gemm"),
        (f"# {replay.ROOT}/src/fusewright/api.py:3, 4 in f", "# fusewright in f"),
        (f"# {replay.__file__}:2 in f  # replay.py:2, 2", "# replay.py:<> in f  # replay.py:<>, <>"),
        ("# subprocess.py:3, gone.py:8", "# subprocess.py:3, fusewright"),
    ],
)  # fmt: skip
def test_what_texts_do_not_hold(text: str, expected: str) -> None:
    source = replay.ROOT / "src" / "fusewright"
    files = replay.module_files(source)
    assert replay.normal(text, source, lambda place: replay.place_text(files, source, place)) == expected
