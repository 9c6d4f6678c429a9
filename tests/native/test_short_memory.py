"""Memory that the native part, or PyTorch's allocator, asks for and does not get: the user's error, or the right result;
nothing is left, and the next call works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux" or os.environ.get("LD_PRELOAD"):
        pytest.skip("needs g++, the GNU C library, and nothing else in front of it")
    made = tmp_path_factory.mktemp("memory") / "short_memory.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(made), str(HERE / "short_memory.cpp"), "-ldl"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the GNU C library")
    return made


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", ["inference", "training", "broken", "module"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("whose", ["native", "torch"])
def test_each_request_may_fail(library: Path, whose: str, calls: int, mode: str) -> None:
    command = [sys.executable, "-m", "tests.native.short_memory", str(library), whose, str(calls), mode]
    environment = {**os.environ, "LD_PRELOAD": str(library), "FUSEWRIGHT_CACHE": "0"}
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    requests = int(done.stdout)
    assert requests >= 10 or calls, "a compile asks for memory"
