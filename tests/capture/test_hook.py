"""The frame hook: the checks that need no torch, and eager regions around torch code."""

from __future__ import annotations

import gc

import pytest
import torch

import fusewright
from fusewright import _native, events
from fusewright.capture import hook
from fusewright.capture.guards import Guard, TensorGuard, build_program
from fusewright.capture.sources import Local
from tests.capture.native_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS["hook"])
def test_without_torch(name):
    CHECKS["hook"][name]()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return helper(self.linear(x))


def helper(x):
    return torch.relu(x) + 1


def test_a_helper_inside_a_module_is_compiled():
    calls = []

    def miss(cache, function, locals):
        (x,) = locals
        guard = TensorGuard(torch.Tensor, x.dtype, x.device, x.requires_grad, tuple(x.shape), x.stride(), False)
        program = build_program([Guard("TENSOR", Local(0, "x"), guard)], [Local(0, "x")])

        def graph(x):
            calls.append(x.shape)
            return (torch.relu(x) + 1,)

        return _native.Entry(program, graph)

    def policy(code, function):
        return _native.FrameCache(miss) if function is helper else None

    block, x = Block(), torch.randn(2, 4)
    wanted = block(x)
    with hook.policy(policy):
        for _ in range(3):
            torch.testing.assert_close(hook.call_eager(block, x), wanted)
            torch.testing.assert_close(block(x), wanted)
        result = hook.call_eager(block, x)
        result.sum().backward()
    assert len(calls) == 4
    assert block.linear.weight.grad is not None
    assert not _native.hook_state()["installed"]


def test_region_context():
    with hook.policy(lambda code, function: None), hook.region():
        assert _native.hook_state()["depth"] == 1
    assert _native.hook_state()["depth"] == 0


def test_what_the_garbage_collector_calls_is_no_part_of_the_program():
    """It runs whenever the collector does, in the eager half of a broken program too."""
    phases = []

    def watch(phase, info):
        phases.append(phase)

    def helper(x):
        gc.collect()
        return x + 1

    def program(x):
        print(end="")
        return helper(x) * 2

    captured = []
    gc.callbacks.append(watch)
    try:
        with events.STREAM.listening(lambda event: captured.append(event.function) if isinstance(event, events.Captured) else None):
            compiled = fusewright.compile(program)
            x = torch.ones(2)
            for _ in range(3):
                assert torch.equal(compiled(x), program(x))
    finally:
        gc.callbacks.remove(watch)
    assert {"start", "stop"} <= set(phases)
    assert not [name for name in captured if "watch" in str(name)]
