"""`fusewright.minify` finds planted defects, says whose they are, and writes programs that fail alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusewright

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

KERNEL = """
from fusewright.loops.lower import registry

registry._ROWS[registry.operator("tanh")] = registry._ROWS[registry.operator("sin")]
"""

SCRIPT = """
import torch
import fusewright

def f(x, weight, bias):
    y = torch.relu(x @ weight + bias)
    z = torch.relu(torch.tanh(x - y)) * 2
    return (z + x).softmax(-1), z.sum()

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


@pytest.mark.parametrize(
    ("defect", "kind", "culprit", "operator"),
    [
        (REWRITE, "wrong", "rewrite 1: tanh becomes sin (pass planted)", "tanh"),
        (FUSION, "wrong", "fusion fused_", ""),
        (KERNEL, "wrong", "kernel fused_tanh", "tanh"),
    ],
    ids=["rewrite", "fusion", "kernel"],
)
def test_a_planted_defect_is_found(defect: str, kind: str, culprit: str, operator: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(defect)
    done = run(SCRIPT.replace("KIND", kind), tmp_path)
    assert done.returncode == 0, done.stderr
    told, _, program = done.stdout.partition("\n")
    assert told.startswith(culprit), told
    assert len(program.strip().splitlines()) <= 15
    assert program.count(" = torch.") <= 2 and operator in program, program  # one operator, and its arguments
    failed = run(program, tmp_path)
    assert "AssertionError" in failed.stderr
    (tmp_path / "sitecustomize.py").unlink()
    assert run(program, tmp_path).returncode == 0, "it fails without the defect too"


def test_the_functions_that_a_script_compiles_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KERNEL)
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, fusewright\n\n@fusewright.compile(mode='default')\ndef f(x):\n    return torch.tanh(x) + 1\n\n"
        "f(torch.randn(3, 5))\n"
    )
    call = f"from pathlib import Path; from fusewright.tools.minify import *; print(minify_script(Path({str(script)!r})))"
    done = run(f"import fusewright; {call}", tmp_path)
    assert done.stdout.startswith("wrong: backend native, kernel fused_tanh"), done.stderr


def test_where_nothing_fails_nothing_is_found() -> None:
    assert fusewright.minify(torch.nn.Linear(3, 3), (torch.randn(2, 3),)) is None
