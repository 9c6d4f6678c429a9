"""Compiled graphs on disk: found by a later process, never used for another graph, and the same results either way."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import graph_cache
from fusewright.base import events
from fusewright.base.errors import CacheWarning, OptionError
from fusewright.base.records import replace
from fusewright.codegen.device_kernel import Processor
from fusewright.graph.fingerprint import Fingerprint, fingerprint
from fusewright.runtime import cuda_code, host
from fusewright.tools import cli
from tests.graph.texts import graph_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def uses(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[bool]]:
    """The result of a fresh compile of `function`, and for each graph whether it came from the cache."""
    hits: list[bool] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.CacheUse):
            hits.append(event.hit)

    fusewright.reset()
    with events.STREAM.listening(listen):
        result = fusewright.compile(function, **options)(*args)
    return result, hits


def test_the_second_compile_finds_the_first() -> None:
    x = torch.randn(30, 40)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).softmax(-1) + torch.lgamma(x.abs() + 1)

    first, missed = uses(f, x)
    second, found = uses(f, x)
    assert (missed, found) == ([False], [True])
    assert torch.equal(first, second)
    torch.testing.assert_close(second, f(x))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.sin() * 3,
        lambda x: x.sin() * 2.0000000000000004,
        lambda x: x.cos() * 2,
        lambda x: x.sin() * 2 + x,
        lambda x: (x.sin() * 2).double(),
        lambda x: x.sin() * torch.tensor(2.0),
        lambda x: x.sin() * torch.tensor(3.0),
    ],
)
def test_another_graph_is_another_entry(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(30)
    uses(lambda x: x.sin() * 2, x)
    uses(lambda x: x.sin() * torch.tensor(2.5), x)
    result, hits = uses(other, x)
    assert hits == [False]
    torch.testing.assert_close(result, other(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:-1],
        lambda x: x.reshape(3, 10),
        lambda x: torch.cat((x, x))[::2],
    ],
)
def test_another_input_is_another_entry(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    result, hits = uses(f, change(x), dynamic=False)
    assert hits == [False]
    torch.testing.assert_close(result, f(change(x)))


def test_options_and_global_state_are_part_of_the_key() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    assert uses(f, x, options={"fusion": False})[1] == [False]
    assert uses(f, x, options={"disk_cache": False})[1] == []
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert uses(f, x)[1] == [False]
    finally:
        torch.set_num_threads(threads)
    assert uses(f, x)[1] == [True]


def test_gradients_come_from_cached_halves() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().mean()

    gradients = []
    hits = []
    for _ in range(2):
        layer.zero_grad()
        result, found = uses(loss, x)
        result.backward()
        hits.append(found)
        gradients.append([p.grad for p in layer.parameters()])
    layer.zero_grad()
    loss(x).backward()
    assert hits == [[False, False], [True, True]]
    for cached, fresh, parameter in zip(gradients[1], gradients[0], layer.parameters()):
        assert torch.equal(cached, fresh)
        torch.testing.assert_close(cached, parameter.grad)


def test_relations_between_sizes_are_guards_again() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2).reshape(-1, 4).sum(1) + (y.reshape(-1, 4)[:, 0] if y.shape[0] == x.shape[0] else 1)

    sizes = [(16, 16), (16, 16), (16, 16), (24, 24), (24, 40), (40, 40), (12, 12)]
    for n, m in sizes:
        fusewright.reset()
        compiled = fusewright.compile(f, dynamic=True)
        for k, l in [(n, m), (n * 2, m * 2), (n + 4, n + 4), (n + 4, m + 8)]:
            x, y = torch.randn(k), torch.randn(l)
            torch.testing.assert_close(compiled(x, y), f(x, y))
    assert host.store().entries()


def test_a_damaged_entry_is_compiled_again(folder: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    (file,) = folder.glob("*/*.fw")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    with pytest.warns(CacheWarning, match="damaged"):
        result, hits = uses(f, x)
    assert hits == [False] and torch.allclose(result, f(x))
    assert uses(f, x)[1] == [True]


def test_a_flipped_bit_anywhere_never_runs(folder: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    (file,) = folder.glob("*/*.fw")
    whole = file.read_bytes()
    generator = random.Random(0)
    for at in (*range(0, 60, 7), *(generator.randrange(len(whole)) for _ in range(15)), len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        with pytest.warns(CacheWarning, match="damaged"):
            result, hits = uses(f, x)
        assert hits == [False] and torch.allclose(result, f(x)) and uses(f, x)[1] == [True]


def test_another_kind_of_host_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    for name in ("_sources", "_processor"):
        with monkeypatch.context() as patch:
            patch.setattr(host, name, lambda: "another")
            host.host_text.cache_clear()
            assert uses(f, x)[1] == [False]
        host.host_text.cache_clear()
    for module, attribute in (
        (torch, "__version__"),
        (torch.version, "git_version"),
        (sys.implementation, "cache_tag"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, "another")
            host.host_text.cache_clear()
            assert uses(f, x)[1] == [False]
        host.host_text.cache_clear()
    assert uses(f, x)[1] == [True]


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with an unknown user number: no home, no entry in the list of users."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FUSEWRIGHT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(Path, "home", staticmethod(nobody))
    _, hits = uses(lambda x: x.sin() * 2, torch.ones(3))
    assert hits == [False] and host.store().folder.parent == tmp_path and host.store().entries()


def test_a_wrong_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_MIB", "many")
    with pytest.raises(OptionError, match="FUSEWRIGHT_CACHE_MIB is 'many'"):
        fusewright.compile(lambda x: x.sin() * 2)(torch.ones(3))


def test_kernels_of_cached_graphs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    reports = []
    for _ in range(2):
        fusewright.reset()
        reports.append(fusewright.explain(f)(x))
    assert [k.name for k in reports[0].kernels] == [k.name for k in reports[1].kernels]
    assert reports[0].kernels[0].locations == reports[1].kernels[0].locations != ()


PROGRAM = """
    import json, sys, time
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.Softmax(-1)).eval()
    x = torch.randn(10, 32)
    with torch.no_grad():
        import fusewright
        result = fusewright.compile(model)(x)
        wrong = (result - model(x)).abs().max().item()
    late = [name for name in ("llvmlite", "fusewright.loops.lower", "fusewright.schedule", "fusewright.graph.passes") if name in sys.modules]
    others = ("backends.gpu", "backends.autotune", "codegen.triton", "graph.passes.bucket", "backends.joint", "autograd.partition")
    unneeded = [name for name in others if f"fusewright.{name}" in sys.modules]
    print(json.dumps([wrong, late, result.sum().item(), unneeded]))
"""


def test_a_warm_process_imports_no_compiler(folder: Path) -> None:
    def run() -> Any:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    cold, warm = run(), run()
    assert cold[1] and not warm[1]
    assert cold[0] < 1e-6 and warm[0] < 1e-6 and cold[2] == warm[2]
    assert cold[3] == warm[3] == []  # what GPUs, buckets and training need


def test_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(30)
    uses(f, x)
    assert cli.main(["cache", "size"]) == 0 and "1 entries" in capsys.readouterr().out
    assert cli.main(["cache", "list"]) == 0 and "test_graph_cache.py" in capsys.readouterr().out
    bundle = tmp_path / "bundle.zip"
    assert cli.main(["cache", "export", str(bundle)]) == 0
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "other"))
    assert cli.main(["cache", "import", "--trust", str(bundle)]) == 0
    assert uses(f, x)[1] == [True]
    capsys.readouterr()
    (file,) = (tmp_path / "other").glob("*/*.fw")
    file.write_bytes(b"nonsense")
    assert cli.main(["cache", "verify"]) == 1 and "damaged" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert cli.main(["cache", "import", "--trust", str(tmp_path / "missing.zip")]) == 2
    (tmp_path / "no.zip").write_bytes(b"no zip")
    assert cli.main(["cache", "import", "--trust", str(tmp_path / "no.zip")]) == 2


def test_what_a_program_has_taken_for_granted_of_its_sizes_is_part_of_the_key() -> None:
    """Passes may rely on it: the graph alone does not say that the first program is for sizes of 2 and more."""

    def asks(x: torch.Tensor) -> torch.Tensor:
        assert not x.t().is_contiguous()
        return x.sin()

    def does_not(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    hits = [uses(program, torch.randn(3, 4), dynamic=True)[1] for program in (asks, does_not, asks, does_not)]
    assert hits == [[False], [False], [True], [True]]


def two_products(first: str, second: str) -> str:
    return f"""
        %x: float32[4, 8]@{first} = input
        %y: float32[8, 4]@{second} = input
        %z: float32[8, 8]@{first} = input
        %0 = aten.mm(%x, %z)
        return [%0, %y]
    """


def test_gpus_are_counted_as_a_graph_names_them() -> None:
    """Processes with a GPU each share an entry; another arrangement of GPUs is another graph."""

    def named(first: str, second: str) -> Fingerprint:
        found = fingerprint(graph_of(two_products(first, second)), {})
        assert found is not None
        return found

    alone, other, pair = named("cuda:0", "cuda:0"), named("cuda:1", "cuda:1"), named("cuda:0", "cuda:1")
    assert (alone.gpus, other.gpus, pair.gpus) == ((0,), (1,), (0, 1))
    assert alone.digest == other.digest != pair.digest
    assert named("cuda:5", "cuda:2") == Fingerprint(pair.digest, (5, 2))
    assert named("cpu", "cpu").gpus == ()
    assert len({named(*devices).digest for devices in itertools.product(("cpu", "cuda:0"), repeat=2)}) == 4


def test_an_entry_for_gpus_is_for_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function's entry is found on another GPU of the same kind, and not on one of another kind."""
    now = [0]
    made = graph_cache.fingerprint
    monkeypatch.setattr(graph_cache, "fingerprint", lambda *given: replace(made(*given), gpus=tuple(now)))
    monkeypatch.setattr(cuda_code, "processor", lambda index: Processor(90 if index < 2 else 80, 132))

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin() - 1

    found = []
    for now[0] in (0, 1, 2, 0):
        found += uses(f, torch.randn(7, 5))[1]
    assert found == [False, True, False, True]
