"""Names in a profile: each region, kernel and library call leads to the module and the user's line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fusewright
from fusewright.runtime import launch


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.project(self.norm(x)))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def names(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile() as profile:
        call()
    return [event.name for event in profile.events()]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("layers", [2, 10])  # the steps of 10 layers are those of a few
def test_each_step_of_a_compiled_call_has_a_name(
    layers: int, trains: bool, warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    line = f"test_profile.py:{inspect.getsourcelines(Layer.forward)[1] + 1}"
    model, x = Model(layers), torch.randn(4, 32)
    for _ in range(1 + warm):
        fusewright.reset()
        compiled = fusewright.compile(model)

        def call() -> None:
            with torch.set_grad_enabled(trains):
                result = compiled(x)
                if trains:
                    result.sum().backward()

        call()
        call()
        found = names(call)
    regions = [name for name in found if name.startswith("fusewright: Model.forward (test_profile.py:")]
    assert len(regions) == (2 if trains else 1)
    assert not trains or (regions[0].endswith(" forward") and regions[1].endswith(" backward"))
    steps = [name for name in found if "[" in name]
    first = next((place for place, name in enumerate(found) if name == regions[-1]), 0) if trains else len(found)
    halves = [found[:first], found[first:]] if trains else [found]
    outermost = f" from test_profile.py:{inspect.getsourcelines(Model.forward)[1] + 2}"
    assert all(line in name and outermost in name for name in steps)
    for half in halves:
        text = "\n".join(name for name in half if "[" in name)
        for layer in range(layers):
            assert re.search(rf"fused_\w+ \[[^\]]*layers\.{layer}[. ]", text), (layer, text)
            assert re.search(rf"(::|product_)\w+ \[[^\]]*layers\.{layer}\.project ", text), (layer, text)


def test_modules_of_a_closure_are_told_apart() -> None:
    first, second = Layer(), Layer()
    compiled = fusewright.compile(lambda x: second(first(x)))
    x = torch.randn(4, 32)
    with torch.no_grad():
        compiled(x)
        text = " ".join(name for name in names(lambda: compiled(x)) if "[" in name)
    assert {"first.norm", "first.project", "second.norm", "second.project"} <= set(re.split(r"[\[\] ]+", text))


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = launch._step_labels
    monkeypatch.setattr(launch, "_step_labels", lambda *args: asked.append(args) or original(*args))
    compiled = fusewright.compile(lambda x: torch.tanh(x) + 1)
    x = torch.randn(8)
    compiled(x)
    assert not asked
    assert any("fused" in name for name in names(lambda: compiled(x)))
    names(lambda: compiled(x))
    assert len(asked) == 1


def test_kernels_are_put_down_to_the_users_line_and_module() -> None:
    with torch.no_grad():
        report = fusewright.explain(Model(3))(torch.randn(4, 32))
    places = [location for kernel in report.kernels for location in kernel.locations]
    assert all(location.file == __file__ for location in places)
    assert {location.module[: len("layers.0")] for location in places} == {"layers.0", "layers.1", "layers.2"}
    outermost = inspect.getsourcelines(Model.forward)[1] + 2
    assert {location.outermost for location in places} == {f"test_profile.py:{outermost}"}
