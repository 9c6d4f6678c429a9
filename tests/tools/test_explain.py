"""`fusewright.explain`: the report's fields, and its table."""

from __future__ import annotations

import datetime
import random
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusewright


def masked(text: str) -> str:
    """Times by `T`, and this file's folder left out."""
    text = re.sub(r"\d+\.\d+ ms", "T ms", text)
    return re.sub(r"\S*/(test_explain\.py)", r"\1", text)


def two_parts(x: torch.Tensor) -> torch.Tensor:
    print("shape", x.shape)
    y = torch.relu(x) + 1
    fusewright.graph_break("half way")
    return torch.sum(y * 2)


def test_the_table_is_exactly_this(capsys: pytest.CaptureFixture[str]) -> None:
    report = fusewright.explain(two_parts)(torch.ones(4, 3))
    assert capsys.readouterr().out == "shape torch.Size([4, 3])\n"
    line = two_parts.__code__.co_firstlineno
    table, breaks = masked(str(report)).split("\n\n")
    rows = [row.split(maxsplit=1) if row.startswith("  ") else row.split("  ", 1) for row in table.splitlines()]
    columns = {len(re.match(r"(  )?\S+( \S+)*  +", row).group()) for row in table.splitlines()}  # type: ignore[union-attr]
    assert len(columns) == 1, table
    found = {name.strip(): value.strip() for name, value in rows}
    assert list(found)[:5] == ["graphs", "graph breaks", "operators", "guards", "compile time"]
    assert found["graphs"] == "2"
    assert found["graph breaks"] == "1"
    assert found["operators"] == "4 (2, 2 by graph)"
    assert found["guards"] == str(len(report.guards))
    assert found["compile time"] == "T ms, 2 frames"
    assert {"capture", "passes", "loops", "schedule", "kernels", "call_plan", "load"} <= set(found)
    assert all(found[stage] == "T ms" for stage in report.stage_times if stage != "kernels")  # a row of its own, below
    assert found["kernels"] == str(len(report.kernels)) == "2"
    assert found[report.kernels[0].name] == f"test_explain.py:{line + 2} in two_parts"
    assert found["after the graph"] == f"print() at test_explain.py:{line + 1} in two_parts"
    assert breaks == (
        "break 1: graph_break() was called: half way [explicit-graph-break]\n"
        f"  at test_explain.py:{line + 3} in two_parts\n"
        "  what to do: remove the call"
    )


def test_the_fields_say_what_was_compiled() -> None:
    report = fusewright.explain(two_parts, torch.ones(4, 3))
    assert torch.equal(report.result, torch.tensor(48.0))
    assert (report.graph_count, report.graph_break_count, report.op_count, report.frame_count) == (2, 1, 4, 2)
    assert [len(ops) for ops in report.ops_per_graph] == [2, 2]
    assert report.ops_per_graph[0] == ["relu.default", "add.Tensor"]
    assert all(isinstance(graph, torch.fx.Graph) for graph in report.graphs)
    (reason,) = report.break_reasons
    assert (reason.code, reason.hint) == ("explicit-graph-break", "remove the call")
    assert "half way" in reason.reason
    assert (reason.stack[-1].file, reason.stack[-1].line) == (__file__, two_parts.__code__.co_firstlineno + 3)
    assert any("L['x']" in guard or "x" in guard for guard in report.guards)
    assert sum(report.compile_times.values()) > 0
    assert set(report.stage_times) >= {"capture", "kernels"}
    assert all("define" in kernel.text for kernel in report.kernels)
    assert report.errors == report.hints == []


def test_a_break_before_the_first_operator_counts() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the first thing that is done
            return x + 1
        return x

    report = fusewright.explain(f)(torch.ones(3))
    assert report.graph_break_count == 1

    def opaque(x: torch.Tensor) -> torch.Tensor:
        open("/dev/null").close()
        return x + 1

    report = fusewright.explain(opaque)(torch.ones(3))
    assert report.graph_break_count >= 1
    assert torch.equal(report.result, torch.full((3,), 2.0))


def test_nested_calls_that_break_count_once_with_their_callers() -> None:
    def inner(x: torch.Tensor) -> None:
        fusewright.graph_break()

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        inner(y)
        return y * 2

    report = fusewright.explain(outer)(torch.ones(3))
    assert report.graph_break_count == 1
    assert [level.function.split(".")[-1] for level in report.break_reasons[0].stack] == ["outer", "inner"]


def test_something_compiled_is_explained_under_its_own_settings() -> None:
    compiled = fusewright.compile(two_parts, backend="eager")
    compiled(torch.ones(2, 2))
    report = fusewright.explain(compiled)(torch.ones(2, 2))
    assert report.graph_count == 2  # captured anew, although it was compiled before
    assert "relu" in report.ops_per_graph[0]
    assert report.kernels == []
    strict = fusewright.compile(two_parts, fullgraph=True)
    assert fusewright.explain(strict)(torch.ones(2, 2)).graph_break_count == 1
    module = fusewright.compile(nn.Linear(3, 3), backend="aot_eager")
    report = fusewright.explain(module)(torch.ones(2, 3))
    assert (report.graph_count, report.kernels) == (1, [])
    in_place = nn.Linear(3, 3)
    fusewright.compile_(in_place, backend="aot_eager")
    assert fusewright.explain(in_place)(torch.ones(2, 3)).kernels == []


def test_training_and_functions_reached_through_a_break_are_explained() -> None:
    @fusewright.disable(recursive=False)
    def cut(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def f(x: torch.Tensor) -> torch.Tensor:
        return cut(x * 2) + 1

    for _ in range(2):  # the second time, too, although the hook has compiled helper by then
        report = fusewright.explain(f)(torch.ones(3))
        assert report.graph_count == 3
    net = nn.Linear(3, 3)
    report = fusewright.explain(net)(torch.ones(2, 3))
    report.result.sum().backward()
    assert net.weight.grad is not None
    assert report.graph_count == 1


def test_unrolled_loops_are_hinted_at() -> None:
    def loop(x: torch.Tensor, turns: int) -> torch.Tensor:
        for _ in range(turns):
            x = x + 1
        return x

    assert fusewright.explain(loop)(torch.ones(1), 64).hints == []
    report = fusewright.explain(loop)(torch.ones(1), 65)
    (hint,) = report.hints
    assert f"unrolled 65 times at {__file__}:{loop.__code__.co_firstlineno + 2}" in hint
    assert "hint: a loop is unrolled" in str(report)


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_the_hint_names_the_line_of_the_loop_and_no_other(backend: str) -> None:
    norm = nn.LayerNorm(3)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    def loop(x: torch.Tensor) -> torch.Tensor:
        turn = 0
        while turn < 70:
            x = normed(x)
            turn += 1
        return x

    def comprehended(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([normed(x) for _ in range(70)])

    def straight(x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch._foreach_add([x] * 70, 1.0))

    def deep(x: torch.Tensor, left: int = 70) -> torch.Tensor:
        return deep(normed(x), left - 1) if left else x

    for function, line in ((loop, 3), (comprehended, 1), (straight, None), (deep, None)):
        with torch.no_grad():
            compiled = fusewright.compile(function, backend=backend)
            hints = fusewright.explain(compiled)(torch.ones(2, 3)).hints
        hints = [hint for hint in hints if "unrolled" in hint]
        if line is None:
            assert not hints
        else:
            assert len(hints) == 1 and f"{__file__}:{function.__code__.co_firstlineno + line} in" in hints[0]


def test_an_exception_of_the_program_is_its_own() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fusewright.explain(f)(torch.ones(1))


@pytest.mark.parametrize(
    ("draw", "code", "remedy"),
    [
        (time.time_ns, "clock", lambda x: x + time.time()),
        (time.perf_counter_ns, "clock", lambda x: x + time.perf_counter()),
        (datetime.datetime.now, "clock", lambda x: x + 1),
        (datetime.date.today, "clock", lambda x: x + 1),
        (lambda: np.random.choice(3), "host-random", lambda x: x + torch.randint(0, 3, ())),
        (np.random.default_rng(0).random, "host-random", lambda x: x + torch.rand(())),
        (lambda: random.choice(range(10)), "host-random", lambda x: x + torch.randint(0, 10, ())),
        (lambda: random.choices([1, 2]), "host-random", lambda x: x + torch.randint(0, 10, ())),
    ],
)
def test_clocks_and_random_numbers_have_a_remedy_that_works(draw: Any, code: str, remedy: Any) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, object]:
        return x + 1, draw()

    assert code in {one.code for one in fusewright.explain(f)(torch.ones(3)).break_reasons}
    assert not fusewright.explain(remedy)(torch.ones(3)).break_reasons
