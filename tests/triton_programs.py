"""Triton kernels as a program has them, for the CPU's tests (Triton's interpreter) and the GPU's."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, alpha, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    value = tl.load(x + place, mask=inside) + alpha * tl.load(y + place, mask=inside)
    tl.store(out + place, value, mask=inside)


@triton.jit
def double(x, n, BLOCK: tl.constexpr = 32):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, 2 * tl.load(x + place, mask=place < n), mask=place < n)
