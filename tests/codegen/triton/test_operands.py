"""Every operation, and every function that generated kernels call, on operands of every kind: compiled for a GPU without
one, and interpreted, against eager."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from fusewright.codegen.device_kernel import DeviceKernel, Processor
from fusewright.codegen.llvm.capabilities import SUPPORTED
from fusewright.codegen.triton import generate, library, operations
from fusewright.runtime import cuda_code
from tests.codegen.triton.harness import refused, run_code
from tests.codegen.triton.operands import COMBINING, FAST, KINDS, Operands, called, operands_of

OPERATIONS = [(op, False) for op in SUPPORTED if op in operations.OPERATIONS] + [(op, True) for op in FAST]


def code_of(operands: Operands) -> DeviceKernel:
    return generate([operands.kernel()], operands.buffers, Processor(90, 132))["operands"]


def test_every_operation_is_compiled(compiler: cuda_code.Compiler, tmp_path: Path) -> None:
    codes = [code_of(operands_of(op, KINDS, fast)) for op, fast in OPERATIONS]
    codes += [called(call)[0] for call in COMBINING]
    text = " ".join(code.text for code in codes)
    functions = [one for one in ast.parse(Path(library.__file__).read_text()).body if isinstance(one, ast.FunctionDef)]
    assert not [one.name for one in functions if one.name[0] != "_" and not re.search(rf"\blib\.{one.name}\(", text)]
    assert not refused(compiler, codes, tmp_path)


@pytest.mark.parametrize(("op", "fast"), OPERATIONS)
def test_every_operation_is_what_eager_has(op: str, fast: bool) -> None:
    operands = operands_of(op, [kind for kind in KINDS if kind != "value"], fast)
    run_code(code_of(operands), operands.tensors)
    for name, stored in operands.expected.items():
        torch.testing.assert_close(operands.tensors[name], torch.cat(stored), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("call", COMBINING)
def test_every_function_is_what_eager_has(call: str) -> None:
    code, tensors, expected = called(call)
    run_code(code, tensors)
    for number, one in enumerate(expected):
        torch.testing.assert_close(tensors[f"out{number}"], one)
