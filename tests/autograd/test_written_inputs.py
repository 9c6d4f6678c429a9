"""Gradients of gradients through a call that writes to its arguments: eager's, or eager's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BACKENDS = ["native", "aot_eager", "eager"]


class Scaled(torch.autograd.Function):
    """What it saves is nothing that its result depends on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, b)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, b = ctx.saved_tensors
        return gradient * x * b, None


def average(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x * x * y * b


def average_of_a_copy(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.lerp_(x.detach().mean(0), 0.1)
    return x * x * y * b.clone()


def before_the_write(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = x * x * y * b.clone()
    b.add_(1)
    return result


def before_and_after(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = x * x * y * b.clone()
    b[:2].add_(1)
    return result + x.sin() * b


def power_iteration(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    weight = y.outer(y) + torch.eye(3)
    with torch.no_grad():
        b.copy_(F.normalize(weight @ b, dim=0))
    v = b.clone()
    return (x @ (weight / v.dot(weight @ v))).square()


def counted(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> Any:
    b += 1
    return x * x * y, b.clone(), b[0] * 2


def scaled_by_a_count(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b += 1
    return x * x * y / b[0]


def clipped(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return x * x * y * y


def through_data(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.data.mul_(3)
    return x * x * y * b


def turned(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.unsqueeze_(0)
    b.mul_(2)
    return x * x * y * b


def by_code_of_its_own(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    return Scaled.apply(x, b * 1) * y  # type: ignore[no-any-return]


def by_code_of_its_own_as_it_is(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    return Scaled.apply(x, b) * y  # type: ignore[no-any-return]


def by_a_hook(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    factor, z = b * 2, x * 1
    z.register_hook(lambda gradient: gradient * factor)
    return z * z * y


def normalised(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, b, torch.ones(3), y, None, True, 0.5) * b.clone()


def evaluated(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(0.5).add_(x.detach().mean(0))
    return F.batch_norm(x, b, torch.ones(3), y, None, False).square()


PROGRAMS: list[Callable[..., Any]] = [
    average, average_of_a_copy, before_the_write, before_and_after, power_iteration, counted, scaled_by_a_count, clipped,
    through_data, turned, by_code_of_its_own, by_code_of_its_own_as_it_is, by_a_hook, normalised, evaluated,
]  # fmt: skip


def nothing(call: Callable[[], Any], leaves: Leaves) -> None:
    pass


def again(call: Callable[[], Any], leaves: Leaves) -> None:
    call()


def written(call: Callable[[], Any], leaves: Leaves) -> None:
    leaves[2].add_(1)


def its_data(call: Callable[[], Any], leaves: Leaves) -> None:
    leaves[2].data.copy_(leaves[2].data.clone())


BETWEEN = [nothing, again, written, its_data]


def derivatives(function: Callable[..., Any], first: Any, second: Any, orders: int) -> list[list[Any]]:
    """The results of three steps, or what was raised: each goes on with what the one before has left. `first`, `second`:
    what happens before the gradients and before those of the gradients. (The compiled backward of the result itself
    keeps a copy of what was written to, so that it refuses no later write.)"""
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin().requires_grad_()
    y = torch.tensor([0.4, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    b, found = torch.tensor([0.5, 1.5, -0.5], dtype=torch.float64), []
    for _ in range(3):
        step: list[Any] = []
        found.append(step)
        try:
            result = function(x, y, b)
            result = result[0] if isinstance(result, tuple) else result
            step.append(result.detach().clone())
            one, more = result.sum(), first
            for _ in range(orders):
                more(lambda: function(x, y, b), (x, y, b))
                grads = torch.autograd.grad(one, (x, y), create_graph=True, allow_unused=True)
                step += [None if each is None else (each.detach().clone(), each.requires_grad) for each in grads]
                one, more = sum(each.sin().sum() for each in grads if each is not None), second  # type: ignore[assignment]
            second(lambda: function(x, y, b), (x, y, b))
            (one if second in (again, written) else one + result.sum()).backward()
            step += [x.grad, y.grad, b.clone(), b.shape]
        except RuntimeError as error:
            step.append("modified by an inplace" in str(error))
        x.grad = y.grad = None
        b = b.detach().reshape(3).clone()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_of_gradients_as_in_eager(program: Callable[..., Any], backend: str) -> None:
    compiled = fusewright.compile(program, backend=backend, fullgraph=program is not turned)
    between = [nothing] if program is through_data else BETWEEN  # no version counts the write, in eager
    for orders in (1, 2):
        for first in between:
            for second in between:
                expected = derivatives(program, first, second, orders)
                found = derivatives(compiled, first, second, orders)
                torch.testing.assert_close(found, expected, msg=lambda text: f"{first, second, orders}: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_critic_with_spectral_norms_and_a_penalty_on_its_gradient(norm: Any, inside: bool, backend: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        critic = nn.Sequential(norm(nn.Linear(4, 8)), nn.LeakyReLU(0.2), nn.BatchNorm1d(8), norm(nn.Linear(8, 1))).double()
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)

        def penalised(x: torch.Tensor, critic: nn.Module = critic) -> tuple[torch.Tensor, torch.Tensor]:
            y = critic(x)
            (once,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y, (once.norm(2, 1) - 1).square().mean()

        if compiled and inside:
            penalised = fusewright.compile(penalised, backend=backend, fullgraph=True)
        elif compiled:
            critic = fusewright.compile(critic, backend=backend, fullgraph=True)
        for _ in range(4):
            fake, real, mixed = (torch.randn(5, 4, dtype=torch.float64) for _ in range(3))
            optimizer.zero_grad()
            scores = critic(fake).mean() - critic(real).mean()
            y, penalty = penalised(mixed.requires_grad_(), *(() if inside else (critic,)))
            (scores + y.mean() + 10 * penalty).backward()
            optimizer.step()
            found.append((mixed.grad, [one.grad for one in critic.parameters()], [one.clone() for one in critic.buffers()]))
    torch.testing.assert_close(found[4:], found[:4])


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("program", [average, by_code_of_its_own])
def test_what_is_too_large_to_be_kept_is_refused(program: Any, backend: str) -> None:
    x, y, b = (torch.ones(*shape, dtype=torch.float64) for shape in ((1, 200_000), (200_000,), (200_000,)))
    result = fusewright.compile(program, backend=backend)(x.requires_grad_(), y, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), x, create_graph=True)


def test_only_what_may_be_needed_is_copied() -> None:
    """A call whose gradients do not depend on what it writes to has no more results than before."""
    halves: list[torch.fx.Graph] = []

    def note(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        halves.append(gm.graph)
        return gm

    for program, copies in ((counted, 0), (normalised, 1), (average, 1), (average_of_a_copy, 1)):
        halves.clear()
        x, y, b = torch.ones(4, 3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3)
        fusewright.compile(program, backend=fusewright.aot(note))(x, y, b)
        forward = halves[0]
        placeholder = list(forward.nodes)[2]
        results = [one for one in forward.output_node().args[0] if one.target is torch.ops.aten.clone.default]  # type: ignore[union-attr]
        assert sum(one.args[0] is placeholder for one in results) == copies, (program, str(forward))
