"""flex_attention and the program's own Triton kernels on a GPU: one graph, eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fusewright
from fusewright.base import events

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tests.triton_programs import add, double  # noqa: E402


@triton.jit
def row_sums(x, out, step, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * step + place, mask=place < n, other=0.0)
    tl.store(out + row, tl.sum(total))


tuned = triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 512}, num_warps=8)], key=["n"])(add)
of_size = triton.heuristics({"BLOCK": lambda given: 64 if given["n"] < 1000 else 256})(add)


def blocks(meta: Any) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def plain(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add[blocks](x.sin(), x, out, x.numel(), 0.5, BLOCK=128)
    return out.relu() + 1


def autotuned(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned[blocks](x, x.cos(), out, x.numel(), 0.5)
    return out + 1


def heuristic(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    of_size[blocks](x, x.cos(), out, x.numel(), 0.5)
    return out + 1


def in_place(x: torch.Tensor) -> torch.Tensor:
    double[(triton.cdiv(x.numel(), 128),)](x, x.numel(), BLOCK=128)
    return x + 1


def sums(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0])
    row_sums[(x.shape[0],)](x * 2, out, x.stride(0), x.shape[1], BLOCK=64)
    return out


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
@pytest.mark.parametrize("program", [plain, autotuned, heuristic, in_place, sums], ids=lambda one: one.__name__)
def test_kernels(program: Callable[..., Any], options: dict[str, Any]) -> None:
    compiled = fusewright.compile(program, fullgraph=True, **options)
    for shape in [(70, 36), (12, 20)]:
        x = torch.randn(*shape, device="cuda")
        for _ in range(4):
            given, wanted = x.clone(), x.clone()
            torch.testing.assert_close(compiled(given), program(wanted))
            torch.testing.assert_close(given, wanted)


BIAS = torch.linspace(-1, 1, 512)


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 100)


def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (k - q) * 0.01 * (h + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 200, 512])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_flex_attention(dtype: torch.dtype, rows: int, key_heads: int) -> None:
    bias = BIAS.cuda()
    mask = create_block_mask(window, None, None, rows, 512, device="cuda")

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return relative(score, b, h, q, k) + bias[k]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, biased, mask, enable_gqa=True)

    shapes = [(2, 4, rows, 64), (2, key_heads, 512, 64), (2, key_heads, 512, 64)]
    values = [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]
    found = []
    for function, given in (
        (fusewright.compile(attend, fullgraph=True), values),
        (attend, values),
        (attend, [value.double() for value in values]),
    ):
        leaves = [value.clone().requires_grad_() for value in given]
        result = function(*leaves)
        result.square().sum().backward()
        found.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for given, other, exact in zip(*found, strict=True):
        assert given.stride() == other.stride()
        error, usual = ((one.double() - exact).norm().item() for one in (given, other))  # of one key: gradients of 0
        assert error <= 2 * usual + 1e-5 * (1 + exact.norm().item())


DOCUMENTS = torch.arange(300, device="cuda") // 70
INFERENCE: dict[str, tuple[Any, Any]] = {
    "causal": (None, lambda b, h, q, k: q >= k),
    "window": (lambda s, b, h, q, k: s + (k - q) * 0.01, lambda b, h, q, k: (q >= k) & (q - k < 50)),
    "soft cap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), lambda b, h, q, k: q >= k),
    "documents": (None, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    "nothing for some": (None, lambda b, h, q, k: (q >= k) & (q > 10)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", INFERENCE)
def test_inference_is_one_kernel(name: str, dtype: torch.dtype) -> None:
    mod, mask = INFERENCE[name]
    q, k, v = (torch.randn(2, heads, 300, 64, device="cuda", dtype=dtype) for heads in (4, 2, 2))
    made = create_block_mask(mask, None, None, 300, 300, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=mod, block_mask=made, enable_gqa=True)

    compiled = fusewright.compile(attend, fullgraph=True)
    with torch.no_grad():
        expected = attend(q.double(), k.double(), v.double())
        error, eagers = ((one(q, k, v) - expected).abs().max() for one in (compiled, attend))
        assert error <= 2 * eagers + 1e-6
        assert len(fusewright.explain(compiled)(q, k, v).kernels) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 300, 300, 64), (4, 4, 256, 512, 128), (2, 1, 130, 70, 32), (2, 2, 128, 128, 256)])
@pytest.mark.parametrize("name", INFERENCE)
def test_training_is_fused(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """No matrix of scores is stored: three kernels make the gradients, with the scores computed again."""
    heads, key_heads, rows, columns, width = shape
    if name == "documents" and max(rows, columns) > len(DOCUMENTS):
        pytest.skip("longer than the documents")
    mod, mask = INFERENCE[name]
    made = create_block_mask(mask, None, None, rows, columns, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=mod, block_mask=made, enable_gqa=True)

    shapes = [(2, heads, rows, width), (2, key_heads, columns, width), (2, key_heads, columns, width)]
    values = [torch.randn(*one, device="cuda", dtype=dtype) for one in shapes]
    tangent = torch.randn_like(values[0])
    heard: list[str] = []

    def step(function: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [value.detach().requires_grad_() for value in given]
        result = function(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, tangent.to(result.dtype))]

    def hear(event: Any) -> None:
        if isinstance(event, events.KernelMade):
            heard.append(event.name)

    with events.STREAM.listening(hear):
        given = step(fusewright.compile(attend, fullgraph=True), values)
    assert sum("chained" in kernel for kernel in heard) == 3 and sum("attention" in kernel for kernel in heard) == 1
    exact, eagers = step(attend, [value.double() for value in values]), step(attend, values)
    for found, wanted, other in zip(given, exact, eagers, strict=True):
        assert found.stride() == other.stride()
        error, usual = ((one.double() - wanted).norm() / wanted.norm() for one in (found, other))
        assert error <= 2 * usual + 2e-3
