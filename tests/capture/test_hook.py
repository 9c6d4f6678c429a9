"""The frame hook: the checks that need no torch, and eager regions around torch code."""

from __future__ import annotations

import pytest
import torch

from fusewright import _native
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
