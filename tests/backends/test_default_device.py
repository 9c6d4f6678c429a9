"""A default device that a program sets is the program's own: what a compiler makes for itself lies elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, FellBack, InternalError

CONSTANT = torch.arange(3.0)


def constants(x: torch.Tensor) -> object:
    return x * (torch.full((3,), 2.0, device="cpu") + 1) * CONSTANT, torch.ones(2)


def resampled(x: torch.Tensor) -> object:
    return torch.nn.functional.interpolate(x[None], scale_factor=1.5), torch.nn.functional.interpolate(x[None], size=4)


def convolved(x: torch.Tensor) -> object:
    return torch.nn.functional.conv1d(x[None], torch.ones(1, 2, 2, device="cpu")).relu()


def through_numpy(x: torch.Tensor) -> object:
    x = x.detach().clone()
    x.add_(1)
    return torch.from_numpy(np.linalg.svd(x.numpy())[1]) + x[0, 0]


def decided(x: torch.Tensor) -> object:
    x = x.detach()
    x.add_(1)
    return x * 2 if x.sum() > 0 else x, x[x > 0], x.tolist()


@pytest.mark.parametrize("program", [constants, resampled, convolved, through_numpy, decided])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_is_the_programs_own(program: Callable[[torch.Tensor], object], backend: str, grad: bool) -> None:
    heard: list[Event] = []
    compiled = fusewright.compile(program, backend=backend)
    with STREAM.listening(heard.append):
        torch.set_default_device("meta")
        try:
            given = [torch.arange(6.0, device="cpu").reshape(2, 3).requires_grad_(grad) for _ in range(2)]
            results = [torch.utils._pytree.tree_leaves(run(x)) for run, x in zip((program, compiled), given)]
            for one in results:
                if grad and one[0].requires_grad:
                    one[0].sum().backward()
        finally:
            torch.set_default_device(None)
    assert not [event for event in heard if isinstance(event, InternalError | FellBack)]
    assert given[0].grad is None or torch.equal(given[0].grad, given[1].grad)
    for eager, ours in zip(*results, strict=True):
        if isinstance(eager, torch.Tensor):
            assert ours.device == eager.device
            assert eager.is_meta or torch.allclose(ours, eager)
        else:
            assert ours == eager


def within(x: torch.Tensor) -> object:
    with torch.overrides._pop_mode_temporarily():
        return float(x.sum()), x.nonzero()


def entered(x: torch.Tensor) -> object:
    context = torch.overrides._pop_mode_temporarily()
    context.__enter__()
    try:
        return x.nonzero() * 2
    finally:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("program", [within, entered])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_an_attempt_that_ends_inside_of_a_context_leaves_the_modes(program: Callable[[torch.Tensor], object], backend: str) -> None:
    """PyTorch's own functions run so where there is a mode. A generator takes it off, and puts it back when it ends."""
    compiled = fusewright.compile(program, backend=backend)
    torch.set_default_device("cpu")
    gc.disable()
    try:
        for size in (3, 3, 4):
            compiled(torch.ones(size))
            assert torch._C._len_torch_function_stack() == 1
    finally:
        gc.enable()
        torch.set_default_device(None)
