"""Attention of many queries over sizes that are known: a kernel of ours in place of the library's operator."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.backends import pipeline as native_stages
from fusewright.codegen.llvm.module import host_target
from fusewright.schedule.plan import Plan
from fusewright.schedule.verify import verify
from fusewright.select import attention as sites, generated_gemm
from tests.backends.rounding import assert_as_near_as_eager
from tests.listening import kernel_names, stage_texts

SHAPES = (
    (2, 3, 16, 16),
    (1, 2, 17, 40),
    (2, 2, 33, 65),
    (1, 1, 64, 130),
    (1, 2, 50, 7),
    (2, 1, 100, 1),
    (1, 3, 48, 64),
)
"""Batch, heads, queries, keys."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels made; plans are verified, and no attention is short."""
    given = native_stages.with_memory

    def verified(plan: Plan, own_bytes: int | None) -> Plan:
        whole = given(plan, own_bytes)
        verify(whole)
        return whole

    monkeypatch.setattr(native_stages, "with_memory", verified)
    monkeypatch.setattr(
        importlib.import_module("fusewright.graph.passes.attention.short_attention"), "is_short", lambda node: False
    )
    monkeypatch.setattr(generated_gemm, "TILES", {})
    with kernel_names() as made:
        yield made


def is_own(kernels: list[str]) -> bool:
    return any(name.startswith("attention_") for name in kernels)


def heads(batch: int, count: int, rows: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Heads as a linear layer leaves them."""
    return torch.randn(batch, rows, count, features, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("mask", ["none", "causal", "added", "for all queries", "for all heads", "chosen", "all"])
@pytest.mark.parametrize(
    ("dtype", "features"),
    [(torch.float32, 64), (torch.float32, 8), (torch.float32, 40), (torch.bfloat16, 64), (torch.float16, 24)],
)
def test_as_near_as_eager(dtype: torch.dtype, features: int, mask: str, kernels: list[str]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal")

    for batch, count, rows, columns in SHAPES:
        q, k, v = (heads(batch, count, n, features, dtype) for n in (rows, columns, columns))
        masks = {
            "added": torch.randn(batch, count, rows, columns, dtype=dtype),
            "for all queries": torch.randn(batch, 1, 1, columns, dtype=dtype).expand(batch, 1, rows, columns),
            "for all heads": torch.randn(rows, columns, dtype=dtype),
            "chosen": torch.rand(batch, 1, rows, columns) > 0.5,
            "all": torch.zeros(batch, 1, rows, columns, dtype=torch.bool),
        }
        given = [masks[mask]] if mask in masks else []
        run = fusewright.compile(attend, dynamic=False, options={"disk_cache": False})
        with torch.no_grad():
            got, expected = run(q, k, v, *given), attend(q, k, v, *given)
            exact = attend(
                *(x.double() for x in (q, k, v)), *(x.double() if x.is_floating_point() else x for x in given)
            )
        assert got.dtype is dtype and got.shape == expected.shape and got.stride() == expected.stride()
        assert_as_near_as_eager(got, expected, exact, 2e-6)
        assert is_own(kernels)
        kernels.clear()


@pytest.mark.parametrize("scale", [None, 0.3, -2.0, 0.0])
def test_scale(scale: float | None, kernels: list[str]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    given = [heads(2, 2, 40, 32, torch.float32) for _ in range(3)]
    with torch.no_grad():
        got = fusewright.compile(attend, options={"disk_cache": False})(*given)
    assert_as_near_as_eager(got, attend(*given), attend(*(x.double() for x in given)), 2e-6)
    assert is_own(kernels)


def test_heads_beside_one_another_and_other_strides(kernels: list[str]) -> None:
    """Queries, keys and values of one product; every second row; all batches the same."""

    def joined(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).view(2, 50, 3, 4, 32).unbind(2)
        return (
            F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            .transpose(1, 2)
            .flatten(2)
        )

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    x = torch.randn(2, 50, 384)
    q = torch.randn(2, 4, 80, 32)[:, :, ::2]
    k, v = torch.randn(1, 4, 30, 32).expand(2, 4, 30, 32), torch.randn(2, 4, 30, 64)[..., 32:]
    for function, given in ((joined, (x,)), (plain, (q, k, v))):
        with torch.no_grad():
            got = fusewright.compile(function, options={"disk_cache": False})(*given)
        assert is_own(kernels)
        assert_as_near_as_eager(got, function(*given), function(*(one.double() for one in given)), 2e-6)
        kernels.clear()


def test_groups_of_heads_are_read_where_they_are(kernels: list[str]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(2, 40, 6, 32).transpose(1, 2)
        k, v = (x.view(2, 70, 2, 32).transpose(1, 2) for x in (k, v))
        k, v = (x[:, :, None].expand(2, 2, 3, 70, 32).reshape(2, 6, 70, 32) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    given = torch.randn(2, 40, 192), torch.randn(2, 70, 64), torch.randn(2, 70, 64)
    with stage_texts("generated_attention") as plans, torch.no_grad():
        got = fusewright.compile(attend, options={"disk_cache": False})(*given)
    assert_as_near_as_eager(got, attend(*given), attend(*(one.double() for one in given)), 2e-6)
    assert [name.startswith("attention_") for name in kernels] == [True] and "many rows" in plans[-1]


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(what: float, kernels: list[str]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    run = fusewright.compile(attend, options={"disk_cache": False})
    given = [torch.randn(2, 2, rows, 32) for rows in (40, 70, 70)] + [torch.randn(2, 2, 40, 70)]
    for which in given:
        which[1, 0, 35, 5] = what
        with torch.no_grad():
            got, expected = run(*given), attend(*given)
        torch.testing.assert_close(got, expected, equal_nan=True)
        which[1, 0, 35, 5] = 1.0
    assert is_own(kernels)


def test_later_keys_are_much_larger(kernels: list[str]) -> None:
    """What was summed so far is scaled, down to nothing."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(1, 2, rows, 16) for rows in (33, 300, 300))
    k = k * torch.linspace(0.1, 60, 300)[:, None]
    with torch.no_grad():
        got = fusewright.compile(attend, options={"disk_cache": False})(q, k, v)
    assert_as_near_as_eager(got, attend(q, k, v), attend(q.double(), k.double(), v.double()), 2e-6)
    assert is_own(kernels)


def test_no_keys_and_no_batch() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    for batch, columns in ((2, 0), (0, 5)):
        q, k, v = (torch.randn(batch, 2, rows, 16) for rows in (20, columns, columns))
        with torch.no_grad():
            got = fusewright.compile(attend, dynamic=False, options={"disk_cache": False})(q, k, v)
        torch.testing.assert_close(got, attend(q, k, v), equal_nan=True)


@pytest.mark.parametrize("empty", [0, 2, 3])  # no heads end the process in PyTorch 2.11
def test_a_size_may_be_0(empty: int, kernels: list[str]) -> None:
    """In inference and in training, without any event that says that something went wrong."""
    shape = [2, 3, 5, 16]
    shape[empty] = 0
    compiled = fusewright.compile(F.scaled_dot_product_attention, dynamic=False)
    for gradients in (False, True):
        operands = [torch.randn(shape).requires_grad_(gradients) for _ in range(3)]
        outcomes = []
        for function in (F.scaled_dot_product_attention, compiled):
            result = function(*operands)
            given = torch.autograd.grad(result.sum(), operands) if gradients else ()
            outcomes.append((result.detach(), given))
        torch.testing.assert_close(outcomes[1], outcomes[0], equal_nan=True)


def test_what_stays_with_the_operator(kernels: list[str]) -> None:
    """Few queries; features that are no multiple of eight, or do not lie side by side; float64; where the option says no; gradients."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def compiled(**options: object) -> object:
        return fusewright.compile(attend, dynamic=False, options={"disk_cache": False, **options})

    side = torch.randn(1, 2, 32, 40).transpose(2, 3)
    with torch.no_grad():
        for q, k in (
            (torch.randn(1, 2, 15, 32), torch.randn(1, 2, 99, 32)),
            (torch.randn(1, 2, 40, 20), torch.randn(1, 2, 40, 20)),
            (side, side),
            (torch.randn(1, 2, 40, 32).double(), torch.randn(1, 2, 40, 32).double()),
        ):
            torch.testing.assert_close(compiled()(q, k, k), attend(q, k, k))  # type: ignore[operator]
        q = torch.randn(1, 2, 40, 32)
        torch.testing.assert_close(compiled(fusion=False)(q, q, q), attend(q, q, q))  # type: ignore[operator]
    q = torch.randn(1, 2, 40, 32, requires_grad=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled()(q, q, q).sin().sum(), q), torch.autograd.grad(attend(q, q, q).sin().sum(), q)
    )  # type: ignore[operator]
    assert not is_own(kernels)


def test_halves_stay_with_a_processor_that_multiplies_tiles_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[sites.Site] = []
    given = sites.find
    monkeypatch.setattr(generated_gemm.attention, "find", lambda plan: seen.extend(given(plan)) or given(plan))
    x = torch.randn(1, 2, 200, 32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            fusewright.compile(F.scaled_dot_product_attention, dynamic=False, options={"disk_cache": False})(
                *[x.to(dtype)] * 3
            )
    of = {site.attention.query.dtype: site for site in seen}
    plain = replace(host_target(), vector_bits=512, features="+avx512f")
    tiles = replace(plain, features="+avx512f,+amx-bf16")

    def is_quick(dtype: torch.dtype, target: object) -> bool:
        return generated_gemm.is_quick_block(of[dtype].kernel, of[dtype].attention, target)  # type: ignore[arg-type]

    assert is_quick(torch.float32, plain) and is_quick(torch.float32, tiles) and is_quick(torch.bfloat16, plain)
    assert not is_quick(torch.bfloat16, tiles) and not is_quick(torch.float32, replace(plain, vector_bits=128))
