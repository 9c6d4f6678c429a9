"""The programs of examples/: each runs, and is compiled. The quick ones run in this process."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fusewright.backends import registry
from fusewright.base.events import STREAM, Captured, Event

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ("training_loop", "custom_backend", "custom_operator")
NEEDS = {
    "transformers_generate": ("transformers",),
    "diffusers_unet": ("diffusers",),
    "timm_classify": ("timm", "torchvision"),
    "lightning_fit": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "serving": ("fastapi", "httpx"),
    "distributed/accelerate_train": ("accelerate",),
    "distributed/lightning_train": ("lightning",),
    "distributed/trainer_train": ("transformers", "accelerate"),
    "distributed/ray_train": ("ray",),
}
DISTRIBUTED = [
    ("distributed/accelerate_train", "ddp"),
    ("distributed/lightning_train", "ddp"),
    ("distributed/lightning_train", "fsdp2"),
    ("distributed/trainer_train", "ddp"),
]
"""accelerate and the Trainer shard models on GPUs only."""


def test_every_example_is_here() -> None:
    found = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.py")}
    assert found == {*QUICK, *NEEDS}
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {"notebook.ipynb"}


@pytest.mark.parametrize("name", QUICK)
def test_quick_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    captured: list[Event] = []
    with STREAM.listening(lambda event: captured.append(event) if isinstance(event, Captured) else None):
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            registry._backends.pop("counting", None)
    assert captured
    assert capsys.readouterr().out


def environment() -> dict[str, str]:
    """Programs find this tree's fusewright, log what they compile, and compile it anew."""
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    return os.environ | {"PYTHONPATH": paths, "FUSEWRIGHT_LOGS": "schedule", "FUSEWRIGHT_CACHE": "0"}


def run(*words: str, shows: str = "[fusewright.schedule]") -> str:
    """What a program prints, in which `shows` tells that something was compiled."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=EXAMPLES.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert shows in done.stdout, f"nothing was compiled:\n{done.stdout}"
    return done.stdout


def require(name: str) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in NEEDS if "/" not in name])
def test_example_runs(name: str) -> None:
    require(name)
    run(f"examples/{name}.py")


@pytest.mark.sweep
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(("name", "kind"), DISTRIBUTED)
def test_example_of_two_processes_runs(name: str, kind: str) -> None:
    require(name)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert f"{kind} on 2: loss" in run(*torchrun, f"examples/{name}.py", kind)


@pytest.mark.sweep
def test_ray_starts_two_processes() -> None:
    """Ray shows no logs of its processes; what cannot be compiled whole would raise there (fullgraph)."""
    require("distributed/ray_train")
    run("examples/distributed/ray_train.py", "ddp", shows="ddp on 2: loss")


@pytest.mark.sweep
def test_notebook_runs() -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute(
        env=environment()
    )
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("text/html" in output.get("data", {}) for output in shown)
    assert any("1 graph" in output.get("text", "") for output in shown)
