"""Layers that repeat are lowered and scheduled a few times, for all of them (graph/repeated_layers.py, schedule/unroll.py): the plan is the one that the
whole graph gives, and where layers differ after all, the whole graph is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.backends import pipeline as native_stages
from fusewright.codegen.signature import signature
from fusewright.loops.ir import BufferRef
from fusewright.schedule.plan import Plan, RunKernel
from fusewright.schedule.verify import verify


class Plans:
    """Collects the plans of compiles, and how many of them came from a few bodies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[Plan] = []
        self.of_bodies = 0
        self.allowed = True
        by_bodies, build = native_stages._of_bodies, native_stages.build_call_plan

        def watched(*args: Any) -> Plan | None:
            plan = by_bodies(*args) if self.allowed else None
            self.of_bodies += plan is not None
            return plan

        def kept(plan: Plan, *args: Any, **kwargs: Any) -> Any:
            verify(plan)
            self.plans.append(plan)
            return build(plan, *args, **kwargs)

        monkeypatch.setattr(native_stages, "_of_bodies", watched)
        monkeypatch.setattr(native_stages, "build_call_plan", kept)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(monkeypatch)


def outline(plan: Plan) -> list[object]:
    """What the plan does, buffers numbered in the order in which they are met."""
    numbers: dict[str, object] = {}

    def number(name: str | None) -> object:
        if name is None:
            return None
        buffer = plan.buffers[name]
        known = (buffer.role, buffer.position) if buffer.role in ("input", "constant") else len(numbers)
        return numbers.setdefault(name, known)

    def argument(value: object) -> object:
        if isinstance(value, BufferRef):
            return number(value.buffer), value.shape, value.stride, value.offset
        return tuple(map(argument, value)) if isinstance(value, (tuple, list)) else value

    rows: list[object] = []
    for step in plan.steps:
        if isinstance(step, RunKernel):
            kernel = plan.kernels[step.kernel]
            rows.append((signature(kernel), step.horizontal, *map(number, kernel.buffers)))
        else:
            extern = step.extern
            rows.append((extern.target, argument((extern.args, extern.kwargs)), *map(number, extern.outputs)))
    rows.append([(output.kind, number(output.buffer or None), argument(output.ref)) for output in plan.outputs])
    return rows


def check(
    plans: Plans, module: nn.Module, *args: Any, repeats: bool = True, tolerance: float = 2e-5, **options: Any
) -> None:
    """`module` compiled by bodies gives what it gives in eager, and its plan is the one of the whole graph."""
    module.eval()
    with torch.no_grad():
        expected = module(*args)
        compiled = fusewright.compile(module, **options)
        for _ in range(2):
            torch.testing.assert_close(compiled(*args), expected, rtol=tolerance, atol=tolerance)
        assert plans.of_bodies == repeats
        if not repeats:
            return
        plans.allowed = False
        fusewright.reset()
        torch.testing.assert_close(
            fusewright.compile(module, **options)(*args), expected, rtol=tolerance, atol=tolerance
        )
        plans.allowed = True
        ours, whole = plans.plans
        assert outline(ours) == outline(whole)
        assert ours.arena_size == whole.arena_size
        for parameter in module.parameters():  # a change of any layer is seen
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
            torch.testing.assert_close(compiled(*args), module(*args), rtol=10 * tolerance, atol=10 * tolerance)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """One of a transformer. `first`: norms stand in front."""

    def __init__(
        self, width: int, first: bool = False, activation: Callable[..., torch.Tensor] = nn.functional.gelu
    ) -> None:
        super().__init__()
        self.attention = Attention(width, 2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.activation = first, activation

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.down(self.activation(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(self.activation(self.up(x))))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.tanh(x) + 1
        for layer in self.layers:
            x = layer(x, mask)
        return x.mean(1) if self.head is None else self.head(x)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_transformers(plans: Plans, first: bool, masked: bool) -> None:
    mask = (torch.rand(2, 1, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool) if masked else None
    check(plans, Stack([Layer(16, first) for _ in range(11)], nn.Linear(16, 3)), torch.randn(2, 6, 16), mask)


def test_sizes_may_be_symbolic(plans: Plans) -> None:
    module = Stack([Layer(16) for _ in range(10)]).eval()
    with torch.no_grad():
        compiled = fusewright.compile(module, dynamic=True)
        for rows in (3, 5, 2, 1):
            x = torch.randn(rows, 4 + rows, 16)
            torch.testing.assert_close(compiled(x), module(x), rtol=2e-5, atol=2e-5)
    assert plans.of_bodies


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor, mask: None) -> torch.Tensor:
        return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))


def test_convolutions(plans: Plans) -> None:
    check(plans, Stack([Block(8) for _ in range(12)]), torch.randn(1, 8, 6, 6))


def test_two_kinds_of_layers_by_turns(plans: Plans) -> None:
    check(plans, Stack([Layer(16, first=k % 2 == 1) for k in range(22)]), torch.randn(1, 5, 16))


def test_one_layer_in_the_middle_differs(plans: Plans) -> None:
    layers: list[nn.Module] = [Layer(16, activation=torch.tanh if k == 3 else nn.functional.gelu) for k in range(16)]
    check(plans, Stack(layers), torch.randn(1, 5, 16))


def test_one_layer_many_times(plans: Plans) -> None:
    check(plans, Stack([Layer(16)] * 12), torch.randn(1, 5, 16))


class Chained(nn.Module):
    """Layer k multiplies by matrices k and k + 1."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(14))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.weights, list(self.weights)[1:]):
            x = x + torch.tanh(x @ one) @ other.exp()
            x = x / x.abs().amax(-1, keepdim=True)
        return x @ self.weights[5] if self.last else x


@pytest.mark.parametrize("last", [False, True])
def test_layers_that_share_weights_with_the_next(plans: Plans, last: bool) -> None:
    check(
        plans, Chained(last), torch.randn(20, 16), repeats=not last
    )  # with few rows each layer has turned weights of its own


def test_layers_of_few_rows_that_share_weights(plans: Plans) -> None:
    check(plans, Chained(last=True), torch.randn(3, 16))


class Kept(nn.Module):
    """What each layer gives is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(10))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for layer in self.layers:
            x = layer(x, None)
            results.append(x)
        return tuple(results)


def test_results_of_all_layers(plans: Plans) -> None:
    check(plans, Kept(), torch.randn(1, 5, 16), repeats=False)


class Linears(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))


class Far(Linears):
    """Layer k reads what layer k - 2 gave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, last = x, x.sin()
        for layer in self.layers:
            before, last = last, layer(last).tanh() + before
        return last


def test_layers_that_read_the_one_before_the_last(plans: Plans) -> None:
    check(plans, Far(20), torch.randn(3, 16), repeats=False)


class Counting(Linears):
    """An index grows from layer to layer: what is known of its range differs."""

    def __init__(self) -> None:
        super().__init__(12)
        self.register_buffer("table", torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(3)
        for layer in self.layers:
            x = layer(x).tanh() + self.table[at]
            at = at + 3
        return x


def test_integers_that_layers_hand_on(plans: Plans) -> None:
    check(plans, Counting(), torch.randn(3, 16), repeats=False)


class Numbered(Linears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() * (1.0 + number / 7) - 0.0
        return x


def test_layers_with_numbers_of_their_own(plans: Plans) -> None:
    check(plans, Numbered(12), torch.randn(3, 16), repeats=False)


class PointwiseLayers(nn.Module):
    """Loops of several layers become one kernel: no stretch of steps is a body."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(16) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale) + x
        return x


def test_layers_that_fuse_into_each_other(plans: Plans) -> None:
    check(plans, PointwiseLayers(), torch.randn(3, 16), repeats=False)
