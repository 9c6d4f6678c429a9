"""Each documented option changes something: what is seen of a compile or a call without it and with it."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fusewright
from fusewright.backends import pipeline
from fusewright.base import events
from fusewright.base.options import OPTIONS, SKIPPABLE
from fusewright.select import linear
from tests.listening import kernel_names, products, stage_texts

Seen = Callable[[dict[str, Any]], object]


def heard(options: dict[str, Any], function: Any, *inputs: torch.Tensor) -> list[events.Event]:
    """The events of a call, and of its backward if it has one."""
    found: list[events.Event] = []
    with events.STREAM.listening(found.append):
        result = fusewright.compile(function, options={"disk_cache": False} | options)(*inputs)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    return found


def stages(found: list[events.Event]) -> dict[str, str]:
    return {event.stage: event.text() for event in found if isinstance(event, events.StageDone)}


def kernels(options: dict[str, Any]) -> int:
    found = heard(options, lambda x: (x.exp() + 1).relu(), torch.randn(100))
    return sum(isinstance(event, events.KernelMade) for event in found)


def code(options: dict[str, Any]) -> str:
    if platform.machine() != "x86_64":
        pytest.skip("the other target is one of x86-64")
    return stages(heard(options, lambda x: x.exp(), torch.randn(100)))["kernels"]


def rewrites(options: dict[str, Any]) -> str:
    found = heard(options, lambda x: (x + 0).view(4, 25).t().t() * 1.0, torch.randn(100))
    return stages(found)["passes"]


def breaks(function: Callable[..., Any], *inputs: torch.Tensor) -> Seen:
    return lambda options: sum(isinstance(one, events.Broken) for one in heard(options, function, *inputs))


def skipped(options: dict[str, Any]) -> list[str]:
    def loop(x: torch.Tensor) -> torch.Tensor:
        total = 0
        for number in range(1000):
            total += number
        return x + total

    return [event.report.code for event in heard(options, loop, torch.ones(3)) if isinstance(event, events.Skipped)]


def slow(options: dict[str, Any]) -> list[str]:
    found = heard(options, lambda x: x.sin() + 1, torch.ones(3))
    return [event.report.code for event in found if isinstance(event, events.Skipped)]


def saved(options: dict[str, Any]) -> str:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return stages(heard(options, lambda x: torch.sigmoid(model(torch.tanh(x))) * 2, torch.randn(8, 16)))[
        "forward graph"
    ]


def stage_runs(name: str, model: Callable[[], nn.Module], *shape: int) -> Seen:
    def see(options: dict[str, Any]) -> bool:
        with torch.no_grad():
            return name in stages(heard(options, model().eval(), torch.randn(*shape)))

    return see


def dropped_like_eager(options: dict[str, Any]) -> bool:
    x = torch.ones(1000)
    torch.manual_seed(1)
    got = fusewright.compile(lambda x: F.dropout(x, 0.5), options={"disk_cache": False} | options)(x)
    torch.manual_seed(1)
    return torch.equal(got, F.dropout(x, 0.5))


def on_this_thread(options: dict[str, Any]) -> bool:
    done = threading.Event()
    threads: list[int] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Compiled):
            threads.append(threading.get_ident())
            done.set()

    with events.STREAM.listening(listen):
        fusewright.compile(lambda x: x.sin(), options={"disk_cache": False} | options)(torch.ones(3))
        assert done.wait(60)
    return threads == [threading.get_ident()]


def kept_bytes(options: dict[str, Any]) -> bool:
    """Whether the process keeps a call's 64 MiB of temporary memory."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("what memory a process has is read from /proc")
    weight, x = torch.randn(4, 4), torch.ones(1 << 22, 4)
    with torch.no_grad():
        compiled = fusewright.compile(lambda x: ((x + 1) @ weight).sum(0), options={"disk_cache": False} | options)
        compiled(x[:8])
        before = int(statm.read_text().split()[1])
        for _ in range(2):
            compiled(x)
        return (int(statm.read_text().split()[1]) - before) * 4096 > 48 << 20


def begun(options: dict[str, Any]) -> int:
    """How many collectives begin, in a group of this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = x + 1, x * 2, x.sin() @ x
        for one in found:
            dist.all_reduce(one)
        return found

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with fusewright.config.patch(dynamic=False):
            found = heard({"pack_weights": False} | options, function, torch.ones(4, 4))
        return stages(found)["loops"].count("_c10d_functional.all_reduce")
    finally:
        dist.destroy_process_group()


def memory_plan(options: dict[str, Any]) -> str:
    weight = torch.randn(8, 8)
    return stages(heard(options, lambda x: ((x + 1) @ weight).relu() @ weight, torch.randn(4, 8)))["memory"]


def test_every_stage_of_a_plan_can_be_skipped() -> None:
    assert [stage.name for stage in pipeline.PLAN_STAGES] == list(SKIPPABLE)


class Seeing:
    """What options are seen by that need a test's fixtures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
        monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder / "cache"))

    def debug_folder(self, options: dict[str, Any]) -> bool:
        heard(options, lambda x: x + 1, torch.ones(3))
        return (self.folder / "fusewright_debug").exists()

    def cache(self, options: dict[str, Any]) -> bool:
        fusewright.compile(lambda x: x + 2, options=options)(torch.ones(3))
        found = any(path.is_file() for path in self.folder.rglob("*") if "graphs" in str(path) or "cache" in str(path))
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        return found

    def measured(self, options: dict[str, Any]) -> list[tuple[str, ...]]:
        """The candidates that are measured for a linear layer."""
        asked: list[tuple[str, ...]] = []

        def measured(layer: Any, candidates: Any, default: str) -> str:
            asked.append(tuple(candidates))
            return default

        self.monkeypatch.setattr(linear, "measured", measured)
        self.monkeypatch.setattr(linear, "_known", {})
        self.monkeypatch.setattr(linear.generated_gemm, "is_possible_for", lambda layer, target=None: True)
        with torch.no_grad():
            heard(options, nn.Linear(256, 768), torch.randn(64, 256))
        return asked


def has_product(options: dict[str, Any], model: nn.Module) -> bool:
    with kernel_names() as made, torch.no_grad():
        fusewright.compile(model, options=options)(torch.randn(64, 256))
    return products(made) > 0


def calls_sleef(options: dict[str, Any]) -> bool:
    with stage_texts("kernels") as texts:
        fusewright.compile(torch.cos, options=options | {"disk_cache": False})(torch.randn(256))
    return "Sleef_cos" in "".join(texts)


def replays(options: dict[str, Any], trains: bool = False) -> bool:
    """Whether launches are those of a recorded CUDA graph."""
    model = nn.Linear(64, 64, device="cuda").requires_grad_(trains)
    compiled = fusewright.compile(lambda x: model(x).relu(), options={"disk_cache": False} | options)
    for _ in range(6):
        x = torch.randn(8, 64, device="cuda")
        if trains:
            compiled(x).sum().backward()
        else:
            compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    return any("cudaGraphLaunch" in event.key for event in profile.key_averages())


def padded(options: dict[str, Any]) -> bool:
    halves = (torch.randn(2047, 2047, device="cuda", dtype=torch.float16) for _ in range(2))
    return "padding" in stages(heard(options, torch.matmul, *halves))


ON_A_GPU: dict[str, tuple[Any, Any]] = {
    "shape_padding": (lambda seeing: padded, False),
    "triton.cudagraphs": (lambda seeing: replays, True),
    "triton.cudagraphs_training": (
        lambda seeing: lambda options: replays({"triton.cudagraphs": True} | options, trains=True),
        False,
    ),
}
DEFAULT_AND_OTHER: dict[str, tuple[Any, Any]] = {
    "max_autotune": (lambda seeing: seeing.measured, True),
    "trace.enabled": (lambda seeing: seeing.debug_folder, True),
    "disk_cache": (lambda seeing: seeing.cache, False),
    "bucket": (
        lambda seeing: lambda options: "buckets" in stages(heard(options, lambda x: x.cumsum(1), torch.ones(2, 5))),
        {"seq": [8, 16]},
    ),
    "fallback_random": (lambda seeing: dropped_like_eager, True),
    "activation_memory_budget": (lambda seeing: saved, 0.0),
    "layout": (
        lambda seeing: stage_runs(
            "layout", lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), 2, 8, 16, 16
        ),
        False,
    ),
    "pack_weights": (lambda seeing: stage_runs("packing", lambda: nn.Linear(64, 64), 4, 64), False),
    "library_products": (
        lambda seeing: lambda options: has_product(options | {"disk_cache": False}, nn.Linear(256, 768).eval()),
        False,
    ),
    "join_collectives": (lambda seeing: begun, True),
    "cut_collectives": (lambda seeing: begun, 2),
    "vector_functions": (lambda seeing: calls_sleef, False),
    "capture_dynamic_output_shape_ops": (
        lambda seeing: breaks(lambda x: x[x > 0] * 2, torch.tensor([1.0, -1.0, 2.0])),
        True,
    ),
    "capture_scalar_outputs": (lambda seeing: breaks(lambda x, n: x * n.item(), torch.ones(3), torch.tensor(3)), True),
    "speculate": (lambda seeing: breaks(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(3)), True),
    "background": (lambda seeing: on_this_thread, True),
    "fusion": (lambda seeing: kernels, False),
    "target": (lambda seeing: code, "x86-64-v2"),
    "checked": (lambda seeing: code, True),
    "skip_stage": (lambda seeing: memory_plan, "memory"),
    "stop_after_rewrites": (lambda seeing: rewrites, 0),
    "instruction_limit": (lambda seeing: skipped, 500),
    "compile_seconds": (lambda seeing: slow, 1e-6),
    "arena_limit_mib": (lambda seeing: kept_bytes, 1),
}
"""How an option is seen, and a value of it beside its default."""


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seeing:
    return Seeing(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", [*DEFAULT_AND_OTHER, *ON_A_GPU])
def test_an_option_changes_something(name: str, seeing: Seeing) -> None:
    if name in ON_A_GPU and not torch.cuda.is_available():
        pytest.skip("no GPU")
    see, other = (DEFAULT_AND_OTHER | ON_A_GPU)[name]
    see = see(seeing)
    without = see({})
    fusewright.reset()
    assert see({name: other}) != without


def test_without_time_nothing_is_measured(seeing: Seeing) -> None:
    assert seeing.measured({"max_autotune": True, "autotune_seconds": 30.0})
    assert not seeing.measured({"max_autotune": True, "autotune_seconds": 0.0})


def test_no_option_is_left_out() -> None:
    assert set(OPTIONS) == DEFAULT_AND_OTHER.keys() | {"autotune_seconds"} | ON_A_GPU.keys()
