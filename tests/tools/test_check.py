"""`fusewright.benchmark` and `fusewright.check`: what they measure is told, and what is wrong does not pass."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.base.errors import OptionError
from fusewright.tools import bench, memory

QUICK = {"seconds": 0.02}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.first(x)))).softmax(-1)


def off_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A backend whose graphs give other outputs than they should."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return lambda *inputs: tuple(change(out) if isinstance(out, torch.Tensor) else out for out in gm(*inputs))

    return backend


@pytest.mark.parametrize("train", [False, True])
def test_a_good_model_passes_and_is_not_changed(train: bool) -> None:
    net = Net().train(train)
    before = copy.deepcopy(net.state_dict())
    found = fusewright.check(net, (torch.randn(6, 8),), shapes=[(3, 8), (5, 8), (1, 8)], **QUICK)
    assert {f.name: f.status for f in found.findings if f.name not in ("speed", "memory")} == dict.fromkeys(
        ("compile", "graph breaks", "accuracy", "recompiles"), "ok"
    )
    assert found.exit_status == 0
    assert ("gradients" in found["accuracy"].text) is train
    assert found["recompiles"].data["compiles"] <= 2
    assert found["memory"].data["eager_peak"] >= 6 * 32 * 4
    assert set(found["speed"].data["timings"]) == {"eager", "compiled"}
    assert json.loads(json.dumps(found.to_dict()))["status"] == found.status
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())


WRONG = {
    "a value": lambda out: out + 0.01,
    "a NaN": lambda out: out.masked_fill(torch.arange(out.numel()).view_as(out) == 1, float("nan")),
    "a dtype": lambda out: out.double(),
    "a shape": lambda out: out.unsqueeze(0),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_result_fails(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = fusewright.check(Net().eval(), (torch.randn(6, 8),), backend=off_by(change), **QUICK)
    assert (found["accuracy"].status, found.status, found.exit_status) == ("failure", "failure", 1)
    assert "accuracy" in found.verdict and "DIFFER" in str(found)


def test_a_wrong_result_for_one_of_the_shapes_fails() -> None:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return lambda *inputs: tuple(out + (out.shape[0] == 3) for out in gm(*inputs))

    found = fusewright.check(lambda x: x * 2, (torch.randn(6, 8),), shapes=[(4, 8), (3, 8)], backend=backend, **QUICK)
    assert found["accuracy"].status == "ok"
    assert (found["recompiles"].status, found["recompiles"].data["wrong"]) == ("failure", ["(3, 8)"])


def test_rounding_is_told_from_an_error_by_float64() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + 1e4) - 1e4

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return lambda x: (x,)

    x = torch.rand(200)
    found = fusewright.check(f, (x,), backend=backend, **QUICK)
    assert found["accuracy"].status == "ok" and "rounding" in found["accuracy"].text
    assert not found["accuracy"].data["close_to_eager"] and "compiled is nearer" in found["accuracy"].text


def test_breaks_and_recompiles_are_warnings_with_their_causes() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x + 1
        return x * 2

    found = fusewright.check(f, (torch.ones(4),), shapes=[((n,),) for n in (5, 6, 7, 8)], dynamic=False, **QUICK)
    assert found["graph breaks"].status == found["recompiles"].status == found.status == "warning"
    assert "torch.where" in found["graph breaks"].text and "L['x'].size()[0]" in found["recompiles"].text
    assert found.exit_status == 0 and "could be better" in found.verdict


def test_what_is_refused_is_a_finding_and_what_eager_raises_is_raised() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    found = fusewright.check(f, (torch.ones(4),), fullgraph=True, **QUICK)
    assert [finding.status for finding in found.findings] == ["failure"] and "GraphBreakError" in str(found)
    with pytest.raises(RuntimeError, match="must match"):
        fusewright.check(lambda a, b: a + b, (torch.ones(2), torch.ones(3)))


def test_random_models_are_compared_by_eagers_numbers() -> None:
    found = fusewright.check(nn.Dropout(), (torch.randn(50, 8),), **QUICK)
    assert found["accuracy"].status == "ok" and "random" in found["accuracy"].text
    assert fusewright.benchmark(nn.Dropout(), torch.randn(50, 8), **QUICK).timings["compiled"].correct is None


def test_what_is_compiled_already_is_checked_under_its_own_settings() -> None:
    net = fusewright.compile(Net().eval(), backend=off_by(WRONG["a value"]))
    assert fusewright.check(net, (torch.randn(6, 8),), **QUICK)["accuracy"].status == "failure"
    assert fusewright.benchmark(net, torch.randn(6, 8), **QUICK).correct is False


def test_shapes_that_do_not_fit_are_errors() -> None:
    for shapes in ([3], [((2, 2), (2, 2))]):
        with pytest.raises(OptionError):
            fusewright.check(lambda x: x, (torch.ones(2, 2),), shapes=shapes, **QUICK)


def test_benchmark_of_several_functions() -> None:
    functions = {"right": torch.sin, "same": lambda x: x.sin(), "wrong": torch.cos}
    timed = fusewright.benchmark(functions, torch.randn(100), **QUICK)
    assert [timing.correct for timing in timed.timings.values()] == [True, True, False] and not timed.correct
    assert all(t.low_ms <= t.median_ms <= t.high_ms for t in timed.timings.values())
    assert "DIFFERS" in str(timed) and set(timed.to_dict()["timings"]) == set(functions)
    with pytest.raises(OptionError, match="empty"):
        fusewright.benchmark({})


def test_functions_that_write_to_their_arguments_do_not_disturb_each_other() -> None:
    x = torch.ones(4)
    assert fusewright.benchmark(lambda x: x.add_(1), x, **QUICK).correct
    assert torch.equal(x, torch.ones(4))


def test_memory_of_a_call_counts_what_lives_at_the_same_time() -> None:
    x = torch.ones(1 << 18)
    assert 0 <= memory.measure(lambda: (x + 1) * 2).peak - (2 << 20) < 64  # the numbers are tensors as well
    held: list[torch.Tensor] = []
    assert memory.measure(lambda: held.append(x + 1)).kept == 1 << 20
    chain = fusewright.compile(lambda x: ((x + 1).sum(0, keepdim=True) * x).exp())
    assert memory.measure_compiled(lambda: chain(x)).peak < (1 << 20) + 4096 + 65536


def test_same_takes_nan_for_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert bench.same(nan, nan.clone()) and not bench.same(nan, torch.zeros(2))
