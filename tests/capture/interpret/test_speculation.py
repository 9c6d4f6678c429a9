"""Values that a program reads from tensors, taken for granted: one graph while they stay, eager's answer when they change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fusewright
from fusewright.base.events import STREAM, Broken, Compiled, Event, FellBack, InternalError, Skipped
from tests.ops.compare import same_strides

ON = {"speculate": True}
OWN = random.Random(5)


def outcome(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a call gives or raises, and what its arguments hold afterwards."""
    own = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
    try:
        result = f(*own)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, own


def calls(f: Callable[..., Any], *several: Any, backend: str = "native") -> list[Event]:
    """Compares calls of a compiled function with eager's; gives what was said of its compiles."""
    events: list[Event] = []
    compiled = fusewright.compile(f, options=ON, backend=backend)
    with STREAM.listening(events.append):
        for args in several:
            args = args if isinstance(args, tuple) else (args,)
            torch.manual_seed(1)
            expected = outcome(f, args)
            torch.manual_seed(1)
            (got, changed), (wanted, changes) = outcome(compiled, args), expected
            if isinstance(wanted, str):
                assert got == wanted
            else:
                torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
                assert layouts(got) == layouts(wanted)
            torch.testing.assert_close(changed, changes, equal_nan=True)
    assert not [event for event in events if isinstance(event, InternalError)]
    return events


def layouts(value: Any) -> list[list[int]]:
    """The strides that count: those of dimensions of several elements."""
    tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and one.numel()]
    return [[step for size, step in zip(one.shape, one.stride()) if size > 1] for one in tensors]


def count(events: list[Event], *kinds: type[Event]) -> int:
    return sum(isinstance(event, kinds) for event in events)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if (x * 2).sum() > 0 else x - 1


def writes_first(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    if x.sum() > 0:
        x.mul_(3)
        return x + 1
    x.mul_(2)
    return x - 1


def writes_to_a_view(x: torch.Tensor) -> torch.Tensor:
    row = x[0]
    total = x.sum()
    row.zero_()
    y = x * 2
    return y + 1 if total > 0 and bool(x[0].sum() == 0) else y


def asks_between_writes(x: torch.Tensor) -> torch.Tensor:
    kept = x * 1
    before = kept.sum()
    kept[0] = 5.0
    if kept[0] > 4:
        kept[1] = 7.0
    return kept + 1 if kept.sum() > before else kept


def number(x: torch.Tensor) -> Any:
    return x * x.sum().item()


def whole_number(x: torch.Tensor) -> Any:
    return x.new_zeros(int(x.sum())) + 1


def listed(x: torch.Tensor) -> Any:
    return [n + 1 for n in x.long().tolist()]


def same(x: torch.Tensor) -> Any:
    return x + 1 if torch.equal(x, torch.ones(3)) else x


def close(x: torch.Tensor) -> Any:
    return x + 1 if torch.allclose(x, torch.ones(3)) else x


def masked(x: torch.Tensor) -> Any:
    return x[x > 0] * 2


def places(x: torch.Tensor) -> Any:
    return (x > 0).nonzero() + 1


def places_of_rows(x: torch.Tensor) -> Any:
    return torch.argwhere(x.outer(x) + x), (x.outer(x) + x).nonzero(as_tuple=True)


def selected(x: torch.Tensor) -> Any:
    return x.masked_select(x > 0) * 2


def counted(x: torch.Tensor) -> Any:
    return x.long().abs().bincount() + 1


def counted_of_few(x: torch.Tensor) -> Any:
    return x.long().abs().bincount(x * 2, minlength=6) + 1


def distinct(x: torch.Tensor) -> Any:
    values, places, counts = torch.unique(x.long(), return_inverse=True, return_counts=True)
    return values + 1, places + 1, counts + 1, torch.unique(x > 0)


def compared(x: torch.Tensor) -> Any:
    mean = x.mean().item()
    return x * mean if mean > 0.25 else x + mean


ONES = torch.ones(3)
FUNCTIONS = [
    branch, writes_first, asks_between_writes, whole_number, listed, same, close, masked, places, places_of_rows,
    selected, counted, counted_of_few, distinct,
    compared,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_one_graph_while_the_value_stays(function: Callable[..., Any], backend: str) -> None:
    events = calls(function, ONES, ONES, ONES, backend=backend)
    assert (count(events, Compiled), count(events, Broken, Skipped, FellBack)) == (1, 0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_another_value_is_eagers_and_ends_it(function: Callable[..., Any]) -> None:
    other = torch.tensor([-2.0, 1.0, -3.0])
    events = calls(function, ONES, ONES, other, other, ONES, other, ONES)
    assert count(events, FellBack) <= 1


def test_counts_of_few_values_may_differ() -> None:
    events = calls(counted_of_few, ONES, torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0.0, 0.0, 4.0]))
    assert (count(events, Compiled), count(events, Broken, Skipped, FellBack)) == (1, 0)


def test_a_write_to_a_view_is_seen() -> None:
    calls(writes_to_a_view, torch.ones(2, 2), torch.ones(2, 2), -torch.ones(2, 2), torch.ones(2, 2))


def test_a_float_stays_a_number_of_the_graph() -> None:
    events = calls(number, ONES, 2 * ONES, 3 * ONES)
    assert (count(events, Compiled), count(events, Broken, Skipped, FellBack)) == (1, 0)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: 1 / x.sum().item(),
        lambda x: x.sum().item() ** 0.5,
        lambda x: x.sum().item() ** -2,
        lambda x: 10 / (2 - x.sum().item()),
    ],
)
def test_arithmetic_that_raises_in_python_raises(formula: Callable[..., Any]) -> None:
    calls(lambda x: x * formula(x), ONES, 2 * ONES, 0 * ONES, torch.tensor([2.0, 0.0, 0.0]), -ONES, ONES)


@pytest.mark.parametrize("train", [False, True])
def test_lengths_of_a_ctc_loss(train: bool) -> None:
    def loss(x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> Any:
        leaf = x.clone().requires_grad_(train)
        value = nn.functional.ctc_loss(leaf.log_softmax(2), targets, torch.tensor([8, 7]), lengths)
        if train:
            value.backward()
        return value.detach(), leaf.grad

    x, targets = torch.randn(8, 2, 8), torch.tensor([[1, 2, 3], [2, 2, 1]])
    long, short = torch.tensor([3, 2]), torch.tensor([1, 2])
    events = calls(loss, (x, targets, long), (x * 2, targets, long))
    assert (count(events, Compiled), count(events, Broken, Skipped, FellBack)) == (1, 0)
    calls(loss, (x, targets, long), (x, targets, short), (x, targets, short), (x, targets, long))


def test_training() -> None:
    linear = nn.Linear(3, 3)

    def loss(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        if not torch.isfinite(y).all():
            return y.sum() * 0
        return y[mask].square().sum()

    compiled = fusewright.compile(loss, options=ON)
    events: list[Event] = []
    mask = torch.tensor([True, False, True])
    with STREAM.listening(events.append):
        for x in (torch.randn(3, 3), torch.randn(3, 3), torch.full((3, 3), torch.nan), torch.randn(3, 3)):
            gradients = []
            for f in (loss, compiled):
                linear.zero_grad()
                f(x, mask).backward()
                assert linear.weight.grad is not None
                gradients.append(linear.weight.grad.clone())
            torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)
    assert count(events, FellBack) == 1 and not count(events, InternalError)


def test_what_is_random_is_not_taken_for_granted() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.rand(1) > 0.5 else x - 1

    assert count(calls(f, ONES, ONES), Broken, Skipped)


def test_a_draw_that_hardly_decides_is() -> None:
    def f(x: torch.Tensor) -> Any:
        kept = x + 1 if torch.rand(1) > 0 else x - 1
        sigma = torch.empty(1).uniform_(0.5, 2.0).item()
        if sigma <= 0:
            raise ValueError(f"not positive: {sigma}")
        return kept * sigma, torch.rand(2)

    assert not count(calls(f, ONES, ONES, ONES), Broken, Skipped, FellBack)


def test_a_number_that_is_an_argument_breaks() -> None:
    """A counter, or a time step: it would be another one at the next call."""

    def f(x: torch.Tensor, step: torch.Tensor) -> Any:
        return x.new_zeros(int(step)) + x.sum() if step > 2 else x

    events = calls(f, *((ONES, torch.tensor(step)) for step in range(5)))
    assert count(events, Broken, Skipped) and not count(events, FellBack)


@pytest.mark.parametrize("backend", ["native", "eager", "aot_eager"])
@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand, OWN.random])
def test_a_call_that_differs_draws_once(draw: Callable[[], Any], backend: str) -> None:
    """What the compiled code had drawn before the check failed is drawn again by the eager call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        drawn = x * draw()
        return drawn if x.sum() > 0 else drawn * draw()

    compiled = fusewright.compile(f, options=ON, backend=backend)
    for x in (ONES, ONES, -ONES, ONES, -ONES):
        found = []
        for run in (f, compiled):
            for seed in (torch.manual_seed, np.random.seed, random.seed, OWN.seed):
                seed(1)
            found.append((run(x), draw(), torch.rand(())))
        assert found[0][1:] == found[1][1:]
        torch.testing.assert_close(found[1][0], found[0][0])


def test_evaluating_draws_and_writes_nothing() -> None:
    def f(x: torch.Tensor) -> Any:
        noise = torch.rand(3)
        x.add_(1)
        return noise + (x if x.sum() > 0 else 0)

    assert not count(calls(f, ONES, ONES), Broken, Skipped)


@pytest.mark.parametrize(("turns", "whole"), [(3, True), (40, False)])
def test_a_loop_over_python_numbers_asks_at_each_turn(turns: int, whole: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for turn in range(turns):
            x = x + 1 if x.sum() > -turn else x - 1
        return x

    events = calls(f, ONES, ONES)
    assert not count(events, FellBack) and (not count(events, Broken, Skipped)) == whole


def test_a_while_loop_is_not_unrolled_by_its_data() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 10000:
            for _ in range(40):
                x = x * 1.02 + x.cos().exp()
        return x

    def asks(x: torch.Tensor) -> bool:
        return bool(x.sum() < 1000)

    def by_a_call(x: torch.Tensor) -> torch.Tensor:
        while asks(x):
            x = x * 2
        return x

    for function in (f, by_a_call):
        events = calls(function, ONES, ONES * 2)
        assert count(events, Broken, Skipped) and count(events, FellBack) <= 1


def test_layers_that_repeat_are_each_asked() -> None:
    class Layer(nn.Module):
        def __init__(self, gate: float) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("gate", torch.tensor([gate]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).relu().sin().cos()
            return y if self.gate > 0 else y * 2

    model = nn.Sequential(*(Layer(gate) for gate in (1.0, 1.0, -1.0, 1.0, -1.0))).eval()
    with torch.no_grad():
        assert not count(calls(lambda x: model(x), torch.randn(2, 3), torch.randn(2, 3)), Broken, Skipped, FellBack)


def test_under_fullgraph_a_branch_on_data_stays_an_error() -> None:
    with pytest.raises(fusewright.GraphBreakError, match="data-dependent-branch"):
        fusewright.compile(branch, fullgraph=True, options=ON)(ONES)


def test_an_operator_of_the_users_own_is_not_run_at_capture() -> None:
    seen = []

    @torch.library.custom_op("speculation::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.clone()

    noted.register_fake(torch.empty_like)
    calls(lambda x: x + 1 if noted(x).sum() > 0 else x, ONES)
    assert len(seen) == 2  # eager's, and the compiled call's


def test_effects_in_python_happen_once() -> None:
    log: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        return x + 1 if x.sum() > 0 else x

    compiled = fusewright.compile(f, options=ON)
    for x in (ONES, -ONES, ONES, -ONES):
        log.clear()
        compiled(x)
        assert log == [1]


def test_a_place_is_dropped_for_good() -> None:
    events = calls(branch, *(sign * ONES for sign in (1, -1) * 6))
    assert count(events, FellBack) == 1 and count(events, Compiled) <= 6


def test_a_function_whose_values_differ_here_and_there_is_let_alone() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for place in range(8):
            x = x + 1 if x[place] > 0 else x - 1
        a = x * 2 if x[0] > 0 else x
        b = x * 2 if x[1] > 0 else x
        c = x * 2 if x[2] > 0 else x
        d = x * 2 if x[3] > 0 else x
        e = x * 2 if x[4] > 0 else x
        return a + b + c + d + e

    torch.manual_seed(0)
    events = calls(f, *((torch.randn(8) * 4).round() for _ in range(40)))
    assert count(events, FellBack) <= 6 and count(events[-len(events) // 2 :], FellBack) == 0


def test_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(branch, *(sign * ONES for sign in (1, -1) * 6))


OF_COUNTS: dict[str, Callable[..., Any]] = {
    "nonzero": torch.nonzero, "argwhere": torch.argwhere, "as_tuple": lambda x: x.nonzero(as_tuple=True), "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0], "rows": lambda x: x[x.sum(tuple(range(1, x.ndim))) > 0], "masked_select": lambda x: x.masked_select(x > 0),
    "computed": lambda x: x.nonzero() + 1,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_COUNTS)
def test_results_of_counts_lie_as_eagers(name: str) -> None:
    compiled = fusewright.compile(OF_COUNTS[name], options=ON)
    for shape in ((4, 5), (4, 5), (2, 3, 4), (3, 4, 2), (6, 6)):
        x = torch.randint(-1, 2, shape).float()
        for given in (x, x.t() if x.ndim == 2 else x.transpose(0, 2)):
            ours, wanted = compiled(given), OF_COUNTS[name](given)
            for a, b in zip(ours, wanted, strict=True) if isinstance(wanted, tuple) else ((ours, wanted),):
                assert torch.equal(a, b) and same_strides(a, b)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, r: int(r * x.shape[0]),
        lambda x, r: float(r.expand(x.shape[0]).sum()),
        lambda x, r: float(r.new_ones(x.shape[0]).sum() * r),
        lambda x, r: int(torch.tensor(2.0) * x.shape[0]),
        lambda x, r: (torch.full((), x.shape[0]) * 2).item(),
        lambda x, r: int(r.long() * x.shape[0]),
        lambda x, r: torch.nonzero(torch.arange(x.shape[0]) > r).shape[0],
        lambda x, r: 1 if r * x.shape[0] > 20 else 2,
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_a_size_that_varies_has_a_part_in(read: Callable[..., Any], dynamic: bool | None) -> None:
    def program(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, Any]:
        found = read(x, r)
        return x * found, found

    compiled = fusewright.compile(program, dynamic=dynamic, options={"speculate": True})
    for rows in (12, 10, 12, 5, 23, 10):
        x, r = torch.ones(rows, 3), torch.full((1,), 2.0)
        (got, number), (expected, eagers) = compiled(x, r), program(x, r)
        assert number == eagers and torch.equal(got, expected)
