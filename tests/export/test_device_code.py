"""Machine code of a package's GPU kernels, made and chosen without a GPU. tests/gpu/test_gpu_package.py runs it."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import pytest

import fusewright
from fusewright.codegen.device_kernel import DeviceKernel, Processor
from fusewright.exporting import device_code
from fusewright.runtime import cuda_code
from tests.export.test_package import written
from tests.export.test_save import exported

TWICE = """import triton
import triton.language as tl


@triton.jit
def twice(x, y, n):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i, i < n) * 2, i < n)
"""


@pytest.fixture
def compiler(monkeypatch):
    """A compiler process that makes machine code, where the tests' own interprets."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = cuda_code.Compiler()
    monkeypatch.setattr(cuda_code, "COMPILER", made)
    yield made
    made.stop()


def test_code_for_gpus_is_made_without_one(compiler, monkeypatch):
    """Cubins and PTX of several architectures; what runs where."""
    pytest.importorskip("triton")
    kernel = DeviceKernel(
        "twice", f"{random.getrandbits(64):x}", "twice", TWICE, ("*fp32", "*fp32", "i64"), (0, 1), ("x", "y"), frozenset(), (),
        (), 1, 4, 2, False,
    )  # fmt: skip
    part = device_code.written([kernel], (80, 90))
    head, _, code = part.partition(b"\n")
    (records,) = json.loads(head).values()
    assert [(one["arch"], one["ptx"]) for one in records] == [(80, False), (80, True), (90, False), (90, True)]
    for one in records:
        data = code[one["start"] : one["start"] + one["size"]]
        if one["ptx"]:
            assert re.search(rb"\.target sm_" + str(one["arch"]).encode() + (b"a" if one["arch"] == 90 else b"\n"), data)
        else:
            assert data[:4] == b"\x7fELF"
    for own, archs, runs in (
        (80, (80, 90), True), (86, (80,), True), (90, (80,), True), (75, (80,), False), (100, (90,), False),
        (103, (100,), False), (90, (), False),
    ):  # fmt: skip
        monkeypatch.setattr(device_code.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device_code.torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(device_code.cuda_code, "processor", lambda index, own=own: Processor(own, 100))
        assert device_code.fits(archs) is runs, (own, archs)
    broken = dataclasses.replace(kernel, key="broken", text=TWICE.replace("tl.load", "tl.lode"))
    with pytest.raises(fusewright.ExportError, match="kernel twice cannot be made for sm_80"):
        device_code.written([broken], (80,))


def test_what_the_assembler_prints_is_no_answer(compiler):
    """It refuses an instruction that the architecture lacks, and prints so; the next kernel is made."""
    pytest.importorskip("triton")
    waiting = "    tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [], tl.int32, False, 1)\n"
    kernel = DeviceKernel(
        "twice", f"{random.getrandbits(64):x}", "twice", TWICE, ("*fp32", "*fp32", "i64"), (0, 1), ("x", "y"), frozenset(), (),
        (), 1, 4, 2, False,
    )  # fmt: skip
    newer = dataclasses.replace(kernel, key=f"{kernel.key} waits", text=TWICE + waiting)
    with pytest.raises(fusewright.ExportError, match="kernel twice cannot be made for sm_80"):
        device_code.written([newer], (80,))
    assert device_code.written([newer], (90,))
    assert device_code.written([kernel], (80,))


def test_kernels_for_several_architectures_are_generated_for_the_oldest(monkeypatch):
    monkeypatch.setattr(cuda_code, "processor", lambda index: Processor(90, 132))
    for archs, oldest in (((), 90), ((90,), 90), ((90, 80), 80), ((100,), 90)):
        with cuda_code.generating_for(archs):
            assert cuda_code.target(0) == Processor(oldest, 132)
    assert cuda_code.target(0) == Processor(90, 132)


@pytest.mark.parametrize("targets", [("sm_80",), ("native", "sm_80")])
def test_targets_of_another_kind_than_the_program_are_an_error(targets):
    _, program = exported()
    with pytest.raises(fusewright.ExportError, match=r"GPUs|cpu"):
        written(program, targets=targets)
