"""Two gloo processes on the CPU: DistributedDataParallel, FSDP2 and collectives, inside and outside of compiled modules, equal eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WORLD = 2
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by check."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # beside a GPU eager's own all_gather over gloo crashes (PyTorch 2.11)
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.training.distributed_worker",
                str(rank),
                str(WORLD),
                *map(str, (folder / "store", folder / f"{rank}.json")),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, texts, strict=True):
        assert worker.returncode == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


NAMES = [
    "ddp inside",
    "ddp outside",
    "ddp static graph inside",
    "ddp static graph outside",
    "ddp gradient as bucket view inside",
    "ddp gradient as bucket view outside",
    "ddp accumulation inside",
    "ddp accumulation outside",
    "ddp unused parameters inside",
    "ddp unused parameters outside",
    "ddp hooks inside",
    "ddp hooks outside",
    "ddp sizes inside",
    "ddp sizes outside",
    "ddp training step inside",
    "ddp training step outside",
    "fsdp inside",
    "fsdp outside",
    "all_reduce outside",
    "functional all_reduce outside",
    "all_gather outside",
]


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        assert "error" not in report[name], report[name]["error"]
        assert report[name]["compiles"] > 0


def test_the_backward_under_ddp_is_cut_at_bucket_borders(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for form in ("inside", "outside"):
            assert report[f"ddp {form}"]["parts"] > 2, "one part of the backward for each bucket"
            assert report[f"ddp {form}"]["overlaps"], "the first bucket's gradients are there before the last part runs"


def test_every_check_is_listed(reports: list[dict[str, Any]]) -> None:
    assert sorted(reports[0]) == sorted(NAMES)
