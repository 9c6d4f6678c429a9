"""A prototype: would GPU kernels through llvmlite's NVPTX target be as quick as Triton's, and compile sooner?

    python -m benchmarks.nvptx

Two kernels written as LLVM text (a pointwise one and sums of rows, the way a code generator would emit them) are compiled by llvmlite to
PTX, which the driver assembles; beside them, the same functions through `fusewright.compile`, that is through Triton. Printed: seconds of
each compile step and the share of a copy's bandwidth that each kernel reaches. Nothing of this is used by the compiler.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial

import torch

TRIPLE, LAYOUT = "nvptx64-nvidia-cuda", "e-p6:32:32-i64:64-i128:128-v16:16-v32:32-n16:32:64"
HEAD = f"""target triple = "{TRIPLE}"
target datalayout = "{LAYOUT}"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32)
declare void @llvm.nvvm.barrier0()
declare <4 x float> @llvm.maxnum.v4f32(<4 x float>, <4 x float>)
"""
POINTWISE = (
    HEAD
    + """
define ptx_kernel void @pointwise(ptr addrspace(1) noalias %a, ptr addrspace(1) noalias %b, ptr addrspace(1) noalias %out) {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %first = mul i32 %block, 1024
  %lane = mul i32 %tid, 4
  %at = add i32 %first, %lane
  %index = zext i32 %at to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %index
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %index
  %po = getelementptr float, ptr addrspace(1) %out, i64 %index
  %x = load <4 x float>, ptr addrspace(1) %pa, align 16
  %y = load <4 x float>, ptr addrspace(1) %pb, align 16
  %sum = fadd <4 x float> %x, %y
  %relu = call <4 x float> @llvm.maxnum.v4f32(<4 x float> %sum, <4 x float> zeroinitializer)
  %twice = fmul <4 x float> %relu, <float 2.0, float 2.0, float 2.0, float 2.0>
  store <4 x float> %twice, ptr addrspace(1) %po, align 16
  ret void
}
"""
)


def _row_sums(width: int) -> str:
    """One block of 256 threads sums a row: vectors of 4 in a loop, a butterfly in each warp, the 8 warps' sums through shared memory."""
    lines = [
        HEAD, "@partial = internal addrspace(3) global [8 x float] undef, align 16",
        "define ptx_kernel void @row_sums(ptr addrspace(1) noalias %in, ptr addrspace(1) noalias %out) {", "entry:",
        "  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()", "  %row = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()",
        "  %row64 = zext i32 %row to i64", f"  %start = mul i64 %row64, {width}", "  %lane4 = mul i32 %tid, 4", "  %lane64 = zext i32 %lane4 to i64",
        "  %base = add i64 %start, %lane64", "  br label %loop", "loop:", "  %i = phi i64 [0, %entry], [%next, %loop]",
        "  %acc = phi <4 x float> [zeroinitializer, %entry], [%more, %loop]", "  %at = add i64 %base, %i",
        "  %p = getelementptr float, ptr addrspace(1) %in, i64 %at", "  %v = load <4 x float>, ptr addrspace(1) %p, align 16",
        "  %more = fadd <4 x float> %acc, %v", "  %next = add i64 %i, 1024", f"  %again = icmp ult i64 %next, {width}",
        "  br i1 %again, label %loop, label %done, !llvm.loop !0", "done:",
    ]  # fmt: skip
    lines += [f"  %e{k} = extractelement <4 x float> %more, i32 {k}" for k in range(4)]
    lines += ["  %t0 = fadd float %e0, %e1", "  %t1 = fadd float %e2, %e3", "  %w0 = fadd float %t0, %t1"]

    def butterfly(name: str, distances: tuple[int, ...]) -> str:
        for k, distance in enumerate(distances):
            lines.extend([
                f"  %{name}b{k} = bitcast float %{name}{k} to i32",
                f"  %{name}s{k} = call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 %{name}b{k}, i32 {distance}, i32 31)",
                f"  %{name}f{k} = bitcast i32 %{name}s{k} to float", f"  %{name}{k + 1} = fadd float %{name}{k}, %{name}f{k}",
            ])  # fmt: skip
        return f"%{name}{len(distances)}"

    warp_sum = butterfly("w", (16, 8, 4, 2, 1))
    lines += [
        "  %warp = lshr i32 %tid, 5", "  %place = getelementptr [8 x float], ptr addrspace(3) @partial, i32 0, i32 %warp",
        f"  store float {warp_sum}, ptr addrspace(3) %place", "  call void @llvm.nvvm.barrier0()", "  %eighth = and i32 %tid, 7",
        "  %from = getelementptr [8 x float], ptr addrspace(3) @partial, i32 0, i32 %eighth", "  %z0 = load float, ptr addrspace(3) %from",
    ]  # fmt: skip
    total = butterfly("z", (4, 2, 1))
    lines += [
        "  %first = icmp eq i32 %tid, 0", "  br i1 %first, label %write, label %end", "write:",
        "  %po = getelementptr float, ptr addrspace(1) %out, i64 %row64", f"  store float {total}, ptr addrspace(1) %po",
        "  br label %end", "end:", "  ret void", "}", '!0 = distinct !{!0, !1}', '!1 = !{!"llvm.loop.unroll.count", i32 4}',
    ]  # fmt: skip
    return "\n".join(lines)


def ptx_of(text: str, arch: str) -> str:
    """LLVM text through llvmlite's pipeline at its highest level, as PTX."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=arch, opt=3)
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    return str(machine.emit_assembly(module))


class Driver:
    """The few calls of the CUDA driver that a prototype needs."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the CUDA driver says {code}")

    def load(self, ptx: str, name: str) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        self.check(self.library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return function

    def launch(self, function: ctypes.c_void_p, grid: int, threads: int, tensors: list[torch.Tensor]) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        parameters = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.library.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, stream, parameters, None))


def main() -> None:
    import fusewright
    from benchmarks.gpu import copy_bandwidth, profiled

    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    driver, bandwidth = Driver(), copy_bandwidth()
    ptx_of(POINTWISE, arch)  # llvmlite's own start
    rows, width = 16384, 8192
    a, b = torch.randn(rows * width, device="cuda"), torch.randn(rows * width, device="cuda")
    matrix = a.view(rows, width)
    cases: list[tuple[str, str, int, list[torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor], int]] = [
        (
            "pointwise",
            POINTWISE,
            rows * width // 1024,
            [a, b, torch.empty_like(a)],
            lambda x, y: torch.relu(x + y) * 2,
            [a, b],
            12 * rows * width,
        ),
        (
            "row_sums",
            _row_sums(width),
            rows,
            [a, torch.empty(rows, device="cuda")],
            lambda x: x.sum(1),
            [matrix],
            4 * rows * width,
        ),
    ]
    print(
        f"{'kernel':12} {'way':10} {'emit ms':>8} {'load ms':>8} {'first ms':>9} {'GPU ms':>8} {'copy %':>7} {'error':>8}"
    )
    for name, text, grid, tensors, function, inputs, moved in cases:
        started = time.perf_counter()
        ptx = ptx_of(text, arch)
        emitted = time.perf_counter()
        kernel = driver.load(ptx, name)
        loaded = time.perf_counter()
        driver.launch(kernel, grid, 256, tensors)
        expected = function(*inputs)
        error = float((tensors[-1] - expected).norm() / expected.norm())
        milliseconds = profiled(partial(driver.launch, kernel, grid, 256, tensors), 20)[0]
        share = moved / milliseconds * 1e3 / bandwidth * 100
        print(
            f"{name:12} {'NVPTX':10} {(emitted - started) * 1e3:8.1f} {(loaded - emitted) * 1e3:8.1f} {'':9} {milliseconds:8.4f} {share:7.1f} {error:8.0e}"
        )
        compiled = fusewright.compile(function)
        started = time.perf_counter()
        result = compiled(*inputs)
        torch.cuda.synchronize()
        first = (time.perf_counter() - started) * 1e3
        error = float((result - expected).norm() / expected.norm())
        milliseconds = profiled(partial(compiled, *inputs), 20)[0]
        share = moved / milliseconds * 1e3 / bandwidth * 100
        print(f"{name:12} {'Triton':10} {'':8} {'':8} {first:9.1f} {milliseconds:8.4f} {share:7.1f} {error:8.0e}")


if __name__ == "__main__":
    main()
