"""A stale answer is the worst defect there is: a sample of programs whose state changes between calls.

`python -m tests.fuzz.run state` runs as many as one likes.
"""

from __future__ import annotations

import ast
import pkgutil

import pytest

from fusewright.capture.border.world import World
from tests.fuzz import run, session, state
from tests.fuzz.state_kinds import Kind, note_original

SAMPLE, SWEEP = 120, 20_000


def check(text: str, name: object) -> None:
    found = session.examine(text)
    assert found is None, f"{name}: {found}\n{session.printed(text)}"


@pytest.mark.parametrize("part", range(SAMPLE // 40))
def test_sample(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        check(state.program(seed), f"seed {seed}")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", state.ALL, ids=lambda kind: kind.name)
def test_each_kind(kind: Kind) -> None:
    for backend in kind.backends:
        for seed in range(6 if backend == "eager" else 3):
            check(state.program(seed, (kind,), backend), f"seed {seed}, {backend}")


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(SWEEP // 200))
def test_sweep(part: int) -> None:
    for seed in range(1000 + part * 200, 1200 + part * 200):
        check(state.program(seed), f"seed {seed}")


def _statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("forgotten", ["LENGTH", "EQUALS", "TYPE_ATTRIBUTE", "STATE"])
def test_a_guard_that_is_forgotten_is_found_and_made_small(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = World.guards
    monkeypatch.setattr(World, "guards", lambda self: tuple(one for one in guards(self) if one.kind != forgotten))
    texts = map(state.program, range(300))
    text, like = next((text, one.like) for text in texts if (one := session.examine(text)) is not None)
    small = run.shrunk(text, like, most=60)
    assert _statements(small) < _statements(text)


def test_a_compile_that_is_not_needed_is_found() -> None:
    step = "def step0():\n    return program()\ndef step0_again():\n    L.append(1)\n    return program()\n"
    found = session.examine(f"begin(state=True)\nL = [1]\ndef program():\n    return len(L)\n{step}")
    assert found is not None and found.kind == "needless"


def test_what_a_cut_program_leaves_behind_reaches_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.GENERATORS, "state", lambda seed: f"# {seed}\n")
    monkeypatch.setattr(run, "examine", lambda text: session.Finding("value", "step0", text) if "1" in text else None)
    monkeypatch.setattr(run.gc, "freeze", lambda: None)  # this process is not over then
    monkeypatch.setattr(run.sys, "unraisablehook", run.sys.unraisablehook)
    run.child("state", range(3), 0.0)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith(("seed", "found", "end"))] == ["seed 0", "seed 1", "found 1 value"]
    run.child("state", range(2, 3), 0.0)
    assert capsys.readouterr().out.splitlines() == ["seed 2", "end"]


PATCHES = (
    ("torch.Tensor", "tanh", "x.tanh()"),
    ("torch.Tensor", "size", "x.size(0) + x"),
    ("torch.Tensor", "shape", "x.shape"),
    ("torch.Tensor", "__add__", "x + 1"),
    ("torch.Tensor", "brand_new", "x.brand_new"),
    ("torch.nn.Parameter", "relu", "torch.nn.Parameter(x).relu()"),
    ("torch.nn.Module", "__call__", "torch.nn.ReLU()(x)"),
    ("torch.nn.Module", "_call_impl", "torch.nn.Sequential(torch.nn.ReLU())(x)"),
    ("torch.nn.Module", "__getattr__", "torch.nn.Sequential(torch.nn.Tanh())[0](x)"),
    ("torch.nn.Linear", "forward", "torch.nn.Linear(3, 2)(x).shape"),
    ("torch.nn.functional", "linear", "torch.nn.Linear(3, 2)(x).shape"),
    ("torch", "sin", "torch.sin(x)"),
)


@pytest.mark.parametrize("owner, name, read", PATCHES)
@pytest.mark.parametrize("value", ["lambda *args: 3", "lambda self, *args: self"])
def test_what_a_program_puts_in_the_place_of_pytorchs_functions_is_called(
    owner: str, name: str, read: str, value: str
) -> None:
    note_original(pkgutil.resolve_name(owner), name)
    if name in ("shape", "brand_new"):
        value = f"property({value})"
    steps = (f"{owner}.{name} = {value}", f"{owner}.{name} = {value}", f"put_back({owner}, '{name}')")
    text = f"begin(state=True)\ndef program(x):\n    return {read}\nx = made((2, 3), f32, 1)\ndef step0(): return program(x)\n"
    for number, step in enumerate(steps):
        text += f"def step{number + 1}():\n    {step}\n    try: return program(x)\n    finally: put_back({owner}, '{name}')\n"
    check(text, name)


def test_the_same_seed_gives_the_same_program() -> None:
    assert state.program(3) == state.program(3) != state.program(4)
