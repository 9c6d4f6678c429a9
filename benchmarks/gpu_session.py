"""What must run on a GPU before a change is believed, in parts that each fit a short loan of the machine.

    python -m benchmarks.gpu_session --list
    python -m benchmarks.gpu_session tests kernels --seconds 540 --folder out

Parts run one after the other; each gets its share of `--seconds`, and is ended when that is over. What a part prints
goes to a file of its own in the folder, its last lines to the terminal. `--dry` starts every command with `--help`, or
collects its tests, which needs no GPU: so no minute of one is lost to a wrong word.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PYTHON = sys.executable
TESTS = ("tests/gpu", "tests/runtime/test_cudagraphs.py")

Command = tuple[str, ...]
PARTS: dict[str, tuple[int, Command]] = {
    # name: (its share of the time in seconds, the command; {seconds}, {processes} and {folder} are replaced)
    "tests": (150, (PYTHON, "-m", "pytest", *TESTS, "-q", "-n", "{processes}", "-p", "no:benchmark")),
    "kernels": (330, (PYTHON, "-m", "benchmarks.gpu_kernels", "--processes", "{processes}", "--seconds", "{seconds}",
                      "--json", "{folder}/kernels.json")),
    "changed": (120, (PYTHON, "-m", "benchmarks.gpu_kernels", "--processes", "{processes}", "--seconds", "{seconds}",
                      "--only", "bicubic,bilinear,tanh,soft cap,small ,batched product,silu,gelu",
                      "--json", "{folder}/changed.json")),
    "decode": (300, (PYTHON, "-m", "benchmarks.gpu", "--stage", "models", "--only", "1x16,1x8",
                     "--ways", "eager,fw max-autotune,tc max-autotune", "--json", "{folder}/decode.json")),
    "calls": (60, (PYTHON, "-m", "benchmarks.gpu", "--stage", "calls")),
    "models": (540, (PYTHON, "-m", "benchmarks.gpu_kernels", "--only", "model ,UNet", "--processes", "8",
                     "--seconds", "{seconds}", "--json", "{folder}/models.json")),
    "recorded": (540, (PYTHON, "-m", "benchmarks.gpu_kernels", "--only", "model ,UNet", "--processes", "8",
                       "--mode", "reduce-overhead", "--seconds", "{seconds}", "--json", "{folder}/recorded.json")),
    "autotuned": (540, (PYTHON, "-m", "benchmarks.gpu_kernels", "--only", "model BERT,model Llama,model Qwen3,model T5,"
                        "model Whisper,model resnet50", "--processes", "6", "--mode", "max-autotune",
                        "--seconds", "{seconds}", "--json", "{folder}/autotuned.json")),
    "operators": (400, (PYTHON, "-m", "tests.ops.sweep", "--database", "op", "--device", "cuda",
                        "--dtype", "float32", "bfloat16", "--limit", "3")),
    # A launch from a thread without a context fails, and makes one: no error of ours.
    "sanitizer": (120, ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no",
                        "--error-exitcode", "9", PYTHON, "-m", "pytest",
                        "tests/gpu/test_gpu.py", "-q", "-x", "-p", "no:benchmark")),
}  # fmt: skip


def dry(command: Sequence[str]) -> list[str]:
    """The command, so that it only shows that it could start."""
    words = list(command)[list(command).index(PYTHON) :]
    return [*words, "--collect-only"] if "pytest" in words else [*words[:3], "--help"]


def run(name: str, command: Sequence[str], seconds: float, log: Path) -> int:
    """The part's exit code; 124 where its time was over."""
    with log.open("w") as out:
        started = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = started.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            code = 124
    lines = log.read_text(errors="replace").splitlines()
    print(f"--- {name}: exit code {code}, {len(lines)} lines in {log}")
    print("\n".join(line[:200] for line in lines[-25:]), flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="; ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=540, help="of all parts together")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    chosen = options.parts or list(PARTS)
    if options.list:
        for name, (share, command) in PARTS.items():
            print(f"{name:10} {share:4} s  {' '.join(command)}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    end, worst = time.monotonic() + options.seconds, 0
    for name in chosen:
        share, template = PARTS[name]
        seconds = min(share, end - time.monotonic())
        if seconds < 10:
            print(f"--- {name}: no time left")
            return worst or 124
        given = {"seconds": str(int(seconds) - 15), "processes": str(options.processes), "folder": str(options.folder)}
        command = [word.format(**given) for word in template]
        worst = max(worst, run(name, dry(command) if options.dry else command, seconds, options.folder / f"{name}.log"))
    return worst


if __name__ == "__main__":
    sys.exit(main())
