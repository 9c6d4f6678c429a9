"""Decorators and marks: fusewright's own, and PyTorch's of the same names."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import decorators
from fusewright.base import marks
from fusewright.base.events import STREAM, Captured, Event, Recompiling

OURS_AND_TORCHS = pytest.mark.parametrize("api", [fusewright, torch.compiler], ids=["fusewright", "torch.compiler"])


def calls_of(gm: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op.startswith("call_")]


def collecting(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    return backend


@pytest.fixture(autouse=True)
def no_marks_left() -> Any:
    yield
    marks.ALLOWED.clear()
    marks.SUBSTITUTES.clear()


@OURS_AND_TORCHS
def test_disable_runs_the_function_and_what_it_calls_eagerly(api: Any) -> None:
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    @api.disable
    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return inner(x) + 1

    @fusewright.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return outer(x + 1).relu()

    for _ in range(3):
        assert torch.equal(f(torch.ones(2)), torch.full((2,), 5.0))
    assert seen == [False] * 6
    report = fusewright.explain(f)(torch.ones(2))
    assert [reason.code for reason in report.break_reasons] == ["disabled-function"]
    assert (report.graph_count, report.graph_break_count) == (2, 1)


@OURS_AND_TORCHS
def test_disable_with_recursive_false_compiles_what_it_calls(api: Any) -> None:
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(fusewright.is_compiling())
        return x * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(fusewright.is_compiling())
        return inner(x) + 1

    eager = api.disable(outer, recursive=False)

    @fusewright.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return eager(x + 1).relu()

    assert torch.equal(f(torch.ones(2)), torch.full((2,), 5.0))
    assert seen == [False, True]


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "disable": fusewright.disable,
    "compile": lambda function: fusewright.compile(function, backend="eager"),
    "torch's disable": torch.compiler.disable,
    "torch's compile": lambda function: torch.compile(function, backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_that_took_over_its_functions_attributes_is_compiled(name: str) -> None:
    def wrapper(function: Any) -> Any:
        return functools.wraps(function)(lambda *args: function(*args) + 100)

    class Holder:
        scale = 3
        method = WRAPPED[name](lambda self, x: x * self.scale)
        wrapped = wrapper(method)

    x, holder = torch.ones(2), Holder()
    compiled = fusewright.compile(holder.wrapped, backend="eager")
    assert torch.equal(compiled(x), x * 103)
    assert torch.equal(fusewright.compile(wrapper(compiled), backend="eager")(x), x * 203)
    assert torch.equal(fusewright.compile(holder.method, backend="eager")(x), x * 3)


def test_disable_takes_modules_classes_methods_and_reasons() -> None:
    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return super().forward(x)

    seen: list[bool] = []
    inner = Inner(3, 3)
    eager = fusewright.disable(inner, reason="not today")
    assert isinstance(eager, Inner)
    assert eager.weight is inner.weight
    assert "forward" not in inner.__dict__
    net = nn.Sequential(nn.ReLU(), eager, nn.ReLU())
    assert list(net.state_dict()) == ["1.weight", "1.bias"]
    x = torch.randn(2, 3)
    expected = net(x)
    seen.clear()
    report = fusewright.explain(net)(x)
    torch.testing.assert_close(report.result, expected)
    assert seen == [False]
    assert "not today" in str(report)
    again = copy.deepcopy(eager)
    assert again.weight is not inner.weight
    torch.testing.assert_close(again(x), inner(x))

    @fusewright.disable
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x + 1

    late = Late()
    seen.clear()
    assert torch.equal(fusewright.compile(lambda x: late(x) * 2)(torch.ones(2)), torch.full((2,), 4.0))
    assert seen == [False]

    class Holder:
        @fusewright.disable(reason="why not")
        @classmethod
        def made(cls, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x + 1

    seen.clear()
    assert torch.equal(fusewright.compile(lambda x: Holder.made(x) * 2)(torch.ones(2)), torch.full((2,), 4.0))
    assert seen == [False]
    with pytest.raises(fusewright.OptionError, match="disable takes"):
        fusewright.disable(3)


PICKLED = nn.Linear(2, 2)


def test_disabled_modules_pickle() -> None:
    eager = fusewright.disable(PICKLED)
    x = torch.randn(1, 2)
    torch.testing.assert_close(pickle.loads(pickle.dumps(eager))(x), PICKLED(x))


@OURS_AND_TORCHS
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_allow_in_graph_runs_the_function_natively(api: Any, backend: str) -> None:
    runs: list[int] = []

    @api.allow_in_graph
    def helper(x: torch.Tensor, scale: float) -> torch.Tensor:
        runs.append(1)  # an effect that happens while capturing only
        return torch.sin(x) * scale

    @fusewright.compile(fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return helper(x, 3.0) + 1

    x = torch.randn(4)
    for _ in range(3):
        torch.testing.assert_close(f(x), torch.sin(x) * 3 + 1)
    assert runs == [1]
    graphs: list[torch.fx.GraphModule] = []
    fusewright.compile(lambda x: helper(x, 3.0) + 1, backend=collecting(graphs))(x)
    assert calls_of(graphs[0])[0] is helper


def test_allow_in_graph_takes_lists_and_refuses_the_rest() -> None:
    made = fusewright.allow_in_graph([torch.sin, abs])
    assert made == [torch.sin, abs]
    with pytest.raises(fusewright.OptionError):
        fusewright.allow_in_graph("sin")


@OURS_AND_TORCHS
def test_assume_constant_result_calls_once(api: Any) -> None:
    calls: list[str] = []

    @api.assume_constant_result
    def look_up(key: str) -> float:
        calls.append(key)
        return {"a": 2.0}[key]

    class Net(nn.Module):
        @api.assume_constant_result
        def table(self) -> torch.Tensor:
            calls.append("table")
            return torch.arange(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * look_up("a") + self.table()

    net = Net()
    compiled = fusewright.compile(net, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))
    assert calls == ["a", "table"]

    @fusewright.compile(fullgraph=True)
    def inside(x: torch.Tensor) -> torch.Tensor:
        return x + look_up(x * 2)  # type: ignore[arg-type]

    with pytest.raises(fusewright.GraphBreakError, match="assume_constant_result"):
        inside(torch.ones(2))


@OURS_AND_TORCHS
def test_substitute_in_graph_captures_another_function(api: Any) -> None:
    original = (
        itertools.compress if api is fusewright else itertools.filterfalse
    )  # a registration lasts as long as the process
    function = getattr(__import__("_bisect"), "bisect_right" if api is fusewright else "bisect_left")
    assert original

    @api.substitute_in_graph(function, skip_signature_check=True)
    def pure(values: list[int], x: int) -> int:
        return sum(value <= x if api is fusewright else value < x for value in values)

    @fusewright.compile(fullgraph=True)
    def f(x: torch.Tensor, limits: list[int]) -> torch.Tensor:
        return x * function(limits, 3) + pure(limits, 9)

    expected = torch.ones(2) * function([1, 3, 5], 3) + 3
    assert torch.equal(f(torch.ones(2), [1, 3, 5]), expected)
    assert pure([1, 3, 5], 2) == 1


def test_substitute_in_graph_checks_its_arguments() -> None:
    def two(a: int, b: int) -> int:
        return a + b

    with pytest.raises(TypeError, match="must take the parameters"):

        @fusewright.substitute_in_graph(two)
        def one(a: int) -> int:
            return a

    @fusewright.substitute_in_graph(two)
    def same(a: int, b: int) -> int:
        return b + a

    with pytest.raises(fusewright.OptionError, match="substituted already"):
        fusewright.substitute_in_graph(two)
    with pytest.raises(fusewright.OptionError, match="takes a function"):
        fusewright.substitute_in_graph(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cut", [fusewright.graph_break, lambda reason: torch._dynamo.graph_break(reason)], ids=["fusewright", "torch"]
)
def test_graph_break_cuts_and_gives_its_reason(cut: Any) -> None:
    import torch._dynamo

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        cut("half way")
        return x * 2

    report = fusewright.explain(f)(torch.ones(2))
    assert torch.equal(report.result, torch.full((2,), 4.0))
    assert (report.graph_count, report.graph_break_count) == (2, 1)
    assert "half way" in report.break_reasons[0].reason
    with pytest.raises(fusewright.GraphBreakError, match="half way"):
        fusewright.compile(f, fullgraph=True)(torch.ones(2))


def test_is_compiling_answers_true_inside_and_false_outside() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, tuple[bool, ...]]:
        return x + 1, (
            fusewright.is_compiling(),
            torch.compiler.is_compiling(),
            torch.compiler.is_dynamo_compiling(),
            torch.compiler.is_exporting(),
        )

    assert fusewright.compile(f, fullgraph=True)(torch.ones(1))[1] == (True, True, True, False)
    assert f(torch.ones(1))[1] == (False,) * 4
    assert decorators.is_compiling() is False


def test_torchs_harmless_calls_do_not_break() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return x * 2

    assert torch.equal(fusewright.compile(f, fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


# Marks on sizes.


def compiles(function: Any, *inputs: torch.Tensor, **arguments: Any) -> int:
    graphs: list[torch.fx.GraphModule] = []
    compiled = fusewright.compile(function, backend=collecting(graphs), **arguments)
    for x in inputs:
        torch.testing.assert_close(compiled(x), function(x))
    return len(graphs)


def _torch_marks() -> Any:
    import torch._dynamo

    return torch._dynamo


BOTH_MARKERS = pytest.mark.parametrize("marker", [lambda: fusewright, _torch_marks], ids=["fusewright", "torch"])


@BOTH_MARKERS
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_marked_size_is_symbolic_from_the_first_call(marker: Any, backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * x.shape[0]

    inputs = [torch.randn(rows, 4) for rows in (5, 6, 7)]
    assert compiles(f, *inputs) == 2
    marker().mark_dynamic(inputs[0], 0)
    assert compiles(f, *inputs) == 1
    maybe = [torch.randn(rows, 4) for rows in (5, 6, 7)]
    marker().maybe_mark_dynamic(maybe[0], [0])
    assert compiles(f, *maybe) == 1
    static = [torch.randn(rows, 4) for rows in (5, 6)]
    for x in static:
        marker().mark_static(x, 0)
    assert compiles(f, *static, dynamic=True) == 2
    compiled = fusewright.compile(f, backend=backend)
    for x in inputs:
        torch.testing.assert_close(compiled(x), f(x))


@BOTH_MARKERS
def test_marked_ranges_are_guarded(marker: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= 8 else x * 3  # decided by the range: no guard of its own

    inputs = [torch.randn(rows, 4) for rows in (5, 6, 8)]
    marker().mark_dynamic(inputs[0], 0, min=3, max=8)
    assert compiles(f, *inputs) == 1
    assert compiles(f, *inputs, torch.randn(9, 4)) == 2


def test_sizes_0_and_1_of_a_marked_dimension_take_few_compiles() -> None:
    inputs = [torch.randn(rows, 4) for rows in (1, 5, 6, 0)]
    for x in inputs:
        fusewright.mark_dynamic(x, 0)
    assert compiles(lambda x: x + 1, *inputs) <= 2


@BOTH_MARKERS
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_mark_that_the_program_contradicts_is_an_error_that_names_the_line(marker: Any, backend: str) -> None:
    weight = torch.randn(5, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y.t() @ weight  # fixes the size

    x = torch.randn(5, 4)
    marker().mark_dynamic(x, 0)
    with pytest.raises(fusewright.DynamicMarkError) as error:
        fusewright.compile(f, backend=backend)(x)
    message = str(error.value)
    assert f"{__file__}:{f.__code__.co_firstlineno + 2}" in message, message
    assert "fixes that size to 5" in message
    x = torch.randn(5, 4)
    marker().maybe_mark_dynamic(x, 0)
    torch.testing.assert_close(fusewright.compile(f, backend=backend)(x), f(x))


def test_a_range_that_the_program_does_not_take_whole_is_an_error_that_names_the_line() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 32:
            return x * 2
        return x + 1

    x = torch.randn(16, 4)
    fusewright.mark_dynamic(x, 0, min=2, max=64)
    with pytest.raises(
        fusewright.DynamicMarkError, match=rf"at most 32 at .*:{f.__code__.co_firstlineno + 1} in .*max=32"
    ):
        fusewright.compile(f)(x)
    fusewright.reset()
    x = torch.randn(16, 4)
    fusewright.mark_dynamic(x, 0, min=2, max=32)
    assert compiles(f, x, torch.randn(20, 4)) == 1


def test_a_recompile_says_which_line_asked_for_the_size() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2 if x.shape[0] > 8 else y

    events: list[Event] = []
    compiled = fusewright.compile(f, dynamic=True)
    with STREAM.listening(events.append):
        compiled(torch.randn(9, 2)), compiled(torch.randn(5, 2))
    (recompile,) = [event for event in events if isinstance(event, Recompiling)]
    assert f"asked at {__file__}:{f.__code__.co_firstlineno + 2} in " in recompile.failures[0], recompile


def test_marks_check_their_arguments() -> None:
    x = torch.randn(3, 4)
    fusewright.mark_dynamic(x, -1, min=2)
    assert x._dynamo_dynamic_indices == {1}  # type: ignore[attr-defined]
    for wrong in (2, -3):
        with pytest.raises(IndexError, match="out of range"):
            fusewright.mark_dynamic(x, wrong)
    for arguments in ({"index": "0"}, {"index": 0, "min": 5, "max": 4}, {"index": 0, "min": -1}, {"index": [0, 1.0]}):
        with pytest.raises(fusewright.OptionError):
            fusewright.mark_dynamic(x, **arguments)  # type: ignore[arg-type]
    for function in (fusewright.mark_dynamic, fusewright.maybe_mark_dynamic, fusewright.mark_static):
        with pytest.raises(fusewright.OptionError, match="takes a"):
            function([1, 2], 0)  # type: ignore[arg-type]
    assert fusewright.mark_static(nn.Linear) is nn.Linear
    del nn.Linear._dynamo_marked_static  # type: ignore[attr-defined]


def test_mark_static_inside_compiled_code_fixes_the_size() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        fusewright.mark_static(x, 0)
        return x + 1

    assert compiles(f, torch.randn(5, 2), torch.randn(6, 2), dynamic=True) == 2


def test_torch_compile_honours_our_marks() -> None:
    x = torch.randn(5, 4)
    fusewright.mark_dynamic(x, 0, min=2, max=64)
    count: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        count.append(1)
        return gm.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend)
    compiled(x)
    compiled(torch.randn(6, 4))
    assert count == [1]


def test_what_eager_code_calls_without_tensors_is_let_alone() -> None:
    """Nobody asked to compile it: no warning, and few versions."""
    lines: list[str] = []

    def note(text: str) -> None:
        lines.append(text)

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @fusewright.disable(recursive=False)
    def eager(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        note(str(turn))
        return scale(x)

    seen: list[Event] = []
    with STREAM.listening(seen.append), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = fusewright.compile(lambda x, turn: eager(x + 1, turn), backend="eager")
        for turn in range(12):
            assert torch.equal(compiled(torch.ones(2), torch.tensor(turn)), torch.full((2,), 4.0))
    assert lines == [f"tensor({turn})" for turn in range(12)]
    names = [event.function.split(" ")[0] for event in seen if isinstance(event, Captured)]
    assert sum("note" in name for name in names) == 3 and sum("scale" in name for name in names) == 1
