"""Kernels read nothing outside of their buffers, not even lanes that they then throw away (see fenced.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.codegen.fenced", *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and "in bounds" in done.stdout, done.stderr[-2000:]


def test_no_read_crosses_a_border() -> None:
    run()


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_no_operator_reads_across_a_border(part: int) -> None:
    run("--operators", f"{part}/8")
