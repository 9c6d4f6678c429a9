"""Training of attention as fused kernels under Triton's interpreter: results and gradients against float64."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

import fusewright
from fusewright.autograd import partition
from fusewright.backends import gpu, pipeline
from fusewright.base.records import replace
from fusewright.codegen.triton import DeviceKernel, Processor, compiler, generate
from fusewright.codegen.triton.gemm_tiles import MOST_SHARED
from fusewright.graph.passes.attention import recomputed_scores
from fusewright.loops.lower import lower
from fusewright.operators.decompositions import flex_attention as written_out
from fusewright.runtime import cuda_code
from fusewright.schedule import ScheduleOptions, schedule
from fusewright.schedule.plan import RunExtern
from fusewright.select import chained_products, fused_attention
from fusewright.sizes.tensor_type import TensorType
from tests.graph.texts import graph_of
from tests.select.product_programs import GPU

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("compiles for a GPU", allow_module_level=True)
from tests.codegen.triton.harness import run_plan

Program = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.ones((), dtype=torch.bool)


def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s


def flex(mod: Callable[..., Any], mask: Callable[..., Any], which: int = 0) -> Program:
    """mod, mask: of a tensor that the program is given."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return written_out.flex_attention(q, k, v, mod(table), (mask(table),), 0.25)[which]

    return attend


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return ((q @ k.transpose(-1, -2)) * 0.25).softmax(-1) @ v


def with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As models write it, in float32."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / 4 + table[: q.shape[2], : k.shape[2]]
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(q.dtype), v)


def with_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result, sums, _ = written_out.flex_attention(q, k, v, plain, (causal,), 0.25)
    return result * sums.unsqueeze(-1).to(q.dtype)


TABLE = torch.linspace(-1, 1, 80 * 80).view(80, 80)
DOCUMENTS = torch.arange(80) // 30
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PROGRAMS: dict[str, tuple[Program, torch.Tensor]] = {
    "causal": (flex(lambda t: plain, lambda t: causal), TABLE),
    "everything": (flex(lambda t: plain, lambda t: everything), TABLE),
    "window": (flex(lambda t: lambda s, b, h, q, k: s + (k - q) * 0.01,
                    lambda t: lambda b, h, q, k: (q >= k) & (q - k < 20)), TABLE),
    "cap": (flex(lambda t: lambda s, b, h, q, k: 5 * torch.tanh(s / 5), lambda t: causal), TABLE),
    "nothing for some": (flex(lambda t: plain, lambda t: lambda b, h, q, k: (q >= k) & (q > 10)), TABLE),
    "documents": (flex(lambda t: plain, lambda t: lambda b, h, q, k: t[q] == t[k]), DOCUMENTS),
    "alibi": (flex(lambda t: lambda s, b, h, q, k: s + t[h] * (k - q), lambda t: causal), SLOPES),
    "bias": (flex(lambda t: lambda s, b, h, q, k: s + t[q, k], lambda t: causal), TABLE),
    "scaled by index": (flex(lambda t: lambda s, b, h, q, k: s * torch.where(h % 2 == 0, 1.0, 0.5),
                             lambda t: lambda b, h, q, k: (q >= k) | (h == 1)), TABLE),
    "by hand": (by_hand, TABLE),
    "with a mask": (with_mask, TABLE),
}  # fmt: skip
SHAPES = {  # batch, heads, heads of keys, rows, columns, features of keys, of values
    "square": (1, 4, 4, 64, 64, 16, 16),
    "grouped": (2, 4, 2, 48, 64, 16, 16),
    "odd": (1, 2, 1, 37, 75, 24, 40),
}
QUICK = {("causal", "grouped"), ("window", "square"), ("documents", "odd"), ("with a mask", "square")}


@dataclass
class Recorded:
    """A training step compiled on a CPU: its result, the gradients' tangent, and its halves as graphs."""

    result: torch.Tensor
    tangent: torch.Tensor
    graphs: list[tuple[str, torch.fx.Graph, Any]]
    saved: tuple[int, ...]
    gradients: tuple[int, ...]


def recorded(program: Program, arguments: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    graphs: list[tuple[str, Any, Any]] = []
    splits: list[tuple[Any, Any]] = []
    generate, split = pipeline.generate, partition.split

    def generating(graph: Any, to_compile: Any, name: str, half: Any = "") -> Any:
        graphs.append((half, graph, to_compile))
        return generate(graph, to_compile, name, half)

    def splitting(joint: Any, *args: Any, **kwargs: Any) -> Any:
        splits.append((split(joint, *args, **kwargs), joint))
        return splits[-1][0]

    monkeypatch.setattr(recomputed_scores, "DEVICES", {"cpu"})
    monkeypatch.setattr(pipeline, "generate", generating)
    monkeypatch.setattr(partition, "split", splitting)
    stages = [stage for stage in pipeline.GRAPH_STAGES if stage.name != "precision"]
    monkeypatch.setattr(pipeline, "GRAPH_STAGES", stages)
    result = fusewright.compile(program, fullgraph=True)(*arguments)
    tangent = torch.randn_like(result)
    torch.autograd.grad(result, [one for one in arguments if one.requires_grad], tangent)
    ((made, joint),) = splits
    return Recorded(result, tangent, graphs, made.saved, joint.gradients)


def halves_of(
    program: Program, arguments: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, list[Any]]:
    """The result, the gradients, their tangent, and the plans, whose kernels ran interpreted."""
    step = recorded(program, arguments, monkeypatch)
    plans = []
    for _, graph, to_compile in step.graphs:
        scheduled = schedule(lower(graph, to_compile.constants, True), GPU)
        plan = fused_attention.fused(scheduled, lambda kernel, buffers: True)
        plans.append(chained_products.fused(plan, lambda kernel, buffers: True))
    inputs = [one.detach() for one in arguments]
    results = run_plan(plans[0], inputs)
    saved = [inputs[place] if place >= 0 else results[~place] for place in step.saved]
    found = dict(zip(step.gradients, run_plan(plans[1], [*saved, step.tangent])))
    wanted = [place for place, one in enumerate(arguments) if one.requires_grad]
    return results[0].view(step.result.shape), [found[place] for place in wanted], step.tangent, plans


def arguments_of(shape: str, table: torch.Tensor) -> list[torch.Tensor]:
    batch, heads, key_heads, rows, columns, wide, narrow = SHAPES[shape]
    shapes = [(batch, heads, rows, wide), (batch, key_heads, columns, wide), (batch, key_heads, columns, narrow)]
    return [*(torch.randn(one, dtype=torch.float16, requires_grad=True) for one in shapes), table]


def check(program: Program, arguments: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    result, gradients, tangent, plans = halves_of(program, arguments, monkeypatch)

    def eager(dtype: torch.dtype) -> list[torch.Tensor]:
        given = [
            one.detach().to(dtype).requires_grad_(one.requires_grad) if one.is_floating_point() else one
            for one in arguments
        ]
        made = program(*given)
        wanted = [one for one in given if one.requires_grad]
        return [made.detach(), *torch.autograd.grad(made, wanted, tangent.to(dtype))]

    exact, eagers = eager(torch.float64), eager(torch.float16)
    for given, wanted, other in zip([result, *gradients], exact, eagers, strict=True):
        size = wanted.norm() + 1e-9
        error, usual = (given.double() - wanted).norm() / size, (other.double() - wanted).norm() / size
        assert error <= 2 * usual + 1e-3
    return plans


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[] if (name, shape) in QUICK else [pytest.mark.sweep])
        for name in PROGRAMS
        for shape in SHAPES
    ],
)
def test_training(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, table = PROGRAMS[name]
    _, heads, key_heads, *_ = SHAPES[shape]
    if heads != key_heads and program in (by_hand, with_mask):
        pytest.skip("takes equal heads")
    forward, backward = check(program, arguments_of(shape, table), monkeypatch)
    assert not [step.extern.name for plan in (forward, backward) for step in plan.steps if isinstance(step, RunExtern)]
    assert sum(kernel.product is not None for kernel in forward.kernels.values()) == 1
    assert sum(kernel.product is not None for kernel in backward.kernels.values()) == 3


@pytest.mark.parametrize("name", ["a learned bias", "sums too"])
def test_what_is_not_fused_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that read the scores' gradient besides, or the scores."""
    program, table = {
        "a learned bias": (with_mask, TABLE.half().requires_grad_()),
        "sums too": (with_sums, TABLE),
    }[name]
    check(program, arguments_of("square", table), monkeypatch)


def test_an_infinite_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose largest score is infinite gives NaN, as in eager; others are not touched."""
    table = torch.zeros(80, 80)
    table[3, 5] = math.inf
    program = flex(lambda t: lambda s, b, h, q, k: s + t[q, k], lambda t: causal)
    arguments = arguments_of("square", table)
    result, gradients, tangent, _ = halves_of(program, arguments, monkeypatch)
    made = program(*arguments)
    wanted = torch.autograd.grad(made, arguments[:3], tangent)
    assert torch.equal(result.isnan(), made.isnan())
    assert torch.equal(gradients[0].isnan(), wanted[0].isnan())


def like_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_code, "processor", lambda index: Processor(arch=90, units=132))
    monkeypatch.setattr(cuda_code, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def errors_of(codes: Iterable[DeviceKernel], folder: Path) -> list[str]:
    """What the compiler process says against these kernels; more shared memory than a program gets is an error."""
    names = ("text", "symbol", "signature", "aligned", "warps", "stages", "checks", "scratch")
    jobs = [
        {name: getattr(code, name) for name in names} | {"arch": 90, "path": str(folder / code.symbol)}
        for code in codes
    ]
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, compiler.__file__, "1"], input="\n".join(map(json.dumps, jobs)) + "\n", env=surroundings,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    answers = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(answers) == len(jobs), told.stderr
    found = [answer["error"] for answer in answers if answer["error"]]
    for job in jobs if not found else ():
        head = json.loads(Path(job["path"]).read_bytes().split(b"\n")[2])
        if head["shared"] > MOST_SHARED:
            found.append(f"{job['symbol']}: {head['shared']} bytes of shared memory")
    return found


def on_a_gpu(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph as if it had been recorded there."""

    def moved(kind: Any) -> Any:
        if isinstance(kind, (tuple, list)):
            return tuple(map(moved, kind))
        return replace(kind, device=torch.device("cuda", 0)) if isinstance(kind, TensorType) else kind

    for node in graph.nodes:
        if "type" in node.meta:
            node.meta["type"] = moved(node.meta["type"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    return graph


@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 300, 300, 64, 64), (2, 2, 2, 128, 128, 256, 256), (2, 2, 1, 130, 70, 32, 32)], ids=str
)
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_a_gpus_plans(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The backend's own schedule and choice, with the options of a large GPU: one kernel, and three. Triton compiles
    them, which needs no GPU."""
    like_an_h100(monkeypatch)
    program, table = {
        "causal": PROGRAMS["causal"],
        "window": PROGRAMS["window"],
        "documents": (PROGRAMS["documents"][0], torch.arange(300) // 70),
    }[name]
    monkeypatch.setitem(SHAPES, "given", shape)
    step = recorded(program, arguments_of("given", table), monkeypatch)
    products = []
    for _, graph, to_compile in step.graphs:
        lowered = lower(on_a_gpu(graph), to_compile.constants, True)
        plan = gpu.with_fused_attention(gpu.scheduled(lowered, gpu.schedule_options(ScheduleOptions(), lowered)))
        assert not [one.extern.name for one in plan.steps if isinstance(one, RunExtern)]
        codes = generate(list(plan.kernels.values()), plan.buffers, cuda_code.processor(0))
        if name == "window":
            assert not errors_of(codes.values(), tmp_path)
        products.append(sum(kernel.product is not None for kernel in plan.kernels.values()))
    assert products == [1, 3]


def test_decoding_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax of few long rows stays whole, where that keeps the GPU busy."""
    like_an_h100(monkeypatch)
    text = """
        %q: bfloat16[128, 1, 64]@cuda = input
        %k: bfloat16[128, 64, 4096]@cuda = input
        %v: bfloat16[128, 4096, 64]@cuda = input
        %s = aten.bmm(%q, %k)
        %w = aten._softmax(%s, -1, False)
        %y = aten.bmm(%w, %v)
        return [%y]"""
    program = lower(graph_of(text), ())
    options = gpu.schedule_options(ScheduleOptions(), program)
    (kernel,) = gpu.with_fused_attention(gpu.scheduled(program, options)).kernels.values()
    assert kernel.product is not None and kernel.product.softmax is not None
