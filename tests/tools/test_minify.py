"""`fusewright.minify` finds planted defects, says whose they are, and writes programs that fail alone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewright
from fusewright.graph import passes
from fusewright.tools import cli

REWRITE = """
import torch
from fusewright.graph import passes

def planted(graph, context):
    for node in graph.nodes:
        if node.target is torch.ops.aten.tanh.default and context.allow("tanh becomes sin"):
            node.target = torch.ops.aten.sin.default
    return graph

passes.PIPELINE.append((planted, "A wrong rewrite."))
"""

FUSION = """
from fusewright.backends import pipeline
from fusewright.base.records import replace
from fusewright.loops.ir import Store
from fusewright.loops.lower import expressions as ex

right = pipeline.schedule

def off_by_one(statement):
    return replace(statement, value=ex.add(statement.value, 1)) if isinstance(statement, Store) else statement

def wrong(program, options, *rest):
    plan = right(program, options, *rest)
    for name, kernel in plan.kernels.items():
        if options.fusion and len(kernel.origins) > 1:
            *stages, last = kernel.stages
            last = replace(last, statements=tuple(map(off_by_one, last.statements)))
            plan.kernels[name] = replace(kernel, stages=(*stages, last))
    return plan

pipeline.schedule = wrong
"""

STAGE = """
from fusewright.backends import pipeline
from fusewright.base.records import replace

right = pipeline.with_memory

def overlapping(plan, own_bytes):
    made = right(plan, own_bytes)
    places = {name: replace(place, offset=0) for name, place in made.placements.items()}
    return replace(made, placements=places)

pipeline.with_memory = overlapping
"""

KERNEL = """
from fusewright.loops.lower import registry

registry._ROWS[registry.operator("tanh")] = registry._ROWS[registry.operator("sin")]
"""

CRASH = """
import os
from fusewright.backends import pipeline

right = pipeline.schedule

def crashing(program, options, *rest):
    plan = right(program, options, *rest)
    if any("tanh" in repr(kernel.stages) for kernel in plan.kernels.values()):
        os.abort()
    return plan

pipeline.schedule = crashing
"""

SLOW = """
import torch
from fusewright.graph import passes

def planted(graph, context):
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.tanh.default and context.allow("tanh takes long"):
            with graph.inserting_after(node):
                last = made = graph.call_function(torch.ops.aten.tanh.default, node.args)
            made.meta = dict(node.meta)
            for turn in range(300):
                with graph.inserting_after(last):
                    target = torch.ops.aten.add.Tensor if turn == 299 else torch.ops.aten.tan.default
                    last = graph.call_function(target, (made, last) if turn == 299 else (last,))
                last.meta = dict(node.meta)
            last.kwargs = {"alpha": 1e-30}
            node.replace_all_uses_with(last)
    return graph

passes.PIPELINE.append((planted, "A slow rewrite."))
"""

SCRIPT = """
import torch
import fusewright

def f(x, weight, bias):
    y = torch.relu(x @ weight + bias)
    z = torch.relu(torch.tanh(x - y)) * 2
    return (z + x).softmax(-1) @ weight @ weight, z.sum()

if __name__ == "__main__":
    found = fusewright.minify(f, (torch.randn(16, 24), torch.randn(24, 24), torch.randn(24)), kind="KIND")
    print(found.culprit)
    print(found.program)
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = str(Path(fusewright.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), source))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("defect", "kind", "culprit", "operator"),
    [
        (REWRITE, "wrong", "rewrite 1: tanh becomes sin (pass planted)", "tanh"),
        (FUSION, "wrong", "fusion fused_", ""),
        (STAGE, "wrong", "stage memory", ""),
        (KERNEL, "wrong", "kernel fused_tanh", "tanh"),
        pytest.param(CRASH, "crash", "kernel", "tanh", marks=pytest.mark.sweep),  # a process for each attempt
        pytest.param(SLOW, "slow", "rewrite 1: tanh takes long (pass planted)", "tanh", marks=pytest.mark.sweep),
    ],
    ids=["rewrite", "fusion", "stage", "kernel", "crash", "slow"],
)
def test_a_planted_defect_is_found(defect: str, kind: str, culprit: str, operator: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(defect)
    done = run(SCRIPT.replace("KIND", kind), tmp_path)
    assert done.returncode == 0, done.stderr
    told, _, program = done.stdout.partition("\n")
    assert told.startswith(culprit), told
    assert len(program.strip().splitlines()) <= 16  # of 19; what two buffers take is the machine's choice of kernels
    assert program.count(" = torch.") <= 2 and operator in program, program  # one operator, and its arguments
    failed = run(program, tmp_path)
    assert failed.returncode < 0 if kind == "crash" else "AssertionError" in failed.stderr, failed
    (tmp_path / "sitecustomize.py").unlink()
    assert run(program, tmp_path).returncode == 0, "it fails without the defect too"


def test_few_inputs_that_no_seed_makes_stand_in_the_program() -> None:
    def planted(graph: torch.fx.Graph, context: Any) -> torch.fx.Graph:
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default and context.allow("relu ends at 100"):
                node.target, node.args = torch.ops.aten.clamp.default, (*node.args, 0, 100)
        return graph

    passes.PIPELINE.append((planted, "A wrong rewrite."))
    try:
        found = fusewright.minify(lambda x, mask: torch.relu(x) * mask, (torch.full((5, 3), 150.0), torch.ones(3) > 0))
        assert found is not None and "relu ends at 100" in found.culprit
        assert "args = [torch.tensor([[150.0]], dtype=torch.float32)]" in found.program
        uncached = found.program.replace("compile(f)", "compile(f, options={'disk_cache': False})")
        with pytest.raises(AssertionError, match="not close"):
            exec(uncached, {})
    finally:
        passes.PIPELINE.pop()
    exec(uncached, {})


@pytest.mark.parametrize("how", ["fusewright.compile(mode='default')", "torch.compile(backend='inductor')"])
def test_the_functions_that_a_script_compiles_are_looked_at(how: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KERNEL)
    script = tmp_path / "script.py"
    script.write_text(
        f"import torch, fusewright\n\n@{how}\ndef f(x):\n    return torch.tanh(x) + 1\n\nf(torch.randn(3, 5))\n"
    )
    call = (
        f"from pathlib import Path; from fusewright.tools.minify import *; print(minify_script(Path({str(script)!r})))"
    )
    done = run(f"import fusewright; {call}", tmp_path)
    assert done.stdout.startswith("wrong: backend native, kernel fused_tanh"), done.stderr


def test_a_script_that_compiles_nothing_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr(sys, "argv", [])
        kept.setattr(sys, "path", list(sys.path))
        assert cli.main(["minify", str(script)]) == 2
    assert "compiles nothing" in capsys.readouterr().err


RECOMPILES = {
    "number": ("f(ones, 1.5, True); f(ones, 1.5, True); f(2 * ones, 2.5, True)", "L['n'] was 1.5, is 2.5", ["cos"]),
    "flag": ("f(ones, 1.5, True); f(ones, 1.5, flag=False)", "L['flag'] was True, is False", ["cos"]),
    "size": ("f(ones, 1.5, True); f(ones[1:], 1.5, True)", "L['x'].size()[0] was 8, is 7", ["cos", "+ 1"]),
    "dtype": ("f(ones, 1.5, True); f(ones.double(), 1.5, True)", "L['x'].dtype was torch.float32", ["cos", "+ 1"]),
    "module": ("m(ones); m(ones); m(ones[2:])", "L['input'].size()[0] was 8, is 6", ["relu"]),
}


@pytest.mark.parametrize("case", RECOMPILES)
def test_the_argument_that_compiles_again_is_found(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, guard, left_out = RECOMPILES[case]
    script, small = tmp_path / "script.py", tmp_path / "small.py"
    script.write_text(
        "import torch\nimport torch.nn.functional as F\nimport fusewright\n\n@fusewright.compile\n"
        "def f(x, n, flag):\n    y = F.relu(x)\n    z = torch.cos(y)\n    for _ in range(3):\n        z = z + 1\n"
        "    return (y * n + 1) * (2 if flag else 3)\n\nones = torch.ones(8, 3)\n"
        f"m = fusewright.compile(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU()))\n{calls}\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["minify", "--kind", "recompiles", "-o", str(small), str(script)]) == 1
    assert f"recompiles: backend eager, {guard}" in capsys.readouterr().out
    program = small.read_text()
    assert len(program.strip().splitlines()) <= 15, program
    assert not [word for word in left_out if word in program.partition("compiled =")[0]], program
    try:
        with pytest.raises(fusewright.RecompileError, match=re.escape(guard.partition(" was")[0]).replace("input", "input_1")):
            runpy.run_path(str(small))
    finally:
        fusewright.set_stance("default")


def test_the_command_says_so_where_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("import sys, torch, fusewright\nfusewright.compile(torch.relu)(torch.ones(int(sys.argv[1])))\n")
    assert cli.main(["minify", str(script), "3"]) == 0 and "nothing found" in capsys.readouterr().out
    assert cli.main(["minify", str(tmp_path / "other.py")]) == 2


def test_hooks_of_a_script_stay_and_calls_that_agree_are_no_recompile() -> None:
    model = torch.nn.Linear(3, 3)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(1))
    assert fusewright.minify(model, [(torch.ones(2, 3),), (torch.ones(2, 3),)], kind="recompiles") is None
    assert len(model._forward_pre_hooks) == 1


def test_where_nothing_fails_nothing_is_found() -> None:
    assert fusewright.minify(torch.nn.Linear(3, 3), (torch.randn(2, 3),)) is None
