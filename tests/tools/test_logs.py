"""Logs and the debug folder: every artifact is wired, from the environment and from code, and says what is true."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusewright
from fusewright import api
from fusewright.backends import stage_texts
from fusewright.base import events
from fusewright.tools import debug_folder, logs

PROGRAM = """
import logging
import torch, fusewright

@fusewright.compile(dynamic=False)
def f(x):
    y = torch.relu(x) + 1
    fusewright.graph_break("half way")
    return y * 2

f(torch.ones(4))
f(torch.ones(5))
"""


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    yield
    fusewright.set_logs(**dict.fromkeys(logs.ARTIFACTS, False))
    api._subscribe.cache_clear()
    debug_folder.of_process.cache_clear()


def test_the_environment_turns_on_logs_and_the_debug_folder(tmp_path: Path) -> None:
    source = str(Path(fusewright.__file__).parents[1])
    wanted = "graph_breaks,recompiles,guards,graph,aot_graphs,fusion,schedule,output_code,kernel_code"
    environment = {**os.environ, "PYTHONPATH": source, "FUSEWRIGHT_LOGS": wanted, "FUSEWRIGHT_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for artifact in wanted.split(","):
        assert f"[fusewright.{artifact}]" in done.stderr, f"{artifact} is missing in:\n{done.stderr}"
    assert "graph_break() was called: half way" in done.stderr
    assert "L['x'].size()[0] was 4, is 5" in done.stderr
    (run,) = (tmp_path / "fusewright_debug").iterdir()
    functions = sorted(folder.name for folder in run.iterdir() if folder.is_dir())
    assert functions == ["f_string_5"], functions
    files = sorted((run / functions[0]).glob("*/*.txt"))
    versions = {path.parent.name for path in files}
    assert len(versions) == 4  # two compiles, each of the function and of what goes on behind the break
    for version in versions:
        stages = [path.name for path in files if path.parent.name == version]
        assert [int(stage[:3]) for stage in stages] == list(range(len(stages)))
        texts = [path.read_text().split("\n# ")[0].strip() for path in files if path.parent.name == version]
        assert all(one != other for one, other in itertools.pairwise(texts))
    index = (run / "index.html").read_text()
    assert all(str(path.relative_to(run)) in index for path in files)
    assert f"to {run} (index.html)" in done.stderr
    names = [path.name[4:-4] for path in files]
    for name in (
        "break",
        "graph",
        "guards",
        "finish",
        "passes",
        "loops",
        "schedule",
        "memory",
        "kernels",
        "call_plan",
        "recompile",
    ):
        assert name in names or f": {name}: unchanged" in index, (name, names)
    assert any(name.startswith("kernel_fused") for name in names)
    complete = {path.name[4:-3]: path.read_text() for path in run.rglob("*.ir")}
    assert {"loops", "schedule", "call_plan"} <= {*complete}
    assert all(stage_texts.complete_text(stage_texts.parse(text)) == text for text in complete.values())
    assert "relu" in files[names.index("graph")].read_text()
    assert "def finish" in files[names.index("finish")].read_text()


def test_the_debug_folder_is_turned_on_and_off_in_a_running_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    debug_folder.of_process.cache_clear()
    compiled = fusewright.compile(lambda x: x.sin() + 1, dynamic=False)
    seen = []
    for size, wanted in enumerate(("0", "1", "0"), 2):
        monkeypatch.setenv("FUSEWRIGHT_DEBUG", wanted)
        compiled(torch.ones(size))
        seen.append(len(list(tmp_path.rglob("*.txt"))))
    assert seen[0] == 0 and 0 < seen[1] == seen[2]


def test_every_artifact_of_a_compile_reaches_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(70):
            x = x * 1.5
        fusewright.graph_break()
        return x + 1

    compiled = fusewright.compile(loop, dynamic=False)
    fusewright.set_logs(**dict.fromkeys(logs.ARTIFACTS, True))
    with caplog.at_level("INFO", logger="fusewright"):
        compiled(torch.ones(3))
        compiled(torch.ones(4))
    seen = {record.name.removeprefix("fusewright.") for record in caplog.records}
    quiet = {"internal_errors", "cache", "autotuning"}  # no defect, no tuning; the cache has tests of its own
    assert seen - quiet == set(logs.ARTIFACTS) - quiet
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_level_may_be_given_and_off_is_off(caplog: pytest.LogCaptureFixture) -> None:
    fusewright.set_logs(graph_breaks=logging.WARNING, recompiles=logging.DEBUG, guards=True)
    fusewright.set_logs(guards=False)

    @fusewright.compile(dynamic=False)
    def f(x: torch.Tensor) -> torch.Tensor:
        fusewright.graph_break()
        return x + 1

    with caplog.at_level("DEBUG", logger="fusewright"):
        f(torch.ones(3))
        f(torch.ones(4))
    levels = {record.name: record.levelno for record in caplog.records}
    assert levels == {"fusewright.graph_breaks": logging.WARNING, "fusewright.recompiles": logging.DEBUG}
    fusewright.set_logs(graph_breaks=False, recompiles=None)
    assert logs._subscriber not in events.STREAM.subscribers
    for wrong in ({"graph_break": True}, {"graphs": True}):
        with pytest.raises(fusewright.OptionError, match="did you mean 'graph"):
            fusewright.set_logs(**wrong)
    with pytest.raises(fusewright.OptionError, match="a logging level"):
        fusewright.set_logs(graph="yes")


def test_a_wrong_name_in_the_environment_is_an_error_at_the_first_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    api._subscribe.cache_clear()
    monkeypatch.setenv("FUSEWRIGHT_LOGS", "graph_breaks,recompile")
    with pytest.raises(fusewright.OptionError, match="did you mean 'recompiles'"):
        fusewright.compile(lambda x: x)


def test_trace_enabled_writes_the_stages_of_this_compile_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    debug_folder.of_process.cache_clear()

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def untraced(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 1

    fusewright.compile(traced, options={"trace.enabled": True}, name="mine")(torch.ones(3))
    fusewright.compile(untraced)(torch.ones(3))
    (run,) = (tmp_path / "fusewright_debug").iterdir()
    (folder,) = (path for path in run.iterdir() if path.is_dir())
    assert folder.name.startswith("mine")
    assert "traced" in folder.name and "untraced" not in folder.name
    texts = [path.read_text() for path in folder.rglob("*.txt")]
    assert any("sin" in text for text in texts)


RECOMPILES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str, str]] = {
    "size": ((torch.ones(4), 1), (torch.ones(5), 1), "L['x'].size()[0] was 4, is 5", "mark_dynamic"),
    "dtype": ((torch.ones(4), 1), (torch.ones(4).double(), 1), "L['x'].dtype was", "Keep dtype"),
    "number": ((torch.ones(4), 1.5), (torch.ones(4), 2.5), "L['n'] was 1.5, is 2.5", "pass it as a tensor"),
    "flag": ((torch.ones(4), True), (torch.ones(4), False), "L['n'] was True, is False", "torch.where"),
}


@pytest.mark.parametrize("case", RECOMPILES)
def test_a_recompile_is_one_line_with_version_guard_callers_line_and_remedy(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, failure, remedy = RECOMPILES[case]
    compiled = fusewright.compile(lambda x, n: x * n + 1, backend="eager", dynamic=False)
    fusewright.set_logs(recompiles=True)
    compiled(*first)
    line = sys._getframe().f_lineno + 1
    compiled(*second)
    compiled(*second)
    (record,) = [one for one in caplog.records if one.name == "fusewright.recompiles"]
    text = record.getMessage()
    assert "\n" not in text and f"called at {__file__}:{line}: version 1: {failure}" in text, text
    assert remedy in text, text


ONES = torch.ones(3)
KEPT: dict[str, tuple[Any, list[Any], str]] = {
    "outcomes": (lambda x, n: x if n == 3.5 else x * n, [1.5, 2.5, 3.5], "the same outcomes as 2.5 no longer holds: it"),
    "set": (lambda x, n: x + len(n), [{1}, {2}], "is the set [1] no longer holds: it is {2}"),
    "factory": (lambda x, n: x + n["a"], [defaultdict(int), defaultdict(float)], "factory <class 'int'> no longer"),
    "bytes": (lambda x, n: x + n[0], [bytearray(b"a"), bytearray(b"b")], "is bytearray(b'a') no longer holds"),
    "array": (lambda x, n: x + torch.from_numpy(n), [np.ones(3), np.ones(1)], "array of float64, shape (3,) and"),
}


@pytest.mark.parametrize("case", KEPT)
def test_guards_that_ask_an_object_of_ours_are_told_in_words(case: str, caplog: pytest.LogCaptureFixture) -> None:
    function, values, words = KEPT[case]
    compiled = fusewright.compile(function, dynamic=None if case == "outcomes" else False)
    fusewright.set_logs(recompiles=True)
    for value in values:
        compiled(ONES, value)
    text = caplog.records[-1].getMessage()
    assert words in text and " at 0x" not in text, text


def test_versions_keep_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """In whichever order they were used last, and each failure is told of the version that it belongs to."""
    compiled = fusewright.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    fusewright.set_logs(recompiles=True)
    for size, flag in ((2, True), (2, False), (2, True), (3, False), (2, False), (4, True)):
        compiled(torch.ones(size), flag)
    told = [one.getMessage() for one in caplog.records if one.name == "fusewright.recompiles"]
    versions = [dict(re.findall(r"versions? ([\d, ]+): (L.*?)(?=; version|\. )", text)) for text in told]
    assert versions == [
        {"1": "L['n'] was True, is False"},
        {"1": "L['n'] was True, is False", "2": "L['x'].size()[0] was 2, is 3"},
        {"2, 3": "L['n'] was False, is True", "1": "L['x'].size()[0] was 2, is 4"},
    ], told
