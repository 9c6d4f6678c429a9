"""Kernels for AArch64, run by qemu's emulator of its programs: on Debian, `qemu-user-static` and `binutils-aarch64-linux-gnu`."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.llvm import CompiledModule
from fusewright.sizes.expressions import Expr, evaluate
from tests.codegen.llvm.harness import run_plan
from tests.codegen.llvm.test_plans import attention, r, rotary
from tests.loops.tracing import lowered
from tests.schedule.reference import schedule

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ASSEMBLER, LINKER = (shutil.which(f"aarch64-linux-gnu-{tool}") for tool in ("as", "ld"))
pytestmark = pytest.mark.skipif(not (QEMU and ASSEMBLER and LINKER), reason="no emulator of AArch64 and its binutils")


def address(register: str, label: str) -> list[str]:
    return [f"adrp {register}, {label}", f"add {register}, {register}, :lo12:{label}"]


def written(label: str, count: int) -> list[str]:
    return ["mov x0, #1", *address("x1", label), f"ldr x2, ={count}", "mov x8, #64", "svc #0"]


def program(code: KernelCode, buffers: list[torch.Tensor], sizes: Mapping[Expr, int], parts: int) -> str:
    """A program that calls a kernel on these buffers, in `parts` ranges, and writes them and the status to its output."""
    lines = [".data"]
    for number, buffer in enumerate(buffers):
        lines += [".balign 64", f"b{number}: .byte " + ",".join(map(str, buffer.tolist() or [0]))]
    lines += [
        ".balign 8",
        "status: .quad 0",
        "buffers: .quad " + ", ".join([*(f"b{n}" for n in range(len(buffers))), "0"]),
    ]
    lines += ["sizes: .quad " + ", ".join([*(str(sizes[symbol]) for symbol in code.sizes), "0"])]
    lines += [".text", ".global _start", "_start:"]
    extent = evaluate(code.extent, sizes)
    for part in reversed(range(parts)):
        lines += [*address("x0", "buffers"), *address("x1", "sizes"), *address("x4", "status")]
        lines += [f"ldr x2, ={extent * part // parts}", f"ldr x3, ={extent * (part + 1) // parts}", f"bl {code.symbol}"]
    for number, buffer in enumerate(buffers):
        lines += written(f"b{number}", buffer.numel())
    lines += [*written("status", 8), "mov x0, #0", "mov x8, #93", "svc #0", ".ltorg"]
    return "\n".join(lines) + "\n"


def test_kernels_give_eagers_results(tmp_path: Path) -> None:
    def run(
        module: CompiledModule,
        code: KernelCode,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[Expr, int],
        parts: int,
    ) -> int:
        buffers = []
        for tensor in (tensors[name] for name in code.buffers):
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            buffers.append(whole[tensor.storage_offset() * tensor.element_size() :])
        (tmp_path / "main.s").write_text(program(code, buffers, sizes, parts))
        (tmp_path / "kernels.o").write_bytes(module.object)
        for command in ((ASSEMBLER, "-o", "main.o", "main.s"), (LINKER, "-o", "main", "main.o", "kernels.o")):
            subprocess.run(command, cwd=tmp_path, check=True)  # type: ignore[arg-type]
        output = subprocess.run([str(QEMU), str(tmp_path / "main")], capture_output=True, check=True).stdout
        for buffer in buffers:
            buffer.copy_(
                torch.frombuffer(bytearray(output[: buffer.numel()]) or bytearray(1), dtype=torch.uint8)[
                    : buffer.numel()
                ]
            )
            output = output[buffer.numel() :]
        return struct.unpack("<q", output)[0]

    for name, (function, *inputs) in CASES.items():
        plan = schedule(lowered(function, [x.clone() for x in inputs]))
        (found,), status = run_plan(plan, [x.clone() for x in inputs], target="aarch64", run=run)
        assert status == 0, name
        torch.testing.assert_close(
            found, function(*inputs), rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


CASES = {
    "pointwise": (lambda x, y: (x * y + 1).relu() * 0.5, r(33, 17), r(17)),
    "sum of rows": (lambda x: x.sum(1), r(40, 129)),
    "mean": (lambda x: x.mean(), r(4000)),
    "variance": (lambda x: x.var(1), r(7, 300)),
    "softmax": (lambda x: torch.softmax(x, -1), r(20, 65)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (96,), w, b), r(12, 96), r(96), r(96)),
    "gelu": (F.gelu, r(500)),
    "silu": (F.silu, r(500)),
    "exp and log": (lambda x: (x.exp() + 1).log(), r(300)),
    "rotary": (rotary, r(2, 8, 16), r(8, 16), r(8, 16)),
    "bfloat16": (lambda x: (x * 2 + x.relu()).float().sum(-1), r(9, 40).bfloat16()),
    "float16": (lambda x: x * 2 + 1, r(100).half()),
    "integers": (lambda x: (x // 3 + x % 5).sum(0), torch.randint(-50, 50, (31, 7))),
    "argmax": (lambda x: x.argmax(1), r(9, 70)),
    "index": (lambda x, at: x[at] * 2, r(10, 6), torch.randint(10, (5,))),
    "transpose": (lambda x: x.t().contiguous() + 1, r(30, 50)),
    "cumsum": (lambda x: x.cumsum(1), r(5, 40)),
    "attention": (attention, r(1, 2, 8, 16), r(1, 2, 8, 16), r(1, 2, 8, 16)),
}
