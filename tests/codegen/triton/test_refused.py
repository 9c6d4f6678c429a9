"""Kernels that their compiler, or the driver, refuses: they alone are replaced, whatever the reason; the plan's results stay."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright.backends import gpu, pipeline
from fusewright.base.errors import InternalErrorWarning
from fusewright.base.events import STREAM, Event, Hint
from fusewright.codegen.device_kernel import DeviceKernel, Processor, Unsupported
from fusewright.codegen.triton import compiler as triton_compiler, operations, tiles
from fusewright.loops.lower import promotion
from fusewright.runtime import cuda_code
from fusewright.schedule.plan import Plan, RunExtern
from tests.select.test_chained_products import on_a_gpu

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETS = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

PROGRAM = '''
import hashlib, json, os, re, sys, time
from pathlib import Path

here = Path(__file__).parent
for line in sys.stdin:
    job = json.loads(line)
    with (here / "asked").open("a") as asked:
        asked.write(job["symbol"] + "\\n")
    error, lasting = next(((e, l) for part, e, l in json.loads((here / "rules").read_text()) if re.search(part, job["text"])), ("", False))
    if error == "end":
        sys.exit()
    if error == "hang":
        if os.fork() == 0:
            (here / "child").write_text(str(os.getpid()))
        time.sleep(100)
    path = Path(job["path"])
    if not error:
        body = json.dumps({"name": job["symbol"], "shared": 0, "warps": job["warps"]}).encode() + b"\\nmachine code"
        digest = hashlib.sha256(path.stem.encode() + b"\\0" + body).hexdigest().encode()
        path.write_bytes(%r + digest + b"\\n" + body)
    print(json.dumps({"path": job["path"], "error": error, "lasting": lasting}), flush=True)
'''


@dataclass
class Gpu:
    """Stands for a GPU and for Triton's process. rules: what of a kernel's text is refused, the error, and whether it lasts; driver: what of a
    kernel's name the driver refuses."""

    folder: Path
    driver: str = "^$"
    loads: list[str] = field(default_factory=list)

    def rules(self, *rules: tuple[str, str, bool]) -> None:
        (self.folder / "rules").write_text(json.dumps(rules))

    @property
    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().split() if file.exists() else []

    def load(self, code: bytes, name: str, shared: int) -> tuple[int, int, int]:
        self.loads.append(name)
        if re.search(self.driver, name):
            raise RuntimeError("setting a kernel's shared memory: invalid argument")
        return 1, 0, 0


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Gpu:
    made = Gpu(folder)
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "1")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(folder / "cache"))
    for name, value in {
        "COMPILER": cuda_code.Compiler(), "_loaded": {}, "_refused": {}, "processor": lambda index: Processor(90, 132),
        "triton_version": lambda: "3.6.0", "_native": types.SimpleNamespace(cuda_load=made.load),
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda_code, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    for name in ("current_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(promotion, "_converts_float8", lambda device: True)
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    made = stand_in(monkeypatch, tmp_path)
    shutil.copy(Path(triton_compiler.__file__).with_name("library.py"), tmp_path)
    (tmp_path / "compiler.py").write_text(PROGRAM % triton_compiler.MAGIC)
    made.rules()
    monkeypatch.setattr(cuda_code, "_PROGRAM", tmp_path / "compiler.py")
    yield made
    cuda_code.COMPILER.stop()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gpu]:
    """With Triton's own process."""
    if not HAS_TRITON:
        pytest.skip("needs Triton")
    made = stand_in(monkeypatch, tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield made
    cuda_code.COMPILER.stop()


@dataclass
class Made:
    """plan: as scheduled; kernels: of the call plan."""

    plan: Plan
    kernels: list[DeviceKernel]
    hints: list[str]
    warned: list[str]

    @property
    def externs(self) -> list[str]:
        found = (step.extern.target for step in self.plan.steps if isinstance(step, RunExtern))
        return sorted(target._schema.name.removeprefix("aten::") for target in found)


def generated(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Made:
    """What the native backend makes of the function on a GPU; checked against eager where kernels can be interpreted."""
    graphs: list[tuple[Any, Any]] = []
    plans: list[Plan] = []
    generate, build = pipeline.generate, pipeline.build_call_plan

    def generating(graph: Any, to_compile: Any, name: str, half: Any = "") -> Any:
        graphs.append((graph, to_compile))
        return generate(graph, to_compile, name, half)

    def building(plan: Plan, *args: Any, **kwargs: Any) -> Any:
        plans.append(plan)
        return build(plan, *args, **kwargs)

    heard: list[Event] = []
    with pytest.MonkeyPatch.context() as patch, STREAM.listening(heard.append):
        patch.setattr(pipeline, "generate", generating)
        patch.setattr(pipeline, "build_call_plan", building)
        copies = [one.clone() for one in inputs]
        with torch.no_grad():
            fusewright.compile(function, fullgraph=True, options={"disk_cache": False})(*copies)
        ((graph, to_compile),) = graphs
        heard.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = generate(on_a_gpu(graph), to_compile, "f")
    plan = plans[-1]
    if INTERPRETS:
        from tests.codegen.triton.harness import run_plan

        given, expected = [one.clone() for one in inputs], [one.clone() for one in inputs]
        found, wanted = run_plan(plan, given), function(*expected)
        torch.testing.assert_close(found[: len(wanted)], list(wanted), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(given, expected)
    kernels = [code for code in made.kernels if isinstance(code, DeviceKernel)]
    assert {code.symbol for code in kernels} == {code.symbol for code in kernels if not cuda_code.refusal(code.key, 0)}
    hints = [event.text for event in heard if isinstance(event, Hint)]
    return Made(plan, kernels, hints, [str(one.message) for one in warned if one.category is InternalErrorWarning])


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).erf() + 1
    z = torch.mm(y, w).tanh()
    return z.sum(-1), z.cos()


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(64, 48), torch.randn(48, 32)]


def test_only_that_kernel_is_replaced(device: Gpu) -> None:
    whole = generated(program, operands())
    assert whole.externs == ["mm"] and not whole.hints and not whole.warned
    assert len(whole.kernels) == 2
    device.rules(("lib.erf", "RuntimeError: PassManager::run failed", True))
    assert cuda_code.COMPILER.errors == {}
    shutil.rmtree(device.folder / "cache")
    cuda_code._loaded.clear()
    made = generated(program, operands())
    assert {"erf", "mm"} <= set(made.externs) <= {"add", "erf", "mm", "mul"}
    assert "tl.cos" in "".join(code.text for code in made.kernels) or "lib.cos" in "".join(code.text for code in made.kernels)
    assert made.hints and all("PassManager" in hint for hint in made.hints)
    assert len(made.hints) == len(set(made.hints)) and len(made.warned) == 1
    assert not cuda_code.short_of_kernels()  # what was made is kept on disk
    asked = len(device.asked)
    again = generated(program, operands())
    assert again.externs == made.externs and len(device.asked) == asked  # nothing is tried again
    assert len(again.hints) == 1


def test_smaller_blocks_are_tried_first(device: Gpu) -> None:
    device.rules(("X: tl.constexpr = (256|512|1024)", "OutOfResources: out of resource: shared memory", True))
    made = generated(lambda x: (x.erf() + 1,), [torch.randn(1 << 20)])
    assert made.externs == []
    assert [hint for hint in made.hints if "another way" in hint] and not made.warned
    (code,) = made.kernels
    assert re.search("X: tl.constexpr = (16|32|64|128)\n", code.text)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "several": (program, operands),
    "rows": (lambda x: ((x.exp() + 1).softmax(-1), x.mean(0)), lambda: [torch.randn(40, 300)]),
    "scans and places": (
        lambda x, i: (x.cumsum(0).relu(), x.index_add(0, i, x[i] * 2), (x + 1)[i].sin()),
        lambda: [torch.randn(40, 9), torch.randint(0, 40, (40,))],
    ),
    "views": (lambda x: ((x * 3).t().reshape(-1, 4).tanh(), x.sin().expand(2, 8, 12)), lambda: [torch.randn(8, 12)]),
    "several results": (lambda x: (*torch.var_mean(x.sin(), 1), x.cos().chunk(2)[1] + 1), lambda: [torch.randn(8, 12)]),
    "writes": (lambda x, y: (x.mul_(y.exp()).sin(), y.add_(1))[:1], lambda: [torch.randn(8, 12), torch.randn(8, 12)]),
    "concatenation": (lambda x: (torch.cat([x.sin(), x.cos() * 2], 1).abs(),), lambda: [torch.randn(8, 12)]),
    "norm": (
        lambda x, w: (torch.nn.functional.layer_norm(x.sin(), (12,), w),),
        lambda: [torch.randn(8, 12), torch.randn(12)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_kernels_are_refused(name: str, device: Gpu) -> None:
    """What is left is a plan of PyTorch's operators, or the graph is run by them."""
    device.rules(("", "CompilationError: at 1:1", True))
    function, make = PROGRAMS[name]
    made = generated(function, make())
    assert not made.kernels and made.externs


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_kernels_are_refused(name: str, number: int, device: Gpu) -> None:
    part = ("lib.(exp|erf|sin|tanh|cos)|tl.(exp|sin|cos)", "tl.sum|tl.reduce", "tl.atomic|tl.associative_scan|tl.cumsum", "in1")[number]
    device.rules((part, "PTXASError: `ptxas` failed with error code 1", True))
    function, make = PROGRAMS[name]
    made = generated(function, make())
    assert not [code for code in made.kernels if re.search(part, code.text)]


def test_what_the_driver_refuses(device: Gpu) -> None:
    device.driver = "add"
    made = generated(program, operands())
    assert "erf" in made.externs and made.kernels
    assert [hint for hint in made.hints if "invalid argument" in hint]
    assert not cuda_code.short_of_kernels()


def test_an_error_of_an_earlier_kernel_is_no_refusal(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    device.driver = "add"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        generated(program, operands())
    assert not cuda_code._refused


def test_what_passes_is_tried_once_more_and_not_kept(device: Gpu) -> None:
    device.rules(("lib.erf", "OSError: No space left on device", False))
    made = generated(program, operands())
    assert "erf" in made.externs and made.kernels
    assert cuda_code.short_of_kernels()
    counts = [device.asked.count(symbol) for symbol in set(device.asked)]
    assert set(counts) == {1, 2}


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_does_not_answer(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was doing is not asked again for ever, and does not go on either."""
    monkeypatch.setattr(cuda_code, "LONGEST_COMPILE", 1.0)
    monkeypatch.setattr(tiles, "smaller", lambda tile: [])
    monkeypatch.setattr(gpu, "smaller", lambda tile: [])
    device.rules(("lib.erf", "hang", False))
    made = generated(lambda x: (x.erf(),), [torch.randn(100)])
    assert made.externs == ["erf"]
    child = int((device.folder / "child").read_text())
    for _ in range(100):  # signals take a moment
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def test_a_process_that_ends(device: Gpu) -> None:
    """Once: a new one is started. Each time: no kernel is asked for any more."""
    device.rules(("", "end", False))
    with pytest.raises(Unsupported, match="ended"):
        generated(program, operands())
    assert len(device.asked) <= 2


def test_no_process_is_to_be_had(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def Popen(*args: Any, **kwargs: Any) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_code.subprocess, "Popen", Popen)
        cuda_code.warm_up()
        with pytest.raises(Unsupported, match="ended"):
            generated(program, operands())


def test_a_process_that_is_killed_between_two_kernels(device: Gpu) -> None:
    """What it was asked for is asked for again."""
    cuda_code.warm_up()
    process = cuda_code.COMPILER.process
    assert process is not None
    process.kill()
    process.wait()
    assert generated(program, operands()).externs == ["mm"]


TEXTS = {
    "CompilationError": "lib.no_such_function({0})",
    "CompileTimeAssertionFailure": "tl.static_assert(False)",
    "PTXASError": 'tl.inline_asm_elementwise("nonsense;", "=f,f", [{0}], dtype=tl.float32, is_pure=True, pack=1)',
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("error", TEXTS)
def test_what_triton_refuses(error: str, triton: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        if INTERPRETS:
            patch.setattr(sys.modules[__name__], "INTERPRETS", False)  # the text is for nobody
        patch.setitem(operations.OPERATIONS, "erf", lambda node, args, style: TEXTS[error].format(*args))
        made = generated(program, operands())
    assert "erf" in made.externs and made.kernels
    assert [hint for hint in made.hints if error in hint]
    assert not cuda_code.short_of_kernels()


@pytest.mark.skipif(not INTERPRETS, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", PROGRAMS)
def test_smaller_blocks_compute_the_same(name: str, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """And Triton takes them."""
    from fusewright.codegen.analysis import analyse
    from tests.codegen.triton.harness import refused, run_plan

    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        patch.setattr(cuda_code, "_PROGRAM", Path(triton_compiler.__file__))
        process = cuda_code.Compiler()
        process.start()
    function, make = PROGRAMS[name]
    inputs = make()
    plan = generated(function, inputs).plan
    chosen = {
        kernel.name: tiles.smaller(tiles.choose(analyse(kernel), Processor(90, 132))) for kernel in plan.kernels.values()
    }
    for number in range(2):
        mine = {name: made[number] for name, made in chosen.items() if number < len(made)}
        given, expected = [one.clone() for one in inputs], [one.clone() for one in inputs]
        wanted = function(*expected)
        torch.testing.assert_close(run_plan(plan, given, tiles=mine)[: len(wanted)], list(wanted), rtol=2e-5, atol=2e-5)
        codes = gpu.generate(list(plan.kernels.values()), plan.buffers, Processor(90, 132), mine)
        assert not refused(process, codes.values(), device.folder)
    process.stop()
