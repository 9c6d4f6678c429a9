"""Gradients of attention over short sequences are written out; those of long ones, or with a mask, stay with PyTorch's operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import fusewright
from tests.listening import stage_texts

Tensors = tuple[torch.Tensor, ...]


def inputs(dtype: torch.dtype, rows: int, columns: int, transposed: bool) -> Tensors:
    torch.manual_seed(0)
    made = []
    for length in (rows, columns, columns):
        value = torch.randn(2, length, 3, 16) if transposed else torch.randn(2, 3, length, 16)
        made.append((value.transpose(1, 2) if transposed else value).to(dtype).requires_grad_())
    return tuple(made)


def gradients(run: Callable[..., torch.Tensor], values: Tensors, weights: torch.Tensor) -> Tensors:
    return torch.autograd.grad((run(*values) * weights.to(values[0].dtype)).sum(), values)


def compiled_gradients(run: Callable[..., torch.Tensor], values: Tensors, weights: torch.Tensor) -> tuple[Tensors, str]:
    with stage_texts("forward graph", "backward graph") as texts:
        found = gradients(fusewright.compile(run, fullgraph=True), values, weights)
    assert "aten.bmm" not in texts[0]  # nothing is made for the backward beforehand
    return found, texts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "causal", "scaled"])
@pytest.mark.parametrize(("rows", "columns", "transposed"), [(7, 12, True), (12, 5, False)])
def test_gradients_are_as_good_as_eagers(
    dtype: torch.dtype, form: str, rows: int, columns: int, transposed: bool
) -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=form == "causal", scale=0.7 if form == "scaled" else None
        )

    values = inputs(dtype, rows, columns, transposed)
    weights = torch.randn(2, 3, rows, 16)
    exact = gradients(
        program, tuple(value.detach().double().requires_grad_() for value in values), weights.to(dtype).double()
    )
    eager = gradients(program, values, weights)
    found, text = compiled_gradients(program, values, weights)
    assert "flash_attention_for_cpu_backward" not in text and "aten.bmm" in text
    for mine, theirs, truth in zip(found, eager, exact, strict=True):
        assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype
        assert (mine - truth).norm() <= 1.25 * (theirs - truth).norm() + (
            1e-6 if dtype is torch.float32 else 5e-3
        ) * truth.norm()


def test_masks_and_long_sequences_stay() -> None:
    values = inputs(torch.float32, 9, 9, True)
    mask = torch.rand(2, 1, 9, 9)
    _, text = compiled_gradients(
        lambda *a: functional.scaled_dot_product_attention(*a, attn_mask=mask), values, torch.randn(2, 3, 9, 16)
    )
    assert "flash_attention_for_cpu_backward" in text
    values = inputs(torch.float32, 600, 600, True)
    found, text = compiled_gradients(
        functional.scaled_dot_product_attention, values, weights := torch.randn(2, 3, 600, 16)
    )
    assert "flash_attention_for_cpu_backward" in text
    torch.testing.assert_close(found, gradients(functional.scaled_dot_product_attention, values, weights))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [4, 16, 64])
def test_gradients_over_large_scores_are_as_good_as_eagers(features: int, causal: bool) -> None:
    """Where one key takes all, what the others get cancels: it must do so for scores that are rounded alike."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    ours, eagers = [], []
    run = fusewright.compile(program)
    for seed in range(8):
        torch.manual_seed(seed)
        values = tuple((torch.randn(3, 1, 3, features) * by).requires_grad_() for by in (30, 30, 1))
        weights = torch.randn(3, 1, 3, features)
        exact = gradients(program, tuple(value.detach().double().requires_grad_() for value in values), weights.double())
        for made, off in ((gradients(program, values, weights), eagers), (gradients(run, values, weights), ours)):
            off.append(sum(float((mine - truth).norm()) for mine, truth in zip(made, exact, strict=True)))
    assert max(ours) <= 2 * max(eagers) + 1e-6, (ours, eagers)


def test_statistics_of_a_longer_attention_are_taken_as_they_are() -> None:
    """Ring attention gives each part the result and the logarithms of sums of the whole."""
    aten = torch.ops.aten
    q, k, v, gradient = (torch.randn(2, 3, 12, 16) for _ in "1234")
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)

    def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: bool) -> list[torch.Tensor]:
        found = []
        for place in (slice(0, 5), slice(5, 12)):
            key, value = k[:, :, place].contiguous(), v[:, :, place].contiguous()
            made, total = aten._scaled_dot_product_flash_attention_for_cpu(q, key, value)
            given = (made, total) if own else (out, logsumexp)
            found += aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, key, value, *given, 0.0, False)
        return found

    for own in (False, True):
        torch.testing.assert_close(fusewright.compile(parts, fullgraph=True)(q, k, v, own), parts(q, k, v, own))
