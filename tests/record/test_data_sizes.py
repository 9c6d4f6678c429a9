"""Sizes that depend on data: captured under an option, a clean break without it, and eager's answer either way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base.events import STREAM, Broken, Compiled, Event, FellBack, InternalError, Skipped

OPTIONS = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


def run(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **arguments: Any) -> list[Event]:
    """Compares each call with eager; gives the events."""
    events: list[Event] = []
    compiled = fusewright.compile(function, **{"options": OPTIONS, **arguments})
    with torch.no_grad(), STREAM.listening(events.append):
        for args in calls:
            state = torch.get_rng_state()
            try:
                expected = function(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
            except RuntimeError as error:
                torch.set_rng_state(state)
                with pytest.raises(
                    RuntimeError, match=str(error).split("\n")[0].replace("(", r"\(").replace(")", r"\)")[:40]
                ):
                    compiled(*args)
                continue
            torch.set_rng_state(state)
            torch.testing.assert_close(compiled(*args), expected, equal_nan=True)
    assert not [event for event in events if isinstance(event, InternalError)]
    return events


def count(events: list[Event], *kinds: type[Event]) -> int:
    return sum(isinstance(event, kinds) for event in events)


def vectors(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(size),) for size in sizes]


def rows(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 6), torch.rand(size) > 0.4) for size in sizes]


def two_masks(x: torch.Tensor) -> Any:
    positive = x[x > 0]
    large = positive[positive > 0.5]
    return large.sum(), large * 2, positive.shape[0] + large.shape[0]


def inverse(x: torch.Tensor) -> Any:
    values, places, counts = torch.unique((x * 4).long(), return_inverse=True, return_counts=True)
    return values * 2, places + 1, counts, values.shape[0]


def assign(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 0] = x[x > 0] * 2
    return x


WHOLE: dict[str, tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]] = {
    "nonzero": (lambda x: (x > 0).nonzero() + 1, vectors(40, 40, 50)),
    "mask": (lambda x: x[x > 0] * 2 + 1, vectors(50, 50, 51, 70)),
    "sum of a mask": (lambda x: (x[x > 0].exp() * 2).sum(), vectors(50, 50, 51)),
    "rows": (lambda x, m: x[m].relu() @ torch.ones(6, 3), rows(50, 50, 51, 60)),
    "one mask, used twice": (lambda x, m: x[m] * x[m].mean(0) + x[m].softmax(0), rows(50, 50, 51)),
    "masks of masks": (two_masks, vectors(50, 50, 51)),
    "unique": (inverse, vectors(30, 30, 40)),
    "assignment": (assign, vectors(30, 30, 31)),
    "masked_select": (lambda x, m: torch.masked_select(x[:, 0], m).cumsum(0), rows(40, 41, 42)),
    "argwhere": (lambda x: torch.argwhere(x.view(5, -1) > 0).double().mean(0), vectors(50, 50, 55)),
    "repeat_interleave": (
        lambda x, r: torch.repeat_interleave(x, r, 0) * 2,
        [(torch.randn(4, 3), torch.tensor(r)) for r in ([1, 2, 3, 0], [2, 2, 2, 2])],
    ),
    "random numbers": (lambda x: (torch.rand(3), x[x > 0].sum() * torch.rand(2)), vectors(30, 30)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_is_one_graph(name: str) -> None:
    function, calls = WHOLE[name]
    events = run(function, calls)
    assert not [event for event in events if isinstance(event, Broken | Skipped | FellBack)]
    assert count(events, Compiled) <= 2


@pytest.mark.parametrize("name", WHOLE)
def test_without_the_option_it_is_a_clean_break(name: str) -> None:
    function, calls = WHOLE[name]
    events = run(function, calls[:2], options={})
    assert not count(events, FellBack)
    if name not in ("assignment",):
        assert count(events, Broken, Skipped)


@pytest.mark.parametrize("speculate", [True, False])
def test_each_call_gives_a_tensor_of_its_own(speculate: bool) -> None:
    """The size is known from the first one, but what is written to that is not seen in the second."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = x.nonzero()
        second, mask = x.argwhere(), x > 0
        first.add_(1)
        return first, second, x.nonzero(), x[x != 0], mask.nonzero(), mask.nonzero()

    options = {"speculate": True} if speculate else OPTIONS
    found = fusewright.compile(program, options=options)(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]))
    expected = program(torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]))
    assert all(map(torch.equal, found, expected))
    assert [a.stride() for a in found] == [a.stride() for a in expected]
    assert len({a.untyped_storage().data_ptr() for a in found}) == len(found)
    for x in (torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 2.0]), torch.eye(2)[:1], torch.eye(3)):
        assert fusewright.compile(torch.nonzero, options=options)(x).stride() == x.nonzero().stride()


def test_a_linear_layer_on_selected_rows() -> None:
    layer = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    events = run(lambda x, m: layer(x[m]).log_softmax(-1), rows(50, 50, 51))
    assert count(events, Compiled) == 2 and not count(events, Broken, Skipped, FellBack)


def test_no_and_one_selected_element_are_eager_s_answer() -> None:
    calls = [
        (torch.tensor(values),) for values in ([1.0, 2, 3, -1], [-1.0, -1, -1, -1], [-1.0, 2, -1, -1], [1.0, 1, 1, 1])
    ]
    events = run(lambda x: (x[x > 0] * 2, x[x > 0].sum()), calls)
    assert count(events, Compiled) == 1


def test_an_item_as_a_size() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        size = n.item()
        return torch.full((size, 3), 2.0) + x[0], size * 2

    events = run(f, [(torch.randn(20), torch.tensor(size)) for size in (5, 7, 9, 1, 0, 3)])
    assert count(events, Compiled) == 1 and not count(events, Broken)


def test_a_negative_item_as_a_size_raises_what_eager_raises() -> None:
    run(lambda n: torch.zeros(n.item(), 2), [(torch.tensor(3),), (torch.tensor(-2),)])


def test_what_is_stated_is_honoured_and_checked() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= 8)
        return torch.ones(size) * 2 if size < 9 else x

    events = run(f, [(torch.randn(20), torch.tensor(size)) for size in (5, 7, 8, 12)])
    assert count(events, Compiled) == 1 and not count(events, Broken)


def test_a_branch_on_an_item_breaks_the_graph() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x + 1 if n.item() > 5 else x - 1

    events = run(f, [(torch.randn(3), torch.tensor(size)) for size in (5, 7, 9)])
    assert count(events, Broken)


def test_gradients_go_around() -> None:
    x, mask = torch.randn(20, 4, requires_grad=True), torch.rand(20) > 0.5
    compiled = fusewright.compile(lambda x, m: (x[m] * 2).square().sum(), options=OPTIONS)
    compiled(x, mask).backward()
    got, x.grad = x.grad, None
    (x[mask] * 2).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_inputs_are_written_once() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        selected = x[x > 0].sum()
        x.add_(1)
        return selected

    compiled = fusewright.compile(f, options=OPTIONS)
    for values in (
        [1.0, 2, -1],
        [3.0, -1, -1],
        [-1.0, -1, -1],
    ):  # the last two have less than two elements selected: repeated eagerly
        mine, theirs = torch.tensor(values), torch.tensor(values)
        with torch.no_grad():
            torch.testing.assert_close(compiled(mine), f(theirs))
        torch.testing.assert_close(mine, theirs)
