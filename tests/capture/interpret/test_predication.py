"""Comparisons of sizes inside of called functions: both outcomes in one version where that is safe, a guard where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base.events import STREAM, Broken, Compiled, FellBack, Skipped
from tests.generalise.test_batches_of_one import KNOWN_AGAIN


def compiles(function: Callable[..., Any], calls: list[tuple[Any, ...]], **settings: Any) -> int:
    """Calls the compiled function as eager; gives how many versions that took."""
    events: list[Any] = []
    STREAM.subscribers.append(events.append)
    try:
        compiled = fusewright.compile(function, **settings)
        for args in calls:
            expected, got = function(*args), compiled(*args)
            assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True), args
    finally:
        STREAM.subscribers.remove(events.append)
    assert not [event for event in events if isinstance(event, (Broken, FellBack, Skipped))]
    return sum(isinstance(event, Compiled) for event in events)


TABLE = torch.randn(8, 4)


def resized(length: int) -> torch.Tensor:
    if length == TABLE.shape[0]:
        return TABLE
    return nn.functional.interpolate(TABLE.t()[None], size=length, mode="linear").permute(0, 2, 1)[0].contiguous()


def test_a_table_that_is_resized_where_it_does_not_fit() -> None:
    with torch.no_grad():
        assert compiles(lambda x: x + resized(x.shape[0]), [(torch.randn(n, 4),) for n in (8, 5, 3, 8, 11, 2, 64)]) == 2


def test_a_table_with_missing_numbers_is_returned_as_it_is() -> None:
    table = torch.randn(6, 4)
    table[2, 1] = float("nan")
    table[4, 2] = float("inf")

    def rows(length: int, table: torch.Tensor) -> torch.Tensor:
        if length == table.shape[0]:
            return table
        return nn.functional.interpolate(table[None, None], size=(length, 4), mode="bicubic")[0, 0]

    with torch.no_grad():
        assert compiles(lambda x, t: x + rows(x.shape[0], t), [(torch.randn(n, 4), table) for n in (9, 7, 6, 12)]) == 2


def kind(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if rows < 8:
        return x * 2
    if rows % 2 == 0:
        return x.neg()
    if rows > y.shape[0]:
        return x.sin()
    return x.abs() + 1


def test_several_comparisons_one_after_the_other() -> None:
    sizes = [(20, 3), (9, 12), (4, 4), (13, 6), (8, 8), (2, 31), (101, 7), (9, 9)]
    calls = [(torch.randn(a, 3), torch.randn(b)) for a, b in sizes]
    assert compiles(lambda x, y: kind(x, y) @ torch.ones(3, 3), calls, dynamic=True) == 1


def chosen(x: torch.Tensor, count: int) -> torch.Tensor:
    if not count % 3:
        return x[:count]
    return x[:count].flip(0).contiguous()


def test_an_integer_argument() -> None:
    x = torch.randn(32, 2)
    assert compiles(lambda x, count: chosen(x, count).cumsum(0), [(x, count) for count in (9, 7, 12, 30, 31, 2)]) == 2


def test_guards_stay_where_the_sizes_differ() -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 4:
            return nn.functional.pad(x, (0, 0, 0, 4 - x.shape[0] % 4))
        return x

    assert compiles(lambda x: padded(x).sum(0), [(torch.randn(n, 3),) for n in (7, 8, 9, 12, 13, 4)], dynamic=True) == 2


class Log:
    count = 0


def counted(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 8:
        Log.count += 1
        return x + 1
    return x - 1


def test_effects_happen_as_often_as_in_eager() -> None:
    compiled = fusewright.compile(lambda x: counted(x) * 2, dynamic=True)
    Log.count = 0
    for rows in (20, 4, 9, 30):
        x = torch.randn(rows)
        before = Log.count
        got = compiled(x)
        assert Log.count == before + (rows > 8)
        assert torch.equal(got, (x + 1 if rows > 8 else x - 1) * 2)


def same_or_copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == y.shape[0]:
        return y
    return nn.functional.interpolate(y.t()[None], size=x.shape[0])[0].t().contiguous()


def result_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = same_or_copy(x, y)
    z += 1
    return z * x


def choice_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = same_or_copy(x, y)
    y[1:].mul_(2)
    return z * x


def data_replaced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = same_or_copy(x, y)
    z.data = z * 3
    return x + y.sum()


def returned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return same_or_copy(x, y)[1:]


def as_eager(function: Callable[..., Any], rows: tuple[int, ...]) -> None:
    """Results, what is written, and whose memory a result lies in, for sizes that do and do not fit a table of three
    rows."""
    compiled = fusewright.compile(function)
    for count in rows:
        x, y = torch.randn(count, 2), torch.randn(3, 2)
        theirs = y.clone()
        expected, got = function(x, theirs), compiled(x, y)
        torch.testing.assert_close((got, y), (expected, theirs))
        assert (got.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()) is (
            expected.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("rows", [(5, 3, 7, 3), (3, 5, 7, 3), (5, 7, 3)], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [result_written, choice_written, data_replaced, returned])
def test_a_result_that_is_written_to_or_returned(
    function: Callable[..., Any], mode: Callable[[], Any], rows: tuple[int, ...]
) -> None:
    with mode():
        as_eager(function, rows)


@pytest.mark.parametrize("known_again", KNOWN_AGAIN.values(), ids=KNOWN_AGAIN.keys())
def test_a_result_that_is_compared(known_again: Callable[..., bool]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = same_or_copy(x, y)
        return x + z if known_again(z, y) else x - z

    as_eager(function, (5, 3, 7, 3))


def test_gradients_keep_their_guards() -> None:
    weight = torch.randn(4, 2, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * same_or_copy(x, weight)).sum()

    compiled = fusewright.compile(function, dynamic=True)
    for rows in (6, 4, 9, 4):
        x = torch.randn(rows, 2)
        gradients = []
        for run in (function, compiled):
            weight.grad = None
            run(x).backward()
            gradients.append(weight.grad)
        assert torch.allclose(gradients[0], gradients[1])


def test_errors_of_one_outcome_are_raised_for_it_alone() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 10:
            raise ValueError("too long")
        return x * 2

    compiled = fusewright.compile(lambda x: checked(x) + 1, dynamic=True)
    for rows in (4, 9, 12, 10):
        x = torch.randn(rows)
        if rows > 10:
            with pytest.raises(ValueError, match="too long"):
                compiled(x)
        else:
            assert torch.equal(compiled(x), x * 2 + 1)


def test_random_numbers_are_drawn_for_one_outcome_alone() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 8:
            return x + torch.rand(x.shape[0])
        return x

    compiled = fusewright.compile(lambda x: noisy(x) * 2, dynamic=True)
    for rows in (4, 12, 3, 9):
        x = torch.randn(rows)
        torch.manual_seed(rows)
        expected, drawn = noisy(x) * 2, torch.rand(1)
        torch.manual_seed(rows)
        assert torch.allclose(compiled(x), expected) and torch.equal(torch.rand(1), drawn)


def test_layers_that_repeat() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 4))
            self.inner = nn.ModuleList([nn.Linear(4, 4)])

        def rows(self, length: int) -> torch.Tensor:
            if length == self.table.shape[0]:
                return self.table
            return self.table[:1].expand(length, 4).contiguous()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](x + self.rows(x.shape[0])).relu() + 1

    net = nn.Sequential(*(Layer() for _ in range(4))).eval()
    with torch.no_grad():
        assert compiles(net.forward, [(torch.randn(n, 4),) for n in (9, 5, 6, 3, 12)]) == 2


def test_sizes_of_one_and_none() -> None:
    with torch.no_grad():
        assert compiles(lambda x: x + resized(x.shape[0]), [(torch.randn(n, 4),) for n in (5, 9, 8, 1, 64, 2)]) <= 3
    assert (
        compiles(lambda x: positions_of(x) + x, [(torch.randn(n, 4),) for n in (5, 9, 8, 1, 0, 3)], dynamic=True) <= 3
    )


def positions_of(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] % 3 == 0:
        return torch.arange(x.shape[0])[:, None] * 2.0
    return torch.ones(x.shape[0], 1)
