"""Hostile files: none is executed, ends the process, or takes memory beyond its own size. 500 of them by `-m sweep`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusewright
from fusewright import Dim
from tests.export.test_export import mlp


@pytest.mark.parametrize("first, last", [(0, 60), pytest.param(0, 500, marks=pytest.mark.sweep)])
def test_mutated_files_are_refused(first: int, last: int, tmp_path: Path) -> None:
    program = fusewright.export(mlp(), (torch.randn(2, 4),), dynamic_shapes=({0: Dim("batch", max=64)},))
    fusewright.save(program, tmp_path / "program.fw")
    fusewright.package(program, tmp_path / "package.fwp")
    command = [sys.executable, "-m", "tests.export.hostile_files", str(tmp_path), str(first), str(last)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == last - first
    assert sum(count for name, count in counts.items() if name.endswith("refused")) > (last - first) * 0.6
