"""GPU kernels and models side by side: eager, torch.compile in its modes, fusewright in its modes. One command, on one GPU:

    python -m benchmarks.gpu --stage check            quick: is every kernel and model right in every mode?
    python -m benchmarks.gpu --stage kernels          time by the profiler, share of the bandwidth of a copy
    python -m benchmarks.gpu --stage models           wall time of a call and of a training step, first call with empty caches
    python -m benchmarks.gpu --stage calls            CPU time to issue one call of a graph of one kernel, and of its parts
    python -m benchmarks.gpu --stage first            first call in a fresh process: with empty caches, and with those of an earlier process
    python -m benchmarks.gpu --only softmax --ways fw,tc --json out.json

Each stage fits ten minutes on an H200. The table is printed last. Every figure is a median; what is compared alternates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("FUSEWRIGHT_CACHE_DIR", tempfile.mkdtemp(prefix="fusewright-bench-"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor-bench-"))

import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from benchmarks.overhead import Watched
from benchmarks.tables import save_rows
from fusewright.backends.registry import Backend
from fusewright.base import events

Half = torch.bfloat16
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """make() gives (function or module, arguments). bytes: what must move at least. train: a loss's gradients are computed too."""

    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    bytes: int = 0
    train: bool = False
    tolerance: float = 2e-2


def rand(*shape: int, dtype: torch.dtype = Half) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, total


class Block(nn.Module):
    """LayerNorm → linear → GELU → add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def _block() -> tuple[Any, tuple[Any, ...]]:
    return Block(512).to(DEVICE, Half).eval(), (rand(32, 512, 512),)


def _mlp() -> tuple[Any, tuple[Any, ...]]:
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).to(DEVICE, Half).eval()
    return model, (rand(4096, 4096),)


def _attention() -> tuple[Any, tuple[Any, ...]]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), tuple(
        rand(4, 16, 4096, 128) for _ in range(3)
    )


def _labels(rows: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (rows,), device=DEVICE)


KERNELS: dict[str, Case] = {
    "tiny relu(x + y) * 2": Case(lambda: (lambda x, y: torch.relu(x + y) * 2, (rand(16), rand(16)))),
    "softmax 8192x8192": Case(lambda: (lambda x: torch.softmax(x, -1), (rand(8192, 8192),)), 2 * 8192 * 8192 * 2),
    "layer norm 16384x8192": Case(
        lambda: (lambda x, w, b: F.layer_norm(x, (8192,), w, b), (rand(16384, 8192), rand(8192), rand(8192))),
        2 * 16384 * 8192 * 2,
    ),
    "residual + rms norm 16384x4096": Case(
        lambda: (rms_norm, (rand(16384, 4096), rand(16384, 4096), rand(4096))), 4 * 16384 * 4096 * 2
    ),
    "gelu * sigmoid 8192x8192": Case(
        lambda: (lambda x, y: F.gelu(x) * torch.sigmoid(y), (rand(8192, 8192), rand(8192, 8192))), 3 * 8192 * 8192 * 2
    ),
    "cross entropy 8192x32768": Case(
        lambda: (lambda x, y: F.cross_entropy(x.float(), y), (rand(8192, 32768), _labels(8192, 32768))),
        8192 * 32768 * 2,
    ),
    "column sum 65536x2048": Case(lambda: (lambda x: x.sum(0), (rand(65536, 2048),)), 65536 * 2048 * 2),
    "sum 16384x16384": Case(lambda: (lambda x: x.float().sum(), (rand(16384, 16384),)), 16384 * 16384 * 2),
    "transpose + add 8192x8192": Case(
        lambda: (lambda x, y: (x.t() + y).contiguous(), (rand(8192, 8192), rand(8192, 8192))), 3 * 8192 * 8192 * 2
    ),
    "batch norm 64x256x56x56": Case(
        lambda: (
            lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
            (rand(64, 256, 56, 56), rand(256), rand(256)),
        ),
        2 * 64 * 256 * 56 * 56 * 2,
    ),
    "embedding 50k x 1024": Case(
        lambda: (lambda i, w: F.embedding(i, w) * 32.0, (_labels(65536, 50000), rand(50000, 1024))),
        2 * 65536 * 1024 * 2,
    ),
    "cumsum 4096x4096": Case(
        lambda: (lambda x: x.cumsum(-1), (rand(4096, 4096, dtype=torch.float32),)), 2 * 4096 * 4096 * 4
    ),
    "argmax 8192x8192": Case(lambda: (lambda x: x.argmax(-1), (rand(8192, 8192),)), 8192 * 8192 * 2),
    "layer norm backward 16384x4096": Case(
        lambda: (
            lambda x, w, b: F.layer_norm(x, (4096,), w, b),
            (rand(16384, 4096).requires_grad_(), rand(4096).requires_grad_(), rand(4096).requires_grad_()),
        ),
        train=True,
    ),
    "layer norm, linear, gelu, add": Case(_block),
    "mlp 4096-16384-4096": Case(_mlp),
    "causal attention 4x16x4096x128": Case(_attention),
}


def _bert() -> tuple[Any, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(attn_implementation="sdpa")).to(DEVICE, Half)
    ids = torch.randint(0, 30000, (16, 256), device=DEVICE)
    return _Wrapped(model), (ids,)


def _llama(batch: int, length: int) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def make() -> tuple[Any, tuple[Any, ...]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=16, vocab_size=32000,
            use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(DEVICE, Half)
        return _Wrapped(model), (torch.randint(0, 32000, (batch, length), device=DEVICE),)

    return make


def _qwen3() -> tuple[Any, tuple[Any, ...]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _Wrapped(Qwen3ForCausalLM(config).to(DEVICE, Half)), (torch.randint(0, 150000, (1, 8), device=DEVICE),)


def _resnet() -> tuple[Any, tuple[Any, ...]]:
    from torchvision.models import resnet50

    model = resnet50().to(DEVICE, Half).to(memory_format=torch.channels_last)
    return model, (rand(64, 3, 224, 224).to(memory_format=torch.channels_last),)


class _Wrapped(nn.Module):
    """The first tensor of a transformers model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[0]


MODELS: dict[str, Case] = {
    "BERT-12 16x256": Case(_bert),
    "Llama-8 4x1024": Case(_llama(4, 1024), tolerance=4e-2),
    "Llama-8 1x16": Case(_llama(1, 16), tolerance=4e-2),
    "Qwen3-28 1x8": Case(_qwen3, tolerance=5e-2),
    "ResNet-50 64": Case(_resnet, tolerance=5e-2),
    "BERT-12 training": Case(_bert, train=True, tolerance=5e-2),
    "ResNet-50 training": Case(_resnet, train=True, tolerance=1e-1),
}

Compile = Callable[[Any], Any]
WAYS: dict[str, Compile] = {
    "eager": lambda f: f,
    "fw": lambda f: fusewright.compile(f),
    "fw reduce-overhead": lambda f: fusewright.compile(f, mode="reduce-overhead"),
    "fw max-autotune": lambda f: fusewright.compile(f, mode="max-autotune"),
    "tc": lambda f: torch.compile(f),
    "tc reduce-overhead": lambda f: torch.compile(f, mode="reduce-overhead"),
    "tc max-autotune": lambda f: torch.compile(f, mode="max-autotune"),
}


@dataclass
class Result:
    case: str
    way: str
    error: float = float("nan")
    first: float = float("nan")  # seconds
    wall: float = float("nan")  # milliseconds
    kernels: float = float("nan")  # milliseconds of GPU time a call
    launches: int = 0
    cpu: float = float("nan")  # microseconds of CPU time to issue a call
    peak: float = float("nan")  # GiB
    note: str = ""


@dataclass
class Prepared:
    """One case ready to be called in every way."""

    case: Case
    function: Any
    arguments: tuple[Any, ...]
    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def call(self, compiled: Any) -> Callable[[], Any]:
        if not self.case.train:

            def infer() -> Any:
                with torch.no_grad():
                    return compiled(*self.arguments)

            return infer

        def step() -> Any:
            out = compiled(*self.arguments)
            out = out[0] if isinstance(out, tuple) else out
            out.float().square().mean().backward()
            leaves = list(self.function.parameters()) if isinstance(self.function, nn.Module) else self.arguments
            grads = [t.grad for t in leaves if isinstance(t, torch.Tensor) and t.grad is not None]
            for t in leaves:
                if isinstance(t, torch.Tensor):
                    t.grad = None
            return (out.detach(), *grads)

        return step


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for item in value for t in flat(item)] if isinstance(value, (tuple, list)) else []


def error(actual: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected, over all tensors: a gradient that is zero but for rounding counts as little
    as it weighs."""
    difference = whole = 0.0
    a, b = flat(actual), flat(expected)
    if len(a) != len(b):
        return float("inf")
    for x, y in zip(a, b):
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        x, y = x.double(), y.double()
        difference += float((x - y).square().sum())
        whole += float(y.square().sum())
    found = (difference / max(whole, 1e-30)) ** 0.5
    return found if found == found else float("inf")


def wall_times(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each, alternating."""
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    repeat: dict[str, int] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        repeat[name] = max(1, min(100, int(0.01 / max(time.perf_counter() - begin, 1e-6))))
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 5:
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeat[name]):
                call()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - begin) / repeat[name] * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def profiled(call: Callable[[], Any], times: int = 5) -> tuple[float, int, float, list[tuple[str, float]]]:
    """(milliseconds of GPU work a call, launches a call, microseconds to issue a call, the longest kernels)."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    issue = (time.perf_counter() - begin) / times * 1e6
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    count = 0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time / times / 1e3
            count += 1
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:6]
    return sum(kernels.values()), count // times, issue, longest


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds, _, _, _ = profiled(lambda: target.copy_(source))
    return 2 * source.numel() * 4 / (milliseconds / 1e3)


def told(event: events.Event) -> str:
    """What a compile or a call said that costs time, in a line."""
    if isinstance(event, (events.FellBack, events.Hint)):
        return f"{type(event).__name__}: {getattr(event, 'reason', '') or getattr(event, 'text', '')}"
    if isinstance(event, (events.Broken, events.Skipped)):
        return f"{type(event).__name__}: {event.report}".replace("\n", " ")
    if isinstance(event, events.InternalError):
        return f"{event.stage}: {event.trace[-600:]}"
    return ""


def run_case(name: str, case: Case, ways: list[str], measure: bool, seconds: float, verbose: bool) -> list[Result]:
    torch.manual_seed(0)
    function, arguments = case.make()
    if isinstance(function, nn.Module):
        function.train(case.train)
        for module in function.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    prepared = Prepared(case, function, arguments)
    heard: list[str] = []

    def subscriber(event: events.Event) -> None:
        if note := told(event):
            heard.append(note)

    expected = prepared.call(function)()
    torch.cuda.synchronize()
    results: list[Result] = []
    calls: dict[str, Callable[[], Any]] = {}
    for way in ways:
        result = Result(name, way)
        results.append(result)
        torch._dynamo.reset()
        fusewright.reset()
        try:
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            call = prepared.call(WAYS[way](function))
            with events.STREAM.listening(subscriber):
                actual = call()
                torch.cuda.synchronize()
                result.first = time.perf_counter() - begin
                for _ in range(3):
                    actual = call()
            for note in dict.fromkeys(heard):
                print(f"      {note[:400]}", flush=True)
            result.note = f"{len(heard)} events" if heard else ""
            heard.clear()
            result.error = error(actual, expected)
            result.peak = torch.cuda.max_memory_allocated() / 2**30
            del actual
            if result.error > case.tolerance:
                result.note = "WRONG"
            calls[way] = call
            if measure:
                result.kernels, result.launches, result.cpu, longest = profiled(call)
                if verbose:
                    for kernel, milliseconds in longest:
                        print(f"      {way:20} {milliseconds:8.4f} ms  {kernel[:110]}", flush=True)
        except Exception as problem:
            result.note = f"{type(problem).__name__}: {problem}"[:300]
            if isinstance(problem, torch.AcceleratorError):
                raise
        print(f"  {name:34} {way:20} error {result.error:.1e} first {result.first:7.2f} s {result.note}", flush=True)
    if measure and calls:
        for way, milliseconds in wall_times(calls, seconds).items():
            next(r for r in results if r.way == way).wall = milliseconds
    return results


@dataclass
class FirstCall:
    """Seconds from before compiling to the first result, each in a fresh process (PyTorch's libraries and the model are warm)."""

    case: str
    way: str
    cold: float
    warm: float


def first_call(name: str, case: Case, way: str) -> float:
    """In a process of its own: seconds of compiling and of the first call; what the engine imports late is in it."""
    torch.manual_seed(0)
    function, arguments = case.make()
    if isinstance(function, nn.Module):
        function.train(case.train)
    prepared = Prepared(case, function, arguments)
    prepared.call(function)()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    prepared.call(WAYS[way](function))()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_calls(cases: dict[str, Case], ways: list[str]) -> list[FirstCall]:
    """Each way twice with one set of caches, empty at first."""
    found: list[FirstCall] = []
    for name in cases:
        for way in ways:
            seconds = []
            with tempfile.TemporaryDirectory() as folder:
                caches = {
                    key: f"{folder}/{key}"
                    for key in ("FUSEWRIGHT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
                }
                for path in caches.values():
                    os.mkdir(path, 0o700)
                for _ in range(2):
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.gpu",
                        "--stage",
                        "first-worker",
                        "--only",
                        name,
                        "--ways",
                        way,
                    ]
                    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
                    if done.returncode:
                        print(done.stderr[-2000:])
                    seconds.append(float(done.stdout.split()[-1]) if not done.returncode else float("nan"))
            found.append(FirstCall(name, way, *seconds))
            print(f"{name:34} {way:19} cold {seconds[0]:8.2f} s, warm {seconds[1]:8.2f} s", flush=True)
    return found


CALLS, ROUNDS = 500, 20
"""Calls that are issued without waiting, each round: few enough that the GPU's queue never fills, whose waiting would count as work."""


def call_times(ways: list[str]) -> dict[str, tuple[float, float]]:
    """(microseconds of this process's CPU time, of wall time) to issue one call of a graph of one kernel, relu(x + y) * 2 on 16 elements;
    medians of rounds in turn, behind what a call of nothing takes. Beside the ways: parts of one of ours."""
    x, y = torch.randn(16, device=DEVICE), torch.randn(16, device=DEVICE)

    def function() -> Callable[..., torch.Tensor]:
        """Code of its own: the ways keep what they compiled, and their guards, by code."""
        scope: dict[str, Any] = {"relu": torch.relu}
        exec("def f(x, y):\n    return relu(x + y) * 2", scope)
        return scope["f"]  # type: ignore[no-any-return]

    calls: dict[str, Callable[[], Any]] = {"nothing": lambda: None}
    for way in ways:
        compiled = WAYS[way](function())
        calls[way] = lambda compiled=compiled: compiled(x, y)
        for _ in range(20):
            assert torch.equal(calls[way](), torch.relu(x + y) * 2)
    watched, mine = Watched(), function()
    whole = fusewright.compile(mine)
    whole(x, y)
    fusewright.compile(
        function(), backend=Backend("watched", "aten", watched.compile, follows_autograd=False, trains=True)
    )(x, y)
    program, plan, inputs = whole.entries[0].program, watched.plan, watched.inputs
    calls["  guards"] = lambda: program.check((x, y), mine)
    calls["  plan"] = lambda: plan(*inputs)
    calls["  one allocation"] = lambda: torch.empty_strided((16,), (1,), device=DEVICE)
    calls["  one operator"] = lambda: torch.relu(x)
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begun, started = time.process_time(), time.perf_counter()
            for _ in range(CALLS):
                call()
            wall[name].append((time.perf_counter() - started) / CALLS * 1e6)
            cpu[name].append((time.process_time() - begun) / CALLS * 1e6)
    torch.cuda.synchronize()
    middle = {name: (statistics.median(cpu[name]), statistics.median(wall[name])) for name in calls}
    idle = middle.pop("nothing")
    return {name: (a - idle[0], b - idle[1]) for name, (a, b) in middle.items()}


def table(results: list[Result], cases: dict[str, Case], bandwidth: float) -> str:
    lines = [
        f"{'case':34} {'way':19} {'error':>7} {'first s':>8} {'wall ms':>9} {'GPU ms':>9} {'copy %':>7} {'launch':>6} {'issue us':>9} {'GiB':>6}"
    ]
    for r in results:
        share = (
            cases[r.case].bytes / (r.kernels / 1e3) / bandwidth * 100
            if cases[r.case].bytes and r.kernels == r.kernels
            else float("nan")
        )
        lines.append(
            f"{r.case:34} {r.way:19} {r.error:7.0e} {r.first:8.2f} {r.wall:9.4f} {r.kernels:9.4f} {share:7.1f} {r.launches:6d} {r.cpu:9.1f} {r.peak:6.2f} {r.note[:60]}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage", choices=("check", "kernels", "models", "calls", "first", "first-worker"), default="check"
    )
    parser.add_argument("--only", default="", help="comma-separated parts of case names")
    parser.add_argument("--ways", default="", help=f"comma-separated, of: {', '.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring, for each case and way")
    parser.add_argument("--json", default="")
    parser.add_argument("--verbose", action="store_true", help="the longest kernels of each call")
    options = parser.parse_args()
    cases = {"check": {**KERNELS, **MODELS}, "kernels": KERNELS}.get(options.stage, MODELS)
    if options.only:
        cases = {name: case for name, case in cases.items() if any(part in name for part in options.only.split(","))}
    ways = options.ways.split(",") if options.ways else (["fw"] if options.stage == "check" else ["eager", "fw", "tc"])
    if options.stage == "first-worker":
        ((name, case),) = cases.items()
        print(first_call(name, case, ways[0]))
        return 0
    if options.stage == "first":
        firsts = first_calls(cases, ways)
        if options.json:
            save_rows(Path(options.json), [vars(f) for f in firsts])
        return 0
    import torch._dynamo

    if options.stage == "calls":
        with torch.no_grad():
            times = call_times(
                options.ways.split(",") if options.ways else [way for way in WAYS if "max-autotune" not in way]
            )
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds to issue a call: CPU time, wall time"
        )
        for name, (cpu, wall) in times.items():
            print(f"{name:20} {cpu:8.2f} {wall:8.2f}")
        if options.json:
            rows = [{"way": way, "CPU, us": cpu, "wall, us": wall} for way, (cpu, wall) in times.items()]
            save_rows(Path(options.json), rows)
        return 0
    bandwidth = copy_bandwidth() if options.stage == "kernels" else float("nan")
    results: list[Result] = []
    for name, case in cases.items():
        torch.cuda.empty_cache()
        try:
            results += run_case(name, case, ways, options.stage != "check", options.seconds, options.verbose)
        except torch.AcceleratorError as problem:
            print(f"the GPU is lost after {name}: {problem}")
            break
    header = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s"
    print(header)
    print(table(results, cases, bandwidth))
    if options.json:
        save_rows(Path(options.json), [vars(r) for r in results])
    return 1 if any(r.note for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
