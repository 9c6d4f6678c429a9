"""Names, arguments, options and stances of torch.compile: each is there, or an error or the page says what to use."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusewright
from fusewright.backends import registry
from fusewright.base import events, options
from fusewright.base.errors import FusewrightError, OptionError, warn_once
from fusewright.runtime import host
from fusewright.runtime.cache import DiskCache
from fusewright.tools.logs import ARTIFACTS

PAGE = (Path(__file__).parents[2] / "docs" / "from-torch-compile.md").read_text()
VARIABLES = """TORCH_LOGS TORCH_LOGS_OUT TORCH_LOGS_FORMAT TORCH_COMPILE_DEBUG TORCH_COMPILE_DEBUG_DIR TORCH_TRACE
TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE TORCHDYNAMO_VERBOSE TORCHDYNAMO_REPRO_AFTER TORCHDYNAMO_REPRO_LEVEL
TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
TORCHINDUCTOR_FORCE_DISABLE_CACHES TORCH_COMPILE_FORCE_DISABLE_CACHES TORCHINDUCTOR_FX_GRAPH_CACHE
TORCHINDUCTOR_AUTOGRAD_CACHE TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_COMPILE_THREADS"""
LOGS = """graph_breaks recompiles recompiles_verbose guards verbose_guards graph graph_code graph_code_verbose
graph_sizes pre_grad_graphs side_effects bytecode aot_graphs aot_graphs_effects aot_joint_graph post_grad_graphs
ir_pre_fusion fusion ir_post_fusion schedule compute_dependencies loop_ordering loop_tiling output_code kernel_code
autotuning benchmarking cache caching perf_hints cudagraphs cudagraph_static_inputs dynamic graph_region_expansion
hierarchical_compile compiled_autograd compiled_autograd_verbose ddp_graphs trace_bytecode trace_call
trace_shape_events trace_source inductor_metrics node_runtime_estimation overlap overlap_scheduling auto_chunker
incremental native_dsl annotation torch dynamo aot inductor export sym_node fake_tensor async_compile not_implemented
autograd c10d ddp distributed dtensor fsdp pp onnx onnx_diagnostics"""
# What torch.compiler has in PyTorch 2.11 and 2.13 (the page must hold for the oldest and the newest that are supported,
# whichever runs the tests), and what is not public in it.
OLDEST = """compile config assume_constant_result reset allow_in_graph substitute_in_graph list_backends disable set_stance
set_enable_guard_collectives cudagraph_mark_step_begin load_compiled_function wrap_numpy is_compiling is_dynamo_compiling
is_exporting save_cache_artifacts load_cache_artifacts keep_portable_guards_unsafe skip_guard_on_inbuilt_nn_modules_unsafe
skip_guard_on_all_nn_modules_unsafe keep_tensor_guards_unsafe skip_guard_on_globals_unsafe skip_all_guards_unsafe
nested_compile_region"""
NEWEST = f"{OLDEST} set_default_backend get_default_backend"
HELPERS = "Any CacheInfo Callable F FuncType NestedCompileRegionOptions ParamSpec TypeVar contextlib io torch"


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    seen: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Compiled):
            seen.append(event.function)

    with events.STREAM.listening(listen):
        yield seen


def section(heading: str) -> dict[str, str]:
    text = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| `")]
    return {name: here for names, here in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_page_maps_every_name_and_argument() -> None:
    names = {name for name in dir(torch.compiler) if not name.startswith("_")} - set(HELPERS.split())
    names -= {*dir(typing), *dir(dataclasses)}  # which its file imports from there
    assert names >= set(OLDEST.split())
    assert set(section("Names")) >= {f"torch.compiler.{name}" for name in {*names, *NEWEST.split()}}
    named = {name for here in section("Names").values() for name in re.findall(r"`fusewright\.(\w+)`", here)}
    assert named <= set(fusewright.__all__)
    assert set(section("Arguments")) >= set(inspect.signature(torch.compile).parameters)
    assert section("Options") == options.PEER_OPTIONS
    registered = torch._logging._internal.log_registry
    logs = {*registered.log_alias_to_log_qnames, *registered.artifact_names} - {"custom_format_test_artifact", "all"}
    assert set(section("Logs")) == {*logs, *LOGS.split()}
    ours = {name for here in section("Logs").values() if not here.startswith(("none", "`TORCH")) for name in here.split()}
    assert {name.strip("`,") for name in ours} <= set(ARTIFACTS)
    assert set(section("Environment variables")) == set(VARIABLES.split())


def test_every_argument_of_torch_compile_is_taken_or_explained() -> None:
    assert set(inspect.signature(torch.compile).parameters) <= set(inspect.signature(fusewright.compile).parameters)
    f = fusewright.compile(lambda x: x + 1, isolate_recompiles=True)
    assert torch.equal(f(torch.zeros(2)), torch.ones(2))
    with pytest.raises(OptionError, match="mark_dynamic"):
        fusewright.compile(lambda x: x, shapes_spec=object())


@pytest.mark.parametrize("name", options.PEER_OPTIONS)
def test_options_of_other_compilers_name_ours(name: str) -> None:
    assert name not in options.OPTIONS
    with pytest.raises(OptionError, match=f"option '{re.escape(name)}' is another compiler's") as error:
        fusewright.compile(lambda x: x, options={name: True})
    mentioned = re.findall(r"'(\w+)'", options.PEER_OPTIONS[name])
    assert all(option in options.OPTIONS or option in ("trace",) for option in mentioned)
    assert options.PEER_OPTIONS[name] in str(error.value)


WITHOUT = [name for name in registry.BUILT_IN if name not in ("native", "inductor", "onnxrt", "xla")]


@pytest.mark.parametrize("backend", [*WITHOUT, pytest.param(lambda gm, inputs: gm.forward, id="callable")])
def test_backends_refuse_what_they_do_not_take(backend: Any) -> None:
    with pytest.raises(OptionError, match=r"takes no options.*epilogue"):
        fusewright.compile(lambda x: x + 1, backend=backend, options={"epilogue": True})
    with pytest.raises(OptionError, match="takes no mode"):
        fusewright.compile(lambda x: x + 1, backend=backend, mode="max-autotune")
    with pytest.raises(OptionError, match="takes bool"):
        fusewright.compile(lambda x: x + 1, backend=backend, options={"capture_scalar_outputs": 1})


def test_backends_get_the_mode_and_the_options_that_they_take() -> None:
    got: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], mode: str = "none", options: Any = None) -> Any:
        got.append((mode, options))
        return gm.forward

    x = torch.ones(2)
    fusewright.compile(lambda x: x + 1, backend=backend, mode="of its own", options={"a": 1})(x)
    fusewright.compile(lambda x: x + 1, backend=backend)(x)
    assert got == [("of its own", {"a": 1}), ("none", None)]
    with pytest.raises(OptionError, match="unknown mode"):
        fusewright.compile(lambda x: x, mode="of its own")


def test_options_of_capture_count_under_every_backend() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2

    asked = {"capture_dynamic_output_shape_ops": True}
    x = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(fusewright.GraphBreakError):
        fusewright.compile(f, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(fusewright.compile(f, backend="aot_eager", fullgraph=True, options=asked)(x), f(x))


def test_options_without_effect_on_a_cpu_say_so_once() -> None:
    warn_once.cache_clear()
    with pytest.warns(fusewright.OptionWarning, match="reduce-overhead") as told:
        for _ in range(2):
            fusewright.compile(lambda x: x + 1, mode="reduce-overhead")(torch.ones(2))
    assert len([one for one in told if issubclass(one.category, fusewright.OptionWarning)]) == 1


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile"])
def test_the_first_call_runs_eagerly_under_a_stance(stance: str, compiled: list[str]) -> None:
    with fusewright.set_stance(stance):
        f = fusewright.compile(lambda x: x * 2)
        counts = [(f(torch.ones(3)).sum().item(), len(compiled)) for _ in range(3)]
    assert counts == [(6.0, 0), (6.0, 1), (6.0, 1)]


def test_unsound_stances_are_explained() -> None:
    for wrong in ({"skip_guard_eval_unsafe": True}, {"force_backend": "eager"}):
        with pytest.raises(OptionError, match="set_stance"):
            fusewright.set_stance("default", **wrong)


def test_default_backend(compiled: list[str]) -> None:
    assert fusewright.get_default_backend() == "native"
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(1)
        return gm.forward

    fusewright.set_default_backend(backend)
    try:
        assert fusewright.get_default_backend() is backend
        fusewright.compile(lambda x: x + 1)(torch.ones(2))
    finally:
        fusewright.set_default_backend(None)
    fusewright.compile(lambda x: x + 1)(torch.ones(2))
    assert seen == [1] and len(compiled) == 2
    with pytest.raises(OptionError, match="unknown backend"):
        fusewright.set_default_backend("nativ")


def test_config_gives_the_defaults(compiled: list[str]) -> None:
    before = dict(vars(fusewright.config))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    with fusewright.config.patch(dynamic=True, fusion=False), fusewright.config.patch({"recompile_limit": 3}):
        settings = options.settings()
        assert (settings.dynamic, settings["fusion"], settings.recompile_limit) == (True, False, 3)
        assert options.settings(dynamic=False, options={"fusion": True})["fusion"] is True
        g = fusewright.compile(f)
    for size in (3, 4, 5):
        assert torch.equal(g(torch.ones(size)), torch.full((size,), float(size)))
    assert len(compiled) == 1 and vars(fusewright.config) == before
    with fusewright.config.patch("triton.cudagraphs", True):
        assert options.settings()["triton.cudagraphs"] is True
    for name, value, match in (
        ("fusoin", True, "did you mean 'fusion'"),
        ("fusion", 1, "takes bool"),
        ("recompile_limit", 0, "cannot be 0"),
        ("cache_size_limit", 3, "recompile_limit"),
    ):
        with pytest.raises(OptionError, match=match), fusewright.config.patch(**{"dynamic": True, name: value}):
            raise AssertionError
    assert vars(fusewright.config) == before


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for answer in (fusewright.is_exporting(), torch.compiler.is_exporting()):
            x = x + (10 if answer else 1)
        return x


def test_is_exporting() -> None:
    x = torch.zeros(2)
    assert torch.equal(Asks()(x), x + 2) and torch.equal(fusewright.compile(Asks(), fullgraph=True)(x), x + 2)
    assert torch.equal(fusewright.export(Asks(), (x,)).module()(x), x + 20)


def test_wrap_numpy() -> None:
    f = fusewright.wrap_numpy(lambda a, b: (np.sin(a) * 2, b))
    compiled = fusewright.compile(f, fullgraph=True)
    x = torch.rand(3)
    for function in (f, compiled):
        first, second = function(x, 3)
        torch.testing.assert_close(first, x.sin() * 2)
        assert second == 3
    with pytest.raises(RuntimeError, match=r"requires grad"):
        f(x.requires_grad_(), 3)


@pytest.mark.parametrize("api", [fusewright, torch.compiler])
def test_regions_and_steps_change_nothing(api: Any) -> None:
    @api.nested_compile_region
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def f(x: torch.Tensor) -> torch.Tensor:
        fusewright.cudagraph_mark_step_begin()
        return inner(inner(x))

    x = torch.rand(3)
    if api is fusewright:
        assert fusewright.nested_compile_region(max_reuse_entries=3)(inner) is inner
    torch.testing.assert_close(fusewright.compile(f, fullgraph=True)(x), f(x))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    return host.store()


def test_cache_artifacts_are_what_this_process_used(cache: DiskCache, compiled: list[str]) -> None:
    assert fusewright.save_cache_artifacts() is None
    with torch.no_grad():
        fusewright.compile(lambda x: x.sin() * 3)(torch.ones(5))
    mine = set(cache.used)
    other = "ab" * 32
    DiskCache(cache.folder, 1 << 20).put(other, "another process's", b"x")
    saved = fusewright.save_cache_artifacts()
    assert saved is not None and type(saved[0]) is bytes and saved[1].entries == len(mine) >= 1
    cache.clear()
    assert fusewright.load_cache_artifacts(saved[0]) == saved[1]
    assert {entry.key for entry in cache.entries()} == mine
    uses: list[events.Event] = []
    with events.STREAM.listening(uses.append), torch.no_grad():
        fusewright.compile(lambda x: x.sin() * 3)(torch.ones(5))
    assert [use.hit for use in uses if isinstance(use, events.CacheUse)] == [True]


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"no zip", lambda b: b[: len(b) // 2], lambda b: b[:-1]])
def test_damaged_artifacts_are_refused(cache: DiskCache, damage: Any) -> None:
    cache.put("ab" * 32, "f", b"x" * 1000)
    saved = fusewright.save_cache_artifacts()
    assert saved is not None
    cache.clear()
    with pytest.raises(FusewrightError, match="no bundle"):
        fusewright.load_cache_artifacts(damage(saved[0]))
    assert not cache.entries()
