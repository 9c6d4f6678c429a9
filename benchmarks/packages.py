"""Packages beside those of PyTorch's compiler and ONNX Runtime: time to make and to load, time of a call, memory.

Run `python -m benchmarks.packages [--models bert ...] [--runtime FOLDER] [--folder FOLDER] [--json FILE]`. --runtime:
where CMake built `examples/` (without it no row of C++). --folder: where the engines' files stay; what is there already
is not made again, so that a second run on a quiet machine only loads and calls. Each file is made by a process of its
own and served by a fresh one; the servers are called in turn, so that what else happens on the machine meets all of
them alike, or, with --apart, one is served after another, so that no threads of one wait beside those of another. Load times begin behind the imports. Needs onnxruntime and a C++ compiler for the peers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ENGINES = ("compiled", "package", "standalone", "C++", "C++ and libtorch", "AOTInductor", "ONNX Runtime")
PAST = 128
"""Tokens that the cache of the decoding step holds."""


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from benchmarks.models import MODELS

        self.model, _, given = MODELS["bert"](torch.float32)
        self.given = tuple(given.values())

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask)[0]


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from benchmarks.models import MODELS

        self.model, self.given, _ = MODELS["resnet50"](torch.float32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)[0]


class LlamaStep(nn.Module):
    """One token behind those of a cache; gives its logits, and what the caller adds to the cache."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DynamicCache

        from benchmarks.models import MODELS

        self.model, _, _ = MODELS["llama"](torch.float32)
        self.cache_type = DynamicCache
        config = self.model.config
        features = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, PAST, features)
        self.given = (torch.randint(0, 1000, (1, 1)), torch.randn(shape), torch.randn(shape))

    def forward(self, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = self.cache_type()
        for layer in range(keys.shape[0]):
            cache.update(keys[layer], values[layer], layer)
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        new_keys = torch.stack([layer.keys[:, :, -1:] for layer in cache.layers])
        return logits, new_keys, torch.stack([layer.values[:, :, -1:] for layer in cache.layers])


MODELS: dict[str, Callable[[], Any]] = {"bert": Bert, "llama_step": LlamaStep, "resnet50": ResNet}


def _model(name: str) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    return model, model.given


def make(name: str, engine: str, folder: Path) -> float:
    """Writes the engine's file; gives the seconds that it took, capture included."""
    import fusewright

    model, given = _model(name)
    start = time.perf_counter()
    if engine == "AOTInductor":
        program = torch.export.export(model, given)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    elif engine == "ONNX Runtime":
        fusewright.to_onnx(fusewright.export(model, given), folder / "model.onnx")
    elif engine != "compiled":
        program = fusewright.export(model, given)
        fusewright.package(program, folder / f"{engine}.fwp", standalone=engine == "standalone")
    return time.perf_counter() - start


def load(name: str, engine: str, folder: Path) -> tuple[float, Callable[[], Any]]:
    """Seconds to load, and a call."""
    import fusewright

    given = torch.load(folder / "given.pt")
    if engine == "compiled":
        model, given = _model(name)
        start = time.perf_counter()
        compiled: Any = fusewright.compile(model)
        compiled(*given)
        return time.perf_counter() - start, lambda: compiled(*given)
    if engine == "ONNX Runtime":
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        start = time.perf_counter()
        session = runtime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        seconds = time.perf_counter() - start
        feed = {one.name: value.numpy() for one, value in zip(session.get_inputs(), given)}
        return seconds, lambda: [torch.from_numpy(one) for one in session.run(None, feed)]
    start = time.perf_counter()
    if engine == "AOTInductor":
        run: Any = torch._inductor.aoti_load_package(str(folder / "model.pt2"))
    else:
        run = fusewright.load_package(folder / f"{engine}.fwp")
    return time.perf_counter() - start, lambda: run(*given)


def _resident() -> int:
    """MiB of this process's own: without the pages of files, which are shared and can be read again."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) // 1024


@torch.no_grad()
def serve(name: str, engine: str, folder: Path) -> None:
    """Answers each line of input by the seconds of a call, its first results, and the memory that it takes now."""
    import fusewright  # noqa: F401

    torch.set_num_threads(torch.get_num_threads())
    if engine == "ONNX Runtime":
        import onnxruntime  # noqa: F401
    before = _resident()
    seconds, call = load(name, engine, folder)
    say("loaded", seconds)
    for _ in sys.stdin:
        start = time.perf_counter()
        results = call()
        seconds = time.perf_counter() - start
        results = results if isinstance(results, (tuple, list)) else (results,)
        say("called", seconds, *(float(one.reshape(-1)[0]) for one in results), "memory", _resident() - before)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Server:
    def __init__(self, engine: str, command: list[str]) -> None:
        self.engine, self.calls, self.first, self.memory = engine, list[float](), list[float](), 0
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.load_seconds = float(self._answer("loaded")[0])

    def _answer(self, kind: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(kind):
                return line.split()[1:]
        raise RuntimeError(f"{self.engine} ended")

    def call(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write("call\n")
        self.process.stdin.flush()
        words = self._answer("called")
        if "memory" in words:
            self.memory = int(words[-1])
            words = words[:-2]
        else:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            self.memory = int(status.split("RssAnon:")[1].split()[0]) // 1024
        self.calls.append(float(words[0]))
        return [float(word) for word in words[1:]]


SERVED = {"C++": "standalone.fwp", "C++ and libtorch": "package.fwp"}
TORCH = str(Path(torch.__file__).parent / "lib")
FILES = {"package": "package.fwp", "standalone": "standalone.fwp", "AOTInductor": "model.pt2", "ONNX Runtime": "model.onnx"}


def compare(name: str, runtime: Path | None, rounds: int, kept: Path | None, apart: bool, engines: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if kept is None else kept / name
        folder.mkdir(parents=True, exist_ok=True)
        here = [sys.executable, "-m", "benchmarks.packages", "--folder", str(folder), "--models", name]
        _, given = _model(name)
        torch.save(given, folder / "given.pt")
        for number, one in enumerate(given):
            (folder / f"given.{number}").write_bytes(one.numpy().tobytes())
        times = folder / "made.json"
        made: dict[str, float] = json.loads(times.read_text()) if times.exists() else {}
        commands: dict[str, list[str]] = {}
        for engine in engines:
            try:
                if engine in FILES and (engine not in made or not (folder / FILES[engine]).exists()):
                    done = subprocess.run([*here, "--make", engine], capture_output=True, text=True, check=True)
                    made[engine] = float(done.stdout.split()[-1])
                    times.write_text(json.dumps(made))
                commands[engine] = [*here, "--serve", engine]
                if engine in SERVED:
                    files = [f"{folder}/given.{number}" for number in range(len(given))]
                    commands[engine] = [f"{runtime}/serve", f"{folder}/{SERVED[engine]}", "--torch", TORCH, *files]
                    if runtime is None:
                        del commands[engine]
            except subprocess.CalledProcessError as error:
                say(f"{name}: {engine} has no figure: {(error.stderr.strip().splitlines() or [error])[-1]}")
        if rounds == 0:
            return rows
        servers: list[Server] = []
        for group in [[engine] for engine in commands] if apart else [list(commands)]:
            servers += served({engine: commands[engine] for engine in group}, rounds, name)
        base = next(one for one in servers if one.engine == "compiled")
        for server in servers:
            far = max(abs(one - other) for one, other in zip(server.first, base.first))
            if far > 1e-2:
                say(f"{name}: {server.engine} differs by {far}")
            ratios = [one / other for one, other in zip(server.calls, base.calls)]
            call = statistics.median(server.calls)
            rows.append({
                "model": name, "engine": server.engine,
                "made_s": made.get(server.engine), "load_s": server.load_seconds, "call_s": call,
                "call_over_compiled": call / statistics.median(base.calls) if apart else statistics.median(ratios),
                "memory_mib": server.memory,
            })  # fmt: skip
    return rows


def served(commands: dict[str, list[str]], rounds: int, name: str) -> list[Server]:
    """The servers of these commands, after their calls, which go round them."""
    servers: list[Server] = []
    for engine, command in commands.items():
        try:
            servers.append(Server(engine, command))
        except RuntimeError as error:
            say(f"{name}: {engine} has no figure: {error}")
    for server in servers:
        server.first = server.call()
    for server in servers:
        server.call()
        server.calls.clear()
    for _ in range(rounds):
        for server in servers:
            server.call()
    for server in servers:
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait()
    return servers


def table(rows: list[dict[str, Any]]) -> str:
    names = ("model", "engine", "made, s", "load, ms", "call, ms", "over compiled", "memory, MiB")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        made = "" if row["made_s"] is None else f"{row['made_s']:.1f}"
        lines.append(
            f"| {row['model']} | {row['engine']} | {made} | {1e3 * row['load_s']:.1f} | {1e3 * row['call_s']:.2f} | "
            f"{row['call_over_compiled']:.2f} | {row['memory_mib']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runtime", type=Path, help="where CMake built examples/")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each; with 0 the files are only made")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--apart", action="store_true", help="one server after another, on a quiet machine")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path)
    for own in ("--make", "--serve"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        with torch.no_grad():
            say(make(options.models[0], options.make, options.folder))
        return
    if options.serve:
        serve(options.models[0], options.serve, options.folder)
        return
    rows = []
    for name in options.models:
        rows += compare(name, options.runtime, options.rounds, options.folder, options.apart, options.engines)
    say(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
