"""`fusewright env` and `fusewright doctor`: what is installed here, and whether it works.

Takes nothing; gives text for a bug report, and findings with a remedy each. Always holds: nothing is changed but the
disk cache's folder, which is made if it is not there.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

import torch

import fusewright
from fusewright import api
from fusewright.base import options
from fusewright.base.errors import CacheWarning, OptionError, near_misses
from fusewright.runtime.host import store
from fusewright.tools.bundle import bytes_text
from fusewright.tools.check import Check, Finding

PACKAGES = (
    "llvmlite",
    "triton",
    "numpy",
    "transformers",
    "accelerate",
    "diffusers",
    "lightning",
    "timm",
    "onnxruntime",
    "jax",
)
VECTOR_UNITS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve")
PROBE = "0" * 64
"""The key of an entry that is written, read and removed again."""
OLDEST_TORCH = (2, 11)
PYTHONS = ((3, 11), (3, 14))


def _processor() -> tuple[str, set[str]]:
    """The processor's name and its features."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor() or platform.machine(), set()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    return facts.get("model name", platform.machine()), set((facts.get("flags") or facts.get("Features", "")).split())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


def environment() -> list[tuple[str, str]]:
    """What belongs in a bug report, as pairs."""
    name, features = _processor()
    cache = store()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    rows = [
        ("fusewright", fusewright.__version__),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("PyTorch", f"{torch.__version__} (git {str(torch.version.git_version)[:10]}, debug {torch.version.debug})"),
        ("packages", ", ".join(_versions())),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"),
        ("processor", f"{name}, {_cores()} of {os.cpu_count()} cores"),
        ("vectors", ", ".join(unit for unit in VECTOR_UNITS if unit in features) or "unknown"),
        ("threads", f"{torch.get_num_threads()} in an operator, {torch.get_num_interop_threads()} between operators"),
        ("GPU", ", ".join(gpus) + f" (CUDA {torch.version.cuda})" if gpus else f"none (CUDA {torch.version.cuda})"),
        ("cache", f"{len(cache.entries())} entries, {bytes_text(cache.size())} of {bytes_text(cache.limit)}"),
    ]
    return rows + list(options.given_variables().items())


def _installation() -> Finding:
    build = Path(fusewright._native.__file__ or "")
    found = version("fusewright") if _is_installed("fusewright") else "not installed, imported from its folder"
    text = f"fusewright {fusewright.__version__} ({found}), native part {build.name}"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if release < OLDEST_TORCH:
        return Finding("installation", "failure", f"{text}\nPyTorch {torch.__version__} is too old: 2.11 is needed")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("installation", "warning", f"{text}\nPython {platform.python_version()} is not tested")
    return Finding("installation", "ok", f"{text}, Python {platform.python_version()}, PyTorch {torch.__version__}")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _variables() -> Finding:
    wrong, odd = [], []
    given = options.given_variables()
    for name in given:
        if name not in options.VARIABLES:
            odd.append(f"{name} is no variable of fusewright: {near_misses(name, options.VARIABLES)}")
            continue
        try:
            options.environment(name)
        except OptionError as error:
            wrong.append(str(error))
    if options.VARIABLES["FUSEWRIGHT_DISABLE"].parse(given.get("FUSEWRIGHT_DISABLE", "")):
        odd.append("FUSEWRIGHT_DISABLE is set: nothing is compiled")
    text = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    return Finding("variables", "failure" if wrong else "warning" if odd else "ok", "\n".join([text, *wrong, *odd]))


def _processors() -> Finding:
    name, features = _processor()
    units = [unit for unit in VECTOR_UNITS if unit in features]
    lines = [f"{name}: {', '.join(units) or 'no known vector unit'}; {torch.get_num_threads()} threads"]
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in features:
        lines.append("without AVX2 kernels are slow, and this is not tested")
    elif platform.machine() not in ("x86_64", "AMD64"):
        lines.append(f"{platform.machine()} is not tested")
    if torch.get_num_threads() > _cores():
        lines.append(f"{torch.get_num_threads()} threads on {_cores()} cores: set torch.set_num_threads({_cores()})")
    return Finding("processor", "warning" if len(lines) > 1 else "ok", "\n".join(lines))


def _cache() -> Finding:
    cache = store()
    if not options.environment("FUSEWRIGHT_CACHE"):
        return Finding("cache", "warning", "FUSEWRIGHT_CACHE=0: every process compiles anew")
    problem = cache.problem()
    if not problem:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # the finding says it
            written = cache.put(PROBE, "fusewright doctor", b"probe") and cache.get(PROBE) == b"probe"
        cache.discard(PROBE)
        problem = "" if written else "cannot be written to"
    if problem:
        return Finding("cache", "failure", f"the folder {cache.folder} {problem}: set FUSEWRIGHT_CACHE_DIR to another")
    damaged = cache.verify()
    held, most = bytes_text(cache.size()), bytes_text(cache.limit)
    size = f"{len(cache.entries())} entries, {held} of at most {most}, in {cache.folder}"
    if damaged:
        return Finding("cache", "warning", f"{size}\n{len(damaged)} damaged entries were removed")
    if cache.size() > 0.9 * cache.limit:
        return Finding("cache", "warning", f"{size}\nit is nearly full: raise FUSEWRIGHT_CACHE_MIB, or clear it")
    return Finding("cache", "ok", size)


def _compiles(device: str) -> str:
    """What goes wrong when a small function is compiled, trained and compared on a device; nothing when it is well."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w).softmax(-1)

    x, w = torch.randn(16, 32, device=device), torch.randn(32, 8, device=device, requires_grad=True)
    expected = f(x, w)
    (slope,) = torch.autograd.grad((expected * expected).sum(), w)
    try:
        compiled = api.compile(f, backend="native", fullgraph=True, options={"disk_cache": False})
        got = compiled(x, w)
        (ours,) = torch.autograd.grad((got * got).sum(), w)
        torch.testing.assert_close((got, ours), (expected, slope))
    except Exception as error:  # whatever it is: that is what the doctor was asked for
        return f"{type(error).__name__}: {error}"
    return ""


def _on_cpu() -> Finding:
    problem = _compiles("cpu")
    return Finding("compiling", "failure" if problem else "ok", problem or "a small function compiles and trains well")


def _on_gpu() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"PyTorch is built for CUDA {built} and finds no GPU" if built else "PyTorch is built without CUDA"
        return Finding("GPU", "warning" if built else "ok", f"none: {reason}")
    if find_spec("triton") is None:
        return Finding("GPU", "failure", "Triton is missing, which makes the kernels: pip install triton")
    problem = _compiles("cuda")
    name = f"{torch.cuda.get_device_name()}, Triton {version('triton')}"
    return Finding("GPU", "failure" if problem else "ok", f"{name}\n{problem}".rstrip())


def _entry_points() -> Finding:
    missing = [
        f"{group}: {meaning}"
        for group, meaning in (
            ("torch_dynamo_backends", 'torch.compile(backend="fusewright")'),
            ("torch.backends", "FUSEWRIGHT_REPLACE_TORCH_COMPILE without an import of fusewright"),
        )
        if not any(point.value.startswith("fusewright") for point in entry_points(group=group))
    ]
    lines = ["registered with PyTorch"] if not missing else ["not registered; install fusewright again for", *missing]
    return Finding("entry points", "warning" if missing else "ok", "\n".join(lines))


CHECKS: list[Callable[[], Finding]] = [
    _installation,
    _entry_points,
    _variables,
    _processors,
    _cache,
    _on_cpu,
    _on_gpu,
]


def examine() -> Check:
    """All findings, in order."""
    return Check([each() for each in CHECKS])
