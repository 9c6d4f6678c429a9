"""The frame hook: the checks that need no torch, and eager regions around torch code."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

import fusewright
from fusewright import _native
from fusewright.base import events
from fusewright.capture import hook
from fusewright.capture.guards import Guard, TensorGuard, build_program
from fusewright.capture.guards.sources import Local
from tests.native.native_checks import CHECKS


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
        with events.STREAM.listening(
            lambda event: captured.append(event.function) if isinstance(event, events.Captured) else None
        ):
            compiled = fusewright.compile(program)
            x = torch.ones(2)
            for _ in range(3):
                assert torch.equal(compiled(x), program(x))
    finally:
        gc.callbacks.remove(watch)
    assert {"start", "stop"} <= set(phases)
    assert not [name for name in captured if "watch" in str(name)]


BESIDE_TORCH_COMPILE = """
import faulthandler, random, threading
faulthandler.dump_traceback_later(200, exit=True)
import torch, torch._dynamo, fusewright

here = threading.local()

def hold():
    here.entered.set()
    assert here.go.wait(60)

def helper(x):
    return x * 2 + 1

def held(x):
    y = helper(x)
    hold()
    return helper(y) * 2

def plain(x):
    return helper(helper(x)) * 2

def run(compiled, entered, go, out):
    here.entered, here.go = entered, go
    out.append(compiled(torch.ones(4)))

compilers = {"ours": fusewright.compile(held), "theirs": torch.compile(held, backend="eager")}
wanted = plain(torch.ones(4))
checks = [fusewright.compile(lambda x: (hold(), plain(x))[1]), torch.compile(plain, backend="eager")]
here.entered, here.go = threading.Event(), threading.Event()
here.go.set()
for seed in range(30):
    draw, open_calls = random.Random(seed), []
    for act in range(10):
        if open_calls and (act > 5 or draw.random() < 0.5):
            thread, go, out = open_calls.pop(draw.randrange(len(open_calls)))
            go.set()
            thread.join()
            assert torch.equal(*out, wanted), (seed, out)
        elif act <= 5:
            entered, go, out = threading.Event(), threading.Event(), []
            compiled = compilers[draw.choice(("ours", "theirs"))]
            thread = threading.Thread(target=run, args=(compiled, entered, go, out))
            thread.start()
            assert entered.wait(60)
            open_calls.append((thread, go, out))
        for check in checks:
            assert torch.equal(check(torch.ones(4)), wanted), seed
"""


def test_torch_compile_in_other_threads():
    """Calls of both that are held in the middle, opened and closed in random orders."""
    done = subprocess.run([sys.executable, "-c", BESIDE_TORCH_COMPILE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


IN_A_SUBINTERPRETER = """
import sys
module = "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
interpreters = __import__(module)
one = interpreters.create()
text = "import sys; sys.path[:] = %r; import fusewright" % sys.path
try:
    error = interpreters.run_string(one, text)
except Exception as raised:
    error = raised
assert "main interpreter" in str(error) or "loading in subinterpreters" in str(error), error  # ours, or Python's own from 3.12
import fusewright
assert fusewright.compile(lambda x: x + 1)(1) == 2
"""


def test_subinterpreters_are_refused():
    done = subprocess.run([sys.executable, "-c", IN_A_SUBINTERPRETER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
