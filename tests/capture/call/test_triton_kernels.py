"""Launches of the program's own Triton kernels: one graph, eager's values, whoever reads and writes what.

The kernels run by Triton's interpreter, on a CPU (tests/conftest.py asks for it where there is no GPU).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.operators import user_kernels

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton does not interpret", allow_module_level=True)
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402

from tests.triton_programs import add, double  # noqa: E402


@triton.jit
def scatter(x, index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    where = tl.load(index + place, mask=inside)
    tl.atomic_add(out + where, tl.load(x + place, mask=inside), mask=inside)


@triton.jit
def rows(x, out, rows_step, columns_step, n: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore
    row = tl.program_id(0)
    total = 0.0
    pointer = x + row * rows_step
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(pointer + place * columns_step, mask=place < n, other=0.0))
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0.0)
    tl.store(out + row, total)


@triton.jit
def two(x, small, large, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    value = tl.load(x + place, mask=inside)
    tl.store(small + place, tl.minimum(value, 0.0), mask=inside)
    tl.store(large + place, tl.maximum(value, 0.0), mask=inside)


@triton.jit
def grid3(out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out + (i * B + j) * C + k, i * 100 + j * 10 + k)


def quickly(function: Callable[[], Any], quantiles: Any = None, **rest: Any) -> list[float]:
    function()
    return [1.0, 1.0, 1.0]


tuned = triton.autotune(
    [triton.Config({"BLOCK": 16}, num_warps=1), triton.Config({"BLOCK": 64})], key=["n"], do_bench=quickly
)(add)
of_size = triton.heuristics({"BLOCK": lambda given: 16 if given["n"] < 100 else 64})(add)
tuned_of_size = triton.autotune([triton.Config({}, num_warps=1)], key=["n"])(of_size)


def blocks(n: int) -> Callable[..., Any]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def of(*shape: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, **options)


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add[blocks(x.numel())](x, y, out, x.numel(), 0.5, BLOCK=32)
    return out


def around(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(x.sin(), y * 2).relu() + 1


def keywords(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    add[(triton.cdiv(x.numel(), 64),)](out=out, y=y, x=x, n=x.numel(), BLOCK=64, alpha=-1.0)
    return out


def closure(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]), 1)](x, y, out, n, 2, 32, num_warps=2)
    return out


def partly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, 7.0)
    add[(1,)](x, y, out, x.numel() // 2, 1.0, BLOCK=512)
    return out


def into_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    double[(8,)](x, x.numel())
    return x + y


def into_both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = x + 1
    add[blocks(x.numel())](x, y, x, x.numel(), 1.0, BLOCK=32)
    return before, x * y


def into_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, *x.shape)
    add[blocks(x.numel())](x, y, out[1], x.numel(), 1.0, BLOCK=32)
    return out


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add[blocks(x.numel())](x, y, out, x.numel(), 1.0, BLOCK=32)
    first = out * 3
    add[blocks(x.numel())](first, out, out, x.numel(), 1.0, BLOCK=32)
    return out + first


def tuned_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned[blocks(x.numel())](x, y, out, x.numel(), 1.0)
    return out.cos()


def heuristic_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    of_size[blocks(x.numel())](x, y, out, x.numel(), 1.0)
    return out.cos()


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned_of_size[blocks(x.numel())](x, y, out, x.numel(), 1.0)
    return out.cos()


def loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = around(x, y)
    return x


def halves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    small, large = torch.empty_like(x), torch.empty_like(x)
    two[blocks(x.numel())](x, small, large, x.numel(), BLOCK=32)
    return small + y, large


def unused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    small, large = torch.empty_like(x), torch.empty_like(x)
    two[blocks(x.numel())](x, small, large, x.numel(), BLOCK=32)
    return large


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0])
    rows[(x.shape[0],)](x, out, x.stride(0), x.stride(1), x.shape[1], "relu", BLOCK=16)
    return out


def summed_columns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    turned = (x * 2).t()
    out = x.new_empty(turned.shape[0])
    rows[(turned.shape[0],)](turned, out, turned.stride(0), turned.stride(1), turned.shape[1], None, BLOCK=16)
    return out


def every_other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    some = (x + y)[:, ::2]
    out = x.new_empty(some.shape[0])
    rows[(some.shape[0],)](some, out, some.stride(0), some.stride(1), some.shape[1], None, BLOCK=16)
    return out


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    index = torch.arange(x.numel()) % 5
    out = torch.zeros(5)
    scatter[(triton.cdiv(x.numel(), 32),)](x, index, out, x.numel(), BLOCK=32)
    return out


def points(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, 3, 4, dtype=torch.int32)
    grid3[(2, 3, 4)](out, 2, 3, 4)
    return out + x.sum().int()


def nothing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    add[(0,)](x, y, out, x.numel(), 1.0, BLOCK=32)
    return out


@triton_op("fusewright_tests::triton_sum", mutates_args={})
def operator_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(add)[blocks(x.numel())](x, y, out, x.numel(), 1.0, BLOCK=32)
    return out


def operator(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return operator_sum(x.exp(), y) * 2


def wrapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(add)[blocks(x.numel())](x, y, out, x.numel(), 1.0, BLOCK=32)
    return out * 2


PROGRAMS = [
    plain, around, keywords, closure, partly, into_input, into_both, into_view, twice, tuned_sum, heuristic_sum,
    both, loop, halves, unused, summed, summed_columns, every_other, counted, points, nothing, operator, wrapped,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Callable[..., Any], dynamic: bool) -> None:
    if program in (operator, wrapped):
        try:
            program(of(3, 4), of(3, 4))
        except RuntimeError as error:  # PyTorch 2.11 wraps no kernel that Triton interprets
            pytest.skip(str(error))
    compiled = fusewright.compile(program, fullgraph=True, dynamic=dynamic)
    for shape in [(7, 36), (12, 20), (3, 17)]:
        given, wanted = ([of(*shape), of(*shape)] for _ in range(2))
        results, expected = compiled(*given), program(*wanted)
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    x, y = (of(40).mul(10).to(dtype) for _ in range(2))

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        add[blocks(x.numel())](x, y, out, x.numel(), 2, BLOCK=32)
        return out + 1

    torch.testing.assert_close(fusewright.compile(program, fullgraph=True)(x, y), program(x, y))


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return plain(x, y)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (x,) = context.saved_tensors
        return gradient, plain(gradient * 0.5, x * 0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(dynamic: bool) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x.sin(), y.exp()).square().sum()

    compiled = fusewright.compile(program, fullgraph=True, dynamic=dynamic)
    found = []
    for function in (compiled, program):
        leaves = [of(30).requires_grad_(), of(30).requires_grad_()]
        function(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_written_keeps_its_gradient(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a kernel's IR does not tell, and what it only reads is copied back: autograd sees neither."""
    if not known:
        monkeypatch.setattr(user_kernels, "written", lambda *given: None)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x.sin(), y.exp()).square().sum() + plain(x, y).sum() + x.exp().sum()

    found = []
    for function in (fusewright.compile(program, fullgraph=True), program):
        leaves = [of(30).requires_grad_(), of(30).requires_grad_()]
        function(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


IR = """
#loc = loc("kernel.py":6:0)
module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc)), %y: !tt.ptr<f32> loc("y"(#loc)), %n: i32 loc("n"(#loc))) {
    %p = tt.get_program_id x : i32 loc(#loc)
    %a = tt.addptr %x, %p : !tt.ptr<f32>, i32 loc(#loc)
    %v = tt.load %a : !tt.ptr<f32> loc(#loc)
BODY
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""
LOOP = """    %r:2 = scf.for %i = %p to %n step %p iter_args(%t = %v, %q = %y) -> (f32, !tt.ptr<f32>)  : i32 {
      tt.store %q, %t : !tt.ptr<f32> loc(#loc)
      %q2 = tt.addptr %q, %p : !tt.ptr<f32>, i32 loc(#loc)
      scf.yield %t, %q2 : f32, !tt.ptr<f32> loc(#loc)
    } loc(#loc)"""
CHOICE = """    %c = arith.cmpi slt, %p, %n : i32 loc(#loc)
    %w = scf.if %c -> (!tt.ptr<f32>) {
      scf.yield %x : !tt.ptr<f32> loc(#loc)
    } else {
      scf.yield %y : !tt.ptr<f32> loc(#loc)
    } loc(#loc)
    tt.store %w, %v : !tt.ptr<f32> loc(#loc)"""
SUM = """    %s = "tt.reduce"(%v) <{axis = 0 : i32}> ({
    ^bb0(%left: f32 loc(#loc), %right: f32 loc(#loc)):
      %both = arith.addf %left, %right : f32 loc(#loc)
      tt.reduce.return %both : f32 loc(#loc)
    }) : (tensor<4xf32>) -> f32 loc(#loc)
    tt.store %y, %s : !tt.ptr<f32> loc(#loc)"""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("", set()),
        ("    tt.store %a, %v : !tt.ptr<f32> loc(#loc)", {0}),
        ("    %o = tt.atomic_rmw fadd, acq_rel, gpu, %y, %v : (!tt.ptr<f32>, f32) -> f32 loc(#loc)", {1}),
        ("    %b = tt.addptr %y, %v : !tt.ptr<f32>, i32 loc(#loc)\n    tt.store %b, %v : !tt.ptr<f32>", {1}),
        (LOOP, {1}),
        (CHOICE, {0, 1}),
        (SUM, {1}),
        ("    some.effect %a, %y : !tt.ptr<f32>, !tt.ptr<f32> loc(#loc)", {0, 1}),
        ("    %g = tt.int_to_ptr %n : i64 -> !tt.ptr<f32> loc(#loc)", None),
        ("    %g = tt.load %h : !tt.ptr<!tt.ptr<f32>> loc(#loc)", None),
        ("    cf.br ^bb1(%x : !tt.ptr<f32>) loc(#loc)", None),
    ],
)
def test_what_the_ir_says(body: str, wanted: set[int] | None) -> None:
    assert user_kernels.written_in(IR.replace("BODY", body)) == wanted


def test_no_gradient_passes_a_kernel() -> None:
    x = of(30).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        return plain(x, x) + x

    compiled = fusewright.compile(program, fullgraph=True)(x)
    compiled.sum().backward()
    assert torch.equal(x.grad, torch.ones(30))
    torch.testing.assert_close(compiled, program(x))


def test_shared_memory_breaks_the_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        add[(1,)](x[:10], x[5:15], x[20:30], 10, 1.0, BLOCK=16)
        return x + 1

    with pytest.raises(fusewright.GraphBreakError):
        fusewright.compile(program, fullgraph=True)(of(30))
    given, wanted = of(30), of(30)
    torch.testing.assert_close(fusewright.compile(program)(given), program(wanted))
    assert torch.equal(given, wanted)


def test_another_kernel_is_another_program() -> None:
    def program(kernel: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[blocks(x.numel())](x, x, out, x.numel(), 1.0)
        return out

    @triton.heuristics({"BLOCK": lambda given: 16})
    @triton.jit
    def subtract(x, y, out, n, alpha, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + place, tl.load(x + place) - tl.load(y + place), mask=place < n)

    compiled = fusewright.compile(program, fullgraph=True)
    for kernel in (of_size, subtract, tuned):
        torch.testing.assert_close(compiled(kernel, of(32)), program(kernel, of(32)))
