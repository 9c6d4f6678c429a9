"""Programs whose reads of tensors stand beside effects, over calls whose values differ: what the program has written, said, drawn, raised
and left behind after each call is what eager has."""

from __future__ import annotations

import contextlib
import io
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.base.events import STREAM, Event, InternalError

Program = Callable[["State", torch.Tensor], Any]
PROGRAMS: list[Program] = []


class State:
    """What programs change."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.counts: dict[int, int] = {}
        self.number = 0
        self.buffer, self.step = torch.zeros(3), torch.zeros(())
        self.kept = [torch.ones(3)]
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.zeros_(self.linear.bias)
        self.optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.1, momentum=0.9)
        self.generator = torch.Generator().manual_seed(3)


def program(f: Program) -> Program:
    PROGRAMS.append(f)
    return f


@program
def read_between_statistics(s: State, x: torch.Tensor) -> Any:
    """What the read depends on is computed for the capture, and statistics are written to without a word of it."""
    s.norm.momentum = None  # a share that follows from the number of calls
    for _ in range(2):
        y = s.norm(x.reshape(1, 3).expand(2, 3) + torch.arange(2.0)[:, None]).relu_()
    return y, s.norm.running_mean.clone(), s.norm.running_var.clone()


@program
def append_print_then_read(s: State, x: torch.Tensor) -> Any:
    s.log.append(x.sum())
    s.number += 1
    print("before", s.number)
    result = x + 1 if x.sum() > 0 else x - 1
    print("after")
    return result


@program
def write_then_read(s: State, x: torch.Tensor) -> Any:
    s.buffer += x
    first = s.buffer.sum().item()
    s.buffer += 1
    if s.buffer.sum() > 0:
        s.buffer.mul_(2)
        return s.buffer + first
    s.buffer.sub_(1)
    return s.buffer * int(s.buffer.sum())


@program
def write_to_a_view(s: State, x: torch.Tensor) -> Any:
    view = s.buffer[1:]
    view.add_(x[1:])
    if s.buffer.sum() > 0:
        view.mul_(2)
    s.buffer.add_(1)
    return view.clone()


@program
def write_to_the_argument_and_raise(s: State, x: torch.Tensor) -> Any:
    x.add_(1)
    if x.sum() < 0:
        raise RuntimeError(f"negative: {x.sum().item()}")
    x.mul_(3)
    return x.sum()


@program
def memory_shared_with_numpy(s: State, x: torch.Tensor) -> Any:
    a = torch.zeros(3)
    b = a.numpy()
    b += x.numpy()
    if a.sum() > 2:
        a.mul_(2)
    return x + a


@program
def draws(s: State, x: torch.Tensor) -> Any:
    noise = torch.rand(3) + random.random() + torch.rand(3, generator=s.generator)
    if x.sum() > 0:
        noise = noise * torch.rand(3)
    return x + noise, torch.rand(2), random.random()


@program
def draw_and_raise(s: State, x: torch.Tensor) -> Any:
    noise = torch.rand(3)
    if x.sum() < 0:
        raise AssertionError(f"negative: {noise}")
    return noise + torch.rand(3)


@program
def seed(s: State, x: torch.Tensor) -> Any:
    torch.manual_seed(int(x.abs().sum()))
    return torch.rand(2)


@program
def running_statistics(s: State, x: torch.Tensor) -> Any:
    y = s.norm(torch.stack([x, x * 2]))
    return y if x.sum() > 0 else s.norm(y)


@program
def training_step(s: State, x: torch.Tensor) -> Any:
    loss = s.linear(x).square().sum()
    s.optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(s.linear.parameters(), 1.0, error_if_nonfinite=True)
    if torch.isfinite(loss) and x.sum() > 0:
        s.optimizer.step()
    return loss.detach(), norm


@program
def unscaled_step(s: State, x: torch.Tensor) -> Any:
    s.optimizer.zero_grad()
    (s.linear(x) * (float("inf") if x.sum() < 0 else 1.0)).sum().backward()
    finite = all(p.grad.isfinite().all() for p in s.linear.parameters())  # type: ignore[union-attr]
    if finite:
        s.optimizer.step()
    s.log.append(finite)
    return s.linear.weight + 0


@program
def learning_rate(s: State, x: torch.Tensor) -> Any:
    for group in s.optimizer.param_groups:
        group["lr"] *= 0.5 if x.sum() > 0 else 2
    s.optimizer.zero_grad()
    s.linear(x).sum().backward()
    s.optimizer.step()


@program
def weights_written(s: State, x: torch.Tensor) -> Any:
    with torch.no_grad():
        s.linear.weight.copy_(x.expand(3, 3))
    s.linear.bias.data.add_(x)
    return s.linear(x) * (2 if (s.linear.weight > 0).all() else 1)


@program
def hook(s: State, x: torch.Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    y = leaf * 2
    y.register_hook(lambda gradient: s.log.append(gradient.sum().item()))
    (y * (3 if x.sum() > 0 else 5)).sum().backward()
    return leaf.grad


@program
def gradients_on_and_off(s: State, x: torch.Tensor) -> Any:
    with torch.set_grad_enabled(bool(x.sum() > 0)):
        y = s.linear(x)
    torch.set_grad_enabled(bool(x[0] > 0))
    z = s.linear(x)
    torch.set_grad_enabled(True)
    with torch.inference_mode(bool(x[1] > 0)):
        return y.requires_grad, z.requires_grad, s.linear(x).is_inference()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2 if x.sum() > 0 else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (2 if x.sum() > 0 else 3)


@program
def custom_gradient_under_a_checkpoint(s: State, x: torch.Tensor) -> Any:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(y).sin() if y.sum() > 0 else y.cos()  # type: ignore[no-untyped-call]

    leaf = x.clone().requires_grad_()
    checkpoint(inner, leaf, use_reentrant=False).sum().backward()
    return leaf.grad


@program
def handlers(s: State, x: torch.Tensor) -> Any:
    try:
        if x.sum() < 0:
            raise KeyError("negative")
        s.log.append(1 / int(x.sum() - 3))
    except KeyError as error:
        s.log.append(str(error))
        return x * 2
    except ZeroDivisionError:
        s.log.append("zero")
    finally:
        s.log.append("end")
    return x + 1


@program
def generators(s: State, x: torch.Tensor) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        s.log.append("start")
        for place in range(3):
            if x[place] > 0:
                yield x[place] + place
            else:
                s.log.append(place)

    return list(parts())


@program
def loop(s: State, x: torch.Tensor) -> Any:
    turns = 0
    while x.sum() < 20 and turns < 10:
        x = x * 2 + 1
        turns += 1
        s.log.append(turns)
    for place, element in enumerate(x):
        if element > 30:
            return element, place
    return x


@program
def containers(s: State, x: torch.Tensor) -> Any:
    key = int(x.sum())
    s.counts[key] = s.counts.get(key, 0) + 1
    s.kept.append(x * 2)
    if s.kept[-1].sum() > 0:
        s.kept.pop(0)
    s.log.append((f"{x.sum():.2f}", x.tolist()))
    return len(s.kept), s.kept[0] + s.counts[key]


@program
def counter(s: State, x: torch.Tensor) -> Any:
    s.step += 1
    return x * 2 if s.step % 2 == 0 else x + s.step.item()


@program
def warn(s: State, x: torch.Tensor) -> Any:
    if x.sum() < 0:
        warnings.warn("negative", stacklevel=1)
    return x + 1


@program
def thread(s: State, x: torch.Tensor) -> Any:
    started = threading.Thread(target=lambda: s.log.append(bool(x.sum() > 0)))
    started.start()
    started.join()
    return x + 1 if s.log[-1] else x


@program
def which_object(s: State, x: torch.Tensor) -> Any:
    return (x, x) if x.sum() > 0 else (x, x.clone())


def seen(value: Any) -> Any:
    """A copy of what can be seen of a value."""
    if isinstance(value, torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        return value.requires_grad, value.detach().clone(), None if gradient is None else gradient.clone()
    if isinstance(value, (list, tuple)):
        return [seen(one) for one in value]
    if isinstance(value, dict):
        return [(key, seen(one)) for key, one in value.items()]
    if isinstance(value, nn.Module):
        return seen(value.state_dict(keep_vars=True))
    if isinstance(value, torch.optim.Optimizer):
        return seen([list(value.state.values()), [group["lr"] for group in value.param_groups]])
    return value.get_state() if isinstance(value, torch.Generator) else value


def same(got: Any, expected: Any, where: str) -> None:
    assert type(got) is type(expected), (where, got, expected)
    if isinstance(got, (torch.Tensor, float)):
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(expected), (where, got, expected)
        for place, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            same(mine, theirs, f"{where}, {place}")
    else:
        assert got == expected, where


def played(f: Program, compiled: Program, values: list[torch.Tensor]) -> list[Any]:
    """What is seen after each call."""
    state, found = State(), []
    for number, value in enumerate(values):
        torch.manual_seed(number)
        random.seed(number)
        x, said = value.clone(), io.StringIO()
        with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = compiled(state, x)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        same = [one is x for one in result] if isinstance(result, tuple) else result is x
        told = [str(one.message) for one in warned], said.getvalue(), same, torch.is_grad_enabled()
        found.append(seen([result, x, vars(state), torch.get_rng_state(), random.getstate()[1], told]))
    return found


P, N, M = torch.ones(3), -torch.ones(3), torch.tensor([1.0, -2.0, 3.0])
STREAMS = {"mixed": [P, P, N, P, N, N, M, P], "negative first": [N, N, P, P, N, P]}


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_each_call_leaves_what_eager_leaves(f: Program, stream: str, backend: str) -> None:
    expected = played(f, f, STREAMS[stream])
    events: list[Event] = []
    with STREAM.listening(events.append):
        compiled = fusewright.compile(f, backend=backend, options={"speculate": True})
        got = played(f, compiled, STREAMS[stream])
    for call, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        same(mine, theirs, f"call {call}")
    assert not [event for event in events if isinstance(event, InternalError)]
