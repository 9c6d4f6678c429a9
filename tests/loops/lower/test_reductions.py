"""Reductions, softmax and scans against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusewright
from fusewright.loops.ir import Pointwise, Reduction
from tests.loops.lower.checking import check

X = torch.randn(3, 4, 5)
REDUCTIONS: dict[str, Callable] = {
    "sum": lambda x: [x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.sum(-1, dtype=torch.float64)],
    "mean": lambda x: [x.mean(), x.mean(1), x.mean((0, 2), keepdim=True)],
    "prod": lambda x: [x.prod(), x.prod(1)],
    "extremes": lambda x: [x.amax(1), x.amin((0, 1)), x.max(), x.min(), *x.max(2), *x.min(0, keepdim=True), *x.aminmax(dim=1)],
    "arg": lambda x: [x.argmax(), x.argmax(1), x.argmin(2, keepdim=True)],
    "truth": lambda x: [(x > 1).any(), (x > 1).all(1), x.any(0), (x > 0).any((0, 1)), x.count_nonzero(1)],
    "var": lambda x: [x.var(), x.var(1), x.var((0, 2), correction=0, keepdim=True), x.std(1), *torch.var_mean(x, 2), x.var(1, correction=7)],
    "logsumexp": lambda x: [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)],
    "norm": lambda x: [x.norm(), x.norm(1, dim=1), x.norm(3, dim=2), x.norm(float("inf"), 0), x.norm(0, 1), torch.linalg.vector_norm(x, -2)],
    "softmax": lambda x: [x.softmax(1), x.softmax(-1), x.log_softmax(0), x.log_softmax(-1)],
    "scan": lambda x: [x.cumsum(1), x.cumprod(2), *x.cummax(0), *x.cummin(1), x.logcumsumexp(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_float(name: str) -> None:
    check(REDUCTIONS[name], X)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_transposed_input(name: str) -> None:
    check(REDUCTIONS[name], X.permute(2, 0, 1))


@pytest.mark.parametrize("name", ["sum", "mean", "extremes", "var", "softmax", "norm", "logsumexp"])
def test_half(name: str) -> None:
    check(REDUCTIONS[name], X.bfloat16())


def test_integers_and_bools() -> None:
    check(
        lambda x: [x.sum(), x.sum(1), x.prod(1), x.amax(0), *x.max(1), x.argmin(1), x.cumsum(0)],
        torch.randint(-5, 5, (4, 6)),
    )
    check(lambda x: [x.sum(), x.sum(1), x.any(), x.all(0), *x.max(1), x.cumsum(1)], torch.rand(4, 6) > 0.5)


def test_nan_and_ties() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("nan"), 1.0, float("nan"), 0.0], [-1.0, -1.0, -2.0, -2.0]])
    check(lambda x: [x.amax(1), x.argmax(1), x.argmin(1), *x.max(1), *x.min(1), x.nansum(1)], x)


def test_a_sum_of_zeros_with_a_sign() -> None:
    """Eager's sums begin with 0, those of one element too: no quotient is minus infinity."""
    check(lambda x: [1 / x.sum(0), 1 / x.mean(-1), 1 / x.sum((0, 2)), 1 / x.nansum(0)], -torch.zeros(1, 3, 1))


def test_infinite_rows() -> None:
    x = torch.tensor([[float("-inf")] * 3, [1.0, float("inf"), 2.0], [1.0, float("-inf"), 2.0]])
    check(lambda x: [x.softmax(1), x.log_softmax(1), x.logsumexp(1)], x)


def test_reductions_of_one_element_are_pointwise() -> None:
    program = check(
        lambda x: [x.sum(1), x.amax(1), x.argmax(1), x.mean(1), x.var(1, correction=0), x.softmax(1)], torch.randn(4, 1)
    )
    assert not any(isinstance(op, Reduction) for op in program.operations)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_a_loss_needs_no_sum_over_its_classes(reduction: str) -> None:
    """It is 0 but at the class of each row, so the sum of a row is what is there; nothing for a row that is ignored."""
    target = torch.tensor([2, -100, 0, 4])

    def gradient(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x, y, reduction=reduction)
        return torch.autograd.grad(loss, x, g if reduction == "none" else g[0])[0]

    program = check(gradient, torch.randn(4, 5), target, torch.tensor([1.0, float("inf"), -3.0, 0.5]))
    sums = [op for op in program.operations if isinstance(op, Reduction) and op.kind == "sum"]
    assert not any("softmax_backward" in op.name for op in sums)


def test_classes_as_ones_and_zeros_are_counted_without_a_loop() -> None:
    classes = torch.tensor([0, 3, -1, 7, 2])

    def counts(y: torch.Tensor) -> list[torch.Tensor]:
        ones = y[:, None] == torch.arange(4)
        return [ones.sum(1), ones.float().sum(1), torch.where(ones, -0.0, 0.0).sum(1), torch.where(ones, 1.0, 2.0).sum(1)]

    program = check(counts, classes)
    assert sum(isinstance(op, Reduction) for op in program.operations) == 1  # the last, which is 2 elsewhere


def test_softmax_keeps_its_exponentials() -> None:
    program = check(lambda x: x.softmax(-1), torch.randn(8, 16))
    text = [type(op) for op in program.operations]
    assert text == [Reduction, Pointwise, Reduction, Pointwise]


def test_dear_input_is_computed_once() -> None:
    program = check(lambda x: torch.nn.functional.gelu(x).softmax(-1), torch.randn(8, 16))
    assert isinstance(program.operations[0], Pointwise) and len(program.operations) == 5


def test_softmax_gradients() -> None:
    def gradient(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        return [torch.autograd.grad(x.softmax(1), x, g)[0], torch.autograd.grad(x.log_softmax(-1), x, g)[0]]

    check(gradient, X, torch.randn(3, 4, 5))


def test_a_gradient_whose_size_is_written_otherwise() -> None:
    """The gradient of `glu` has twice half the size, in a softmax's backward beside a tensor of that size."""

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.glu(x.log_softmax(1).abs().sqrt()).square().sum().backward()
        return x.grad  # type: ignore[return-value]

    compiled = fusewright.compile(step, dynamic=True)
    for shape in ((3, 4), (5, 6), (2, 18)):
        x, y = (torch.linspace(-2, 2, shape[0] * shape[1]).reshape(shape).requires_grad_() for _ in "xy")
        torch.testing.assert_close(compiled(x), step(y))


def test_a_product_that_overflows_in_some_order() -> None:
    """Eager's order depends on the layout, too. What is finite and not 0 is the product."""
    torch.manual_seed(0)
    compiled = fusewright.compile(lambda x: x.prod(-1))
    for length in (8, 50, 100):
        moderate = torch.randn(200, length).exp2()
        torch.testing.assert_close(compiled(moderate), moderate.prod(-1), rtol=1e-4, atol=0)
        powers = torch.randint(-60, 60, (200, length))
        found = compiled(torch.pow(2.0, powers))
        inside = found.isfinite() & (found != 0)
        assert inside.any() and torch.equal(found.log2()[inside].long(), powers.sum(-1)[inside])
