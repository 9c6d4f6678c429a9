"""Two and four gloo processes on the CPU: collectives, and training of small models, equal eager's on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusewright.backends import agreement

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def launch(module: str, size: int, folder: Path, *more: str, timeout: float = 900) -> list[tuple[int, str]]:
    """Runs a module as that many processes, with rank, world size, a store's file and a report's file; gives the exit
    codes and what was printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # beside a GPU eager's own all_gather over gloo crashes (PyTorch 2.11)
    workers = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module, str(rank), str(size), str(folder / "store"), str(folder / f"{rank}.json"), *more],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        texts = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, texts, strict=True)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])  # four take minutes on two cores
def test_equals_eager_on_every_rank(size: int, tmp_path: Path) -> None:
    """One launch runs every case: most of the time of one is the start of the processes."""
    ended = launch("tests.distributed.worker", size, tmp_path)
    assert not any(code for code, _ in ended), "\n".join(f"rank {n}: {one[0]}\n{one[1]}" for n, one in enumerate(ended))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    failed = [
        f"{name}, rank {rank}: {error}"
        for rank, report in enumerate(reports)
        for name, error in report.items()
        if error
    ]
    assert not failed, "\n".join(failed)
    assert len(reports[0]) > 15


DIFFERENCES = {
    "mismatch": ("Number 2 is all_reduce", "min", "max"),
    "recompile": ("Number 2 is all_reduce", "min", "max"),
    "shapes": ("Number 1 is all_reduce sum", "float32 3", "float32 4"),
    "dtypes": ("Number 1 is all_reduce sum", "float32 3", "float64 3"),
    "code": ("Number 2 is ", "nothing", "all_reduce sum of float32 3"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_different_collectives_are_an_error_that_names_the_first_difference(case: str, tmp_path: Path) -> None:
    launch("tests.distributed.faults", 2, tmp_path, case)
    for rank in range(2):
        text, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert text.startswith("CollectiveMismatch"), text
        assert all(part in text for part in DIFFERENCES[case]), text
        assert seconds < 20


@pytest.mark.parametrize("case", ["sizes", "eager"])
def test_a_process_may_compile_alone(case: str, tmp_path: Path) -> None:
    launch("tests.distributed.faults", 2, tmp_path, case)
    for rank in range(2):
        text, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert text == "nothing was raised"
        assert seconds < 20


@pytest.mark.parametrize("case", ["dies", "dies_in_the_backward"])
def test_a_rank_that_dies_gives_the_groups_own_error(case: str, tmp_path: Path) -> None:
    launch("tests.distributed.faults", 2, tmp_path, case)
    text, seconds = json.loads((tmp_path / "0.json").read_text())
    assert text.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")), text
    assert seconds < 30


def test_graphs_on_the_processes_own_gpus_are_alike() -> None:
    def digest(*devices: str) -> str:
        graph = torch.fx.Graph()
        made = [graph.call_function(torch.ops.aten.zeros.default, ([2],), {"device": torch.device(d)}) for d in devices]
        graph.output(tuple(made))
        return agreement.digest(graph)

    assert digest("cuda:0", "cuda:0") == digest("cuda:1", "cuda:1") != digest("cuda:0", "cuda:1")
    assert digest("cuda:0", "cuda:1") == digest("cuda:1", "cuda:0") != digest("cpu", "cuda:0")
