"""Dropout by the kernels' own generator: the same truths in kernels, as an operator, in both directions, and on average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.api import Mode
from fusewright.base.events import STREAM, Event, StageDone
from fusewright.record.draws import BERNOULLI


def next_seed() -> torch.Tensor:
    """The seed that a compiled call draws next."""
    return torch.randint(-(2**63), 2**63 - 1, [], dtype=torch.int64)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 9), (64, 100), (2, 1, 4, 4)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_draw_what_the_operator_gives(shape: tuple[int, ...], dynamic: bool) -> None:
    x = torch.rand(shape) + 1

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.dropout(x, 0.3), functional.dropout(x.mT if x.dim() > 1 else x, 0.6).sqrt()

    torch.manual_seed(5)
    got = fusewright.compile(program, fullgraph=True, dynamic=dynamic)(x)
    torch.manual_seed(5)
    seed = next_seed()
    for index, (mine, p) in enumerate(zip(got, (0.3, 0.6))):
        assert torch.equal(mine != 0, BERNOULLI(seed, index, 1 - p, list(mine.shape)))


def test_layout_does_not_matter() -> None:
    x = torch.rand(2, 8, 6, 6) + 1
    compiled = fusewright.compile(lambda x: functional.dropout(x, 0.5), fullgraph=True)
    results = []
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.manual_seed(1)
        results.append(compiled(given))
        assert results[-1].stride() == given.stride()
    assert torch.equal(*results)


def test_draws_are_independent_and_right_on_average() -> None:
    count = 1 << 20
    ones = torch.ones(count)
    torch.manual_seed(0)
    compiled = fusewright.compile(lambda x: [functional.dropout(x, 0.25) != 0 for _ in range(3)], fullgraph=True)
    draws = [kept.float() - 0.75 for kept in (*compiled(ones), *compiled(ones))]
    spread = 0.75 * 0.25
    for k, one in enumerate(draws):
        assert abs(one.mean().item()) < 5 * (spread / count) ** 0.5
        for other in (*draws[:k], one.roll(1), one.roll(64), one.view(1024, 1024).t().flatten()):
            assert abs((one * other).mean().item()) < 5 * spread / count**0.5 + (
                2 / 1024 if other.stride() != one.stride() else 0
            )


def test_extreme_probabilities() -> None:
    x = torch.rand(100) + 1
    assert torch.equal(fusewright.compile(lambda x: functional.dropout(x, 0.0))(x), x)
    assert not fusewright.compile(lambda x: functional.dropout(x, 1.0))(x).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        fusewright.compile(lambda x: functional.dropout(x, 1.5))(x)
    with pytest.raises(RuntimeError):
        fusewright.compile(lambda x: x.bernoulli_(1.5))(x)


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("drop", [functional.dropout, lambda x, p: torch.dropout(x, p, True)])
def test_dropout_of_nothing_gives_the_tensor_itself(drop: Callable[..., torch.Tensor], p: float) -> None:
    compiled = fusewright.compile(lambda x: drop(x, p), dynamic=True, fullgraph=True)
    for size in (3, 0, 5):
        x = torch.ones(2, size)
        assert (compiled(x) is x) == (drop(x, p) is x) == (size == 0)


def test_in_place_on_every_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool):
        torch.manual_seed(2)
        got = fusewright.compile(lambda x: x.bernoulli_(0.5), fullgraph=True)(torch.zeros(50, dtype=dtype))
        torch.manual_seed(2)
        assert got.dtype == dtype and torch.equal(got != 0, BERNOULLI(next_seed(), 0, 0.5, [50]))


def drawn(run: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    x.grad = None
    y = run(x)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_backward_sees_the_same_mask_and_saves_none() -> None:
    layer = nn.Dropout(0.3)
    x = torch.ones(40, 50, requires_grad=True)
    graphs: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, StageDone) and event.stage == "backward graph":
            graphs.append(event.text())

    with STREAM.listening(listen):
        compiled = fusewright.compile(lambda x: layer(x * 2), fullgraph=True)
        y, gradient = drawn(compiled, x)
    assert torch.equal(y, gradient) and 0 < (y == 0).sum() < 2000
    assert "bool[40, 50] = input" not in graphs[0] and "fusewright.bernoulli" in graphs[0]
    within = fusewright.compile(lambda x: checkpoint(layer, x * 2, use_reentrant=False), fullgraph=True)
    assert torch.equal(drawn(within, x)[1], drawn(compiled, x)[1])


def test_gradients_of_gradients_see_the_same_mask() -> None:
    x = torch.rand(60, dtype=torch.float64, requires_grad=True)
    y = fusewright.compile(lambda x: functional.dropout(x**3, 0.5), fullgraph=True)(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, torch.where(y != 0, 6 * x**2, 0.0))
    torch.testing.assert_close(second, torch.where(y != 0, 12 * x, 0.0))


def test_fallback_random_gives_eagers_numbers() -> None:
    x = torch.rand(1000)
    compiled = fusewright.compile(lambda x: functional.dropout(x, 0.5), options={"fallback_random": True})
    torch.manual_seed(4)
    got = compiled(x)
    torch.manual_seed(4)
    assert torch.equal(got, functional.dropout(x, 0.5))


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": functional.dropout,
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.25),
    "bernoulli of tensors": lambda x: torch.empty_like(x).bernoulli_(x.abs().clamp(0, 1)),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential": lambda x: torch.empty_like(x).exponential_(2),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.25),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "random": lambda x: torch.empty_like(x).random_(7),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FILLS)
def test_what_is_drawn_into_the_layout_of_a_view(name: str, dynamic: bool) -> None:
    """What it is drawn into has a layout that a copy of it has otherwise: where a size is 1, say."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return FILLS[name](x.diagonal()), FILLS[name](x.transpose(0, 2))

    compiled = fusewright.compile(function, fullgraph=True, dynamic=dynamic, options={"fallback_random": True})
    for shape in ((5, 1, 4, 4), (2, 2, 4, 4), (1, 7, 1, 4)):
        x = torch.randn(shape)[..., 1:-1]
        torch.manual_seed(4)
        got = compiled(x)
        torch.manual_seed(4)
        for ours, eagers in zip(got, function(x)):
            assert torch.equal(ours, eagers) and ours.stride() == eagers.stride()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("training", [False, True])
def test_a_call_that_is_repeated_draws_once(training: bool, mode: Mode) -> None:
    """An index is out of bounds after numbers were drawn: the repeated call draws the same ones."""

    def function(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(3)
        try:
            return x[places] * drawn
        except IndexError:
            return drawn * 2

    found = []
    for run in (function, fusewright.compile(function, mode=mode)):
        torch.manual_seed(4)
        x = torch.ones(3, requires_grad=training)
        results = [run(x, torch.tensor(places)) for places in ([0, 1, 2], [0, 9, 2], [2, 1, 0])]
        found.append([*results, torch.rand(2)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_call_whose_layout_is_refused_has_drawn_once() -> None:
    """What is looked for among few elements must lie in one line; over varying sizes only the operator knows."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape[0]) * torch.isin(x, x).sum()

    found = []
    for run in (function, fusewright.compile(function)):
        torch.manual_seed(4)
        run(torch.ones(7, 2))
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            run(torch.ones(4, 4)[::2])
        found.append(torch.rand(2))
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_a_call_with_a_constant_place_out_of_bounds_has_drawn_once(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, torch.tensor([1]), torch.rand(1, 3))

    found = []
    for run in (function, fusewright.compile(function, backend=backend)):
        torch.manual_seed(4)
        for _ in range(2):
            with pytest.raises(Exception, match=r"out of (bounds|range)"):
                run(torch.ones(1, 3))
        found.append(torch.rand(2))
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize(
    "draw",
    [torch.rand, lambda *sizes: torch.empty(*sizes).normal_(), lambda *sizes: functional.dropout(torch.ones(*sizes))],
)
def test_a_product_that_is_refused_has_drawn_once(draw: Callable[..., torch.Tensor], backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ draw(3, 3)

    x, found = torch.ones(2, 3, dtype=torch.float64), []
    options = {"fallback_random": True} if backend == "native" else None
    for run in (function, fusewright.compile(function, backend=backend, options=options)):
        torch.manual_seed(4)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="same dtype"):
                run(x)
        found.append(torch.rand(2))
    assert torch.equal(*found)


def test_layers_share_their_kernels() -> None:
    """A draw is an argument of its kernel: eight layers with dropout need no more code than four."""

    def functions(layers: int) -> int:
        net = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8)) for _ in range(layers)]
        )
        texts: list[str] = []

        def note(event: Event) -> None:
            if isinstance(event, StageDone) and event.stage == "kernels":
                texts.append(event.text())

        with STREAM.listening(note):
            fusewright.compile(net, fullgraph=True, options={"disk_cache": False})(torch.randn(4, 8)).sum().backward()
        assert len(texts) == 2  # forward and backward
        return sum(text.count("define void @") for text in texts)

    assert functions(8) == functions(4)
