"""Complex numbers as pairs of reals: eager's results, gradients, types and strides, infinities and NaN included."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

import fusewright
from tests.listening import kernel_names

complex_parts = importlib.import_module("fusewright.graph.passes.clean.complex_parts")
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(complex_parts, "DEVICES", ("cpu", "cuda"))


def z(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def weighed(x: torch.Tensor) -> torch.Tensor:
    """A sum in which each element, and each part of it, counts otherwise."""
    weights = torch.arange(1.0, x.numel() + 1, device=x.device).reshape(x.shape)
    return (x * weights * (2 - 3j)).sum().real


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def special() -> torch.Tensor:
    parts = [0.0, -0.0, 1.0, -2.5, INF, -INF, NAN]
    return torch.tensor([complex(a, b) for a in parts for b in parts], dtype=torch.complex64)


def rotary(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * freqs[None, :, None, :]).flatten(3).type_as(x)


PROGRAMS: dict[str, tuple[Callable[..., object], list[Callable[[], torch.Tensor]]]] = {
    "rotary": (rotary, [lambda: r(2, 5, 3, 8), lambda: z(5, 4)]),
    "rotary of halves": (rotary, [lambda: r(2, 5, 3, 8).bfloat16(), lambda: z(5, 4)]),
    "two products": (lambda a, b: a * b + a.conj() * 2, [lambda: z(4, 6), lambda: z(6)]),
    "double": (lambda a, b: a * b - b, [lambda: z(4, dtype=torch.complex128), lambda: z(4)]),
    "a real operand": (lambda a, x: a * x + x - a, [lambda: z(4, 6), lambda: r(4, 1)]),
    "real by a complex number": (lambda x: x * 1j + 2, [lambda: r(5)]),
    "a whole number's rotation": (lambda x: x * (0.5 + 1j), [lambda: torch.arange(5)]),
    "alpha": (lambda a, b: (torch.add(a, b, alpha=3), torch.sub(a, b, alpha=2)), [lambda: z(4), lambda: z(4)]),
    "special values": (lambda a: (a * a.roll(1), a + a.roll(3), a * 2.0, a - 1, -a), [special]),
    "a transform between": (lambda a, b: torch.fft.ifft(torch.fft.fft(a) * b).real, [lambda: z(4, 8), lambda: z(8)]),
    "absolute values": (lambda a: (a * 2).abs().sum(), [lambda: z(4, 6)]),
    "parts": (lambda a: ((a * a).real, (a * a).imag, a.real + 1), [lambda: z(4, 6)]),
    "polar": (lambda s, t: torch.polar(s, t) * 2, [lambda: r(6).abs(), lambda: r(6)]),
    "complex": (lambda s, t: torch.complex(s, t) * (1 - 2j), [lambda: r(6), lambda: r(6)]),
    "sums": (lambda a: ((a * a).sum(-1), a.mean(), (a + 1).mean(0, keepdim=True)), [lambda: z(4, 6)]),
    "views of what is computed": (lambda a: (a * 2).t()[1:].reshape(-1), [lambda: z(4, 6)]),
    "a transposed result": (lambda a, b: (a * b).mT + b.mT, [lambda: z(3, 4, 6).mT, lambda: z(3, 6, 4)]),
    "joined": (lambda a, b: torch.cat([a * b, b]).flip(0), [lambda: z(4, 2), lambda: z(4, 2)]),
    "chosen": (lambda a, b: torch.where(a.real > 0, a * 2, b), [lambda: z(4, 2), lambda: z(4, 2)]),
    "by index": (lambda a, i: (a * 2)[i] + a.gather(0, i[:, None].expand(-1, 2)), [lambda: z(4, 2), lambda: torch.tensor([3, 0, 1])]),
    "by a mask": (lambda a: torch.where(a.abs() > 0.5, a, a * 0), [lambda: z(4, 2)]),
    "split": (lambda a: [part * 2 for part in (a + 1).split(2)], [lambda: z(5, 2)]),
    "an expanded result": (lambda a: (a * 2).expand(3, -1), [lambda: z(4)]),
    "a matrix product": (lambda a, b: (a * 2) @ b, [lambda: z(4, 5), lambda: z(5, 3)]),
    "no elements": (lambda a: a * 2 + a, [lambda: z(0, 3)]),
    "one number": (lambda a, b: a * b + 1, [lambda: z(), lambda: z(3)]),
    "a conversion": (lambda x: x.to(torch.complex64) * 1j, [lambda: r(5)]),
    "twice as precise": (lambda a: a.to(torch.complex128) * 2, [lambda: z(5)]),
}  # fmt: skip


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_eagers(name: str, dynamic: bool | None, device: str) -> None:
    program, makers = PROGRAMS[name]
    compiled = fusewright.compile(program, fullgraph=True, dynamic=dynamic, options={"disk_cache": False})
    for gradients in (False, True):
        torch.manual_seed(0)
        given = [make().to(device) for make in makers]
        found = []
        for f in (program, compiled):
            inputs = [x.clone() if x.is_contiguous() else x for x in given]
            for x in inputs:
                x.requires_grad_(gradients and (x.is_floating_point() or x.is_complex()) and x.is_contiguous())
            results = f(*inputs)
            flat = list(results) if isinstance(results, (tuple, list)) else [results]
            if gradients and any(x.requires_grad for x in flat):
                sum(weighed(x) for x in flat if x.requires_grad).backward()
            found.append((flat, [x.grad for x in inputs]))
        (eager, eager_gradients), (ours, our_gradients) = found
        for expected, actual in zip((*eager, *eager_gradients), (*ours, *our_gradients), strict=True):
            if expected is None:
                assert actual is None
                continue
            assert actual.stride() == expected.stride() and actual.is_conj() == expected.is_conj()
            torch.testing.assert_close(actual, expected, equal_nan=True)


def test_in_place_and_conjugate_inputs() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(b)
        a[0].add_(1)
        return a.conj() * 2

    compiled = fusewright.compile(f, options={"disk_cache": False})
    for change in (lambda x: x, torch.conj, lambda x: x.mT.contiguous().mT):
        a, b = z(4, 4), z(4, 4)
        one, other = a.clone(), a.clone()
        torch.testing.assert_close(compiled(other, change(b)), f(one, change(b)))
        torch.testing.assert_close(other, one)


def test_a_chain_is_one_kernel_over_parts() -> None:
    with kernel_names() as made, torch.no_grad():
        fusewright.compile(rotary, options={"disk_cache": False})(r(2, 5, 3, 8), z(5, 4))
    assert len(made) == 1
