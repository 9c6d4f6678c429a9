"""What is prepared for one number of rows and serves any: values at every number, and when it is prepared for another one."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

import fusewright
from fusewright import _native
from fusewright.base.events import STREAM, Event, FellBack, StageDone
from fusewright.graph.passes.library.linear_paths import LARGEST_TWICE, MKL, Linear, candidates_for, likely
from fusewright.select.linear import Chooser

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch without MKL")


def prepared_plans() -> list[_native.PreparedPlan]:
    return [item for item in gc.get_objects() if type(item) is _native.PreparedPlan]


def take_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "__call__", lambda self, linear, candidates: MKL if MKL in candidates else candidates[0])


@needs_mkl
@pytest.mark.parametrize("by_inputs", [False, True])
def test_values_at_the_usual_rows_and_at_others(monkeypatch: pytest.MonkeyPatch, by_inputs: bool) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 48, bias=False)
            self.third = nn.Parameter(torch.randn(48, 80))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(self.first(x).relu())
            return y.flatten(0, 1) @ self.third if by_inputs else y

    take_mkl(monkeypatch)
    torch.manual_seed(0)
    net = Layers().eval()
    seen: list[Event] = []
    compiled = fusewright.compile(net, dynamic=True, fullgraph=True, options={"disk_cache": False})
    others = set(map(id, prepared_plans()))
    with torch.no_grad(), STREAM.listening(seen.append):
        for batch, length in [
            (4, 20),
            (4, 20),
            (3, 7),
            *[(5, 33)] * 12,
            (4, 20),
            (0, 9),
            (1, 9),
            (2, 1),
            (4, 4),
            *[(4, 20)] * 20,
        ]:
            x = torch.randn(batch, length, 64)
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        odd = torch.full((4, 20, 64), float("nan"))
        assert compiled(odd).isnan().all()
        net.second.weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    graphs = [event.text() for event in seen if isinstance(event, StageDone) and event.stage == "parameters"]
    assert len(re.findall("_mkl_linear", graphs[0])) == 2 + by_inputs
    assert not [event for event in seen if isinstance(event, FellBack)]
    made = [item for item in prepared_plans() if id(item) not in others]
    plan = max(made, key=lambda one: one.prepared)  # beside one for sizes of 1, where they need their own
    assert len(made) <= 2 and plan.prepared == 4  # for the first call, for 5x33, for 4x20 again, for the weight
    assert [value for value in plan.values if isinstance(value, int)] == [4, 20]


@needs_mkl
def test_convolutions_by_one_pixel_over_images_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 64, 3, stride=2, bias=False), nn.Conv2d(64, 128, 1, bias=False)
            self.norm, self.third = nn.BatchNorm2d(128), nn.Conv2d(128, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.norm(self.second(self.first(x))).relu()).relu()

    take_mkl(monkeypatch)
    torch.manual_seed(0)
    net = Images().eval()
    net.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    seen: list[Event] = []
    compiled = fusewright.compile(net, dynamic=True, fullgraph=True, options={"disk_cache": False})
    others = set(map(id, prepared_plans()))
    with torch.no_grad(), STREAM.listening(seen.append):
        for size in [(2, 33, 20), (2, 33, 20), (1, 15, 40), *[(3, 21, 21)] * 9, (2, 33, 20), (5, 3, 3)]:
            x = torch.randn(size[0], 3, *size[1:])
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        net.norm.weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    graphs = [event.text() for event in seen if isinstance(event, StageDone) and event.stage == "parameters"]
    assert len(re.findall("_mkl_linear", graphs[0])) == 2
    assert not [event for event in seen if isinstance(event, FellBack)]
    (plan,) = [item for item in prepared_plans() if id(item) not in others]
    assert plan.prepared == 3  # for the first call, for 3x21x21, for the factor


def test_other_sizes_come_eight_times_on_end_then_sixteen_times() -> None:
    asked: list[tuple[int, ...]] = []

    def prepare(weight: torch.Tensor, *sizes: int) -> object:
        asked.append(sizes)
        return (*sizes, weight), (weight,), ((),)

    plan = _native.PreparedPlan(lambda *inputs: inputs, prepare, 3, (1,), (0, 2))
    weight = torch.ones(3)
    assert plan(5, weight, 6) == (5, weight, 6, 5, 6, weight)
    for size in range(40):
        plan(size, weight, 6)
    assert asked == [(5, 6)]
    for _ in range(8):
        plan(9, weight, 6)
        plan(5, weight, 6)
    assert asked == [(5, 6)]
    for number in range(9):
        assert plan(9, weight, 6)[3:5] == ((9, 6) if number >= 7 else (5, 6))
    for number in range(17):
        assert plan(1, weight, 1)[3:5] == ((1, 1) if number >= 15 else (9, 6))
    weight.add_(1)
    plan(2, weight, 2)
    assert asked == [(5, 6), (9, 6), (1, 1), (2, 2)]  # whatever is prepared anew is prepared for the call at hand
    with pytest.raises(ValueError, match="no input"):
        _native.PreparedPlan(lambda *inputs: inputs, prepare, 3, (1,), (3,))
    with pytest.raises(TypeError):
        plan("a", weight, 2)


@needs_mkl
def test_a_plan_for_usual_sizes_comes_back_from_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    take_mkl(monkeypatch)
    net = nn.Linear(64, 96).eval()
    stages: list[str] = []
    with torch.no_grad():
        for rows in (30, 30):
            compiled = fusewright.compile(net, dynamic=True)
            with STREAM.listening(lambda event: stages.append(event.stage) if isinstance(event, StageDone) else None):
                for count in (rows, rows, 3, rows):
                    x = torch.randn(count, 64)
                    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
            fusewright.reset()
    assert stages.count("parameters") == 1  # the second time it was on the disk


def test_no_matrix_is_laid_out_twice_for_few_rows_or_when_it_is_large() -> None:
    few = Linear(torch.float32, 4, 256, 256, True, True, varies=True)
    large = Linear(torch.float32, 64, 4096, LARGEST_TWICE // 4096 // 4 + 1, True, True, varies=True)
    for linear in (few, large):
        assert MKL not in candidates_for(linear) and likely(linear, candidates_for(linear)) != MKL
